#include "quantizer/methods/alphabet.h"

#include "base/status.h"

namespace freshet::quantizer {

Alphabet Alphabet::integers(int lo, int hi) {
  Alphabet a;
  a.lowest_ = static_cast<float>(lo);
  a.highest_ = static_cast<float>(hi);
  for (int q = lo; q <= hi; ++q) a.levels_[static_cast<size_t>(q - lo)] = static_cast<float>(q);
  return a;
}

Alphabet Alphabet::table(std::span<const float> ascending) {
  FRESHET_CHECK(ascending.size() >= 2 && ascending.size() <= 16);
  Alphabet a;
  a.kind_ = Kind::kTable;
  a.lowest_ = ascending.front();
  a.highest_ = ascending.back();
  a.bins_per_one_ = kBins / (a.highest_ - a.lowest_);
  std::copy(ascending.begin(), ascending.end(), a.levels_.begin());
  for (size_t i = 0; i + 1 < ascending.size(); ++i) {
    a.borders_[i] = 0.5f * (ascending[i] + ascending[i + 1]);
  }
  a.borders_[ascending.size() - 1] = a.highest_;
  for (int bin = 0; bin <= kBins; ++bin) {
    const float start = static_cast<float>(bin) / a.bins_per_one_ + a.lowest_;
    uint8_t code = 0;
    while (code + 1u < ascending.size() && a.borders_[code] < start) ++code;
    a.bins_[static_cast<size_t>(bin)] = code;
  }
  return a;
}

Alphabet Alphabet::e4m3() {
  Alphabet a;
  a.kind_ = Kind::kE4M3;
  a.lowest_ = -448.0f;
  a.highest_ = 448.0f;
  for (int i = 0; i < 256; ++i) {
    const auto code = static_cast<uint8_t>(i);
    a.levels_[static_cast<size_t>(i)] = (i & 0x7f) == 0x7f ? 0.0f : quant::e4m3_to_f32(code);
  }
  return a;
}

const CodeTable& e2m1_table() {
  static constexpr CodeTable kTable = {
      {-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6},
      {15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7},
      15};
  return kTable;
}

const CodeTable& nf4_table() {
  static constexpr CodeTable kTable = {
      {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
       -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
       0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
       0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f},
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
      16};
  return kTable;
}

const CodeTable& fp4_table() {
  // Codes 0 .. 7 are 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4; bit 3 is the sign.
  static constexpr CodeTable kTable = {
      {-1.0f, -0x1.555556p-1f, -0.5f, -0x1.555556p-2f, -0.25f, -0x1.555556p-3f, -0x1.555556p-8f,
       0.0f, 0x1.555556p-8f, 0x1.555556p-3f, 0.25f, 0x1.555556p-2f, 0.5f, 0x1.555556p-1f, 1.0f},
      {11, 10, 13, 12, 15, 14, 9, 0, 1, 6, 7, 4, 5, 2, 3},
      15};
  return kTable;
}

const CodeTable* code_table(Levels levels) {
  switch (levels) {
    case Levels::kE2M1:
      return &e2m1_table();
    case Levels::kNF4:
      return &nf4_table();
    case Levels::kFP4:
      return &fp4_table();
    case Levels::kInteger:
    case Levels::kE4M3:
      break;
  }
  return nullptr;
}

}  // namespace freshet::quantizer
