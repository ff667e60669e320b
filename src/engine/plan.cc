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
// With drafts, room for all of them in steps of up to this many rows.
constexpr int kDraftedRows = 128, kLargeDraftedRows = 512;
// Default limits of a step.
constexpr int kStepSeqs = 256, kStepTokens = 2048, kShortStepTokens = 512;
constexpr int kLargeStepSeqs = 1024, kLargeStepTokens = 8192;

// How many tokens the pools hold.
int64_t tokens_of(const std::vector<KvGroup>& groups, const std::vector<int32_t>& blocks) {
  int64_t most = 0, states = 0;
  for (size_t g = 0; g < blocks.size(); ++g) {
    int64_t& of = groups[g].kind == KvKind::kTokens ? most : states;
    of = std::max<int64_t>(of, blocks[g]);
  }
  // With states alone a sequence may have any length.
  return most > 0 ? most * kBlockTokens : states * kUsualLength;
}

size_t drafter_cache(const PlanRequest& r, const std::vector<int32_t>& blocks) {
  return static_cast<size_t>(tokens_of(r.kv.groups, blocks)) * r.drafter_bytes_per_token;
}

// The cache with these pools, and a drafter's.
size_t bytes_of(const PlanRequest& r, const std::vector<int32_t>& blocks) {
  size_t bytes = drafter_cache(r, blocks);
  for (size_t g = 0; g < blocks.size(); ++g) {
    bytes += r.kv.block_bytes(static_cast<int>(g)) * static_cast<size_t>(blocks[g]);
  }
  return bytes;
}

// How many checkpoints are planned beside these blocks: their share of the cache, at least two.
int64_t checkpoints(const PlanRequest& r, const std::vector<int32_t>& blocks) {
  const int g = r.kv.state_group();
  if (g < 0) return 0;
  const double share = std::clamp(r.checkpoint_share, 0.0, 0.9);
  size_t bytes = 0;
  for (size_t i = 0; i < blocks.size(); ++i)
    bytes += r.kv.block_bytes(static_cast<int>(i)) * static_cast<size_t>(blocks[i]);
  const double others = static_cast<double>(bytes) * share / (1.0 - share);
  return 2 + static_cast<int64_t>(others / static_cast<double>(r.kv.block_bytes(g)));
}

// Blocks for `sequences` of the usual length, one of which may be as long as `length`.
std::vector<int32_t> blocks_for(const PlanRequest& r, int64_t sequences, int length, int chunk) {
  std::vector<int32_t> blocks;
  const int usual = std::min(length, kUsualLength);
  for (size_t g = 0; g < r.kv.groups.size(); ++g) {
    const KvGroup& group = r.kv.groups[g];
    if (group.cross > 0) {  // any request may have the longest input
      const int64_t one = (group.cross + kBlockTokens - 1) / kBlockTokens;
      const int64_t wanted = one * std::clamp<int64_t>(sequences, 1, r.max_num_seqs);
      blocks.push_back(static_cast<int32_t>(std::min<int64_t>(wanted, INT32_MAX)));
      continue;
    }
    const bool states = group.kind == KvKind::kState;
    const int64_t slots = states ? r.state_slots : 1;
    const bool evicts = r.max_slots > 0 && r.kv.may_evict(static_cast<int>(g));
    const int held = evicts ? std::min(length, r.max_slots) : length;
    const int64_t longest = slots * BlockCache::most_blocks(group, held, chunk);
    const int64_t each =
        slots * BlockCache::most_blocks(group, std::min(usual, held), kBlockTokens);
    const int64_t most = longest * r.max_num_seqs;
    const int64_t wanted = std::clamp(each * sequences, longest, std::max(longest, most));
    blocks.push_back(static_cast<int32_t>(std::min<int64_t>(wanted, INT32_MAX)));
  }
  if (const int g = r.kv.state_group(); g >= 0) {
    int32_t& slots = blocks[static_cast<size_t>(g)];
    slots =
        static_cast<int32_t>(std::min<int64_t>(int64_t{slots} + checkpoints(r, blocks), INT32_MAX));
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
  const int64_t drafted =
      std::min<int64_t>(int64_t{r.max_num_seqs} * (1 + r.drafts),
                        r.steps == Steps::kLarge ? kLargeDraftedRows : kDraftedRows);
  plan.max_logit_rows = std::min(
      std::max({r.max_num_seqs, kMinLogitRows, r.drafts > 0 ? static_cast<int>(drafted) : 0}),
      plan.max_num_batched_tokens);
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

// The type of keys and values; nullopt: there are none.
std::optional<ops::KvType> kv_type(const KvCacheSpec& kv) {
  for (const KvLayer& layer : kv.layers) {
    if (layer.state_bytes == 0) return layer.shape.type;
  }
  return std::nullopt;
}

// Settings that would fit, given `room` bytes for the cache, besides `ways`.
std::string advice(const PlanRequest& r, const MemoryPlan& plan, size_t room, int length,
                   std::vector<std::string> ways) {
  const ops::KvType type = kv_type(r.kv).value_or(ops::KvType::kFP8);
  const bool one_byte = ops::info(type).key.bits <= 8;
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
  return tokens_of(groups, blocks);
}

std::string MemoryPlan::describe() const {
  std::string text = fmt::format("memory plan: {}", format_bytes(total()));
  if (available > 0) text += fmt::format(" of {} available", format_bytes(available));
  text += fmt::format("\n  weights    {:>9}", format_bytes(weights));
  for (size_t g = 0; g < kv.size(); ++g) {
    if (groups[g].kind == KvKind::kState) {
      text += fmt::format("\n  states     {:>9}  {} slots, {} of them for checkpoints",
                          format_bytes(kv[g]), blocks[g], checkpoints);
      continue;
    }
    const int window = groups[g].window;
    const std::string reach = window == 0 ? "full attention" : fmt::format("window of {}", window);
    text += fmt::format("\n  cache      {:>9}  {}, {} blocks of {} tokens, {}", format_bytes(kv[g]),
                        kv_types[g], blocks[g], kBlockTokens, reach);
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

// How many of the slots are the checkpoints' share.
int32_t planned_checkpoints(const PlanRequest& r, const MemoryPlan& plan) {
  const int g = r.kv.state_group();
  if (g < 0) return 0;
  const double share = std::clamp(r.checkpoint_share, 0.0, 0.9);
  const double fit =
      static_cast<double>(plan.kv_bytes()) * share / static_cast<double>(r.kv.block_bytes(g));
  const int32_t spare = plan.blocks[static_cast<size_t>(g)] - r.state_slots;
  return std::min(2 + static_cast<int32_t>(std::min(fit, 1e9)), spare);
}

// A plan for steps of a given size.
Result<MemoryPlan> plan_with_steps(const PlanRequest& r, bool by_user) {
  const auto model_context = static_cast<int>(std::min<int64_t>(r.model_context, INT32_MAX / 2));
  if (r.max_model_len < 0 || r.max_model_len == 1) {
    return invalid_argument("--max-model-len is {}: must be 2 or more", r.max_model_len);
  }
  if (r.max_model_len > model_context) {
    return invalid_argument("--max-model-len is {}: the model allows {}", r.max_model_len,
                            model_context);
  }
  MemoryPlan plan;
  plan.weights = r.weights;
  plan.drafter = r.drafter_weights;
  plan.fixed = kFixed;
  plan.available = r.available;
  for (size_t g = 0; g < r.kv.groups.size(); ++g)
    plan.kv_types.push_back(r.kv.type_names(static_cast<int>(g)));
  plan.groups = r.kv.groups;
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
  plan.checkpoints = planned_checkpoints(r, plan);
  plan.drafter += drafter_cache(r, plan.blocks);
  return plan;
}

// The cache of one step: its tokens, and a block that is not full for each sequence. The scheduler
// keeps a hundredth of a pool free.
std::vector<int32_t> blocks_of_step(const PlanRequest& r, const MemoryPlan& plan) {
  const int64_t blocks = plan.max_num_batched_tokens / kBlockTokens + plan.max_num_seqs + 1;
  return std::vector<int32_t>(r.kv.groups.size(), static_cast<int32_t>(blocks + blocks / 64 + 1));
}

// A plan for sequences that are computed whole and live for one step.
Result<MemoryPlan> plan_whole(PlanRequest r) {
  const auto context = static_cast<int>(std::min<int64_t>(r.model_context, INT32_MAX / 2));
  if (r.max_model_len > context) {
    return invalid_argument("--max-model-len is {}: the model allows {}", r.max_model_len, context);
  }
  const bool length_given = r.max_model_len > 0, tokens_given = r.max_num_batched_tokens > 0;
  if (length_given && tokens_given && r.max_num_batched_tokens < r.max_model_len) {
    return invalid_argument(
        "max_num_batched_tokens is {}: this model computes a prompt in one step, so it must be at "
        "least max_model_len ({})",
        r.max_num_batched_tokens, r.max_model_len);
  }
  if (!length_given) r.max_model_len = context;
  if (tokens_given) r.max_model_len = std::min(r.max_model_len, r.max_num_batched_tokens);
  if (r.max_num_seqs == 0) r.max_num_seqs = kStepSeqs;
  const int usual = r.steps == Steps::kShort ? kShortStepTokens : kStepTokens;
  const size_t room =
      r.available == 0 ? SIZE_MAX / 4 : r.available - std::min(r.available, kReserve);
  while (true) {
    PlanRequest step = r;
    if (!tokens_given) step.max_num_batched_tokens = std::max(usual, r.max_model_len);
    MemoryPlan plan;
    plan.weights = r.weights;
    plan.fixed = kFixed;
    plan.available = r.available;
    plan.groups = r.kv.groups;
    for (size_t g = 0; g < r.kv.groups.size(); ++g)
      plan.kv_types.push_back(r.kv.type_names(static_cast<int>(g)));
    plan.max_model_len = r.max_model_len;
    size_step(step, plan);
    plan.blocks = blocks_of_step(r, plan);
    for (size_t g = 0; g < plan.blocks.size(); ++g) {
      plan.kv.push_back(r.kv.block_bytes(static_cast<int>(g)) *
                        static_cast<size_t>(plan.blocks[g]));
    }
    const bool fits = plan.total() <= room;
    if (fits && (r.kv_cache_memory == 0 || plan.kv_bytes() <= r.kv_cache_memory)) return plan;
    if (fits) {
      return resource_exhausted("one step needs {} of cache, but --kv-cache-memory is {}",
                                format_bytes(plan.kv_bytes()), format_bytes(r.kv_cache_memory));
    }
    if (length_given || tokens_given || r.max_model_len <= 2 * kBlockTokens) {
      return resource_exhausted(
          "needs {}, {} free: a smaller --max-model-len or a machine with "
          "more memory is needed",
          format_bytes(plan.total()), format_bytes(room));
    }
    r.max_model_len /= 2;
  }
}

}  // namespace

Result<MemoryPlan> make_plan(const PlanRequest& request) {
  if (request.max_num_seqs < 0)
    return invalid_argument("max_num_seqs is {}: must be 1 or more", request.max_num_seqs);
  if (request.max_num_batched_tokens < 0) {
    return invalid_argument("max_num_batched_tokens is {}: must be 1 or more",
                            request.max_num_batched_tokens);
  }
  if (request.one_step) return plan_whole(request);
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
