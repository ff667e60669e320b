// TQ1_0: 256 values d * (digit - 1) with base-3 digits; 1.6875 bits per value. A byte holds five
// digits as the fraction byte / 256 in base 3, most significant first: multiplying by three moves
// the next digit to the integer. Digit n of byte i of qs is value 32 n + i for the first 32 bytes
// and 160 + 16 n + i for the other 16; the last 16 values are four digits of each byte of qh.
#pragma once

#include <string_view>

#include "quant/search_grid.h"

namespace freshet::quant {

struct TQ1_0 {
  static constexpr Format kFormat = Format::kTQ1_0;
  static constexpr std::string_view kName = "tq1_0";
  static constexpr int kBlockSize = 256;
  static constexpr uint32_t kGgmlType = 34;
  struct Block {
    uint8_t qs[48];
    uint8_t qh[4];
    uint16_t d;  // f16
  };
  static_assert(sizeof(Block) == 54);

  // Runs of bytes: digit n of byte i of a run is value `first` + n * count + i.
  struct Run {
    int first, count, digits;
  };
  static constexpr Run kRuns[] = {{0, 32, 5}, {160, 16, 5}, {240, 4, 4}};

  static void decode(const Block& b, float* out) {
    const float d = f16_to_f32(b.d);
    const uint8_t* byte = b.qs;  // qh follows qs
    for (const Run& run : kRuns) {
      for (int i = 0; i < run.count; ++i) {
        int fraction = byte[i];
        for (int n = 0; n < run.digits; ++n) {
          out[run.first + n * run.count + i] = d * static_cast<float>((fraction * 3 >> 8) - 1);
          fraction = fraction * 3 & 255;
        }
      }
      byte = run.first == 0 ? b.qs + 32 : b.qh;
    }
  }

  static void encode(const float* x, const float* w, Block& b) {
    int8_t q[256];
    b = {};
    b.d = fit_ternary_block(x, w, q);
    uint8_t* byte = b.qs;
    for (const Run& run : kRuns) {
      for (int i = 0; i < run.count; ++i) {
        int digits = 0;  // of five places
        for (int n = 0; n < 5; ++n) {
          digits = digits * 3 + (n < run.digits ? q[run.first + n * run.count + i] + 1 : 0);
        }
        byte[i] = static_cast<uint8_t>((digits * 256 + 242) / 243);
      }
      byte = run.first == 0 ? b.qs + 32 : b.qh;
    }
  }
};

}  // namespace freshet::quant
