// The operations between the QKV GEMM and attention in one pass: norms of heads, rotary embedding
// and storing to the KV cache. A warp processes one head of one token. The head's size fixes the
// order of sums of its norm.
#include "backend/cuda/attention/qk_norm_rope_store.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kHeadWarps = 8;

struct HeadPlace {
  int sequence, position;
};

__device__ __forceinline__ HeadPlace place_of(const BatchArgs& b, int token) {
  if (token < b.sequences) {  // decode batch: all three are loaded at once
    const int begin = b.query_start[token], end = b.query_start[token + 1];
    const int context = b.context_len[token];
    if (begin == token && end == token + 1) return {token, context - 1};
  }
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

// A token's position in the cache.
struct Slot {
  int64_t block;
  int at;
};
__device__ __forceinline__ Slot slot_of(const BatchArgs& b, int token) {
  const HeadPlace place = place_of(b, token);
  return {b.tables[place.sequence * b.table_stride + place.position / kBlockTokens],
          place.position % kBlockTokens};
}
// Where a head is stored.
struct Kept {
  uint8_t* to = nullptr;
  ScalesAt scales;  // relative to `to`
};
__device__ __forceinline__ Kept place_in_cache(const HeadsArgs& a, HeadsArgs::Store store, int head,
                                               const Slot& slot) {
  const bool keys = store == HeadsArgs::kKeys;
  const int dim = keys ? a.cache.key_dim : a.cache.value_dim;
  const CacheType type = part_of(a.cache.type, keys);
  const int at = slot_at(type, slot.at, dim);
  ScalesAt scales = scales_at(type, slot.at, dim, keys);
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
  // Block tables were copied before the step's first kernel.
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
  Turn turn = turn_at(part, table, lane * 4);  // these loads overlap those of the head
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
    if (kept.to != nullptr) {  // stored heads are multiples of 8 features
      store_four(part_of(a.cache.type, true), kept.to, c, dim, v, kept.scales);
    }
  }
}

// A warp processes several usual heads of a token (in prefill all of them), because finding a
// token's slot costs time.
constexpr int kAtOnce = 4;

bool usual(const HeadsArgs& a) {
  for (int i = 0; i < a.count; ++i) {
    if (!usual(a.of[i])) return false;
  }
  return true;
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
  // Block tables were copied before the step's first kernel.
  if (kept) slot = slot_of(a.batch, token);
  wait();
  Turn turn = {};
  if (turned) turn = usual_turn(a.cos_sin, token, c);
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
      if (of.normed != 0) norm_four(v[i], weight_at(of, head[i], c), of.norm.eps);
      if (of.rotary_dim != 0) rotate_usual(v[i], turn);
      if (of.rotary_dim != 0 || of.normed != 0) *reinterpret_cast<float4*>(x[i]) = v[i];
      if (of.store == HeadsArgs::kNowhere) continue;
      const Kept kept = place_in_cache(a, of.store, head[i], slot);
      store_four(part_of(a.cache.type, true), kept.to, c, kUsualDim, v[i], kept.scales);
    }
  }
}

// Usual heads of many tokens that only the cache needs: a warp processes one head of eight tokens,
// so that many loads overlap and adjacent features are written together. Grid: [kTokensOfWarp
// tokens, kHeadWarps heads].
constexpr int kTokensOfWarp = 8;

template <CacheType kType>
__global__ void __launch_bounds__(kHeadWarps * 32)
    stored_heads_kernel(const __grid_constant__ HeadsArgs a) {
  let_next_start();
  const int lane = static_cast<int>(threadIdx.x % 32), c = lane * 4;
  int h = static_cast<int>(blockIdx.y) * kHeadWarps + static_cast<int>(threadIdx.x / 32), p = 0;
  while (p < a.count && h >= a.of[p].heads) h -= a.of[p++].heads;
  if (p == a.count) return;
  const HeadsArgs::Part& of = a.of[p];
  const int first = static_cast<int>(blockIdx.x) * kTokensOfWarp;
  const int last = static_cast<int>(a.tokens) - 1;
  wait();
  float4 v[kTokensOfWarp];
#pragma unroll
  for (int i = 0; i < kTokensOfWarp; ++i) {
    v[i] = *reinterpret_cast<const float4*>(of.x + min(first + i, last) * of.stride +
                                            h * kUsualDim + c);
  }
  // Lane i, i + 8, ... knows the slot of token i.
  const Kept kept =
      place_in_cache(a, of.store, h, slot_of(a.batch, min(first + lane % kTokensOfWarp, last)));
  const auto its_place = [&](int i) {
    return reinterpret_cast<uint8_t*>(
        __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(kept.to), i));
  };
  float4 weight = {};
  if (of.normed != 0) weight = weight_at(of, h, c);
#pragma unroll
  for (int i = 0; i < kTokensOfWarp; ++i) {
    if (of.normed != 0) norm_four(v[i], weight, of.norm.eps);
    if (of.rotary_dim != 0) {
      rotate_usual(v[i], usual_turn(a.cos_sin, min(first + i, last), c));
    }
  }
  // The lanes that hold 16 bytes of a token exchange them, so that each lane has one token.
  if constexpr (in_bytes(kType)) {
#pragma unroll
    for (int from = 0; from < kTokensOfWarp; from += 4) {
      uint32_t codes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kType == CacheType::kInt8) {
          uint16_t scale;
          codes[i] = int8_codes(v[from + i], 32, &scale);
          uint8_t* to = its_place(from + i);
          const int at = __shfl_sync(0xffffffff, kept.scales.first, from + i);
          if (c % 32 == 0 && first + from + i <= last) {
            *reinterpret_cast<uint16_t*>(to + at + c / 32 * kept.scales.apart) = scale;
          }
        } else {
          codes[i] = e4m3_codes(v[from + i]);
        }
      }
#pragma unroll
      for (int step = 1; step < 4; step <<= 1) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t &low = codes[i * (3 - step)], &high = codes[i * (3 - step) + step];
          const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? low : high, step);
          (upper ? low : high) = got;
        }
      }
      uint8_t* to = its_place(from + lane % 4);
      if (first + from + lane % 4 <= last) {
        *reinterpret_cast<uint4*>(to + lane / 4 * 128) =
            make_uint4(codes[0], codes[1], codes[2], codes[3]);
      }
    }
  } else {
    const auto pack = pack_numbers < kType == CacheType::kBF16 > ;
#pragma unroll
    for (int from = 0; from < kTokensOfWarp; from += 2) {
      const float4 &one = v[from], &other = v[from + 1];
      const uint2 low = make_uint2(pack(one.x, one.y), pack(one.z, one.w));
      const uint2 high = make_uint2(pack(other.x, other.y), pack(other.z, other.w));
      const bool upper = lane % 2 != 0;
      const uint2 got = make_uint2(__shfl_xor_sync(0xffffffff, upper ? low.x : high.x, 1),
                                   __shfl_xor_sync(0xffffffff, upper ? low.y : high.y, 1));
      uint8_t* to = its_place(from + lane % 2);
      if (first + from + lane % 2 <= last) {
        *reinterpret_cast<uint4*>(to + lane / 2 * 128) =
            upper ? make_uint4(got.x, got.y, high.x, high.y)
                  : make_uint4(low.x, low.y, got.x, got.y);
      }
    }
  }
}

int complete_heads(const Context& ctx, const HeadsArgs& args) {
  int count = 0, longest = 0;
  for (int i = 0; i < args.count; ++i) {
    count += args.of[i].heads;
    longest = args.of[i].head_dim > longest ? args.of[i].head_dim : longest;
  }
  if (usual(args)) {
    constexpr int64_t kManyTokens = 1024;
    if (args.tokens >= kManyTokens) {
      const auto blocks = static_cast<unsigned>(ceil_div(args.tokens, kHeadWarps));
      return launch(ctx, usual_heads_kernel<true>, dim3(blocks), dim3(kHeadWarps * 32), 0, args,
                    count);
    }
    const int64_t blocks = ceil_div(count, args.tokens > 256 ? kAtOnce * kHeadWarps : kHeadWarps);
    return launch(ctx, usual_heads_kernel<false>,
                  dim3(static_cast<unsigned>(args.tokens), static_cast<unsigned>(blocks)),
                  dim3(kHeadWarps * 32), 0, args, count);
  }
  const int room = static_cast<int>(ceil_div(longest, 4)) * 4;
  const dim3 grid(static_cast<unsigned>(args.tokens),
                  static_cast<unsigned>(ceil_div(count, kHeadWarps)));
  return launch(ctx, heads_kernel, grid, dim3(kHeadWarps * 32),
                static_cast<size_t>(kHeadWarps * room) * sizeof(float), args, room);
}

// Parts stored in four bits are computed first, and stored by a separate kernel. The other kernels
// don't see them as stored parts: for K8V4 they store keys only.
int heads_in_four_bits(const Context& ctx, const HeadsArgs& args) {
  HeadsArgs plain = args, rotated = args;
  plain.count = rotated.count = 0;
  for (int i = 0; i < args.count; ++i) {
    HeadsArgs::Part part = args.of[i];
    const bool keys = part.store == HeadsArgs::kKeys;
    if (part.store != HeadsArgs::kNowhere && part_of(args.cache.type, keys) == CacheType::kInt4) {
      rotated.of[rotated.count++] = part;
      part.store = HeadsArgs::kNowhere;
      if (part.normed == 0 && part.rotary_dim == 0) continue;
    }
    plain.of[plain.count++] = part;
  }
  if (plain.count > 0) {
    if (const int error = complete_heads(ctx, plain); error != 0) return error;
  }
  return rotated.count > 0 ? store_rotated(ctx, rotated) : 0;
}

bool in_four_bits(const HeadsArgs& args) {
  return args.cache.type == CacheType::kInt4 || args.cache.type == CacheType::kK8V4;
}

}  // namespace

int heads_to_cache(const Context& ctx, const HeadsArgs& args) {
  constexpr int64_t kManyTokens = 256;
  int count = 0;
  bool stored = true;
  for (int i = 0; i < args.count; ++i) {
    count += args.of[i].heads;
    stored = stored && args.of[i].store != HeadsArgs::kNowhere;
  }
  if (args.tokens < kManyTokens || !stored || !usual(args) || in_four_bits(args)) {
    return heads(ctx, &args);
  }
  const auto kernel = [&] {
    switch (args.cache.type) {
      case CacheType::kE4M3:
        return stored_heads_kernel<CacheType::kE4M3>;
      case CacheType::kInt8:
        return stored_heads_kernel<CacheType::kInt8>;
      case CacheType::kBF16:
        return stored_heads_kernel<CacheType::kBF16>;
      default:
        return stored_heads_kernel<CacheType::kF16>;
    }
  }();
  return launch(ctx, kernel,
                dim3(static_cast<unsigned>(ceil_div(args.tokens, kTokensOfWarp)),
                     static_cast<unsigned>(ceil_div(count, kHeadWarps))),
                dim3(kHeadWarps * 32), 0, args);
}

int heads(const Context& ctx, const HeadsArgs* args) {
  return in_four_bits(*args) ? heads_in_four_bits(ctx, *args) : complete_heads(ctx, *args);
}

}  // namespace freshet::cuda
