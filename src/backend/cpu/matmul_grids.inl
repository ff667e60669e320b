// Decoding of blocks whose values come from grids (IQ1 to IQ3), or are ternary (TQ1_0, TQ2_0), as
// in matmul_blocks.inl: lines of unsigned bytes, 2^kShift too high. Dwords of a stored block are
// lines of a panel's block in the same order; the scale d is the tail, except in IQ1_M.
#pragma once

#include "backend/cpu/matmul_nest.inl"
#include "quant/iq_grids.h"

namespace freshet::cpu {
namespace {

FRESHET_INLINE I32 bits_of(I32 v, int shift, int mask) {
  return and_i(shr(v, shift), set_i(mask));
}

// Bit i of each lane, i < 4, goes to bit 0 of byte i. Lanes are below 128.
FRESHET_INLINE I32 spread_bits(I32 v) {
  const I32 two = or_i(v, shl(v, 7));
  return and_i(or_i(two, shl(two, 14)), bytes_i(1));
}
// kOffset plus or minus each byte of `size`: minus if the byte of `minus` is 1, plus if it is 0.
// kOffset is a power of two above all sizes, which are positive: no byte carries into the next.
template <int kOffset>
FRESHET_INLINE I32 with_signs(I32 size, I32 minus) {
  return add_i(xor_i(size, sub_i(bytes_i(kOffset), minus)), minus);
}
// Signs 4 half .. 4 half + 3 of eight, of which seven are stored: the number of minus signs is
// even.
FRESHET_INLINE I32 even_signs(I32 seven, int half) {
  if (half == 0) return seven;
  I32 odd = xor_i(seven, shr(seven, 4));
  odd = xor_i(odd, shr(odd, 2));
  odd = and_i(xor_i(odd, shr(odd, 1)), set_i(1));
  return or_i(shr(seven, 4), shl(odd, 3));
}

// Quad `half` of the entries of a grid of 8 values.
template <class Grid>
FRESHET_INLINE I32 half_entry(const Grid& grid, I32 entry, int half) {
  return gather(grid.quads + half, shl(entry, 1));
}

// 2 scale + 1.
FRESHET_INLINE I32 odd_scale(I32 v, int shift, int mask) {
  return add_i(shl(bits_of(v, shift, mask), 1), set_i(1));
}

struct BlockIQ2 {
  static constexpr int kTop = 64 + 43, kShift = 6;
  static constexpr bool kAffine = false;
  FRESHET_INLINE F32 d(const uint8_t*, const uint8_t* tail) {
    return mul_f(load_f16(tail), set_f(0.125f));
  }
};

struct BlockIQ2_XXS : BlockIQ2 {
  static constexpr Format kFormat = Format::kIQ2_XXS;
  static constexpr int kGroup = 32;
  struct Lines {
    const uint8_t* p;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      const int entry = i / 2, half = i % 2;
      const I32 size =
          half_entry(quant::kGridIQ2_XXS, bits_of(line_at(p, 0), 8 * entry, 255), half);
      const I32 signs = bits_of(line_at(p, 1), 7 * entry, 127);
      return with_signs<64>(size, spread_bits(even_signs(signs, half)));
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main + 2 * j * kLine}; }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return odd_scale(line_at(main, 2 * g + 1), 28, 15);
  }
};

struct BlockIQ2_XS : BlockIQ2 {
  static constexpr Format kFormat = Format::kIQ2_XS;
  static constexpr int kGroup = 16;
  struct Lines {
    const uint8_t* p;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      const int shift = i / 2 % 2 * 16, half = i % 2;
      const I32 v = line_at(p, i / 4);
      const I32 size = half_entry(quant::kGridIQ2_XS, bits_of(v, shift, 511), half);
      return with_signs<64>(size, spread_bits(even_signs(bits_of(v, shift + 9, 127), half)));
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main + 2 * j * kLine}; }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return odd_scale(line_at(main, 16 + g / 8), 4 * (g % 8), 15);
  }
};

struct BlockIQ2_S : BlockIQ2 {
  static constexpr Format kFormat = Format::kIQ2_S;
  static constexpr int kGroup = 16;
  struct Lines {
    const uint8_t* main;
    int j;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      const int entry = i / 2, half = i % 2;
      const I32 low = bits_of(line_at(main, j), 8 * entry, 255);
      const I32 high = bits_of(line_at(main, 16 + j / 4), 8 * (j % 4) + 2 * entry, 3);
      const I32 size = half_entry(quant::kGridIQ2_S, or_i(low, shl(high, 8)), half);
      const I32 signs = bits_of(line_at(main, 8 + j), 8 * entry + 4 * half, 15);
      return with_signs<64>(size, spread_bits(signs));
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main, j}; }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return odd_scale(line_at(main, 18 + g / 8), 4 * (g % 8), 15);
  }
};

struct BlockIQ3_XXS {
  static constexpr Format kFormat = Format::kIQ3_XXS;
  static constexpr int kTop = 64 + 62, kShift = 6, kGroup = 32;
  static constexpr bool kAffine = false;
  struct Lines {
    const uint8_t* main;
    int j;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      const I32 entry = bits_of(line_at(main, 2 * j + i / 4), 8 * (i % 4), 255);
      const I32 size = gather(quant::kGridIQ3_XXS.quads, entry);
      const I32 signs = bits_of(line_at(main, 16 + j), 7 * (i / 2), 127);
      return with_signs<64>(size, spread_bits(even_signs(signs, i % 2)));
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main, j}; }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return odd_scale(line_at(main, 16 + g), 28, 15);
  }
  FRESHET_INLINE F32 d(const uint8_t*, const uint8_t* tail) {
    return mul_f(load_f16(tail), set_f(0.25f));
  }
};

struct BlockIQ3_S {
  static constexpr Format kFormat = Format::kIQ3_S;
  static constexpr int kTop = 16 + 15, kShift = 4, kGroup = 32;
  static constexpr bool kAffine = false;
  struct Lines {
    const uint8_t* main;
    int j;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      const I32 low = bits_of(line_at(main, 2 * j + i / 4), 8 * (i % 4), 255);
      const I32 high = bits_of(line_at(main, 16 + j / 4), 8 * (j % 4) + i, 1);
      const I32 size = gather(quant::kGridIQ3_S.quads, or_i(low, shl(high, 8)));
      return with_signs<16>(size, spread_bits(bits_of(line_at(main, 18 + j), 4 * i, 15)));
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main, j}; }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return odd_scale(line_at(main, 26), 4 * g, 15);
  }
  FRESHET_INLINE F32 d(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};

// Values of IQ1 in eighths, 16 too high (so up to 25): 8 (g + 1) + 8 + 8 delta. minus: all bits set
// if delta is negative.
FRESHET_INLINE I32 eighths(I32 entry, I32 minus, int half) {
  const I32 delta = sub_i(bytes_i(9), and_i(minus, bytes_i(2)));
  return add_i(shl(half_entry(quant::kGridIQ1, entry, half), 3), delta);
}
// Copies bit `at` of each lane to all bits of the lane.
FRESHET_INLINE I32 all_bits(I32 v, int at) {
  return sar(shl(v, 31 - at), 31);
}

struct BlockIQ1_S {
  static constexpr Format kFormat = Format::kIQ1_S;
  static constexpr int kTop = 31, kShift = 4, kGroup = 32;
  static constexpr bool kAffine = false;
  struct Lines {
    const uint8_t* main;
    int j;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      const int entry = i / 2, shift = j % 2 * 16;
      const I32 more = line_at(main, 8 + j / 2);
      const I32 low = bits_of(line_at(main, j), 8 * entry, 255);
      const I32 high = bits_of(more, shift + 3 * entry, 7);
      return eighths(or_i(low, shl(high, 8)), all_bits(more, shift + 15), i % 2);
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main, j}; }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return odd_scale(line_at(main, 8 + g / 2), g % 2 * 16 + 12, 7);
  }
  FRESHET_INLINE F32 d(const uint8_t*, const uint8_t* tail) {
    return mul_f(load_f16(tail), set_f(0.125f));
  }
};

struct BlockIQ1_M {
  static constexpr Format kFormat = Format::kIQ1_M;
  static constexpr int kTop = 31, kShift = 4, kGroup = 16;
  static constexpr bool kAffine = false;
  struct Lines {
    const uint8_t* main;
    int j;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      const int entry = i / 2, shift = j % 2 * 16 + 4 * entry;
      const I32 more = line_at(main, 8 + j / 2);
      const I32 low = bits_of(line_at(main, j), 8 * entry, 255);
      const I32 high = bits_of(more, shift, 7);
      return eighths(or_i(low, shl(high, 8)), all_bits(more, shift + 3), i % 2);
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main, j}; }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return odd_scale(line_at(main, 12 + g / 8), g / 4 % 2 * 16 + g % 4 * 3, 7);
  }
  FRESHET_INLINE F32 d(const uint8_t* main, const uint8_t*) {
    const I32 low = line_at(main, 12), high = line_at(main, 13);
    const I32 half = or_i(or_i(bits_of(low, 12, 15), bits_of(low, 24, 0xf0)),
                          or_i(bits_of(high, 4, 0xf00), bits_of(high, 16, 0xf000)));
    alignas(64) uint8_t halves_of_rows[2 * kPanelRows];
    store_u16(halves_of_rows, half);
    return mul_f(load_f16(halves_of_rows), set_f(0.125f));
  }
};

// Ternary values are stored as digits 0 to 2. Lines hold the digit plus one, which is two
// (2^kShift) too high.
struct BlockTernary {
  static constexpr int kTop = 4, kShift = 1, kGroup = 32;
  static constexpr bool kAffine = false;
  FRESHET_INLINE I32 group_scale(const uint8_t*, int) { return set_i(1); }
  FRESHET_INLINE F32 d(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};

struct BlockTQ1_0 : BlockTernary {
  static constexpr Format kFormat = Format::kTQ1_0;
  // Digit n of a byte, for the bytes of two halves of 16 bits each.
  FRESHET_INLINE I32 digit_of(I32 pairs, int n) {
    const I32 mask = set_i(0x00ff00ff);
    I32 fraction = and_i(pairs, mask);
    for (int i = 0; i < n; ++i) fraction = and_i(add_i(fraction, shl(fraction, 1)), mask);
    return and_i(shr(add_i(fraction, shl(fraction, 1)), 8), set_i(0x00030003));
  }
  struct Lines {
    const uint8_t* main;
    int j;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      int from = i, n = j;  // 32 bytes of five digits
      if (j >= 5) {         // 16 bytes
        from = 8 + i % 4;
        n = 2 * (j - 5) + i / 4;
      }
      if (n == 5) {  // the last four bytes
        from = 12;
        n = i % 4;
      }
      const I32 v = line_at(main, from);
      const I32 digits = or_i(digit_of(v, n), shl(digit_of(shr(v, 8), n), 8));
      return add_i(digits, bytes_i(1));
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main, j}; }
};

struct BlockTQ2_0 : BlockTernary {
  static constexpr Format kFormat = Format::kTQ2_0;
  struct Lines {
    const uint8_t* p;
    int shift;
    FRESHET_INLINE_MEMBER I32 line(int i) const {
      return add_i(bits_at(line_at(p, i), shift, 3), bytes_i(1));
    }
  };
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) {
    return {main + j / 4 * 8 * kLine, j % 4 * 2};
  }
};

// In the order of quant::Format, from kFirstGrid on.
#define FRESHET_GRID_KERNELS                                                                 \
  run<Family256, BlockIQ1_S>, run<Family256, BlockIQ1_M>, run<Family256, BlockIQ2_XXS>,      \
      run<Family256, BlockIQ2_XS>, run<Family256, BlockIQ2_S>, run<Family256, BlockIQ3_XXS>, \
      run<Family256, BlockIQ3_S>, run<Family256, BlockTQ1_0>, run<Family256, BlockTQ2_0>

}  // namespace
}  // namespace freshet::cpu
