// Unpacks blocks of weights to units, two operands of bytes (matmul_amx_pipe.inl), in the L1 cache.
// A block is unpacked in eighths, which a loop nest can place between its tile instructions.
#pragma once

#include "backend/cpu/matmul_amx_tiles.inl"

namespace freshet::cpu {
namespace {

inline constexpr int64_t kUnitK = 256;

// Q4_0 with each product of scale and value rounded to a byte, so that the tiles multiply a single
// plane of bytes. Over 256 values of a row the scales become integers up to 127, and a byte is an
// eighth of the product. A matrix that uses the fine plane of activations keeps both planes.
struct RoundedQ4_0 : BlockQ4_0 {};
// The same for Q4_K: its scales are integers already, and a byte is a quarter of the product. Its
// minima are subtracted by BF16 tiles: see put_offsets().
struct RoundedQ4_K : BlockQ4_K {
  static constexpr bool kAffine = false;
};
template <class F>
inline constexpr bool kRounded = false;
template <>
inline constexpr bool kRounded<RoundedQ4_0> = true;
template <>
inline constexpr bool kRounded<RoundedQ4_K> = true;
template <class F>
inline constexpr bool kOffsets = std::is_same_v<F, RoundedQ4_K>;
inline constexpr float kRoundedTop = 127.0f;

// Shifts each group of four bytes up by one byte, without using the execution port of the shifts.
FRESHET_INLINE I32 byte_up(I32 v) {
  return _mm512_shuffle_epi8(v, _mm512_set4_epi32(0x0e0d0c80, 0x0a090880, 0x06050480, 0x02010080));
}

// Bits [kFrom, kFrom + 4) of each odd byte, with the top bit flipped, as the upper half of the
// byte. All other bits are zero.
template <int kFrom>
FRESHET_INLINE I32 signed_nibbles(I32 v) {
#if defined(__GFNI__)
  constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;
  const I32 to_upper = _mm512_set1_epi64(kFrom == 0 ? 0x01020408 : 0x10204080);
  return _mm512_maskz_gf2p8affine_epi64_epi8(kOdd, v, to_upper, 0x80);
#else
  const I32 upper = _mm512_slli_epi16(_mm512_xor_si512(v, bytes_i(0x88)), 4 - kFrom);
  return _mm512_and_si512(upper, _mm512_set1_epi16(-0x1000));
#endif
}

// Converts the F16 scales of up to eight blocks to integers: calls put(g, v) with the integer of
// block g in the low 16 bits of v. Returns their unit. Uses few instructions: finds the maximum in
// 16 bits, and adds 1.5 * 2^23, which leaves an integer in the low bits.
template <class F, class Put>
FRESHET_INLINE F32 read_scales(const uint8_t* d, int count, const Put& put) {
  constexpr int kTail = panel_layout(F::kFormat).tail;
  alignas(64) uint8_t padded[8 * kTail];
  if (count < 8) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, d, static_cast<size_t>(count * kTail));
    d = padded;
  }
  I32 most = zero_i();
  FRESHET_UNROLL
  for (int i = 0; i < 4; ++i) {
    most = _mm512_max_epu16(most, and_i(line_at(d, i), set_i(0x7fff7fff)));
  }
  const __m256i most_of_rows =
      _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
  const F32 top = _mm512_cvtph_ps(most_of_rows);
  F32 inverse, unit;
  if constexpr (kRounded<F>) {
    inverse = _mm512_maskz_div_ps(_mm512_test_epi32_mask(bits_i(top), bits_i(top)),
                                  set_f(kRoundedTop), top);
    unit = mul_f(top, set_f(8.0f / kRoundedTop));
  } else {
    const WholeScales<F::kScaleBits> scales(bits_i(top));
    inverse = scales.inverse;
    unit = scales.unit();
  }
  FRESHET_UNROLL
  for (int g = 0; g < 8; ++g) {
    put(g, bits_i(fma_f(load_f16(d + g * kTail), inverse, set_f(0x1.8p23f))));
  }
  return unit;
}
// Copies the low 16 bits to both halves.
FRESHET_INLINE I32 low_halves(I32 v) {
  return _mm512_shuffle_epi8(v, _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100));
}

// The low byte of every 16 bits: even bytes from `even`, odd bytes from `odd`. high_bytes() is the
// same for the high bytes.
FRESHET_INLINE I32 low_bytes(I32 even, I32 odd) {
  constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaa;
  const I32 swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
  return _mm512_mask_shuffle_epi8(even, kOdd, odd, swap);
}
FRESHET_INLINE I32 high_bytes(I32 even, I32 odd) {
  constexpr __mmask64 kEven = 0x5555555555555555;
  const I32 swap = _mm512_set4_epi32(0x0e0f0c0d, 0x0a0b0809, 0x06070405, 0x02030001);
  return _mm512_mask_shuffle_epi8(odd, kEven, even, swap);
}

// A PackedGroup of blocks with F16 scales.
template <class F>
struct F16Group {
  static constexpr PanelLayout kLayout = panel_layout(F::kFormat);
  const uint8_t* main;
  const uint8_t* tail;
  const Packed<F>& panel;
  int count;
  I32 both[8];
  F32 unit;
  FRESHET_INLINE_MEMBER F16Group(const Packed<F>& from, int64_t b, int64_t blocks)
      : main(from.main(8 * b)),
        tail(from.tail(8 * b)),
        panel(from),
        count(static_cast<int>(blocks - 8 * b < 8 ? blocks - 8 * b : 8)),
        unit(read_scales<F>(tail, count, [this](int g, I32 scale) __attribute__((always_inline)) {
          both[g] = low_halves(scale);
        })) {}
  FRESHET_INLINE_MEMBER int subs() const { return count; }
  FRESHET_INLINE_MEMBER auto sub(int j) const { return F::lines(main + j * kLayout.main); }
  FRESHET_INLINE_MEMBER F32 d() const { return unit; }
  FRESHET_INLINE_MEMBER void ahead(int j) const { fetch_group_ahead(panel, main, tail, j); }
};
template <class F>
inline constexpr bool kF16Scales =
    kOf32<F> && !F::kAffine && panel_layout(F::kFormat).tail == 2 * kPanelRows;

// Copies byte i of each 32 bits to all four bytes.
FRESHET_INLINE I32 every_byte(I32 v, int i) {
  const int k = i * 0x01010101;
  return _mm512_shuffle_epi8(v,
                             _mm512_set4_epi32(k + 0x0c0c0c0c, k + 0x08080808, k + 0x04040404, k));
}

// A block of Q4_K as a source of bytes: a quarter of scale times value, rounded.
struct ByteBlockQ4_K {
  using F = BlockQ4_K;
  const uint8_t* main;
  I32 both[8];  // 512 times a group's scale, in both halves
  F32 unit;
  ByteBlockQ4_K() = default;
  FRESHET_INLINE_MEMBER explicit ByteBlockQ4_K(const uint8_t* from) { open_at(from); }
  FRESHET_INLINE_MEMBER void open_at(const uint8_t* from) {
    main = from;
    unit = unit_at(from);
    FRESHET_UNROLL
    for (int k = 0; k < 2; ++k) {
      const I32 scales = six_bit_scales(main + 32 * kLine, k), twice = add_i(scales, scales);
      FRESHET_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = i * 0x01000100;
        both[4 * k + i] = _mm512_maskz_shuffle_epi8(
            0xaaaaaaaaaaaaaaaa, twice,
            _mm512_set4_epi32(at + 0x0c000c00, at + 0x08000800, at + 0x04000400, at));
      }
    }
  }
  // NaN if d is NaN or dmin is not finite.
  FRESHET_INLINE F32 unit_at(const uint8_t* from) {
    return fma_f(F::dmin(from), zero_f(), mul_f(F::d(from, nullptr), set_f(4.0f)));
  }
  static constexpr int subs() { return 8; }
  FRESHET_INLINE_MEMBER auto sub(int j) const { return F::sub(main, j); }
  FRESHET_INLINE_MEMBER F32 d() const { return unit; }
  FRESHET_INLINE_MEMBER void ahead(int j) const {
    constexpr int kEighth = (panel_layout(F::kFormat).main / kLine + 7) / 8;
    prefetch_lines<kEighth>(main + j * kEighth * kLine + kAhead);
  }
  // Line i of group j as bytes. The values are in bits [4, 8) or [8, 12); with the scale's factor
  // that makes 2^13 in all, and the rounding multiplication divides by 2^15.
  FRESHET_INLINE_MEMBER I32 bytes(int j, int i) const {
    const I32 raw = line_at(main, j / 2 * 8 + i);
    const I32 even = and_i(j % 2 ? raw : _mm512_slli_epi16(raw, 4), set_i(0x00f000f0));
    const I32 odd = and_i(j % 2 ? _mm512_srli_epi16(raw, 4) : raw, set_i(0x0f000f00));
    return low_bytes(_mm512_mulhrs_epi16(even, both[j]),
                     _mm512_mulhrs_epi16(odd, _mm512_srli_epi16(both[j], 4)));
  }
};

// The offsets that the minima of RoundedQ4_K subtract: BF16, in the upper half of put(g, bits).
template <class Put>
FRESHET_INLINE void read_offsets(const uint8_t* main, const Put& put) {
  using F = BlockQ4_K;
  const F32 unit = F::dmin(main);
  FRESHET_UNROLL
  for (int k = 0; k < 2; ++k) {
    const I32 minima = F::min_bytes(main, k);
    FRESHET_UNROLL
    for (int i = 0; i < 4; ++i) {
      const F32 of_byte = mul_f(unit, set_f(-1.0f / static_cast<float>(1 << 8 * i)));
      const F32 v = mul_f(to_f(and_i(minima, set_i(0xff << 8 * i))), of_byte);
      put(4 * k + i, add_i(bits_i(v), set_i(0x8000)));
    }
  }
}
// Bytes of a quarter of a tile. Its line i holds groups 2 i and 2 i + 1.
inline constexpr int64_t kOffsetBytes = 4 * kLine;
FRESHET_INLINE void put_offsets(const uint8_t* main, uint8_t* to) {
  I32 bits[8];
  read_offsets(main, [&bits](int g, I32 v) __attribute__((always_inline)) { bits[g] = v; });
  constexpr __mmask32 kOdd = 0xaaaaaaaa;
  FRESHET_UNROLL
  for (int i = 0; i < 4; ++i) {
    store_i(to + i * kLine, _mm512_mask_mov_epi16(shr(bits[2 * i], 16), kOdd, bits[2 * i + 1]));
  }
}
// The same for block `block` of a tile; after a row's last block, fills the rest of the tile with
// zeros.
FRESHET_INLINE void put_offsets(const uint8_t* main, int64_t block, bool last, uint8_t* tile) {
  put_offsets(main, tile + block % 4 * kOffsetBytes);
  if (!last) return;
  for (int64_t i = (block % 4 + 1) * kOffsetBytes; i < 4 * kOffsetBytes; i += kLine) {
    store_i(tile + i, zero_i());
  }
}
// Offsets are added to a row's sums after every kOffsetBlocks blocks, and after the last one.
inline constexpr int64_t kOffsetBlocks = 16, kOffsetTiles = kOffsetBlocks / 4;
inline constexpr int64_t kOffsetTile = 4 * kOffsetBytes;
// Offset, among all row sums, of those that are multiplied by block b's offsets.
FRESHET_INLINE int64_t offsets_of(int64_t block) {
  return block / kOffsetBlocks * kOffsetTiles * kLine;
}
FRESHET_INLINE bool ends_offsets(int64_t block, int64_t blocks) {
  return block % kOffsetBlocks == kOffsetBlocks - 1 || block + 1 == blocks;
}

// Multiplies tiles of rounded values: signed bytes, except for Q4_K, whose bytes are unsigned.
template <class F, int kTile, int kX>
FRESHET_INLINE void rounded_product() {
  if constexpr (kOffsets<F>) {
    tile_dp_u8<kTile, kX, 6>();
  } else {
    tile_dp_i8<kTile, kX, 6>();
  }
}

// Packed blocks of 256 values, as units are made from them.
template <class F>
struct TilePacked : Packed256<F> {
  using Packed256<F>::Packed256;
  FRESHET_INLINE_MEMBER auto block(int64_t b) const {
    if constexpr (std::is_same_v<F, RoundedQ4_K>) {
      return ByteBlockQ4_K(this->main(b));
    } else if constexpr (kF16Scales<F>) {
      return F16Group<F>(*this, b, this->blocks);
    } else {
      return Packed256<F>::block(b);
    }
  }
};

// Prefetches eighth j of block b of a panel: to the L1 cache if kNear, else to the L2 cache.
template <class F, bool kNear>
FRESHET_INLINE void fetch_eighth(const Packed256<F>& panel, int64_t b, int j) {
  constexpr PanelLayout kLayout = panel_layout(F::kFormat);
  constexpr int kOf = kUnitK / kLayout.block, kEighth = (kOf * kLayout.main / kLine + 7) / 8;
  const auto fetch = [](const uint8_t* line) __attribute__((always_inline)) {
    kNear ? prefetch_near(line) : prefetch(line);
  };
  FRESHET_UNROLL
  for (int i = 0; i < kEighth; ++i) fetch(panel.main(b * kOf) + (j * kEighth + i) * kLine);
  if (j * kLine < kOf * kLayout.tail) fetch(panel.tail(b * kOf) + j * kLine);
}

// Unpacks a block in eighths, each with U::unpack_sub.
template <class U>
struct Unpacks {
  // j is a constant after inlining.
  template <class View>
  FRESHET_INLINE void unpack_one(const View& block, int j, uint8_t* to) {
    switch (j) {
      case 0:
        return U::unpack_sub(block, 0, to);
      case 1:
        return U::unpack_sub(block, 1, to);
      case 2:
        return U::unpack_sub(block, 2, to);
      case 3:
        return U::unpack_sub(block, 3, to);
      case 4:
        return U::unpack_sub(block, 4, to);
      case 5:
        return U::unpack_sub(block, 5, to);
      case 6:
        return U::unpack_sub(block, 6, to);
      default:
        return U::unpack_sub(block, 7, to);
    }
  }
  // j is not known at compile time.
  template <class View>
  __attribute__((noinline)) static void unpack_any(const View& block, int j, uint8_t* to) {
    unpack_one(block, j, to);
  }
};

// A block of weights, unpacked for the tiles.
template <class F>
struct Unit : Unpacks<Unit<F>> {
  static constexpr bool kHalves = false;
  // One plane of bytes: a Q2_K product is 15 * 3 at most.
  static constexpr int kBytePlanes = F::kFormat == Format::kQ2_K || kRounded<F> ? 1 : 2;
  static constexpr int kPairs = F::kAffine ? kOffsetPairs<F> : 0;
  // Planes of values, then what scaling needs: pairs of offsets, d (and dmin).
  static constexpr int64_t kPlane = 64 * kLine, kPlanesBytes = kBytePlanes * kPlane,
                           kDAt = kPairs * kLine,
                           kScalesBytes = kDAt + (F::kAffine ? 2 : 1) * kLine,
                           kBytes = kPlanesBytes + kScalesBytes;

  // Stores 16-bit products as low and high bytes.
  FRESHET_INLINE void put_bytes(I32 even, I32 odd, uint8_t* to) {
    store_i(to, low_bytes(even, odd));
    if constexpr (kBytePlanes == 2) store_i(to + kPlane, high_bytes(even, odd));
  }
  // Multiplies four values of each row (unsigned bytes, 2^kShift too high) by the rows' scales (in
  // both halves) and stores low and high bytes. Avoids shifts where possible, because they use the
  // same execution port as multiplications.
  FRESHET_INLINE void put_products(I32 line, I32 scale, I32 too_much, uint8_t* to) {
    I32 even = _mm512_mullo_epi16(_mm512_and_si512(line, _mm512_set1_epi16(0xff)), scale);
    I32 odd = _mm512_mullo_epi16(_mm512_srli_epi16(line, 8), scale);
    if constexpr (F::kShift > 0) {
      even = _mm512_sub_epi16(even, too_much);
      odd = _mm512_sub_epi16(odd, too_much);
    }
    put_bytes(even, odd, to);
  }
  // Stores Q4_0's products as low and high bytes. A nibble minus 8 is a signed nibble with its top
  // bit flipped. In the upper bits of 16 it counts 2^12, the scale (less than 2^12) counts 2^3, and
  // the rounding multiplication divides by 2^15: that gives the product without a subtraction. When
  // rounded to a byte, it is an eighth of that.
  template <class Lines>
  FRESHET_INLINE void put_signed_nibbles(const Lines& lines, I32 scale, uint8_t* to) {
    const I32 eighth = kRounded<F> ? scale : _mm512_slli_epi16(scale, 3);
    FRESHET_UNROLL
    for (int i = 0; i < 4; ++i) {
      const I32 odd = lines.raw(i), even = _mm512_slli_epi16(odd, 8);
      put_bytes(_mm512_mulhrs_epi16(signed_nibbles<0>(even), eighth),
                _mm512_mulhrs_epi16(signed_nibbles<0>(odd), eighth), to + i * kLine);
      put_bytes(_mm512_mulhrs_epi16(signed_nibbles<4>(even), eighth),
                _mm512_mulhrs_epi16(signed_nibbles<4>(odd), eighth), to + (i + 4) * kLine);
    }
  }
  // A group's scale in both halves.
  template <class View>
  FRESHET_INLINE I32 both_halves(const View& block, int g) {
    if constexpr (kF16Scales<F>) {
      return block.both[g];
    } else {
      return halves(block.group_scale(g), block.group_scale(g));
    }
  }
  // Unpacks values [32 j, 32 j + 32) of a block.
  template <class View>
  FRESHET_INLINE void unpack_sub(const View& block, int j, uint8_t* to) {
    if constexpr (std::is_same_v<F, RoundedQ4_K>) {
      FRESHET_UNROLL
      for (int i = 0; i < 8; ++i) store_i(to + (j * 8 + i) * kLine, block.bytes(j, i));
      return;
    } else {
      unpack_products(block, j, to);
    }
  }
  template <class View>
  FRESHET_INLINE void unpack_products(const View& block, int j, uint8_t* to) {
    const bool is = j < block.subs();
    const auto lines = block.sub(is ? j : 0);
    if constexpr (F::kFormat == Format::kQ4_0) {
      return put_signed_nibbles(lines, is ? both_halves(block, j) : zero_i(), to + j * 8 * kLine);
    }
    FRESHET_UNROLL
    for (int i = 0; i < 8; ++i) {
      const I32 group = both_halves(block, (j * 32 + i * 4) / F::kGroup);
      const I32 scale = is ? group : zero_i();
      put_products(lines.line(i), scale, _mm512_slli_epi16(scale, F::kShift),
                   to + (j * 8 + i) * kLine);
    }
  }
  // Stores what scaling needs.
  template <class View>
  FRESHET_INLINE void unpack_scales(const View& block, uint8_t* to) {
    if constexpr (kPairs > 0) {
      FRESHET_UNROLL
      for (int i = 0; i < kPairs; ++i) store_i(to + i * kLine, block.pair(i));
    }
    store_i(to + kDAt, bits_i(block.d()));
    if constexpr (F::kAffine) store_i(to + kDAt + kLine, bits_i(block.dmin()));
  }
};

// Number minus zero point is a byte: neither is more than 15.
template <class F>
  requires kPairedGroups<F>
struct Unit<F> : Unpacks<Unit<F>> {
  static constexpr int kBytePlanes = 1;
  static constexpr bool kHalves = true;
  static constexpr int64_t kPlane = 64 * kLine, kPlanesBytes = kPlane, kDAt = 0,
                           kScalesBytes = 2 * kLine, kBytes = kPlanesBytes + kScalesBytes;

  template <class View>
  FRESHET_INLINE void unpack_sub(const View& block, int j, uint8_t* to) {
    const bool is = j < block.subs();
    const I32 zeros = _mm512_mullo_epi32(block.group(j).zero(), bytes_i(1));
    const auto lines = block.sub(j);
    FRESHET_UNROLL
    for (int i = 0; i < 8; ++i) {
      const I32 line = _mm512_sub_epi8(lines.line(i), zeros);
      store_i(to + (j * 8 + i) * kLine, is ? line : zero_i());
    }
  }
  template <class View>
  FRESHET_INLINE void unpack_scales(const View& block, uint8_t* to) {
    for (int h = 0; h < 2; ++h) store_i(to + kDAt + h * kLine, bits_i(block.groups[h].d()));
  }
};

}  // namespace
}  // namespace freshet::cpu
