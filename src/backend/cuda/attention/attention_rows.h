// Which kernel runs attention (see runtime/kernel_row.h). All kernels sum a query's keys in the
// same order, so the choice affects speed only.
#pragma once

#include "backend/cuda/api.h"
#include "backend/cuda/runtime/kernel_row.h"

namespace freshet::cuda {

// A batch of sequences that all have one query, or of which some have more.
struct AttentionProblem {
  int format = 0;      // CacheType
  int64_t tokens = 1;  // an upper bound on the queries of a sequence
  int key_dim = 0, value_dim = 0, heads = 0, kv_heads = 0;
  int sequences = 0;
  bool single = false;         // every sequence has one query
  bool shared_values = false;  // values are the first features of keys
  bool partial = false;        // there is scratch for the KV splits of single queries
  int window = 0;
  int64_t max_context = 0;
  bool ranged = false;          // queries have key ranges, or scores get a bias by distance
  bool decode_aligned = true;   // q in multiples of four floats, rows of the result in pairs
  bool prefill_aligned = true;  // both in multiples of four floats, the result 16-byte aligned
};

using AttentionRow = KernelRow<AttentionProblem>;

constexpr uint64_t bit(CacheType type) {
  return uint64_t{1} << static_cast<int>(type);
}
// Whether the cache holds codes of at most a byte (E4M3, INT8, INT4, K8V4) rather than F16 or BF16.
inline bool stores_bytes(const AttentionProblem& p) {
  return ((bit(CacheType::kF16) | bit(CacheType::kBF16)) >> p.format & 1) == 0;
}
inline bool shares_codes(const AttentionProblem& p) {
  return stores_bytes(p) && p.shared_values;
}

enum AttentionKernel : int {
  kDecodeClusterSm90,
  kDecodeSm90,
  kExtendSm90,
  kPrefillSm90,
  kAttentionSm80,
  kAttentionKernels
};
extern const AttentionRow kAttentionRows[kAttentionKernels];

}  // namespace freshet::cuda
