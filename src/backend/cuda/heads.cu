// What lies between the products of queries, keys and values and attention: norms of heads,
// rotation, and storing, in one pass. A warp takes one head of one token; the sums of its norm run
// in an order that the head's size fixes.
#include "backend/cuda/attention.cuh"
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

// Where a head goes in the cache; nullptr: nowhere.
__device__ __forceinline__ uint8_t* place_in_cache(const HeadsArgs& a, HeadsArgs::Store store,
                                                   int head, int token) {
  if (store == HeadsArgs::kNowhere) return nullptr;
  const Place place = place_of(a.batch, token);
  const int64_t block =
      a.batch.tables[place.sequence * a.batch.table_stride + place.position / kBlockTokens];
  const int slot = place.position % kBlockTokens;
  return store == HeadsArgs::kKeys
             ? keys_at(a.cache, block, head) + slot_at(a.cache.type, slot, a.cache.key_dim)
             : values_at(a.cache, block, head) + slot_at(a.cache.type, slot, a.cache.value_dim);
}

// Codes of two features and of the two that are eight further, as two pairs.
__device__ __forceinline__ uint32_t pairs_of(uint32_t first, uint32_t second) {
  const uint32_t a = __byte_perm(first, 0, 0x4140), b = __byte_perm(second, 0, 0x4140);
  return (a & 0x00800080) << 8 | (b & 0x00800080) << 7 | (a & 0x007f007f) << 7 | (b & 0x007f007f);
}

// Four neighbours of a head, from feature c on. In E4M3 the lanes of every 16 features together.
__device__ __forceinline__ void store_four(CacheType type, uint8_t* to, int c, int dim,
                                           const float4& v) {
  to += feature_at(type, c);
  if (type == CacheType::kE4M3) {
    const int lanes = min(32, (dim - c / 128 * 128) / 4);
    const uint32_t codes = two_e4m3(v.x, v.y) | two_e4m3(v.z, v.w) << 16;
    const uint32_t others = __shfl_xor_sync(0xffffffff >> (32 - lanes), codes, 2);
    if (c % 16 < 8) {
      *reinterpret_cast<uint2*>(to) =
          make_uint2(pairs_of(codes, others), pairs_of(codes >> 16, others >> 16));
    }
    return;
  }
  const __half2 low = __halves2half2(to_half(v.x), to_half(v.y));
  const __half2 high = __halves2half2(to_half(v.z), to_half(v.w));
  *reinterpret_cast<uint2*>(to) =
      make_uint2(reinterpret_cast<const uint32_t&>(low), reinterpret_cast<const uint32_t&>(high));
}

__device__ __forceinline__ float sum_of_warp(float v) {
  for (int step = 16; step > 0; step >>= 1) {
    v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  }
  return v;
}

// Four neighbours of a row of `n`.
__device__ __forceinline__ float4 load_four(const float* p, int c, int n, bool whole) {
  if (whole) return *reinterpret_cast<const float4*>(p + c);
  const auto at = [&](int i) { return c + i < n ? p[c + i] : 0.0f; };
  return make_float4(at(0), at(1), at(2), at(3));
}

// The head in shared memory, normalised.
__device__ __forceinline__ void norm_head(float* head, int dim, const NormArgs& norm,
                                          int64_t offset) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // Calls f for each of a lane's numbers.
  const auto each = [&](const auto& f) {
    for (int c = lane * 4; c < dim; c += 128) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (c + i < dim) f(c + i, head[c + i]);
      }
    }
  };
  const auto count = static_cast<float>(dim);
  float mean = 0.0f, sum = 0.0f;
  if (norm.layer != 0) {
    each([&](int, float v) { sum = __fadd_rn(sum, v); });
    mean = sum_of_warp(sum) / count;
    sum = 0.0f;
  }
  each([&](int, float v) { sum = __fmaf_rn(v - mean, v - mean, sum); });
  const float scale = rsqrtf(sum_of_warp(sum) / count + norm.eps);
  each([&](int c, float v) {
    v = __fmul_rn(__fsub_rn(v, mean), scale);
    if (norm.weight != nullptr) v = __fmul_rn(v, norm.weight[offset + c]);
    if (norm.bias != nullptr) v = __fadd_rn(v, norm.bias[offset + c]);
    head[c] = v;
  });
}

// Number c of a head, rotated: `partner` is the other of its pair, and `second` says which it is.
__device__ __forceinline__ float rotated(float v, float partner, float cos, float sin,
                                         bool second) {
  return __fmaf_rn(v, cos, second ? __fmul_rn(partner, sin) : -__fmul_rn(partner, sin));
}

// How four neighbours from c on are rotated, where pairs are half of the rotated part apart.
struct Turn {
  float4 cos, sin;
};
__device__ __forceinline__ bool turns_by_fours(const HeadsArgs::Part& part) {
  return part.interleaved == 0 && (part.rotary_dim / 2 | part.offset) % 4 == 0;
}
__device__ __forceinline__ Turn turn_at(const HeadsArgs::Part& part, const float* table, int c) {
  const int half = part.rotary_dim / 2, at = c - part.offset;
  if (!turns_by_fours(part) || at < 0 || at >= part.rotary_dim) return {};
  const float* from = table + (at >= half ? at - half : at);
  return {*reinterpret_cast<const float4*>(from), *reinterpret_cast<const float4*>(from + half)};
}

// Four neighbours of the head in shared memory, from c on, rotated.
__device__ __forceinline__ float4 rotate_four(const float* head, int c, int dim,
                                              const HeadsArgs::Part& part, const float* table,
                                              const Turn& turn) {
  float4 v = *reinterpret_cast<const float4*>(head + c);
  if (part.rotary_dim == 0) return v;
  const int half = part.rotary_dim / 2, at = c - part.offset;
  if (turns_by_fours(part)) {
    if (at < 0 || at >= part.rotary_dim) return v;
    const bool second = at >= half;
    const auto& [cos, sin] = turn;
    const float4 other = *reinterpret_cast<const float4*>(head + (second ? c - half : c + half));
    v.x = rotated(v.x, other.x, cos.x, sin.x, second);
    v.y = rotated(v.y, other.y, cos.y, sin.y, second);
    v.z = rotated(v.z, other.z, cos.z, sin.z, second);
    v.w = rotated(v.w, other.w, cos.w, sin.w, second);
    return v;
  }
  const auto one = [&](float x, int i) {
    const int e = at + i;
    if (e < 0 || e >= part.rotary_dim || c + i >= dim) return x;
    const bool second = part.interleaved != 0 ? e % 2 != 0 : e >= half;
    const int k = part.interleaved != 0 ? e / 2 : (second ? e - half : e);
    const int apart = part.interleaved != 0 ? 1 : half;
    return rotated(x, head[c + i + (second ? -apart : apart)], table[k], table[half + k], second);
  };
  return make_float4(one(v.x, 0), one(v.y, 1), one(v.z, 2), one(v.w, 3));
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
  uint8_t* to = place_in_cache(a, part.store, h, token);
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
    if (to != nullptr) store_four(a.cache.type, to, c, dim, v);  // heads there are multiples of 8
  }
}

}  // namespace

int heads(const HeadsArgs* args) {
  int count = 0, longest = 0;
  for (int i = 0; i < args->count; ++i) {
    count += args->of[i].heads;
    longest = args->of[i].head_dim > longest ? args->of[i].head_dim : longest;
  }
  const int room = static_cast<int>(ceil_div(longest, 4)) * 4;
  const dim3 grid(static_cast<unsigned>(args->tokens),
                  static_cast<unsigned>(ceil_div(count, kHeadWarps)));
  return launch(heads_kernel, grid, dim3(kHeadWarps * 32),
                static_cast<size_t>(kHeadWarps * room) * sizeof(float), *args, room);
}

}  // namespace freshet::cuda
