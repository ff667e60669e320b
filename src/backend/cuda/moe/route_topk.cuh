// From a router's logits to a token's experts and their weights; by one warp.
#pragma once

#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {

inline constexpr int kFewExperts = 128;  // four per lane

// Experts' outputs are rounded to BF16, because they are often stored in BF16.
__device__ __forceinline__ float given(float v) {
  return __bfloat162float(__float2bfloat16_rn(v));
}

// Monotonic in the value.
__device__ __forceinline__ uint32_t key_of(float v) {
  const auto bits = __float_as_uint(v + 0.0f);  // makes -0 equal to 0
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
// The lowest index that has the warp's largest value.
__device__ __forceinline__ int best_of_warp(float v, int index) {
  const uint32_t key = key_of(v);
  const uint32_t best = __reduce_max_sync(0xffffffff, key);
  return __reduce_min_sync(0xffffffff, key == best ? index : INT32_MAX);
}

__device__ __forceinline__ float warp_sum(float v) {
  for (int step = 16; step > 0; step >>= 1) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  }
  return v;
}

// Excludes the experts of all but the best groups. By one lane.
__device__ inline void limit_groups(const RoutingArgs& r, float* choice, float* group_scores) {
  const int n = r.experts / r.groups;
  for (int g = 0; g < r.groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = g * n; i < (g + 1) * n; ++i) {
      if (choice[i] > first) {
        second = first;
        first = choice[i];
      } else {
        second = fmaxf(second, choice[i]);
      }
    }
    group_scores[g] = r.group_score_top == 2 && n > 1 ? first + second : first;
  }
  for (int dropped = 0; dropped < r.groups - r.top_groups; ++dropped) {
    int worst = -1;  // ties: drop the higher id
    for (int g = 0; g < r.groups; ++g) {
      if (isnan(group_scores[g])) continue;
      if (worst < 0 || group_scores[g] <= group_scores[worst]) worst = g;
    }
    if (worst < 0) return;
    group_scores[worst] = NAN;
    for (int i = worst * n; i < (worst + 1) * n; ++i) choice[i] = -INFINITY;
  }
}

// Floats of shared memory per warp that routes.
__host__ __device__ inline int routing_room(const RoutingArgs& r) {
  return r.groups > 1 ? r.experts + r.groups : 0;
}

// Routes a warp's token: from logits to experts and their weights. Lane l has experts l, l + 32,
// ...
template <int kMine>
__device__ __forceinline__ void route_token(const float* x, const RoutingArgs& r, float* room,
                                            int32_t* ids, float* weights) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  float score[kMine], choice[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    score[i] = lane + i * 32 < r.experts ? __ldcg(x + lane + i * 32) : -INFINITY;
  }
  if (r.score == 0) {  // softmax over all
    float most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMine; ++i) most = fmaxf(most, score[i]);
    for (int step = 16; step > 0; step >>= 1) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (lane + i * 32 < r.experts) sum += score[i] = expf(score[i] - most);
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kMine; ++i) score[i] = __fdiv_rn(score[i], sum);
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int e = lane + i * 32;
    if (r.score == 1) score[i] = __fdiv_rn(1.0f, 1.0f + expf(-score[i]));
    const bool corrected = r.correction != nullptr && e < r.experts;
    choice[i] = e >= r.experts ? -INFINITY : corrected ? score[i] + r.correction[e] : score[i];
  }
  if (r.groups > 1) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (lane + i * 32 < r.experts) room[lane + i * 32] = choice[i];
    }
    __syncwarp();
    if (lane == 0) limit_groups(r, room, room + r.experts);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (lane + i * 32 < r.experts) choice[i] = room[lane + i * 32];
    }
  }
  int id = 0;  // lane k has choice k
  float chosen = 0.0f;
  for (int k = 0; k < r.top_k; ++k) {
    float v = -INFINITY;
    int best = r.experts;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if (choice[i] > v) {
        v = choice[i];
        best = lane + i * 32;
      }
    }
    best = best_of_warp(v, best);
    if (best >= r.experts) best = 0;  // all are taken, or NaN
    float its = 0.0f;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const bool mine = best == lane + i * 32;
      its = mine ? score[i] : its;
      choice[i] = mine ? -INFINITY : choice[i];
    }
    its = __shfl_sync(0xffffffff, its, best % 32);
    if (lane == k) {
      id = best;
      chosen = its;
    }
  }
  const auto sum_of_chosen = [&](float all) {
    for (int k = 0; k < r.top_k; ++k) all += __shfl_sync(0xffffffff, chosen, k);
    return all;
  };
  if (r.score == 2) {  // softmax over the chosen
    float top = lane < r.top_k ? chosen : -INFINITY;
    for (int step = 16; step > 0; step >>= 1) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    }
    chosen = expf(chosen - top);
    chosen = __fdiv_rn(chosen, sum_of_chosen(0.0f));
  }
  float factor = r.scale;
  if (r.renormalize != 0) factor = __fdiv_rn(factor, sum_of_chosen(r.renormalize_eps));
  if (lane >= r.top_k) return;
  ids[lane] = id;
  weights[lane] = chosen * factor;
}

}  // namespace freshet::cuda
