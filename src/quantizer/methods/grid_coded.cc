// Grids of the schemes that become a CodedMatrix: integers, FP8, FP4 and tables in groups.
#include <cmath>
#include <limits>

#include "quantizer/containers/double_quantisation.h"
#include "quantizer/methods/fit_scale.h"
#include "quantizer/methods/grid.h"

namespace freshet::quantizer {
namespace {

// A scale that a type can hold, never infinite.
float stored_scale(ScaleType type, float scale) {
  switch (type) {
    case ScaleType::kF16:
      return f16_to_f32(f32_to_f16(std::clamp(scale, -65504.0f, 65504.0f)));
    case ScaleType::kBF16:
      return bf16_to_f32(f32_to_bf16(std::clamp(scale, -3e38f, 3e38f)));
    case ScaleType::kE8M0: {
      if (!(scale > 0.0f)) return std::ldexp(1.0f, -127);
      return std::ldexp(1.0f,
                        std::clamp(static_cast<int>(std::lround(std::log2(scale))), -127, 127));
    }
    case ScaleType::kE4M3:
      // The sign bit is left unused: readers take these scales as positive.
      return quant::e4m3_to_f32(quant::f32_to_e4m3(std::max(scale, 0.0f)));
    case ScaleType::kF32:
      break;
  }
  return scale;
}

class CodedGrid : public Grid {
 public:
  CodedGrid(const Scheme& scheme, int64_t rows, int64_t cols, const GridOptions& options)
      : scheme_(scheme), options_(options), table_(code_table(scheme.levels)) {
    const int64_t group = scheme.group == 0 ? cols : std::min(scheme.group, cols);
    group_rows_ = scheme.group_rows == 0 ? rows : scheme.group_rows;
    groups_ = (cols + group - 1) / group;
    const bool powers = scheme.scale == ScaleType::kE8M0;
    shape_ = {.rows = rows,
              .cols = cols,
              .block = group,
              .unit = group,
              .offsets = !scheme.symmetric,
              .refits = group_rows_ == 1 && !scheme.double_quantised && !powers};
    const int half = 1 << (scheme.bits - 1);
    if (scheme.levels == Levels::kInteger) {
      alphabet_ = scheme.symmetric ? Alphabet::integers(-half, half - 1)
                                   : Alphabet::integers(0, 2 * half - 1);
    } else if (scheme.levels == Levels::kE4M3) {
      alphabet_ = Alphabet::e4m3();
    } else {
      alphabet_ =
          Alphabet::table(std::span(table_->levels).first(static_cast<size_t>(table_->size)));
    }
    out_.rows = rows;
    out_.cols = cols;
    out_.codes.resize(static_cast<size_t>(rows * cols));
    out_.scales.resize(static_cast<size_t>((rows + group_rows_ - 1) / group_rows_ * groups_));
    if (!scheme.symmetric) out_.zeros.resize(static_cast<size_t>(rows * groups_));
  }

  void prepare(const float* w, const float* weights) override {
    if (scheme_.scale == ScaleType::kE4M3) {
      float most = 0.0f;
      for (int64_t i = 0; i < shape_.rows * shape_.cols; ++i) most = std::max(most, std::abs(w[i]));
      if (options_.tensor_max > 0.0f) most = options_.tensor_max;
      out_.global_scale = most > 0.0f ? most / (448.0f * alphabet_.highest()) : 1.0f;
    }
    if (group_rows_ != 1) prepare_shared(w, weights);
    if (scheme_.double_quantised) prepare_double(w, weights);
  }

  void fit(int64_t row, int64_t column, const float* x, const float* weights, int64_t n,
           BlockParameters& out) const override {
    out = {};
    out.scales[0] = out.mins[0] = 1;
    if (!shape_.refits && !fitted_.empty()) {
      out.d = fitted_[static_cast<size_t>(row / group_rows_ * groups_ + column / shape_.block)];
      return;
    }
    const Group group(x, weights, n);
    if (shape_.offsets) {
      const ScaleZero s =
          search_scale_zero(group, alphabet_, options_.search_ranges,
                            [this](float v) { return stored_scale(scheme_.scale, v); });
      out.d = out.dmin = s.scale;
      out.mins[0] = static_cast<int16_t>(s.zero);
      return;
    }
    out.d = fit_scale(group);
  }

  Unit unit(const BlockParameters& p, int) const override {
    return {out_.global_scale * p.d, p.dmin * static_cast<float>(p.mins[0])};
  }

  void set_unit(BlockParameters& p, int, Unit wanted) const override {
    const float d = stored_scale(scheme_.scale, wanted.scale / out_.global_scale);
    if (shape_.offsets) {
      if (!(d > 0.0f)) return;
      p.mins[0] = static_cast<int16_t>(
          std::lround(std::clamp(wanted.offset / d, 0.0f, alphabet_.highest())));
      p.dmin = d;
    }
    p.d = d;
  }

  void store(int64_t row, const BlockParameters* blocks, const uint8_t* codes) override {
    for (int64_t g = 0; g < groups_; ++g) {
      if (row % group_rows_ == 0) {
        out_.scales[static_cast<size_t>(row / group_rows_ * groups_ + g)] = blocks[g].d;
      }
      if (shape_.offsets) {
        out_.zeros[static_cast<size_t>(row * groups_ + g)] =
            static_cast<uint8_t>(blocks[g].mins[0]);
      }
    }
    uint8_t* const to = out_.codes.data() + row * shape_.cols;
    for (int64_t j = 0; j < shape_.cols; ++j) {
      to[j] = table_ != nullptr ? table_->codes[codes[j]] : codes[j];
    }
  }

  QuantisedMatrix take() override {
    // A factor that was multiplied in and divided out leaves a scale an ulp off.
    if (out_.global_scale != 1.0f) {
      for (float& scale : out_.scales) scale = stored_scale(scheme_.scale, scale);
    }
    return std::move(out_);
  }

 private:
  float fit_scale(const Group& group) const {
    const float global = out_.global_scale;
    const auto round = [&](float v) { return global * stored_scale(scheme_.scale, v / global); };
    const float extreme = std::abs(group.largest());
    if (scheme_.scale == ScaleType::kE8M0) return fit_power(group, extreme);
    if (scheme_.levels == Levels::kInteger) {
      const float half = 0.5f * (alphabet_.highest() - alphabet_.lowest());
      if (!options_.search_ranges) return round(extreme / half);
      return search_scale(group, alphabet_, {.negative = scheme_.bits < 8}, round) / global;
    }
    if (!options_.search_ranges) return round(extreme / alphabet_.highest()) / global;
    if (scheme_.levels == Levels::kE4M3) {
      // Where the largest value lies between levels decides: try the eight highest of an octave.
      return search_scale(group, alphabet_, {.widest = 2.0f, .narrowest = 1.0f, .steps = 16},
                          round);
    }
    return search_scale(group, alphabet_, {.widest = 1.6f, .narrowest = 0.7f, .steps = 24}, round) /
           global;
  }

  // The smallest power of two that clips nothing, or one of the next two, by their errors.
  float fit_power(const Group& group, float extreme) const {
    if (!(extreme > 0.0f)) return std::ldexp(1.0f, -127);
    int cover = 0;
    if (std::frexp(extreme / alphabet_.highest(), &cover) == 0.5f) --cover;
    float best = std::ldexp(1.0f, std::clamp(cover, -127, 127));
    if (!options_.search_ranges) return best;
    float least = std::numeric_limits<float>::max();
    for (int e = cover; e >= cover - 2; --e) {
      const float scale = std::ldexp(1.0f, std::clamp(e, -127, 127));
      const float error = group.error(alphabet_, scale, 0.0f);
      if (error < least) {
        least = error;
        best = scale;
      }
    }
    return best;
  }

  // Scales that several rows share: fitted to at most kMostTested numbers, in whole rows.
  void prepare_shared(const float* w, const float* weights) {
    constexpr int64_t kMostTested = int64_t{1} << 22;
    std::vector<float> scales(out_.scales.size());
    for (int64_t r0 = 0; r0 < shape_.rows; r0 += group_rows_) {
      const int64_t rows = std::min(group_rows_, shape_.rows - r0);
      const int64_t step = std::max<int64_t>(1, rows * shape_.block / kMostTested);
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t c0 = g * shape_.block;
        const int64_t n = std::min(shape_.block, shape_.cols - c0);
        std::vector<float> x, xw;
        float extreme = 0.0f;
        for (int64_t r = r0; r < r0 + rows; ++r) {
          const float* const from = w + r * shape_.cols + c0;
          for (int64_t i = 0; i < n; ++i) extreme = std::max(extreme, std::abs(from[i]));
          if ((r - r0) % step != 0) continue;
          x.insert(x.end(), from, from + n);
          if (weights != nullptr) xw.insert(xw.end(), weights + c0, weights + c0 + n);
        }
        // The extreme value takes part in any case.
        x.push_back(extreme);
        if (weights != nullptr) xw.push_back(0.0f);
        const Group group(x.data(), weights != nullptr ? xw.data() : nullptr,
                          static_cast<int64_t>(x.size()));
        scales[static_cast<size_t>(r0 / group_rows_ * groups_ + g)] = fit_scale(group);
      }
    }
    fitted_ = std::move(scales);
  }

  void prepare_double(const float* w, const float* weights) {
    std::vector<float> scales(out_.scales.size());
    for (int64_t r = 0; r < shape_.rows; ++r) {
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t c0 = g * shape_.block;
        const Group group(w + r * shape_.cols + c0, weights != nullptr ? weights + c0 : nullptr,
                          std::min(shape_.block, shape_.cols - c0));
        scales[static_cast<size_t>(r * groups_ + g)] = fit_scale(group);
      }
    }
    out_.double_scales = double_quantise(scales);
    fitted_ = scales_of(out_.double_scales);
  }

  Scheme scheme_;
  GridOptions options_;
  const CodeTable* table_;
  int64_t group_rows_ = 1;
  int64_t groups_ = 0;
  std::vector<float> fitted_;  // scales that are fixed by prepare()
  CodedMatrix out_;
};

}  // namespace

Result<std::unique_ptr<Grid>> make_coded_grid(const Scheme& scheme, int64_t rows, int64_t cols,
                                              const GridOptions& options) {
  if (scheme.levels == Levels::kInteger && (scheme.bits < 2 || scheme.bits > 8)) {
    return invalid_argument("integers of {} bits; 2 to 8 can be written", scheme.bits);
  }
  if (!scheme.symmetric && (scheme.levels != Levels::kInteger || scheme.group_rows != 1)) {
    return invalid_argument("zero points need integers with a scale for each row");
  }
  if (scheme.group < 0 || scheme.group_rows < 0) {
    return invalid_argument("groups of {} columns and {} rows; write 0 for all of them",
                            scheme.group, scheme.group_rows);
  }
  return std::unique_ptr<Grid>(std::make_unique<CodedGrid>(scheme, rows, cols, options));
}

Result<std::unique_ptr<Grid>> make_grid(const Target& target, int64_t rows, int64_t cols,
                                        const GridOptions& options) {
  if (rows <= 0 || cols <= 0) return invalid_argument("a matrix of {} x {} numbers", rows, cols);
  if (const auto* scheme = std::get_if<Scheme>(&target)) {
    return make_coded_grid(*scheme, rows, cols, options);
  }
  return make_gguf_grid(std::get<quant::Format>(target), rows, cols);
}

}  // namespace freshet::quantizer
