// Groups of 2, 3, 4 or 8 bits with zero points, and NVFP4: exact integer sums of a group of 16, 32
// or 128 k, then acc = fma(sum, d_weight * d_x, acc) group by group. Scales are used as stored.
#pragma once

#include "backend/cpu/matmul_tiles.inl"

namespace freshet::cpu {
namespace {

template <int kSize>
struct BlockInt4 {
  static constexpr Format kFormat = kSize == 128 ? Format::kInt4G128 : Format::kInt4G32;
  static constexpr int kGroup = kSize, kTop = 15, kShift = 0, kSubs = kSize / 32, kSubLines = 4;
  static constexpr bool kAffine = false;
  FRESHET_INLINE NibbleLines sub(const uint8_t* main, int j) { return {main + j * 4 * kLine}; }
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) {
    return bits_f(or_i(shl(load_u16(tail), 16), shl(and_i(load_u8(tail + 32), set_i(0xf0)), 8)));
  }
  FRESHET_INLINE I32 zero(const uint8_t*, const uint8_t* tail) {
    return and_i(load_u8(tail + 32), set_i(15));
  }
};

// Quad p has its low bit pairs in line p % 2, and a third bit in line 2.
template <bool kThird>
struct PairLines {
  const uint8_t* p;
  FRESHET_INLINE_MEMBER I32 line(int i) const {
    const I32 low = bits_at(line_at(p, i & 1), i / 2 * 2, 3);
    return kThird ? or_i(low, bits_at(line_at(p, 2), i - 2, 4)) : low;
  }
};
struct OffsetByteLines {
  const uint8_t* p;
  FRESHET_INLINE_MEMBER I32 line(int i) const {
    const I32 v = line_at(p, i);
    return kFlipSigned ? v : xor_i(v, bytes_i(0x80));
  }
};

template <int kBits, int kSize>
struct BlockInt {
  static constexpr Format kFormat =
      kBits == 2   ? (kSize == 128 ? Format::kInt2G128 : Format::kInt2G32)
      : kBits == 3 ? (kSize == 128 ? Format::kInt3G128 : Format::kInt3G32)
                   : (kSize == 128 ? Format::kInt8G128 : Format::kInt8G32);
  using Lines = std::conditional_t<kBits == 8, OffsetByteLines, PairLines<kBits == 3>>;
  static constexpr int kGroup = kSize, kTop = kBits == 8 ? 0 : (1 << kBits) - 1, kShift = 0,
                       kSubs = kSize / 32, kSubLines = kBits;
  static constexpr bool kAffine = false;
  FRESHET_INLINE Lines sub(const uint8_t* main, int j) { return {main + j * kBits * kLine}; }
  FRESHET_INLINE I32 head(const uint8_t* main) { return line_at(main, kSubs * kBits); }
  FRESHET_INLINE F32 scale(const uint8_t* main, const uint8_t*) {
    return bits_f(and_i(head(main), set_i(-256)));
  }
  // Bytes that are multiplied as signed ones are 128 too low.
  FRESHET_INLINE I32 zero(const uint8_t* main, const uint8_t*) {
    const I32 z = and_i(head(main), set_i(255));
    return kBits == 8 && !kFlipSigned ? sub_i(z, set_i(128)) : z;
  }
};

// Quads p and p + 2 are in the two nibbles of line p's bytes.
struct E2M1Lines {
  const uint8_t* p;
  FRESHET_INLINE_MEMBER I32 line(int i) const {
    return look_up(kE2M1Levels, bits_at(line_at(p, i & 1), i / 2 * 4, 15));
  }
};
// Decodes one E4M3 code per lane.
FRESHET_INLINE F32 from_e4m3(I32 code) {
  const I32 bits = shl(and_i(code, set_i(127)), 20);
  const I32 small = sar(sub_i(bits, set_i(8 << 20)), 31);  // subnormal
  const F32 normal = bits_f(add_i(bits, set_i(120 << 23)));
  const F32 subnormal = sub_f(bits_f(add_i(bits, set_i(121 << 23))), set_f(0x1p-6f));
  const I32 either = bits_i(normal);
  const I32 size = xor_i(either, and_i(xor_i(either, bits_i(subnormal)), small));
  return bits_f(or_i(size, shl(and_i(code, set_i(128)), 24)));
}
struct BlockNVFP4 {
  static constexpr Format kFormat = Format::kNVFP4;
  static constexpr int kGroup = 16, kTop = 28, kShift = 4, kSubs = 1, kSubLines = 2;
  static constexpr bool kAffine = false;
  FRESHET_INLINE E2M1Lines sub(const uint8_t* main, int) { return {main}; }
  FRESHET_INLINE F32 scale(const uint8_t*, const uint8_t* tail) { return from_e4m3(load_u8(tail)); }
  FRESHET_INLINE I32 zero(const uint8_t*, const uint8_t*) { return set_i(16); }
};
// The quads of a sub.
template <class F>
inline constexpr int kSubQuads = F::kGroup < 32 ? F::kGroup / 4 : 8;

// Negates a group's zero points, ready to be multiplied by sums of 32 activations: as pairs (0, 2),
// (1, 3) for a group of 128, or alone.
template <class F>
FRESHET_INLINE I32 minus_zeros(I32 zero) {
  const I32 minus = and_i(sub_i(zero_i(), zero), set_i(0xffff));
  return F::kSubs == 1 ? minus : or_i(minus, shl(minus, 16));
}
// Returns sum - zeros times the activations of group `at` of a record's block.
template <class F>
FRESHET_INLINE I32 less_zeros(I32 sum, I32 minus, const uint8_t* record, int at) {
  const uint8_t* const sums =
      record + (F::kGroup < 32 ? offsetof(Q8x256Record, sum16) : offsetof(Q8x256Record, sum32));
  if constexpr (F::kSubs == 1) {
    int16_t s;
    std::memcpy(&s, sums + 2 * (at / 4 * 4 + at % 2 * 2 + at % 4 / 2), 2);
    return add_madd_i(sum, minus, set_i(s));
  }
  sum = add_madd_i(sum, minus, set_i(i32_at(sums + 8 * at)));
  return add_madd_i(sum, minus, set_i(i32_at(sums + 8 * at + 4)));
}

// The packed groups of a panel.
template <class F>
struct PackedInt4 : Packed<F> {
  using Packed<F>::Packed;
  struct View {
    const Packed<F>& panel;
    const uint8_t* main;
    const uint8_t* tail;
    FRESHET_INLINE_MEMBER auto sub(int j) const { return F::sub(main, j); }
    FRESHET_INLINE_MEMBER I32 zero() const { return F::zero(main, tail); }
    FRESHET_INLINE_MEMBER I32 minus() const { return minus_zeros<F>(zero()); }
    FRESHET_INLINE_MEMBER F32 d() const { return F::scale(main, tail); }
    // Past a panel's end it prefetches the next panel.
    FRESHET_INLINE_MEMBER void ahead(int j) const {
      constexpr int kLines = F::kSubLines;
      const uint8_t* next = main + j * kLines * kLine + kAhead;
      if (next >= panel.tail_part) next += panel.end - panel.tail_part;
      prefetch_lines<kLines>(next);
      if (j > 0 || Packed<F>::kLayout.tail == 0) return;
      next = tail + 8 * kLine;
      if (next >= panel.end) next += panel.tail_part - panel.main_part;
      prefetch_near(next);
    }
  };
  FRESHET_INLINE_MEMBER View group(int64_t b) const {
    return {*this, this->main(b), this->tail(b)};
  }
};

// Two groups of 128, used as one block of 256; a row may end with half a block.
template <class F>
inline constexpr bool kPairedGroups = false;
template <>
inline constexpr bool kPairedGroups<BlockInt4<128>> = true;
template <>
inline constexpr bool kPairedGroups<BlockInt<2, 128>> = true;
template <>
inline constexpr bool kPairedGroups<BlockInt<3, 128>> = true;
template <class F>
  requires kPairedGroups<F>
struct Packed256<F> : PackedInt4<F> {
  using Group = typename PackedInt4<F>::View;
  struct View {
    Group groups[2];
    bool whole;
    FRESHET_INLINE_MEMBER int subs() const { return whole ? 8 : 4; }
    FRESHET_INLINE_MEMBER const Group& group(int j) const { return groups[j / 4]; }
    FRESHET_INLINE_MEMBER auto sub(int j) const { return group(j).sub(j % 4); }
    FRESHET_INLINE_MEMBER void ahead(int j) const { group(j).ahead(j % 4); }
  };
  const int64_t groups;
  Packed256(const MatmulCall& c, int64_t panel) : PackedInt4<F>(c, panel), groups(c.cols / 128) {}
  FRESHET_INLINE_MEMBER View block(int64_t b) const {
    const bool whole = 2 * b + 1 < groups;
    return {{this->group(2 * b), this->group(whole ? 2 * b + 1 : 2 * b)}, whole};
  }
};

// An unpacked group: its lines, the negated zero points, d.
template <class F>
struct UnpackedInt4 {
  using Block = F;
  static constexpr int kQuads = kSubQuads<F>;
  static constexpr int kZeroLine = F::kGroup / 4, kDLine = kZeroLine + 1;
  static constexpr int64_t kBytes = (kDLine + 1) * kLine;
  struct View {
    const uint8_t* data;
    FRESHET_INLINE_MEMBER WholeLines sub(int j) const { return {data + j * 8 * kLine}; }
    FRESHET_INLINE_MEMBER I32 minus() const { return line_at(data, kZeroLine); }
    FRESHET_INLINE_MEMBER F32 d() const { return bits_f(line_at(data, kDLine)); }
    FRESHET_INLINE_MEMBER void ahead(int) const {}
  };
  const uint8_t* data;
  FRESHET_INLINE_MEMBER View group(int64_t b) const { return {data + b * kBytes}; }

  static void unpack(const PackedInt4<F>& from, int64_t b0, int64_t b1, uint8_t* to) {
    for (int64_t b = b0; b < b1; ++b, to += kBytes) {
      const auto group = from.group(b);
      FRESHET_UNROLL
      for (int j = 0; j < F::kSubs; ++j) {
        group.ahead(j);
        const auto lines = group.sub(j);
        FRESHET_UNROLL
        for (int i = 0; i < kQuads; ++i) store_i(to + (j * 8 + i) * kLine, lines.line(i));
      }
      store_i(to + kZeroLine * kLine, group.minus());
      store_i(to + kDLine * kLine, bits_i(group.d()));
    }
  }
};

template <class Source, int T, int kPlanes>
FRESHET_INLINE void tile_int4(const Source& source, const Q8x256Layout& l,
                              const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                              F32 (&acc)[T]) {
  using F = typename Source::Block;
  constexpr int kRows = T * kPlanes, kOf256 = 256 / F::kGroup;
  for (int64_t b = b0; b < b1; ++b) {
    const auto group = source.group(b - b0);
    const int at = static_cast<int>(b % kOf256);
    const I32 minus = group.minus();
    I32 sum[kRows];
    const int8_t* x[kRows];
    const uint8_t* record[kRows];
    FRESHET_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* const from = row[r / kPlanes];
      const int plane = r % kPlanes;
      x[r] = reinterpret_cast<const int8_t*>(from) + plane * l.fine + b * F::kGroup;
      record[r] = from + l.records + (b / kOf256 * 2 + plane) * kLine;
      sum[r] = less_zeros<F>(zero_i(), minus, record[r], at);
    }
    FRESHET_UNROLL
    for (int j = 0; j < F::kSubs; ++j) {
      group.ahead(j);
      dot_plain<kRows, kSubQuads<F>, F::kTop>(sum, group.sub(j), x);
      FRESHET_UNROLL
      for (int r = 0; r < kRows; ++r) x[r] += 32;
    }
    const F32 d = group.d();
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      const F32 scale = mul_f(d, set_f(f32_at(record[t * kPlanes + kPlanes - 1])));
      acc[t] = fma_f(join_planes<kPlanes>(sum + t * kPlanes), scale, acc[t]);
    }
  }
}

}  // namespace
}  // namespace freshet::cpu
