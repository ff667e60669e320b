// GEMM in plain F32, for every format. Rows are kept as stored and decoded on use, a chunk of 256
// values of 4 rows at a time for up to 64 tokens.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "ops/reference.h"
#include "ops/weight.h"

namespace freshet::ops {
namespace {

constexpr int kPanel = 16;   // rows
constexpr int kRows = 4;     // rows decoded at a time
constexpr int kChunk = 256;  // values: a multiple of every block size
constexpr int kTokens = 64;
constexpr int kLanes = 8;  // partial sums per dot product: two vectors of plain x86-64

template <quant::Format F>
size_t packed_bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(rows) * quant::row_bytes(F, cols);
}

template <quant::Format F>
void pack_panel(uint8_t* packed, int64_t panel, const uint8_t* const* rows, int64_t cols) {
  const size_t bytes = quant::row_bytes(F, cols);
  uint8_t* out = packed + static_cast<size_t>(panel * kPanel) * bytes;
  for (int r = 0; r < kPanel && rows[r] != nullptr; ++r, out += bytes) {
    std::memcpy(out, rows[r], bytes);
  }
}

template <quant::Format F>
void unpack_row(const uint8_t* packed, int64_t row, int64_t cols, float* out) {
  quant::info(F).decode(packed + static_cast<size_t>(row) * quant::row_bytes(F, cols), out, cols);
}

// sums[r] += w[r] . x over n values; rows of w are kChunk apart and zero past n.
void dot_rows(const float* w, const float* x, int n, double* sums) {
  float acc[kRows][kLanes] = {};
  int k = 0;
  for (; k + kLanes <= n; k += kLanes) {
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kLanes; ++j) acc[r][j] += w[r * kChunk + k + j] * x[k + j];
    }
  }
  for (; k < n; ++k) {
    for (int r = 0; r < kRows; ++r) acc[r][0] += w[r * kChunk + k] * x[k];
  }
  for (int r = 0; r < kRows; ++r) {
    const float* a = acc[r];
    sums[r] += ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
  }
}

// Writes rows [row, row + rows) of out for tokens [t0, t0 + tokens), from their complete sums.
void finish(const MatmulArgs& args, const double (*sums)[kRows], int64_t t0, int64_t tokens,
            int64_t row, int64_t rows) {
  for (int64_t t = 0; t < tokens; ++t) {
    float* out = args.out + (t0 + t) * args.out_stride + row;
    for (int64_t r = 0; r < rows; ++r) {
      const float sum = static_cast<float>(sums[t][r]);
      const float v = args.scale * (args.bias != nullptr ? sum + args.bias[row + r] : sum);
      out[r] = args.add ? out[r] + v : v;
    }
  }
}

void run_format(const quant::FormatInfo& format, const MatmulArgs& args, const uint8_t* act,
                int64_t act_row_bytes, int64_t first, int64_t last) {
  const Weight& weight = *args.weight;
  const size_t bytes = quant::row_bytes(format.format, weight.cols);
  const int64_t end = std::min(last * kPanel, weight.rows);
  alignas(64) float w[kRows * kChunk];
  double sums[kTokens][kRows];
  for (int64_t t0 = 0; t0 < args.tokens; t0 += kTokens) {
    const int64_t tokens = std::min<int64_t>(kTokens, args.tokens - t0);
    for (int64_t row = first * kPanel; row < end; row += kRows) {
      const int64_t rows = std::min<int64_t>(kRows, end - row);
      std::fill(w, w + kRows * kChunk, 0.0f);
      std::fill(&sums[0][0], &sums[0][0] + kTokens * kRows, 0.0);
      for (int64_t k = 0; k < weight.cols; k += kChunk) {
        const int n = static_cast<int>(std::min<int64_t>(kChunk, weight.cols - k));
        for (int64_t r = 0; r < rows; ++r) {
          const uint8_t* stored = weight.packed.data() + static_cast<size_t>(row + r) * bytes;
          format.decode_part(stored, k, w + r * kChunk, n);
        }
        for (int64_t t = 0; t < tokens; ++t) {
          const int64_t x_row = args.rows_index != nullptr ? args.rows_index[t0 + t] : t0 + t;
          const auto* x = reinterpret_cast<const float*>(act + x_row * act_row_bytes);
          dot_rows(w, x + k, n, sums[t]);
        }
      }
      finish(args, sums, t0, tokens, row, rows);
    }
  }
}

template <quant::Format F>
void run(const MatmulArgs& args, const uint8_t* act, int64_t act_row_bytes, int64_t first,
         int64_t last) {
  run_format(quant::info(F), args, act, act_row_bytes, first, last);
}

constexpr size_t kMaxFormats = 64;

struct Rows {
  std::array<std::array<char, 32>, kMaxFormats> names{};
  std::array<MatmulKernel, kMaxFormats> kernels{};
};

template <size_t... I>
void fill(Rows& rows, std::index_sequence<I...>) {
  const auto fill_one = [&]<size_t J>() {
    constexpr auto kF = static_cast<quant::Format>(J);
    if (J >= quant::all_formats().size()) return;
    fmt::format_to(rows.names[J].data(), "{:.20}.reference", quant::info(kF).name);
    rows.kernels[J] = {rows.names[J].data(), kF,
                       CpuIsa::kScalar,      ActKind::kF32,
                       packed_bytes<kF>,     pack_panel<kF>,
                       unpack_row<kF>,       run<kF>};
  };
  (fill_one.template operator()<I>(), ...);
}

}  // namespace

std::span<const MatmulKernel> reference_matmul() {
  static const Rows kRowsOfTable = [] {
    Rows rows;
    fill(rows, std::make_index_sequence<kMaxFormats>{});
    return rows;
  }();
  return std::span(kRowsOfTable.kernels).first(quant::all_formats().size());
}

}  // namespace freshet::ops
