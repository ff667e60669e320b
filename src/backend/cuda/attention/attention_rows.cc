#include "backend/cuda/attention/attention_rows.h"

namespace freshet::cuda {
namespace {

constexpr uint64_t bit(CacheType type) {
  return uint64_t{1} << static_cast<int>(type);
}
constexpr uint64_t kAllTypes =
    bit(CacheType::kF16) | bit(CacheType::kBF16) | bit(CacheType::kE4M3) | bit(CacheType::kInt8);

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
bool in_bytes(const AttentionProblem& p) {
  return ((bit(CacheType::kE4M3) | bit(CacheType::kInt8)) >> p.format & 1) != 0;
}
bool shares_codes(const AttentionProblem& p) {
  return in_bytes(p) && p.shared_values;
}
int64_t query_tiles(const AttentionProblem& p) {  // of 16 heads that share a key head
  return int64_t{p.sequences} * p.kv_heads * ceil_div(p.heads / p.kv_heads, 16);
}

bool takes_decode(const DeviceLimits&, const AttentionProblem& p) {
  constexpr int64_t kMostCounters = 1 << 16;
  const int d = p.key_dim;
  return p.single && p.value_dim == d && (d == 64 || d == 128 || d == 256) &&
         query_tiles(p) <= kMostCounters && p.decode_aligned && !shares_codes(p);
}

bool takes_cluster(const DeviceLimits& limits, const AttentionProblem& p) {
  constexpr int64_t kPieceTokens = 512, kRanks = 4;
  if (!takes_decode(limits, p) || !p.partial || p.key_dim != 128) return false;
  int64_t pieces = ceil_div(p.max_context, kPieceTokens);
  if (p.window > 0) {
    const int64_t seen = ceil_div(p.window, kPieceTokens) + 1;
    pieces = pieces < seen ? pieces : seen;
  }
  // More would wait for each other: their copies of values are small. Codes are read fast enough by
  // blocks that leave the next kernel's more multiprocessors.
  const int64_t most = in_bytes(p) ? limits.multiprocessors / 2 : limits.multiprocessors;
  return query_tiles(p) * pieces * kRanks <= most;
}

// Fewer rows leave warps without work.
bool takes_prefill(const DeviceLimits&, const AttentionProblem& p) {
  constexpr int64_t kGroupRows = 64;
  const int d = p.key_dim;
  const bool large = d == 256 && !in_bytes(p);  // codes find no room
  return p.tokens * (p.heads / p.kv_heads) > kGroupRows && p.value_dim == d &&
         (d == 64 || d == 128 || large) && p.prefill_aligned && !shares_codes(p);
}

bool always(const DeviceLimits&, const AttentionProblem&) {
  return true;
}

}  // namespace

const AttentionRow kAttentionRows[kAttentionKernels] = {
    {"decode_cluster_sm90", 90, kAllTypes & ~bit(CacheType::kBF16), 1, 1,
     "heads of 128, few queries over short contexts", takes_cluster},
    {"decode_sm90", 90, kAllTypes, 1, 1, "heads of 64, 128 or 256", takes_decode},
    {"prefill_sm90", 90, kAllTypes, 1, kAnyTokens,
     "heads of 64, 128 or (F16, BF16) 256, over 64 rows of queries and heads a key head",
     takes_prefill},
    {"attention_sm80", 80, kAllTypes, 1, kAnyTokens, "", always},
};

}  // namespace freshet::cuda
