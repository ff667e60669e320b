#include "quantizer/methods/alphabet.h"

#include "base/status.h"
#include "quant/levels4.h"

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

namespace {

// The levels of these codes, which must ascend.
template <size_t kSize>
constexpr CodeTable table_of(const float (&levels)[16], const std::array<int, kSize>& codes) {
  CodeTable table{};
  for (size_t i = 0; i < kSize; ++i) {
    table.levels[i] = levels[codes[i]];
    table.codes[i] = static_cast<uint8_t>(codes[i]);
  }
  table.size = static_cast<int>(kSize);
  return table;
}

}  // namespace

const CodeTable& e2m1_table() {
  static constexpr CodeTable kTable = {
      {-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6},
      {15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7},
      15};
  return kTable;
}

const CodeTable& nf4_table() {
  static constexpr CodeTable kTable =
      table_of(quant::kNf4Levels, std::array{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
  return kTable;
}

const CodeTable& fp4_table() {
  static constexpr CodeTable kTable =
      table_of(quant::kFp4Levels, std::array{11, 10, 13, 12, 15, 14, 9, 0, 1, 6, 7, 4, 5, 2, 3});
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
