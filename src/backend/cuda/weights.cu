// Packing of stored rows into tiles, and look-ups of single rows.
#include "backend/cuda/formats.cuh"
#include "backend/cuda/kernels.cuh"

namespace freshet::cuda {
namespace {

template <class F>
__global__ void __launch_bounds__(256)
    pack_kernel(uint8_t* packed, const uint8_t* raw, int64_t first, int64_t rows, int64_t cols) {
  wait();
  const int64_t row_bytes = cols / F::kBlock * F::kBytes;
  const int64_t unit = blockIdx.x, tile = blockIdx.y;
  const uint8_t* of[16];
  for (int r = 0; r < 16; ++r) {
    const int64_t row = tile * 16 + r;
    of[r] = first + row < rows ? raw + row * row_bytes + unit * (F::kUnit / F::kBlock) * F::kBytes
                               : nullptr;
  }
  __shared__ const uint8_t* shared[16];
  if (threadIdx.x < 16) shared[threadIdx.x] = of[threadIdx.x];
  __syncthreads();
  uint8_t* to = packed + tile_at<F>(first / 16 + tile, cols) + unit * kUnitStep<F>;
  F::pack(to, shared, cols - unit * F::kUnit, static_cast<int>(threadIdx.x));
}

template <class F>
__global__ void embed_kernel(Rows out, WeightView table, const int32_t* ids, int32_t offset,
                             float scale) {
  wait();
  let_next_start();
  const int64_t t = blockIdx.x;
  const int64_t row = ids[t] + offset;
  const uint8_t* panel = table.data + tile_at<F>(row / 16, table.cols);
  for (int64_t c = threadIdx.x; c < table.cols; c += blockDim.x) {
    const uint8_t* tile = panel + c / F::kUnit * kUnitStep<F>;
    out.data[t * out.stride + c] =
        F::at(tile, static_cast<int>(row % 16), static_cast<int>(c % F::kUnit)) * scale;
  }
}

}  // namespace

int64_t packed_bytes(Code code, int64_t rows, int64_t cols) {
  int64_t bytes = 0;
  with_format(code, [&](auto f) { bytes = tiles_bytes<decltype(f)>(ceil_div(rows, 16), cols); });
  return bytes;
}

int pack(Code code, uint8_t* packed, const uint8_t* raw, int64_t first, int64_t count, int64_t rows,
         int64_t cols) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  with_format(code, [&](auto f) {
    using F = decltype(f);
    const dim3 grid(static_cast<unsigned>(ceil_div(cols, F::kUnit)),
                    static_cast<unsigned>(ceil_div(count, 16)));
    error = launch(pack_kernel<F>, grid, dim3(256), 0, packed, raw, first, rows, cols);
  });
  return error;
}

int embed(const Rows* out, const WeightView* table, const int32_t* ids, int32_t offset,
          float scale) {
  int error = static_cast<int>(cudaErrorInvalidValue);
  with_format(table->code, [&](auto f) {
    error = launch(embed_kernel<decltype(f)>, dim3(static_cast<unsigned>(out->rows)), dim3(256), 0,
                   *out, *table, ids, offset, scale);
  });
  return error;
}

}  // namespace freshet::cuda
