// The levels that codes stand for: integers, the floats of E4M3, or a table of up to 16 numbers.
//
// Codes count levels from the lowest up, except those of E4M3, which are its bytes. nearest() takes
// any number; NaN gets some code. Immutable after construction; thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>

#include "quant/fp8.h"
#include "quantizer/coded_matrix.h"

namespace freshet::quantizer {

class Alphabet {
 public:
  enum class Kind { kInteger, kTable, kE4M3 };

  Alphabet() = default;
  static Alphabet integers(int lo, int hi);
  static Alphabet table(std::span<const float> ascending);
  static Alphabet e4m3();

  Kind kind() const { return kind_; }
  float lowest() const { return lowest_; }
  float highest() const { return highest_; }
  float level(uint8_t code) const { return levels_[code]; }

  template <Kind kKind>
  uint8_t nearest(float t) const {
    if constexpr (kKind == Kind::kE4M3) {
      return quant::f32_to_e4m3(t);
    } else {
      t = t > lowest_ ? t : lowest_;
      t = t < highest_ ? t : highest_;
      if constexpr (kKind == Kind::kInteger) {
        constexpr float kRound = 0x1.8p23f;  // rounds |t| < 2^22 to even
        return static_cast<uint8_t>(((t + kRound) - kRound) - lowest_);
      }
      // A bin holds one border between levels at most.
      const uint8_t code = bins_[static_cast<size_t>((t - lowest_) * bins_per_one_)];
      return static_cast<uint8_t>(code + (t > borders_[code] ? 1 : 0));
    }
  }
  uint8_t nearest(float t) const {
    switch (kind_) {
      case Kind::kInteger:
        return nearest<Kind::kInteger>(t);
      case Kind::kTable:
        return nearest<Kind::kTable>(t);
      case Kind::kE4M3:
        break;
    }
    return nearest<Kind::kE4M3>(t);
  }

 private:
  static constexpr int kBins = 1024;
  Kind kind_ = Kind::kInteger;
  float lowest_ = 0.0f;
  float highest_ = 0.0f;
  float bins_per_one_ = 0.0f;
  std::array<float, 256> levels_{};
  std::array<float, 16> borders_{};
  std::array<uint8_t, kBins + 1> bins_{};
};

// The tables of the 4-bit floats: levels from the lowest up, and the code of a level in files.
struct CodeTable {
  std::array<float, 16> levels;
  std::array<uint8_t, 16> codes;
  int size;
};
const CodeTable& e2m1_table();
const CodeTable& nf4_table();
const CodeTable& fp4_table();                // bitsandbytes
const CodeTable* code_table(Levels levels);  // nullptr: codes are integers or E4M3's bytes

}  // namespace freshet::quantizer
