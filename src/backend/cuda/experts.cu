// Routing of tokens to experts, their order by expert, and the sums of what experts gave.
#include "backend/cuda/common.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

// The greatest value of a warp and the lowest index that has it.
__device__ __forceinline__ void best_of_warp(float& v, int& index) {
  for (int step = 16; step > 0; step >>= 1) {
    const float other = __shfl_xor_sync(0xffffffff, v, step);
    const int its = __shfl_xor_sync(0xffffffff, index, step);
    if (other > v || (other == v && its < index)) {
      v = other;
      index = its;
    }
  }
}

__device__ __forceinline__ float warp_sum(float v) {
  for (int step = 16; step > 0; step >>= 1) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  }
  return v;
}

// Takes the experts of all but the best groups out of the choice. One lane.
__device__ void limit_groups(const RoutingArgs& r, float* choice, float* group_scores) {
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
    int worst = -1;  // of equals the higher id goes first
    for (int g = 0; g < r.groups; ++g) {
      if (isnan(group_scores[g])) continue;
      if (worst < 0 || group_scores[g] <= group_scores[worst]) worst = g;
    }
    if (worst < 0) return;
    group_scores[worst] = NAN;
    for (int i = worst * n; i < (worst + 1) * n; ++i) choice[i] = -INFINITY;
  }
}

// A warp a token.
__global__ void route_kernel(Rows logits, RoutingArgs r, int32_t* ids, float* weights) {
  __shared__ float scores[kMaxExperts], choice[kMaxExperts], group_scores[kMaxExperts];
  __shared__ float chosen[kMaxTopK];
  let_next_start();
  wait();
  const int64_t t = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const float* x = logits.data + t * logits.stride;
  float most = -INFINITY, sum = 0.0f;
  if (r.score == 0) {  // softmax over all
    for (int e = lane; e < r.experts; e += 32) most = fmaxf(most, x[e]);
    for (int step = 16; step > 0; step >>= 1) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    }
    for (int e = lane; e < r.experts; e += 32) sum += expf(x[e] - most);
    sum = warp_sum(sum);
  }
  for (int e = lane; e < r.experts; e += 32) {
    float v = x[e];
    if (r.score == 0) v = __fdiv_rn(expf(v - most), sum);
    if (r.score == 1) v = __fdiv_rn(1.0f, 1.0f + expf(-v));
    scores[e] = v;
    choice[e] = r.correction != nullptr ? v + r.correction[e] : v;
  }
  __syncwarp();
  if (r.groups > 1 && lane == 0) limit_groups(r, choice, group_scores);
  __syncwarp();
  for (int k = 0; k < r.top_k; ++k) {
    float v = -INFINITY;
    int best = r.experts;
    for (int e = lane; e < r.experts; e += 32) {
      if (choice[e] > v) {
        v = choice[e];
        best = e;
      }
    }
    best_of_warp(v, best);
    if (best >= r.experts) best = 0;  // all are taken or not numbers
    if (lane == 0) {
      choice[best] = -INFINITY;
      ids[t * r.top_k + k] = best;
      chosen[k] = scores[best];
    }
    __syncwarp();
  }
  if (lane != 0) return;
  if (r.score == 2) {  // softmax over the chosen
    float top = chosen[0], all = 0.0f;
    for (int k = 1; k < r.top_k; ++k) top = fmaxf(top, chosen[k]);
    for (int k = 0; k < r.top_k; ++k) all += chosen[k] = expf(chosen[k] - top);
    for (int k = 0; k < r.top_k; ++k) chosen[k] = __fdiv_rn(chosen[k], all);
  }
  float factor = r.scale;
  if (r.renormalize != 0) {
    float all = r.renormalize_eps;
    for (int k = 0; k < r.top_k; ++k) all += chosen[k];
    factor = __fdiv_rn(factor, all);
  }
  for (int k = 0; k < r.top_k; ++k) weights[t * r.top_k + k] = chosen[k] * factor;
}

// One block. Which place a token gets among its expert's is chance, and touches no sum.
__global__ void __launch_bounds__(1024) group_kernel(GroupArgs a) {
  __shared__ int32_t count[kMaxExperts], next[kMaxExperts];
  let_next_start();
  wait();
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int pairs = a.tokens * a.top_k;
  for (int e = thread; e < a.experts; e += threads) count[e] = 0;
  for (int p = thread; p < a.slots * a.slot_tokens; p += threads) a.token[p] = -1;
  for (int s = thread; s < a.slots; s += threads) a.slot_expert[s] = -1;
  __syncthreads();
  for (int i = thread; i < pairs; i += threads) atomicAdd(&count[a.ids[i]], 1);
  __syncthreads();
  if (thread == 0) {
    int slot = 0;
    for (int e = 0; e < a.experts; ++e) {
      next[e] = slot * a.slot_tokens;
      const int slots = (count[e] + a.slot_tokens - 1) / a.slot_tokens;
      for (int s = 0; s < slots; ++s) a.slot_expert[slot++] = e;
    }
  }
  __syncthreads();
  for (int i = thread; i < pairs; i += threads) {
    const int place = atomicAdd(&next[a.ids[i]], 1);
    a.token[place] = i / a.top_k;
    a.place_weight[place] = a.weights[i];
    a.place[i] = place;
  }
}

__global__ void combine_kernel(Rows out, const float* y, GroupArgs a, int weighted, int add) {
  __shared__ int32_t places[kMaxTopK];
  let_next_start();
  wait();
  const int64_t t = blockIdx.y;
  if (threadIdx.x == 0) {  // ascending, hence in order of expert
    for (int k = 0; k < a.top_k; ++k) {
      const int32_t place = a.place[t * a.top_k + k];
      int at = k;
      for (; at > 0 && places[at - 1] > place; --at) places[at] = places[at - 1];
      places[at] = place;
    }
  }
  __syncthreads();
  const int64_t c = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (c >= out.cols) return;
  float sum = 0.0f;
  for (int k = 0; k < a.top_k; ++k) {
    const float w = weighted != 0 ? a.place_weight[places[k]] : 1.0f;
    const float v = y[places[k] * out.cols + c];
    sum = k == 0 ? __fmul_rn(v, w) : __fmaf_rn(v, w, sum);
  }
  float& to = out.data[t * out.stride + c];
  to = add != 0 ? __fadd_rn(to, sum) : sum;
}

}  // namespace

int route(const Rows* logits, const RoutingArgs* routing, int32_t* ids, float* weights) {
  return launch(route_kernel, dim3(static_cast<unsigned>(logits->rows)), dim3(32), 0, *logits,
                *routing, ids, weights);
}

int group(const GroupArgs* args) {
  return launch(group_kernel, dim3(1), dim3(1024), 0, *args);
}

int combine(const Rows* out, const float* y, const GroupArgs* args, int weighted, int add) {
  const dim3 grid(static_cast<unsigned>(ceil_div(out->cols, 256)),
                  static_cast<unsigned>(out->rows));
  return launch(combine_kernel, grid, dim3(256), 0, *out, y, *args, weighted, add);
}

}  // namespace freshet::cuda
