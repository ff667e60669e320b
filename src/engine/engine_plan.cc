#include "engine/engine_plan.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "base/units.h"
#include "engine/memory.h"
#include "engine/sparse.h"
#include "layers/vision_tower.h"
#include "runtime/picture_settings.h"
#include "speculative/draft_runner.h"
#include "speculative/registry.h"

namespace freshet::engine {
namespace {

constexpr int kFewCores = 4;  // with up to this many threads, steps are shorter

using loader::Checkpoint;

// The memory that a host tier leaves; 0: not known.
Result<size_t> memory_beside(size_t host_tier) {
  const size_t available = available_memory();
  if (available == 0 || host_tier < available) return available - std::min(available, host_tier);
  return resource_exhausted(
      "{} of host memory for the cache's blocks, {} available: a smaller --kv-offloading-size is "
      "needed",
      format_bytes(host_tier), format_bytes(available));
}

// The memory that the largest pictures take, by the longest context. Where the layers run: beside a
// device, the host has room.
Result<std::function<size_t(int64_t context)>> picture_memory(
    const std::optional<media::ImageSettings>& pictures, const ModelSpec& spec,
    runtime::Compute& compute) {
  if (!pictures) return std::function<size_t(int64_t)>([](int64_t) { return size_t{0}; });
  FRESHET_ASSIGN_OR_RETURN(ops::Ops* const host, compute.host_ops());
  const auto tower = std::make_shared<VisionTower>(spec.vision, nullptr, *host, compute.ops());
  const bool alone = compute.device() == nullptr;
  return std::function<size_t(int64_t)>(
      [tower, alone, settings = *pictures, vision = spec.vision](int64_t context) {
        const int64_t most = runtime::planned_positions(settings, *vision, context);
        const Decoder::Workspace w = tower->workspace(most);
        return w.own + w.scratch + w.inputs + (alone ? tower->host_bytes(most) : 0);
      });
}

void add_shape(const ModelSpec& spec, const CacheLayout& layout, PlanRequest& r) {
  r.model_context = spec.max_context;
  if (spec.learned_positions > 0) {
    r.model_context = std::min(r.model_context, spec.learned_positions - spec.position_offset);
  }
  r.vocab_size = spec.generates ? spec.vocab_size : 0;
  r.hidden_size = spec.hidden_size;
  r.kv = layout.kv;
  r.max_slots = layout.retention.max_slots;
}

}  // namespace

Result<CacheLayout> cache_layout(const EngineOptions& options, const runtime::Compute& compute,
                                 const ModelSpec& spec) {
  CacheLayout layout;
  FRESHET_ASSIGN_OR_RETURN(layout.types, runtime::kv_types(compute, options.kv_cache_dtype,
                                                           options.kv_cache_skip_layers, spec));
  layout.kv = kv_cache_spec(spec, layout.types);
  FRESHET_ASSIGN_OR_RETURN(layout.retention,
                           usual_retention(options, compute.device() != nullptr, layout.kv));
  FRESHET_ASSIGN_OR_RETURN(layout.sparse, usual_sparse(options, compute.device() != nullptr,
                                                       spec.vision != nullptr, layout.kv));
  return layout;
}

Result<MemoryPlan> plan_memory(const EngineOptions& options, const runtime::LoadOptions& loading,
                               const Checkpoint& checkpoint, const ModelSpec& spec,
                               const speculative::Config* speculation, size_t host_tier,
                               const CacheLayout& layout,
                               const std::optional<media::ImageSettings>& pictures,
                               runtime::Compute& compute) {
  FRESHET_ASSIGN_OR_RETURN(const auto seeing, picture_memory(pictures, spec, compute));
  const ops::KvType type = layout.types.type;
  PlanRequest r;
  r.one_step = reads_both_ways(spec);
  speculative::DrafterCost drafter;
  if (speculation != nullptr) {
    const auto cost = speculative::find_method(speculation->method)->cost;
    if (cost != nullptr) {
      FRESHET_ASSIGN_OR_RETURN(drafter,
                               cost({*speculation, spec, checkpoint, compute, type, loading}));
    }
    r.drafter_weights = drafter.weights;
    if (drafter.model)
      r.drafter_bytes_per_token = speculative::cache_bytes_per_token(*drafter.model, type);
  }
  FRESHET_ASSIGN_OR_RETURN(r.weights,
                           runtime::packed_bytes(checkpoint, spec, loading, compute.ops()));
  add_shape(spec, layout, r);
  if (drafter.model) r.max_slots = 0;  // it keeps all keys
  r.checkpoint_share = options.enable_prefix_caching ? options.state_checkpoint_share : 0.0;
  if (speculation != nullptr) {
    r.state_slots = 1 + speculation->limit();
    r.drafts = std::max(speculation->limit(), speculation->tree.nodes);
  }
  FRESHET_ASSIGN_OR_RETURN(r.available, memory_beside(host_tier));
  FRESHET_RETURN_IF_ERROR(runtime::check_cache(compute, r.kv));
  if (const ops::Device* device = compute.device()) {
    const double share = std::clamp(options.gpu_memory_utilization, 0.05, 1.0);
    r.available = std::min(device->free_bytes(),
                           static_cast<size_t>(static_cast<double>(device->total_bytes()) * share));
    r.kv_share = 1.0;
    r.steps = Steps::kLarge;
  } else if (compute.pool().size() <= kFewCores) {
    r.steps = Steps::kShort;
  }
  r.max_model_len = options.max_model_len;
  r.kv_cache_memory = options.kv_cache_memory;
  r.max_num_seqs = options.max_num_seqs;
  r.max_num_batched_tokens = options.max_num_batched_tokens;
  r.workspace = [&](int64_t tokens, int64_t rows, int64_t context) {
    std::vector<runtime::PlannedModel> models = {{spec, {tokens, rows, context}}};
    if (speculation == nullptr) return runtime::workspace_bytes(compute, models) + seeing(context);
    const int64_t drafting =
        speculative::draft_rows(*speculation, static_cast<int>(rows), static_cast<int>(tokens));
    size_t buffers = drafter.bytes_per_row * static_cast<size_t>(drafting);
    // States that the drafter reads are on the host, and on a device before.
    buffers += (compute.device() != nullptr ? 2 : 1) * sizeof(float) *
               static_cast<size_t>(drafter.boundaries * tokens * spec.hidden_size);
    if (drafter.model) {
      models.push_back({*drafter.model, {tokens, drafting, context}});
      buffers += speculative::DraftRunner::buffer_bytes(*drafter.model, tokens, drafting);
    }
    return runtime::workspace_bytes(compute, models) + buffers + seeing(context);
  };
  auto plan = make_plan(r);
  if (plan.ok() || compute.device() == nullptr) return plan;
  const Status& why = plan.status();
  return Status(why.code(), fmt::format("{}: {}; use --device cpu to run on the CPU",
                                        compute.device_name(), why.message()));
}

}  // namespace freshet::engine
