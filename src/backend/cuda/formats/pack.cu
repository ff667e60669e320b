// Packs stored rows into tiles, and looks up single rows.
#include <type_traits>

#include "backend/cuda/formats/formats.cuh"
#include "backend/cuda/gemm/gemm_f32_bf16x3.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

template <class Body>
void with_packed(const Context& ctx, Code code, const Body& body) {
  if (code == Code::kExactF32) {
    body(ExactF32{});
  } else if (code > Code::kHeads) {
    const int32_t of = static_cast<int32_t>(code) - static_cast<int32_t>(Code::kHeads);
    with_format(static_cast<Code>(of), [&](auto f) {
      if constexpr (kHasHeads<decltype(f)>) body(Heads<decltype(f)>{});
    });
  } else if (code == Code::kFP8Panels && ctx.capability == 90) {
    body(FP8Panels{});
  } else {
    with_format(code == Code::kFP8Panels ? Code::kFP8 : code, body);
  }
}

template <class F>
__global__ void __launch_bounds__(256)
    pack_kernel(uint8_t* packed, const uint8_t* raw, int64_t first, int64_t rows, int64_t cols) {
  wait();
  const int64_t row_bytes = F::kHead + cols / F::kBlock * F::kBytes;
  const int64_t unit = blockIdx.x, tile = blockIdx.y;
  const uint8_t* of[16];
  for (int r = 0; r < 16; ++r) {
    const int64_t row = tile * 16 + r;
    of[r] = first + row < rows
                ? raw + row * row_bytes + F::kHead + unit * (F::kUnit / F::kBlock) * F::kBytes
                : nullptr;
  }
  __shared__ const uint8_t* shared[16];
  if (threadIdx.x < 16) shared[threadIdx.x] = of[threadIdx.x];
  __syncthreads();
  const int64_t in = first / 16 + tile;
  const auto thread = static_cast<int>(threadIdx.x);
  if constexpr (std::is_same_v<F, FP8Panels>) {
    uint8_t* to = packed + F::step_at(in / kPanelTiles<F>, unit, cols);
    F::pack(to, static_cast<int>(in % kPanelTiles<F>) * 16, shared, thread);
  } else {
    uint8_t* to = packed + tile_at<F>(in, cols) + unit * kUnitStep<F>;
    F::pack(to, shared, cols - unit * F::kUnit, thread);
  }
}

// What the scales of a panel share (FP8Panels::Scaled).
__global__ void __launch_bounds__(256) scaled_kernel(uint8_t* packed, int64_t rows, int64_t cols) {
  wait();
  using F = FP8Panels;
  const int64_t panel = blockIdx.x, units = cols / F::kUnit;
  const int64_t left = rows - panel * F::kRows;
  const int count = static_cast<int>(left < F::kRows ? left : F::kRows);
  const auto scale = [&](int64_t row, int64_t unit) {
    const uint8_t* step = packed + F::step_at(panel, unit, cols);
    return *reinterpret_cast<const float*>(step + F::scale_place(static_cast<int>(row)));
  };
  int of_steps = 1, of_rows = 1;
  for (int64_t i = threadIdx.x; i < count * units; i += 256) {
    const float its = scale(i % count, i / count);
    of_steps &= its == scale(0, i / count);
    of_rows &= its == scale(i % count, 0);
  }
  of_steps = __syncthreads_and(of_steps);
  of_rows = __syncthreads_and(of_rows);
  if (threadIdx.x == 0) {
    const_cast<int32_t*>(F::scaled_at(packed, rows, cols))[panel] = of_rows != 0    ? F::kOfRows
                                                                    : of_steps != 0 ? F::kOfSteps
                                                                                    : F::kOfBlocks;
  }
}

// Copies the scales of INT8 rows from the headers of `count` rows.
__global__ void __launch_bounds__(256)
    row_scales_kernel(float* to, const uint8_t* raw, int64_t count, int64_t row_bytes) {
  wait();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (row >= count) return;
  const uint8_t* p = raw + row * row_bytes;  // not aligned
  to[row] =
      __uint_as_float(p[0] | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24);
}

template <class F>
__global__ void embed_kernel(Rows out, WeightView table, const int32_t* ids, int32_t offset,
                             float scale) {
  let_next_start();
  wait();
  const int64_t t = blockIdx.x;
  const int64_t row = ids[t] + offset;
  const int64_t c = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (c >= table.cols) return;
  constexpr int kRows = std::is_same_v<F, FP8Panels> ? FP8Panels::kRows : 16;
  const uint8_t* tile =
      table.data + tile_at<F>(row / kRows * (kRows / 16), table.cols) + c / F::kUnit * kUnitStep<F>;
  const int tile_row = static_cast<int>(row % kRows), tile_col = static_cast<int>(c % F::kUnit);
  float v;
  if constexpr (kHasHeads<F>) {
    using H = Heads<F>;
    const uint8_t* heads = table.data + tiles_bytes<F>((table.rows + 15) / 16, table.cols) +
                           tile_at<H>(row / 16, table.cols) + c / H::kUnit * kUnitStep<H>;
    v = F::at(tile, heads, tile_row, tile_col);
  } else {
    v = F::at(tile, tile_row, tile_col);
  }
  if constexpr (F::kCode == Code::kInt8) v *= int8_scales(table.data, table.rows, table.cols)[row];
  out.data[t * out.stride + c] = v * scale;
}

}  // namespace

int64_t packed_bytes(const Context& ctx, Code code, int64_t rows, int64_t cols) {
  int64_t bytes = 0;
  with_packed(ctx, code,
              [&](auto f) { bytes = tiles_bytes<decltype(f)>(ceil_div(rows, 16), cols); });
  if (code == Code::kFP8Panels) {
    bytes += ceil_div(rows, FP8Panels::kRows) * static_cast<int64_t>(sizeof(int32_t));
  }
  // One scale for every row of the tiles, so that no kernel needs a bounds check.
  if (code == Code::kInt8) bytes += ceil_div(rows, 128) * 128 * static_cast<int64_t>(sizeof(float));
  return bytes;
}

int pack(const Context& ctx, Code code, uint8_t* packed, const uint8_t* raw, int64_t first,
         int64_t count, int64_t rows, int64_t cols) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  with_packed(ctx, code, [&](auto f) {
    using F = decltype(f);
    const dim3 grid(static_cast<unsigned>(ceil_div(cols, F::kUnit)),
                    static_cast<unsigned>(ceil_div(count, 16)));
    error = launch(ctx, pack_kernel<F>, grid, dim3(256), 0, packed, raw, first, rows, cols);
  });
  if (error == 0 && code == Code::kFP8Panels && ctx.capability == 90 && first + count >= rows) {
    const dim3 panels(static_cast<unsigned>(ceil_div(rows, FP8Panels::kRows)));
    error = launch(ctx, scaled_kernel, panels, dim3(256), 0, packed, rows, cols);
  }
  if (error == 0 && code == Code::kInt8) {
    auto* scales = const_cast<float*>(int8_scales(packed, rows, cols)) + first;
    error = launch(ctx, row_scales_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))),
                   dim3(256), 0, scales, raw, count, INT8::kHead + cols);
  }
  return error;
}

int embed(const Context& ctx, const Rows* out, const WeightView* table, const int32_t* ids,
          int32_t offset, float scale) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  const auto run = [&](auto f) {
    const dim3 grid(static_cast<unsigned>(out->rows),
                    static_cast<unsigned>(ceil_div(table->cols, 256)));
    error = launch(ctx, embed_kernel<decltype(f)>, grid, dim3(256), 0, *out, *table, ids, offset,
                   scale);
  };
  if (table->code == Code::kFP8 && ctx.capability == 90) {
    run(FP8Panels{});
  } else {
    with_format(table->code, run);
  }
  return error;
}

}  // namespace freshet::cuda
