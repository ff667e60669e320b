// What lies between the products of queries, keys and values and attention: norms of heads,
// rotation, and storing, in one pass. A warp takes one head of one token; the sums of its norm run
// in an order that the head's size fixes.
#include "backend/cuda/heads.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kHeadWarps = 8;

struct Place {
  int sequence, position;
};

__device__ __forceinline__ Place place_of(const BatchArgs& b, int token) {
  int low = 0, high = b.sequences - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (b.query_start[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, b.context_len[low] - (b.query_start[low + 1] - token)};
}

// Where a token goes in the cache.
struct Slot {
  int64_t block;
  int at;
};
__device__ __forceinline__ Slot slot_of(const BatchArgs& b, int token) {
  const Place place = place_of(b, token);
  return {b.tables[place.sequence * b.table_stride + place.position / kBlockTokens],
          place.position % kBlockTokens};
}
// Where a head that is kept goes.
struct Kept {
  uint8_t* to = nullptr;
  ScalesAt scales;  // from there on
};
__device__ __forceinline__ Kept place_in_cache(const HeadsArgs& a, HeadsArgs::Store store, int head,
                                               const Slot& slot) {
  const bool keys = store == HeadsArgs::kKeys;
  const int dim = keys ? a.cache.key_dim : a.cache.value_dim;
  const int at = slot_at(a.cache.type, slot.at, dim);
  ScalesAt scales = scales_at(slot.at, dim, keys);
  scales.first -= at;
  return {(keys ? keys_at(a.cache, slot.block, head) : values_at(a.cache, slot.block, head)) + at,
          scales};
}

// Blocks [token, kHeadWarps heads of all parts].
__global__ void __launch_bounds__(kHeadWarps * 32)
    heads_kernel(const __grid_constant__ HeadsArgs a, int room) {
  extern __shared__ __align__(16) float rooms[];
  let_next_start();
  const int token = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int h = static_cast<int>(blockIdx.y) * kHeadWarps + warp, p = 0;
  while (p < a.count && h >= a.of[p].heads) h -= a.of[p++].heads;
  if (p == a.count) return;
  const HeadsArgs::Part& part = a.of[p];
  // Tables came by a copy before the step's first kernel.
  Kept kept;
  if (part.store != HeadsArgs::kNowhere) {
    kept = place_in_cache(a, part.store, h, slot_of(a.batch, token));
  }
  float* x = part.x + token * part.stride + static_cast<int64_t>(h) * part.head_dim;
  const int dim = part.head_dim;
  const bool whole = dim % 4 == 0 && whole_rows(part.x, part.stride);
  float* head = rooms + warp * room;
  const float* table = a.cos_sin + static_cast<int64_t>(token) * part.rotary_dim;
  wait();
  Turn turn = turn_at(part, table, lane * 4);  // on its way while the head is
  for (int c = lane * 4; c < dim; c += 128) {
    *reinterpret_cast<float4*>(head + c) = load_four(x, c, dim, whole);
  }
  if (part.normed != 0) {
    norm_head(head, dim, part.norm, part.norm_per_head != 0 ? static_cast<int64_t>(h) * dim : 0);
  }
  __syncwarp();
  for (int c = lane * 4; c < dim; c += 128) {
    if (c >= 128) turn = turn_at(part, table, c);
    const float4 v = rotate_four(head, c, dim, part, table, turn);
    if (part.rotary_dim != 0 || part.normed != 0) {
      if (whole) {
        *reinterpret_cast<float4*>(x + c) = v;
      } else {
        const float values[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4 && c + i < dim; ++i) x[c + i] = values[i];
      }
    }
    if (kept.to != nullptr) {  // heads there are multiples of 8
      store_four(a.cache.type, kept.to, c, dim, v, kept.scales);
    }
  }
}

// The usual heads: 128 numbers that are rotated from end to end, or not at all, with an RMS norm or
// none. A warp takes several heads of a token, in prompts all of them, since where the token goes
// takes some looking up.
constexpr int kUsualDim = 128, kAtOnce = 4;

bool usual(const HeadsArgs& a) {
  for (int i = 0; i < a.count; ++i) {
    const HeadsArgs::Part& p = a.of[i];
    const bool whole = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.stride % 4 == 0;
    const bool turns = p.offset == 0 && p.interleaved == 0 && p.rotary_dim == kUsualDim;
    const NormArgs& n = p.norm;
    const bool norms = n.layer == 0 && n.bias == nullptr && n.weight != nullptr &&
                       reinterpret_cast<uintptr_t>(n.weight) % 16 == 0;
    if (p.head_dim != kUsualDim || (p.normed != 0 && !norms) || !whole ||
        (p.rotary_dim != 0 && !turns)) {
      return false;
    }
  }
  return true;
}

// norm_head() of four neighbours a lane.
__device__ __forceinline__ void norm_four(float4& v, const NormArgs& norm, const float* weight) {
  const float4 w = *reinterpret_cast<const float4*>(weight);
  float sum = __fmaf_rn(v.x, v.x, 0.0f);
  sum = __fmaf_rn(v.y, v.y, sum);
  sum = __fmaf_rn(v.z, v.z, sum);
  sum = __fmaf_rn(v.w, v.w, sum);
  const float scale = rsqrtf(sum_of_warp(sum) / static_cast<float>(kUsualDim) + norm.eps);
  v.x = __fmul_rn(__fmul_rn(v.x, scale), w.x);
  v.y = __fmul_rn(__fmul_rn(v.y, scale), w.y);
  v.z = __fmul_rn(__fmul_rn(v.z, scale), w.z);
  v.w = __fmul_rn(__fmul_rn(v.w, scale), w.w);
}

// Blocks [token, kHeadWarps heads], or kAll: [kHeadWarps tokens].
template <bool kAll>
__global__ void __launch_bounds__(kHeadWarps * 32)
    usual_heads_kernel(const __grid_constant__ HeadsArgs a, int heads) {
  let_next_start();
  const int warp = static_cast<int>(threadIdx.x / 32), c = static_cast<int>(threadIdx.x % 32) * 4;
  const int token = static_cast<int>(blockIdx.x) * (kAll ? kHeadWarps : 1) + (kAll ? warp : 0);
  const int first = kAll ? 0 : static_cast<int>(blockIdx.y) * kHeadWarps + warp;
  const int step = kAll ? 1 : static_cast<int>(gridDim.y) * kHeadWarps;
  if (token >= a.tokens) return;
  bool kept = false, turned = false;
  for (int p = 0; p < a.count; ++p) {
    kept = kept || a.of[p].store != HeadsArgs::kNowhere;
    turned = turned || a.of[p].rotary_dim != 0;
  }
  Slot slot = {};
  if (kept) slot = slot_of(a.batch, token);  // tables came before the step's first kernel
  wait();
  float4 cos = {}, sin = {};
  if (turned) {
    const float* table = a.cos_sin + static_cast<int64_t>(token) * kUsualDim + c % (kUsualDim / 2);
    cos = *reinterpret_cast<const float4*>(table);
    sin = *reinterpret_cast<const float4*>(table + kUsualDim / 2);
  }
  const bool second = c >= kUsualDim / 2;
  for (int from = first; from < heads; from += kAtOnce * step) {
    float4 v[kAtOnce];
    float* x[kAtOnce];
    int part[kAtOnce], head[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      head[i] = from + i * step, part[i] = 0;
      if (head[i] >= heads) break;
      while (head[i] >= a.of[part[i]].heads) head[i] -= a.of[part[i]++].heads;
      x[i] = a.of[part[i]].x + token * a.of[part[i]].stride + head[i] * kUsualDim + c;
      v[i] = *reinterpret_cast<const float4*>(x[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (from + i * step >= heads) break;
      const HeadsArgs::Part& of = a.of[part[i]];
      if (of.normed != 0) {
        norm_four(v[i], of.norm,
                  of.norm.weight + (of.norm_per_head != 0 ? head[i] * kUsualDim : 0) + c);
      }
      if (of.rotary_dim != 0) {
        const auto turn = [&](float& its, float by_cos, float by_sin) {
          const float other = __shfl_xor_sync(0xffffffff, its, 16);
          its = rotated(its, other, by_cos, by_sin, second);
        };
        turn(v[i].x, cos.x, sin.x), turn(v[i].y, cos.y, sin.y);
        turn(v[i].z, cos.z, sin.z), turn(v[i].w, cos.w, sin.w);
      }
      if (of.rotary_dim != 0 || of.normed != 0) *reinterpret_cast<float4*>(x[i]) = v[i];
      if (of.store == HeadsArgs::kNowhere) continue;
      const Kept kept = place_in_cache(a, of.store, head[i], slot);
      store_four(a.cache.type, kept.to, c, kUsualDim, v[i], kept.scales);
    }
  }
}

}  // namespace

int heads(const HeadsArgs* args) {
  int count = 0, longest = 0;
  for (int i = 0; i < args->count; ++i) {
    count += args->of[i].heads;
    longest = args->of[i].head_dim > longest ? args->of[i].head_dim : longest;
  }
  if (usual(*args)) {
    constexpr int64_t kManyTokens = 1024;
    if (args->tokens >= kManyTokens) {
      const auto blocks = static_cast<unsigned>(ceil_div(args->tokens, kHeadWarps));
      return launch(usual_heads_kernel<true>, dim3(blocks), dim3(kHeadWarps * 32), 0, *args, count);
    }
    const int64_t blocks = ceil_div(count, args->tokens > 256 ? kAtOnce * kHeadWarps : kHeadWarps);
    return launch(usual_heads_kernel<false>,
                  dim3(static_cast<unsigned>(args->tokens), static_cast<unsigned>(blocks)),
                  dim3(kHeadWarps * 32), 0, *args, count);
  }
  const int room = static_cast<int>(ceil_div(longest, 4)) * 4;
  const dim3 grid(static_cast<unsigned>(args->tokens),
                  static_cast<unsigned>(ceil_div(count, kHeadWarps)));
  return launch(heads_kernel, grid, dim3(kHeadWarps * 32),
                static_cast<size_t>(kHeadWarps * room) * sizeof(float), *args, room);
}

}  // namespace freshet::cuda
