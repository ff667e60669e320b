#include "eval/session.h"

#include <numeric>
#include <utility>

#include "backend/cpu/backend.h"
#include "backend/cuda/backend.h"
#include "loader/checkpoint.h"
#include "models/dummy.h"
#include "models/registry.h"

namespace freshet::eval {
namespace {

Result<ops::CpuIsa> isa_limit(const std::string& name) {
  if (name.empty()) return ops::kAnyIsa;
  return ops::isa_by_name(name);
}

}  // namespace

Result<ModelSpec> Session::read_spec(const std::string& model) {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(model));
  return freshet::read_spec(checkpoint);
}

Result<std::unique_ptr<Session>> Session::open(const SessionOptions& options) {
  std::unique_ptr<Session> s(new Session(options, options.threads));
  FRESHET_RETURN_IF_ERROR(s->load());
  FRESHET_RETURN_IF_ERROR(s->make_cache());
  const int64_t vocab = s->model_->spec().vocab_size;
  FRESHET_RETURN_IF_ERROR(s->model_->reserve(options.batch, options.logit_rows, options.context));
  FRESHET_ASSIGN_OR_RETURN(
      s->logits_, Buffer::allocate(static_cast<size_t>(options.logit_rows * vocab) * sizeof(float),
                                   s->ops_->host_memory()));
  return s;
}

std::string Session::device() const {
  return ops_->device() != nullptr ? ops_->device()->name() : "cpu";
}

Status Session::load() {
  FRESHET_ASSIGN_OR_RETURN(const ops::CpuIsa limit, isa_limit(options_.cpu_isa));
  const ops::KernelTable& kernels = options_.reference ? ops::reference_kernels() : cpu::kernels();
  ops::OpsOptions o;
  o.reference = options_.reference;
  o.force_kernels = options_.force_kernels;
  const bool needs_cpu = options_.reference || !options_.cpu_isa.empty();
  FRESHET_ASSIGN_OR_RETURN(auto device,
                           cuda::open(options_.device, needs_cpu, options_.force_kernels));
  if (device != nullptr) {
    ops_ = ops::Ops::create(pool_, std::move(device));
  } else {
    FRESHET_ASSIGN_OR_RETURN(ops_, ops::Ops::create(pool_, kernels, cpu::detect(limit), o));
  }
  if (options_.load_format != "auto") {
    if (options_.weight_cache_dir.empty()) return make_dummy();
    return invalid_argument("--weight-cache-dir is for --load-format auto: {} weights are made up",
                            options_.load_format);
  }
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(options_.model));
  FRESHET_ASSIGN_OR_RETURN(
      model_, load_model(
                  checkpoint, *ops_,
                  [&](size_t done, size_t total) {
                    if (options_.on_progress && total > 0)
                      options_.on_progress("loading",
                                           static_cast<double>(done) / static_cast<double>(total));
                  },
                  options_.weight_cache_dir));
  return {};
}

Status Session::make_dummy() {
  constexpr std::string_view kPrefix = "dummy:";
  const std::string& asked = options_.load_format;
  const auto format = asked.starts_with(kPrefix)
                          ? quant::format_by_name(std::string_view(asked).substr(kPrefix.size()))
                          : std::nullopt;
  if (!format || quant::info(*format).encode == nullptr) {
    return invalid_argument(
        "--load-format {}: write auto, or dummy: and a format, e.g. dummy:bf16 or dummy:int4_g128",
        asked);
  }
  FRESHET_ASSIGN_OR_RETURN(const json::Value config,
                           json::parse_file(options_.model + "/config.json"));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, models::read_spec(config));
  FRESHET_ASSIGN_OR_RETURN(model_,
                           models::dummy_model(spec, [&](auto...) { return *format; }, *ops_));
  return {};
}

Status Session::make_cache() {
  std::string type_name = options_.kv_cache_dtype;
  if (type_name == "auto") type_name = options_.reference ? "f32" : "f16";
  FRESHET_ASSIGN_OR_RETURN(kv_type_, ops::kv_type_by_name(type_name));
  const KvCacheSpec spec = kv_cache_spec(model_->spec(), kv_type_);
  for (const ops::KvShape& shape : spec.layers) {
    if (ops_->device() != nullptr) FRESHET_RETURN_IF_ERROR(ops_->device()->supports(shape));
  }
  blocks_ = (options_.context + ops::kBlockTokens - 1) / ops::kBlockTokens;
  const int64_t all = blocks_ * options_.sequences;
  if (all > INT32_MAX) return resource_exhausted("{} blocks of cache are too many", all);
  FRESHET_ASSIGN_OR_RETURN(
      cache_,
      KvStorage::allocate(spec, std::vector<int32_t>(spec.groups.size(), static_cast<int32_t>(all)),
                          ops_->memory()));
  length_.assign(static_cast<size_t>(options_.sequences), 0);
  batch_.tables.resize(spec.groups.size());
  return {};
}

size_t Session::weight_bytes() const {
  size_t bytes = 0;
  for (const auto& w : model_->weights()) bytes += w.bytes;
  return bytes;
}

void Session::set_length(int sequence, int64_t tokens) {
  FRESHET_CHECK(tokens <= options_.context);
  length_[static_cast<size_t>(sequence)] = tokens;
}

std::span<float> Session::run(std::span<const Piece> pieces) {
  batch_.token_ids.clear();
  batch_.positions.clear();
  batch_.query_start.assign(1, 0);
  batch_.context_len.clear();
  batch_.logit_rows.clear();
  for (BlockTables& t : batch_.tables) {
    t.ids.clear();
    t.stride = blocks_;
  }
  for (const Piece& piece : pieces) {
    int64_t& length = length_[static_cast<size_t>(piece.sequence)];
    const auto first = static_cast<int32_t>(batch_.token_ids.size());
    const auto count = static_cast<int32_t>(piece.ids.size());
    batch_.token_ids.insert(batch_.token_ids.end(), piece.ids.begin(), piece.ids.end());
    batch_.positions.resize(batch_.token_ids.size());
    std::iota(batch_.positions.begin() + first, batch_.positions.end(),
              static_cast<int32_t>(length));
    length += count;
    FRESHET_CHECK(length <= options_.context, "{} tokens, planned for {}", length,
                  options_.context);
    batch_.query_start.push_back(first + count);
    batch_.context_len.push_back(static_cast<int32_t>(length));
    for (BlockTables& t : batch_.tables) {
      for (int64_t b = 0; b < blocks_; ++b)
        t.ids.push_back(static_cast<int32_t>(piece.sequence * blocks_ + b));
    }
    for (int64_t r = piece.logits_from; r >= 0 && r < count; ++r)
      batch_.logit_rows.push_back(first + static_cast<int32_t>(r));
  }
  const auto rows = static_cast<int64_t>(batch_.logit_rows.size());
  FRESHET_CHECK(batch_.tokens() <= options_.batch && rows <= options_.logit_rows);
  model_->forward(batch_, cache_, {logits_.as<float>()});
  return {logits_.as<float>(), static_cast<size_t>(rows * model_->spec().vocab_size)};
}

}  // namespace freshet::eval
