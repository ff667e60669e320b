// Decoding of each integer format's blocks, to lines of quads and vectors of scales. For the byte
// layout see matmul_layout.h.
//
// A format with blocks of 256 has sub(j), the Lines of 32 values (line(p): quad p as unsigned bytes
// up to kTop, 2^kShift too high; kShift 0: not shifted; kTop 0: signed, see kFlipSigned);
// group_scale(g), an integer per group of kGroup; if kAffine, min_bytes(k), the minima of four
// groups; d() and dmin(). A format with blocks of 32 has lines(), scale() and, if kAffine, low().
// Eight of its blocks are used as one of 256, with their scales converted to integers of
// kScaleBits; see whole_scales().
#pragma once

#include "backend/cpu/float_bits.inl"
#include "backend/cpu/matmul_layout.h"

namespace freshet::cpu {
namespace {

using quant::Format;

inline constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr int8_t kIq4Flipped[16] = {1,    24,   45,   63,  79,  93,  106, 118,
                                           -127, -115, -103, -90, -75, -59, -39, -15};
inline constexpr int8_t kE2M1Levels[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                           16, 15, 14, 13, 12, 10, 8,  4};

FRESHET_INLINE I32 bytes_i(int b) {
  return set_i(b * 0x01010101);
}
FRESHET_INLINE I32 low_nibbles(I32 v) {
  return and_i(v, bytes_i(15));
}
// (v >> n) & mask in each byte; n < 0 shifts left.
FRESHET_INLINE I32 bits_at(I32 v, int n, int mask) {
  return and_i(n >= 0 ? shr(v, n) : shl(v, -n), bytes_i(mask));
}
FRESHET_INLINE I32 line_at(const uint8_t* p, int i) {
  return load_i(p + i * kLine);
}

// Quads p and p + 4 are in the two nibbles of line p's bytes.
struct NibbleLines {
  const uint8_t* p;
  // The bits of quad i: in each byte of raw(i), from bit at(i) on.
  FRESHET_INLINE_MEMBER I32 raw(int i) const { return line_at(p, i & 3); }
  static constexpr int at(int i) { return i & 4; }
  FRESHET_INLINE_MEMBER I32 line(int i) const { return bits_at(line_at(p, i & 3), i & 4, 15); }
};
struct FiveBitLines {
  const uint8_t* p;
  FRESHET_INLINE_MEMBER I32 line(int i) const {
    return or_i(bits_at(line_at(p, i & 3), i & 4, 15), bits_at(line_at(p, 4), i - 4, 16));
  }
};
struct TableLines {
  const uint8_t* p;
  const int8_t* table;
  FRESHET_INLINE_MEMBER I32 raw(int i) const { return line_at(p, i & 3); }
  static constexpr int at(int i) { return i & 4; }
  FRESHET_INLINE_MEMBER I32 line(int i) const {
    return look_up(table, bits_at(line_at(p, i & 3), i & 4, 15));
  }
};
struct ByteLines {
  const uint8_t* p;
  FRESHET_INLINE_MEMBER I32 line(int i) const {
    const I32 v = line_at(p, i);
    return kFlipSigned ? xor_i(v, bytes_i(0x80)) : v;
  }
};

// Converts the scales of up to eight blocks of 32 to integers times one unit. The unit is the power
// of two for which the largest scale has kBits bits. Values times such scales add up exactly over
// all the blocks, in any order. An F16 has eleven significant bits, so with twelve bits no scale
// within a factor of two of the largest is rounded. kBits is as large as the format's values allow
// within 16 bits. If a scale is not finite, the unit is NaN.
template <int kBits>
struct WholeScales {
  I32 top;       // at least 2^-100: smaller scales count as zero
  I32 exponent;  // the largest scale may round up to a power of two
  F32 inverse;   // 1 / unit
  // most: the bits of the largest magnitude.
  FRESHET_INLINE_MEMBER explicit WholeScales(I32 most)
      : top(max_i(most, set_i(27 << 23))),
        exponent(shr(add_i(top, set_i(1 << (23 - kBits))), 23)),
        inverse(bits_f(shl(sub_i(set_i(253 + kBits), exponent), 23))) {}
  FRESHET_INLINE_MEMBER F32 unit() const {
    return fma_f(bits_f(top), zero_f(), bits_f(shl(add_i(exponent, set_i(1 - kBits)), 23)));
  }
};
template <int kBits>
FRESHET_INLINE F32 whole_scales(const F32 (&d)[8], I32 (&whole)[8]) {
  I32 most = magnitude_bits(d[0]);
  FRESHET_UNROLL
  for (int g = 1; g < 8; ++g) most = max_i(most, magnitude_bits(d[g]));
  const WholeScales<kBits> scales(most);
  FRESHET_UNROLL
  for (int g = 0; g < 8; ++g) whole[g] = round_i(mul_f(d[g], scales.inverse));
  return scales.unit();
}

struct BlockQ4_0 {
  static constexpr Format kFormat = Format::kQ4_0;
  static constexpr int kTop = 15, kShift = 3, kGroup = 32, kScaleBits = 12;
  static constexpr bool kAffine = false;
  FRESHET_INLINE NibbleLines lines(const uint8_t* main) { return {main}; }
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};
struct BlockQ4_1 {
  static constexpr Format kFormat = Format::kQ4_1;
  static constexpr int kTop = 15, kShift = 0, kGroup = 32, kScaleBits = 11;
  static constexpr bool kAffine = true;
  FRESHET_INLINE NibbleLines lines(const uint8_t* main) { return {main}; }
  FRESHET_INLINE F32 scale(const uint8_t* main, const uint8_t*) { return load_f16(main + 256); }
  FRESHET_INLINE F32 low(const uint8_t* main) { return load_f16(main + 288); }
};
struct BlockQ5_0 {
  static constexpr Format kFormat = Format::kQ5_0;
  static constexpr int kTop = 31, kShift = 4, kGroup = 32, kScaleBits = 11;
  static constexpr bool kAffine = false;
  FRESHET_INLINE FiveBitLines lines(const uint8_t* main) { return {main}; }
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};
struct BlockQ5_1 {
  static constexpr Format kFormat = Format::kQ5_1;
  static constexpr int kTop = 31, kShift = 0, kGroup = 32, kScaleBits = 10;
  static constexpr bool kAffine = true;
  FRESHET_INLINE FiveBitLines lines(const uint8_t* main) { return {main}; }
  FRESHET_INLINE F32 scale(const uint8_t* main, const uint8_t*) { return load_f16(main + 320); }
  FRESHET_INLINE F32 low(const uint8_t* main) { return load_f16(main + 352); }
};
struct BlockQ8_0 {
  static constexpr Format kFormat = Format::kQ8_0;
  static constexpr int kTop = 0, kShift = kFlipSigned ? 7 : 0, kGroup = 32, kScaleBits = 8;
  static constexpr bool kAffine = false;
  FRESHET_INLINE ByteLines lines(const uint8_t* main) { return {main}; }
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};
struct BlockIQ4_NL {
  static constexpr Format kFormat = Format::kIQ4_NL;
  static constexpr int kTop = 0, kShift = kFlipSigned ? 7 : 0, kGroup = 32, kScaleBits = 8;
  static constexpr bool kAffine = false;
  FRESHET_INLINE TableLines lines(const uint8_t* main) {
    return {main, kFlipSigned ? kIq4Flipped : kIq4Levels};
  }
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};
struct BlockMXFP4 {
  static constexpr Format kFormat = Format::kMXFP4;
  static constexpr int kTop = 28, kShift = 4, kGroup = 32, kScaleBits = 11;
  static constexpr bool kAffine = false;
  FRESHET_INLINE TableLines lines(const uint8_t* main) { return {main, kE2M1Levels}; }
  // 2^(e - 128), subnormal for e < 2 (levels are doubled).
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) {
    const I32 e = load_u8(tail);
    const I32 small = sar(sub_i(e, set_i(2)), 31);
    const I32 normal = shl(sub_i(e, set_i(1)), 23);
    const I32 subnormal = shl(add_i(e, set_i(1)), 21);
    return bits_f(xor_i(normal, and_i(xor_i(normal, subnormal), small)));
  }
};

// Byte i of each dword of `v` (one byte per group), as integers.
FRESHET_INLINE I32 unsigned_byte(I32 v, int i) {
  return i == 3 ? shr(v, 24) : and_i(shr(v, 8 * i), set_i(255));
}
FRESHET_INLINE I32 signed_byte(I32 v, int i) {
  return sar(shl(v, 24 - 8 * i), 24);
}

// The six-bit scales and minima of Q4_K and Q5_K: one byte for each of groups 4 k .. 4 k + 3.
FRESHET_INLINE I32 six_bit_scales(const uint8_t* s, int k) {
  const I32 low = line_at(s, 0);
  if (k == 0) return and_i(low, bytes_i(63));
  return or_i(low_nibbles(line_at(s, 2)), bits_at(low, 2, 48));
}
FRESHET_INLINE I32 six_bit_minima(const uint8_t* s, int k) {
  const I32 low = line_at(s, 1);
  if (k == 0) return and_i(low, bytes_i(63));
  return or_i(bits_at(line_at(s, 2), 4, 15), bits_at(low, 2, 48));
}

// The j-th 32 values of a block: quad i is in bits [kBits * s, ...) of line i of a run of lines.
struct SlicedLines {
  const uint8_t* p;
  int shift;
  int mask;
  FRESHET_INLINE_MEMBER I32 raw(int i) const { return line_at(p, i); }
  FRESHET_INLINE_MEMBER int at(int) const { return shift; }
  FRESHET_INLINE_MEMBER I32 line(int i) const { return bits_at(line_at(p, i), shift, mask); }
};
struct SlicedLinesPlusBit {
  const uint8_t* p;
  int shift;
  int mask;
  const uint8_t* high;
  int high_shift;  // moves the bit to the position of `high_mask`
  int high_mask;
  FRESHET_INLINE_MEMBER I32 line(int i) const {
    return or_i(bits_at(line_at(p, i), shift, mask),
                bits_at(line_at(high, i), high_shift, high_mask));
  }
};

struct BlockQ2_K {
  static constexpr Format kFormat = Format::kQ2_K;
  static constexpr int kTop = 3, kShift = 0, kGroup = 16;
  static constexpr bool kAffine = true;
  FRESHET_INLINE SlicedLines sub(const uint8_t* main, int j) {
    return {main + j / 4 * 8 * kLine, j % 4 * 2, 3};
  }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return and_i(shr(line_at(main, 16 + g / 4), g % 4 * 8), set_i(15));
  }
  FRESHET_INLINE I32 min_bytes(const uint8_t* main, int k) {
    return bits_at(line_at(main, 16 + k), 4, 15);
  }
  FRESHET_INLINE F32 d(const uint8_t* main, const uint8_t*) { return load_f16(main + 20 * kLine); }
  FRESHET_INLINE F32 dmin(const uint8_t* main) { return load_f16(main + 20 * kLine + 32); }
};
struct BlockQ3_K {
  static constexpr Format kFormat = Format::kQ3_K;
  static constexpr int kTop = 7, kShift = 2, kGroup = 16;
  static constexpr bool kAffine = false;
  FRESHET_INLINE SlicedLinesPlusBit sub(const uint8_t* main, int j) {
    return {main + j / 4 * 8 * kLine, j % 4 * 2, 3, main + 16 * kLine, j - 2, 4};
  }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    const I32 low = bits_at(line_at(main, 24 + g / 4 % 2), g / 8 * 4, 15);
    const I32 v = or_i(low, bits_at(line_at(main, 26), g / 4 * 2 - 4, 48));
    return sub_i(unsigned_byte(v, g % 4), set_i(32));
  }
  FRESHET_INLINE F32 d(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};
struct BlockQ4_K {
  static constexpr Format kFormat = Format::kQ4_K;
  static constexpr int kTop = 15, kShift = 0, kGroup = 32;
  static constexpr bool kAffine = true;
  FRESHET_INLINE SlicedLines sub(const uint8_t* main, int j) {
    return {main + j / 2 * 8 * kLine, j % 2 * 4, 15};
  }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return unsigned_byte(six_bit_scales(main + 32 * kLine, g / 4), g % 4);
  }
  FRESHET_INLINE I32 min_bytes(const uint8_t* main, int k) {
    return six_bit_minima(main + 32 * kLine, k);
  }
  FRESHET_INLINE F32 d(const uint8_t* main, const uint8_t*) { return load_f16(main + 35 * kLine); }
  FRESHET_INLINE F32 dmin(const uint8_t* main) { return load_f16(main + 35 * kLine + 32); }
};
struct BlockQ5_K {
  static constexpr Format kFormat = Format::kQ5_K;
  static constexpr int kTop = 31, kShift = 0, kGroup = 32;
  static constexpr bool kAffine = true;
  FRESHET_INLINE SlicedLinesPlusBit sub(const uint8_t* main, int j) {
    return {main + j / 2 * 8 * kLine, j % 2 * 4, 15, main + 32 * kLine, j - 4, 16};
  }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return unsigned_byte(six_bit_scales(main + 40 * kLine, g / 4), g % 4);
  }
  FRESHET_INLINE I32 min_bytes(const uint8_t* main, int k) {
    return six_bit_minima(main + 40 * kLine, k);
  }
  FRESHET_INLINE F32 d(const uint8_t* main, const uint8_t*) { return load_f16(main + 43 * kLine); }
  FRESHET_INLINE F32 dmin(const uint8_t* main) { return load_f16(main + 43 * kLine + 32); }
};
struct BlockQ6_K {
  static constexpr Format kFormat = Format::kQ6_K;
  static constexpr int kTop = 63, kShift = 5, kGroup = 16;
  static constexpr bool kAffine = false;
  FRESHET_INLINE SlicedLinesPlusBit sub(const uint8_t* main, int j) {
    return {main + (j / 4 * 16 + j % 2 * 8) * kLine, j % 4 / 2 * 4, 15,
            main + (32 + j / 4 * 8) * kLine,         j % 4 * 2 - 4, 48};
  }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    return signed_byte(line_at(main, 48 + g / 4), g % 4);
  }
  FRESHET_INLINE F32 d(const uint8_t*, const uint8_t* tail) { return load_f16(tail); }
};
struct BlockIQ4_XS {
  static constexpr Format kFormat = Format::kIQ4_XS;
  static constexpr int kTop = 0, kShift = kFlipSigned ? 7 : 0, kGroup = 32;
  static constexpr bool kAffine = false;
  FRESHET_INLINE TableLines sub(const uint8_t* main, int j) {
    return {main + j * 4 * kLine, kFlipSigned ? kIq4Flipped : kIq4Levels};
  }
  FRESHET_INLINE I32 group_scale(const uint8_t* main, int g) {
    const I32 low = and_i(shr(line_at(main, 32), 4 * g), set_i(15));
    const I32 high = and_i(shl(shr(load_u16(main + 33 * kLine + 32), 2 * g), 4), set_i(48));
    return sub_i(or_i(low, high), set_i(32));
  }
  FRESHET_INLINE F32 d(const uint8_t* main, const uint8_t*) { return load_f16(main + 33 * kLine); }
};

}  // namespace
}  // namespace freshet::cpu
