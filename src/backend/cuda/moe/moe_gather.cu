// Gathers the tokens of experts by place.
#include "backend/cuda/moe/moe.h"
#include "backend/cuda/runtime/common.cuh"

namespace freshet::cuda {
namespace {

__device__ __forceinline__ uint4 packed(const float (&v)[kUnit], float factor) {
  uint32_t two[kUnit / 2];
#pragma unroll
  for (int i = 0; i < kUnit; i += 2) {
    two[i / 2] = pack_bf16(__fmul_rn(v[i], factor), __fmul_rn(v[i + 1], factor));
  }
  return make_uint4(two[0], two[1], two[2], two[3]);
}

// x by place: a block processes a tile of 8 places, a thread 8 columns at a time. It uses few
// registers, so that blocks of the next kernel fit beside it; that kernel relies on the groups when
// it starts.
__global__ void __launch_bounds__(256, 6) gather_kernel(const __grid_constant__ ExpertsArgs e) {
  wait();
  let_next_start();
  const int64_t tile = blockIdx.x, place = tile * kTokenTile + threadIdx.x % 8;
  if (tile * kTokenTile >= int64_t{*e.groups.used} * e.groups.slot_tokens) return;
  const int token = e.groups.token[place];
  if (token < 0) return;
  const float factor = e.weight_before != 0 ? e.groups.place_weight[place] : 1.0f;
  const float* x = e.x.data + token * e.x.stride;
  const int64_t padded = (e.hidden + kPadCols - 1) / kPadCols * kPadCols;
  const bool aligned = e.hidden % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
#pragma unroll 4
  for (int64_t c = threadIdx.x / 8 * 8; c < padded; c += 256) {
    float v[8];
    if (aligned && c < e.hidden) {
      const auto* four = reinterpret_cast<const float4*>(x + c);
      *reinterpret_cast<float4*>(v) = four[0];
      *reinterpret_cast<float4*>(v + 4) = four[1];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = c + i < e.hidden ? x[c + i] : 0.0f;
    }
    auto* to = reinterpret_cast<uint4*>(e.in.data) + activation_at(e.in, place, c, e.hidden) / 8;
    *to = packed(v, factor);
  }
}

// The same if there are few tokens: a block reads one token and writes it to all of its places.
// kMany: in the layout of moe_bf16_sm90_large_m.cu, [64 columns][place][128 bytes]. Otherwise the
// next kernel relies on the groups when it starts, as above.
template <bool kMany>
__global__ void __launch_bounds__(256, 6) spread_kernel(const __grid_constant__ ExpertsArgs e) {
  if (kMany) let_next_start();
  wait();
  if (!kMany) let_next_start();
  const int64_t token = blockIdx.x, padded = (e.hidden + kPadCols - 1) / kPadCols * kPadCols;
  const int64_t step = e.in.core_tiles * kTokenTile * kPadCols * 2;  // to the next 64 columns
  const float* x = e.x.data + token * e.x.stride;
  const bool whole = whole_rows(e.x.data, e.x.stride);
  const int32_t* places = e.groups.place + token * e.groups.top_k;
  for (int64_t c = threadIdx.x * int64_t{kUnit}; c < padded; c += 256 * kUnit) {
    float v[kUnit];
    load_unit(v, x, c, e.hidden, whole);
#pragma unroll 8
    for (int k = 0; k < e.groups.top_k; ++k) {
      const int64_t place = places[k];
      const float factor = e.weight_before != 0 ? e.groups.place_weight[place] : 1.0f;
      int64_t to = 0;
      if constexpr (kMany) {
        const int64_t piece = (c % kPadCols / kUnit) ^ (place % kTokenTile);
        to = c / kPadCols * step + place * (kPadCols * 2) + piece * 16;
      } else {
        to = activation_at(e.in, place, c, e.hidden) * 2;
      }
      *reinterpret_cast<uint4*>(e.in.data + to) = packed(v, factor);
    }
  }
}

}  // namespace

int gather_places(const Context& ctx, const ExpertsArgs& e) {
  constexpr int64_t kSpread = 128;  // tokens; with more, contiguous writes matter more
  const auto run = [&](auto kernel, int64_t blocks) {
    if (const int error = leave_shared(kernel); error != 0) return error;
    return launch(ctx, kernel, dim3(static_cast<unsigned>(blocks)), dim3(256), 0, e);
  };
  if (e.groups.slot_tokens == kManySlot) return run(spread_kernel<true>, e.x.rows);
  if (e.x.rows <= kSpread) return run(spread_kernel<false>, e.x.rows);
  return run(gather_kernel, e.in.core_tiles);
}

}  // namespace freshet::cuda
