// Usual heads (qk_norm_rope_store.cuh) inside decode attention: queries, keys and values are
// normalised, rotated and stored when a task loads them; bit-identical to the separate kernel.
//
// The consumer warps finish the queries; the producer warp finishes the new key and value before it
// copies the cache block that holds them.
#pragma once

#include "backend/cuda/attention/decode_split_kv.cuh"
#include "backend/cuda/attention/qk_norm_rope_store.cuh"

namespace freshet::cuda::single {

template <class T>
struct Shared;  // decode_sm90.cuh

// Whether usual heads may be normalised, rotated and stored here.
template <class T>
inline constexpr bool kTakesHeads = T::kAhead && T::D == kUsualDim;

// Loads the new key and value of a task's query (one warp).
struct Newest {
  float4 key, value, weight;
  Turn turn;
};
__device__ __forceinline__ Newest load_newest(const HeadsArgs& of, const Range& w) {
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  const auto at = [&](const HeadsArgs::Part& part) {
    return *reinterpret_cast<const float4*>(part.x + w.sequence * part.stride +
                                            w.kv_head * kUsualDim + c);
  };
  const HeadsArgs::Part& key = of.of[1];
  Newest n = {};
  n.key = at(key);
  n.value = at(of.of[2]);
  if (key.normed != 0) n.weight = weight_at(key, w.kv_head, c);
  if (key.rotary_dim != 0) n.turn = usual_turn(of.cos_sin, w.sequence, c);
  return n;
}
// Stores them in their cache block, which is read by later copies.
template <class T>
__device__ __forceinline__ void store_newest(Newest& n, const HeadsArgs& of, const CacheArgs& cache,
                                             const Range& w, int64_t block) {
  constexpr CacheType kType = T::Stored::kType;
  const int c = static_cast<int>(threadIdx.x % 32) * 4;
  const int slot = slot_at(kType, w.position % kBlockTokens, T::D);
  if (of.of[1].normed != 0) norm_four(n.key, n.weight, of.of[1].norm.eps);
  if (of.of[1].rotary_dim != 0) rotate_usual(n.key, n.turn);
  store_four(kType, keys_at(cache, block, w.kv_head) + slot, c, T::D, n.key);
  store_four(kType, values_at(cache, block, w.kv_head) + slot, c, T::D, n.value);
  memory_for_copies();
}

// Normalises and rotates a task's queries, which are in shared memory if `ahead`, else in global
// memory.
template <class T>
__device__ __forceinline__ void finish_queries(Shared<T>& s, const AttentionArgs& a,
                                               const HeadsArgs& of, const Range& w, bool ahead) {
  static_assert(T::D == kUsualDim);
  const int c = static_cast<int>(threadIdx.x % 32) * 4, warp = static_cast<int>(threadIdx.x / 32);
  const HeadsArgs::Part& part = of.of[0];
  Turn turn = {};
  if (part.rotary_dim != 0) {
    turn = ahead ? usual_turn(s.turn, 0, c) : usual_turn(of.cos_sin, w.sequence, c);
  }
  for (int row = warp; row < w.rows; row += kWarps) {
    const float* from = a.q + w.sequence * a.q_stride + (w.first_head + row) * T::D;
    if (ahead) from = s.queries[row];
    float4 v = *reinterpret_cast<const float4*>(from + c);
    if (part.normed != 0) norm_four(v, weight_at(part, w.first_head + row, c), part.norm.eps);
    if (part.rotary_dim != 0) rotate_usual(v, turn);
    *reinterpret_cast<float4*>(s.queries[row] + c) = v;
  }
  shared_for_copies();
  sync_summing();
}

}  // namespace freshet::cuda::single
