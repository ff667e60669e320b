// Grids of GGUF's types: the parameters come from the encoders of src/quant.
#include <cmath>
#include <cstring>

#include "quant/iq4_nl.h"
#include "quant/iq4_xs.h"
#include "quant/q2_k.h"
#include "quant/q3_k.h"
#include "quant/q4_0.h"
#include "quant/q4_1.h"
#include "quant/q4_k.h"
#include "quant/q5_0.h"
#include "quant/q5_1.h"
#include "quant/q5_k.h"
#include "quant/q6_k.h"
#include "quant/q8_0.h"
#include "quantizer/methods/grid.h"

namespace freshet::quantizer {
namespace {

template <class Fit>
concept HasMins = requires(Fit f) { f.min[0]; };
template <class Fit>
concept HasScales = requires(Fit f) { f.scale[0]; };
template <class Fit>
concept HasMinimum = requires(Fit f) { f.m; };

uint16_t finite_f16(float f) {
  return f32_to_f16(std::clamp(f, -65504.0f, 65504.0f));
}
float through_f16(float f) {
  return f16_to_f32(finite_f16(f));
}
int16_t nearest_multiple(float value, float of, int lo, int hi) {
  if (of == 0.0f) return 0;
  const float ratio = std::clamp(value / of, static_cast<float>(lo), static_cast<float>(hi));
  return static_cast<int16_t>(std::lround(ratio));
}

// F: the format; lo .. hi: the multiples of d that its units may have (super-blocks).
template <class F, int kLo, int kHi>
class GgufGrid : public Grid {
  using Fit = typename F::Fit;
  static constexpr bool kSuper = HasScales<Fit>;

 public:
  GgufGrid(int64_t rows, int64_t cols, Alphabet alphabet) {
    shape_ = {.rows = rows,
              .cols = cols,
              .block = F::kBlockSize,
              .unit = F::kBlockSize / units(),
              .offsets = HasMins<Fit> || HasMinimum<Fit>,
              .refits = true,
              .super_blocks = kSuper};
    alphabet_ = alphabet;
    bytes_.resize(static_cast<size_t>(rows) * quant::row_bytes(F::kFormat, cols));
  }

  void fit(int64_t, int64_t, const float* x, const float* weights, int64_t,
           BlockParameters& out) const override {
    constexpr int kN = F::kBlockSize;
    float values[kN];
    float w[kN];
    quant::prepare_block(x, weights, kN, values, w);
    Fit f;
    F::fit(values, w, f);
    out.d = f16_to_f32(f.d);
    if constexpr (HasMins<Fit>) out.dmin = f16_to_f32(f.dmin);
    if constexpr (HasMinimum<Fit>) out.dmin = -f16_to_f32(f.m);
    for (int u = 0; u < units(); ++u) {
      out.scales[u] = out.mins[u] = 1;
      if constexpr (kSuper) out.scales[u] = static_cast<int16_t>(f.scale[u]);
      if constexpr (HasMins<Fit>) out.mins[u] = static_cast<int16_t>(f.min[u]);
    }
  }

  Unit unit(const BlockParameters& p, int u) const override {
    return {p.d * static_cast<float>(p.scales[u]), p.dmin * static_cast<float>(p.mins[u])};
  }

  void set_unit(BlockParameters& p, int u, Unit wanted) const override {
    if constexpr (kSuper) {
      p.scales[u] = nearest_multiple(wanted.scale, p.d, kLo, kHi);
      if constexpr (HasMins<Fit>) p.mins[u] = nearest_multiple(wanted.offset, p.dmin, 0, kHi);
    } else {
      set_block(p, wanted.scale, wanted.offset);
    }
  }

  void set_block(BlockParameters& p, float d, float dmin) const override {
    // The offset of a block is a number of either sign, that of a super-block's unit is not.
    if (shape_.offsets && !(HasMinimum<Fit> || dmin >= 0.0f)) dmin = p.dmin;
    if (shape_.offsets && d < 0.0f) d = p.d;
    p.d = through_f16(d);
    p.dmin = through_f16(dmin);
  }

  void store(int64_t row, const BlockParameters* blocks, const uint8_t* codes) override {
    constexpr size_t kBytes = sizeof(typename F::Block);
    uint8_t* to =
        bytes_.data() + static_cast<size_t>(row) * bytes_.size() / static_cast<size_t>(shape_.rows);
    for (int64_t first = 0; first < shape_.cols; first += F::kBlockSize, to += kBytes, ++blocks) {
      Fit f = {};
      f.d = finite_f16(blocks->d);
      if constexpr (HasMins<Fit>) f.dmin = finite_f16(blocks->dmin);
      if constexpr (HasMinimum<Fit>) f.m = finite_f16(-blocks->dmin);
      if constexpr (kSuper) {
        using Number = std::remove_reference_t<decltype(f.scale[0])>;
        for (int u = 0; u < units(); ++u) f.scale[u] = static_cast<Number>(blocks->scales[u]);
      }
      if constexpr (HasMins<Fit>) {
        for (int u = 0; u < units(); ++u) f.min[u] = static_cast<uint8_t>(blocks->mins[u]);
      }
      for (int i = 0; i < F::kBlockSize; ++i) {
        f.q[i] = static_cast<int8_t>(alphabet_.level(codes[first + i]));
      }
      typename F::Block block;
      F::store(f, block);
      std::memcpy(to, &block, kBytes);
    }
  }

  QuantisedMatrix take() override {
    return EncodedRows{F::kFormat, shape_.rows, shape_.cols, std::move(bytes_)};
  }

 private:
  static constexpr int units() {
    if constexpr (kSuper) return static_cast<int>(std::size(Fit{}.scale));
    return 1;
  }
  std::vector<uint8_t> bytes_;
};

template <class F, int kLo = 0, int kHi = 0>
std::unique_ptr<Grid> of_integers(int64_t rows, int64_t cols, int lo, int hi) {
  return std::make_unique<GgufGrid<F, kLo, kHi>>(rows, cols, Alphabet::integers(lo, hi));
}

Alphabet iq4_alphabet() {
  std::array<float, 16> levels;
  std::copy(std::begin(quant::kIq4Levels), std::end(quant::kIq4Levels), levels.begin());
  return Alphabet::table(levels);
}

}  // namespace

Result<std::unique_ptr<Grid>> make_gguf_grid(quant::Format format, int64_t rows, int64_t cols) {
  using quant::Format;
  const quant::FormatInfo& info = quant::info(format);
  if (cols % info.block_size != 0) {
    return invalid_argument("rows of {} numbers do not fill blocks of {} ({})", cols,
                            info.block_size, info.name);
  }
  switch (format) {
    case Format::kQ4_0:
      return of_integers<quant::Q4_0>(rows, cols, -8, 7);
    case Format::kQ4_1:
      return of_integers<quant::Q4_1>(rows, cols, 0, 15);
    case Format::kQ5_0:
      return of_integers<quant::Q5_0>(rows, cols, -16, 15);
    case Format::kQ5_1:
      return of_integers<quant::Q5_1>(rows, cols, 0, 31);
    case Format::kQ8_0:
      return of_integers<quant::Q8_0>(rows, cols, -127, 127);
    case Format::kQ2_K:
      return of_integers<quant::Q2_K, 0, 15>(rows, cols, 0, 3);
    case Format::kQ3_K:
      return of_integers<quant::Q3_K, -32, 31>(rows, cols, -4, 3);
    case Format::kQ4_K:
      return of_integers<quant::Q4_K, 0, 63>(rows, cols, 0, 15);
    case Format::kQ5_K:
      return of_integers<quant::Q5_K, 0, 63>(rows, cols, 0, 31);
    case Format::kQ6_K:
      return of_integers<quant::Q6_K, -128, 127>(rows, cols, -32, 31);
    case Format::kIQ4_NL:
      return std::unique_ptr<Grid>(
          std::make_unique<GgufGrid<quant::IQ4_NL, 0, 0>>(rows, cols, iq4_alphabet()));
    case Format::kIQ4_XS:
      return std::unique_ptr<Grid>(
          std::make_unique<GgufGrid<quant::IQ4_XS, -32, 31>>(rows, cols, iq4_alphabet()));
    default:
      return std::unique_ptr<Grid>();
  }
}

}  // namespace freshet::quantizer
