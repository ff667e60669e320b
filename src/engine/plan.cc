#include "engine/plan.h"

#include <algorithm>
#include <optional>

#include "base/units.h"
#include "engine/memory.h"
#include "kv_cache/block_cache.h"

namespace freshet::engine {
namespace {

using kv_cache::BlockCache;
using kv_cache::kBlockTokens;

// The program, its vocabulary, requests and queues.
constexpr size_t kFixed = size_t{48} << 20;
// Left free, because the available memory that the system reports is an estimate.
constexpr size_t kReserve = size_t{64} << 20;
// Sequences are seldom as long as allowed: the pools of groups with and without a window are
// balanced for this length.
constexpr int kUsualLength = 2048;
// At least this many rows of logits, so that prompt log-probabilities get chunks of a useful size.
constexpr int kMinLogitRows = 16;
// Default limits of a step.
constexpr int kStepSeqs = 256, kStepTokens = 2048, kShortStepTokens = 512;
constexpr int kLargeStepSeqs = 1024, kLargeStepTokens = 8192;

size_t drafter_cache(const PlanRequest& r, const std::vector<int32_t>& blocks) {
  if (blocks.empty()) return 0;
  const auto most = static_cast<size_t>(*std::ranges::max_element(blocks));
  return most * kBlockTokens * r.drafter_bytes_per_token;
}

// The cache with these pools, and a drafter's.
size_t bytes_of(const PlanRequest& r, const std::vector<int32_t>& blocks) {
  size_t bytes = drafter_cache(r, blocks);
  for (size_t g = 0; g < blocks.size(); ++g) {
    bytes += r.kv.block_bytes(static_cast<int>(g)) * static_cast<size_t>(blocks[g]);
  }
  return bytes;
}

// Blocks for `sequences` of the usual length, one of which may be as long as `length`.
std::vector<int32_t> blocks_for(const PlanRequest& r, int64_t sequences, int length, int chunk) {
  std::vector<int32_t> blocks;
  const int usual = std::min(length, kUsualLength);
  for (size_t g = 0; g < r.kv.groups.size(); ++g) {
    const bool evicts = r.max_slots > 0 && r.kv.may_evict(static_cast<int>(g));
    const int most_slots = evicts ? r.max_slots : length, window = r.kv.groups[g].window;
    const int64_t longest = BlockCache::most_blocks(window, std::min(length, most_slots), chunk);
    const int64_t each = BlockCache::most_blocks(window, std::min(usual, most_slots), kBlockTokens);
    const int64_t most = longest * r.max_num_seqs;
    const int64_t wanted = std::clamp(each * sequences, longest, std::max(longest, most));
    blocks.push_back(static_cast<int32_t>(std::min<int64_t>(wanted, INT32_MAX)));
  }
  return blocks;
}

// The largest pools within `budget` bytes; nullopt when not even one sequence fits.
std::optional<std::vector<int32_t>> largest_pools(const PlanRequest& r, size_t budget, int length,
                                                  int chunk) {
  if (bytes_of(r, blocks_for(r, 0, length, chunk)) > budget) return std::nullopt;
  int64_t low = 0;
  int64_t high = int64_t{r.max_num_seqs} * (length / std::min(length, kUsualLength) + 1);
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (bytes_of(r, blocks_for(r, middle, length, chunk)) <= budget) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return blocks_for(r, low, length, chunk);
}

// The longest sequence whose blocks fit `budget`, in whole blocks.
int longest_that_fits(const PlanRequest& r, size_t budget, int most, int chunk) {
  int low = 0;
  int high = most / kBlockTokens;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (bytes_of(r, blocks_for(r, 0, middle * kBlockTokens, chunk)) <= budget) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  // A limit that is not a multiple of the block size uses its last block in part.
  return bytes_of(r, blocks_for(r, 0, most, chunk)) <= budget ? most : low * kBlockTokens;
}

void size_step(const PlanRequest& r, MemoryPlan& plan) {
  plan.max_num_seqs = r.max_num_seqs;
  const int64_t useful = int64_t{plan.max_model_len} * r.max_num_seqs;
  plan.max_num_batched_tokens =
      static_cast<int>(std::min<int64_t>(r.max_num_batched_tokens, useful));
  plan.max_logit_rows =
      std::min(std::max(r.max_num_seqs, kMinLogitRows), plan.max_num_batched_tokens);
  plan.workspace =
      r.workspace(plan.max_num_batched_tokens, plan.max_logit_rows, plan.max_model_len);
  plan.logits =
      static_cast<size_t>(plan.max_logit_rows) * static_cast<size_t>(r.vocab_size) * sizeof(float);
  plan.logits += static_cast<size_t>(plan.max_num_batched_tokens) *
                 static_cast<size_t>(r.hidden_size) * sizeof(float);
}

// The largest smaller token budget whose workspace leaves `least` bytes for the cache; or 0.
int shorter_steps(PlanRequest r, MemoryPlan plan, size_t room, size_t least) {
  while (r.max_num_batched_tokens > 2 * kBlockTokens) {
    r.max_num_batched_tokens /= 2;
    size_step(r, plan);
    if (plan.weights + plan.workspace + plan.logits + plan.fixed + plan.drafter + least <= room)
      return r.max_num_batched_tokens;
  }
  return 0;
}

// Settings that would fit, given `room` bytes for the cache, besides `ways`.
std::string advice(const PlanRequest& r, const MemoryPlan& plan, size_t room, int length,
                   std::vector<std::string> ways) {
  const ops::KvType type = r.kv.layers.empty() ? ops::KvType::kFP8 : r.kv.layers.front().type;
  const bool one_byte = ops::element_bytes(type) == 1;
  const size_t needs = bytes_of(r, blocks_for(r, 0, length, plan.max_num_batched_tokens));
  if (!one_byte && needs / 2 <= room) {
    ways.emplace_back(type == ops::KvType::kF32 ? "--kv-cache-dtype f16" : "--kv-cache-dtype fp8");
  }
  const int shorter = longest_that_fits(r, room, length, plan.max_num_batched_tokens);
  if (shorter >= kBlockTokens && shorter < length)
    ways.push_back(fmt::format("--max-model-len {}", shorter));
  if (ways.empty()) return "a smaller model or a machine with more memory is needed";
  return fmt::format("{} would fit", fmt::join(ways, " or "));
}

}  // namespace

size_t MemoryPlan::kv_bytes() const {
  size_t bytes = 0;
  for (const size_t group : kv) bytes += group;
  return bytes;
}

size_t MemoryPlan::total() const {
  return weights + kv_bytes() + workspace + logits + drafter + fixed;
}

int64_t MemoryPlan::cache_tokens() const {
  return blocks.empty() ? 0 : int64_t{*std::ranges::max_element(blocks)} * kBlockTokens;
}

std::string MemoryPlan::describe() const {
  std::string text = fmt::format("memory plan: {}", format_bytes(total()));
  if (available > 0) text += fmt::format(" of {} available", format_bytes(available));
  text += fmt::format("\n  weights    {:>9}", format_bytes(weights));
  for (size_t g = 0; g < kv.size(); ++g) {
    const std::string reach =
        windows[g] == 0 ? "full attention" : fmt::format("window of {}", windows[g]);
    text += fmt::format("\n  cache      {:>9}  {}, {} blocks of {} tokens, {}", format_bytes(kv[g]),
                        kv_type, blocks[g], kBlockTokens, reach);
  }
  text += fmt::format("\n  workspace  {:>9}  steps of {} tokens", format_bytes(workspace),
                      max_num_batched_tokens);
  text += fmt::format("\n  logits     {:>9}  {} rows", format_bytes(logits), max_logit_rows);
  if (drafter > 0) text += fmt::format("\n  drafter    {:>9}", format_bytes(drafter));
  text += fmt::format("\n  program    {:>9}", format_bytes(fixed));
  text += fmt::format("\n  sequences of up to {} tokens, {} at once", max_model_len, max_num_seqs);
  return text;
}

namespace {

// A plan for steps of a given size.
Result<MemoryPlan> plan_with_steps(const PlanRequest& r, bool by_user) {
  const auto model_context = static_cast<int>(std::min<int64_t>(r.model_context, INT32_MAX / 2));
  if (r.max_model_len < 0 || r.max_model_len == 1) {
    return invalid_argument("max_model_len is {}: must be 2 or more", r.max_model_len);
  }
  if (r.max_model_len > model_context) {
    return invalid_argument("max_model_len is {}: the model allows {}", r.max_model_len,
                            model_context);
  }
  MemoryPlan plan;
  plan.weights = r.weights;
  plan.drafter = r.drafter_weights;
  plan.fixed = kFixed;
  plan.available = r.available;
  plan.kv_type = r.kv.layers.empty() ? "" : std::string(ops::name_of(r.kv.layers.front().type));
  for (const KvGroup& group : r.kv.groups) plan.windows.push_back(group.window);
  plan.max_model_len = r.max_model_len > 0 ? r.max_model_len : model_context;
  size_step(r, plan);

  const size_t room =
      r.available == 0 ? SIZE_MAX / 4 : r.available - std::min(r.available, kReserve);
  const auto rest = [&] {
    return plan.weights + plan.workspace + plan.logits + plan.fixed + r.drafter_weights;
  };
  const auto left = [&] { return room - std::min(room, rest()); };
  const auto budget = [&] {
    if (r.kv_cache_memory > 0) return r.kv_cache_memory;
    return static_cast<size_t>(static_cast<double>(left()) * r.kv_share);
  };
  if (r.max_model_len == 0) {
    // A shorter limit needs less workspace, so this is conservative.
    const int fits = longest_that_fits(r, std::min(budget(), left()), model_context,
                                       plan.max_num_batched_tokens);
    if (fits >= 2) plan.max_model_len = fits;
    size_step(r, plan);
  }
  const int chunk = plan.max_num_batched_tokens;
  const size_t least = bytes_of(r, blocks_for(r, 0, plan.max_model_len, chunk));
  constexpr size_t kMiB = size_t{1} << 20;
  std::vector<std::string> ways;
  if (r.kv_cache_memory > 0 && least > r.kv_cache_memory) {
    const size_t offer = (least + kMiB - 1) / kMiB;
    if (rest() + offer * kMiB <= room) ways.push_back(fmt::format("--kv-cache-memory {}M", offer));
    return resource_exhausted(
        "a sequence of {} tokens needs {} of cache, but --kv-cache-memory is {}: {}",
        plan.max_model_len, format_bytes(least), format_bytes(r.kv_cache_memory),
        advice(r, plan, r.kv_cache_memory, plan.max_model_len, std::move(ways)));
  }
  const size_t asked = std::max(least, r.kv_cache_memory);
  if (rest() + asked > room) {
    const std::string needs =
        fmt::format("needs {}, {} free", format_bytes(rest() + asked), format_bytes(room));
    if (left() / kMiB * kMiB >= least)  // the cache fits, but not in the size that was asked for
      return resource_exhausted("{}: --kv-cache-memory {}M would fit", needs, left() / kMiB);
    if (const int tokens = by_user ? shorter_steps(r, plan, room, least) : 0; tokens > 0)
      ways.push_back(fmt::format("--max-num-batched-tokens {}", tokens));
    return resource_exhausted("{}: {}", needs,
                              advice(r, plan, left(), plan.max_model_len, std::move(ways)));
  }
  plan.blocks = *largest_pools(r, std::max(least, budget()), plan.max_model_len, chunk);
  for (size_t g = 0; g < plan.blocks.size(); ++g) {
    plan.kv.push_back(r.kv.block_bytes(static_cast<int>(g)) * static_cast<size_t>(plan.blocks[g]));
  }
  plan.drafter += drafter_cache(r, plan.blocks);
  return plan;
}

}  // namespace

Result<MemoryPlan> make_plan(const PlanRequest& request) {
  if (request.max_num_seqs < 0)
    return invalid_argument("max_num_seqs is {}: must be 1 or more", request.max_num_seqs);
  if (request.max_num_batched_tokens < 0) {
    return invalid_argument("max_num_batched_tokens is {}: must be 1 or more",
                            request.max_num_batched_tokens);
  }
  const auto with_steps = [&](int sequences, int tokens) {
    PlanRequest r = request;
    if (r.max_num_seqs == 0) r.max_num_seqs = sequences;
    if (r.max_num_batched_tokens == 0) r.max_num_batched_tokens = tokens;
    return plan_with_steps(r, request.max_num_batched_tokens > 0);
  };
  const bool given = request.max_num_seqs > 0 && request.max_num_batched_tokens > 0;
  if (request.steps == Steps::kLarge && !given) {
    auto plan = with_steps(kLargeStepSeqs, kLargeStepTokens);
    const size_t room = request.available - std::min(request.available, request.weights);
    if (plan.ok() && (request.available == 0 || (plan->workspace + plan->logits) * 8 <= room))
      return plan;
  }
  return with_steps(kStepSeqs, request.steps == Steps::kShort ? kShortStepTokens : kStepTokens);
}

}  // namespace freshet::engine
