#include "backend/cuda/attention/attention_rows.h"

#include "backend/cuda/attention/decode_cluster_sm90.h"
#include "backend/cuda/attention/decode_sm90.h"
#include "backend/cuda/attention/prefill_sm90.h"

namespace freshet::cuda {
namespace {

constexpr uint64_t kAllTypes =
    bit(CacheType::kF16) | bit(CacheType::kBF16) | bit(CacheType::kE4M3) | bit(CacheType::kInt8);

constexpr uint64_t kEveryType = kAllTypes | bit(CacheType::kInt4) | bit(CacheType::kK8V4);

bool always(const DeviceLimits&, const AttentionProblem&) {
  return true;
}

}  // namespace

const AttentionRow kAttentionRows[kAttentionKernels] = {
    {"decode_cluster_sm90", 90, kAllTypes & ~bit(CacheType::kBF16), 1, 1,
     "heads of 128, few queries over short contexts", supports_decode_cluster},
    {"decode_sm90", 90, kEveryType, 1, 1, "heads of 64, 128 or 256", supports_decode},
    {"extend_sm90", 90, kEveryType, 2, kExtendRows,
     "heads of 64, 128 or 256, up to 64 rows of queries and heads a key head", supports_extend},
    {"prefill_sm90", 90, kAllTypes, 1, kAnyTokens,
     "heads of 64, 128 or (F16, BF16) 256, over 64 rows of queries and heads a key head",
     supports_prefill},
    {"attention_sm80", 80, kEveryType, 1, kAnyTokens, "", always},
};

}  // namespace freshet::cuda
