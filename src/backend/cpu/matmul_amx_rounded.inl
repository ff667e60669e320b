// GEMM for few tokens with Q4_0 and Q4_K weights that are rounded to bytes (RoundedQ4_0,
// RoundedQ4_K). Bit-identical to the kernels for many tokens: the sums of a block are integers and
// exact in any order, and Q4_K's offsets are summed in the order in which the tiles sum them.
// Blocks are read in memory order. Each block is opened (its scales are converted to integers)
// while the previous one is in use.
#pragma once

#include "backend/cpu/matmul_amx_units.inl"

namespace freshet::cpu {
namespace {

// Prefetch distance in blocks. With a distance of two, twelve cores wait for memory.
inline constexpr int kFarBlocks = 5;

// Walks over the blocks of panels in memory order.
template <class F>
struct MemoryWalk {
  static constexpr PanelLayout kLayout = panel_layout(F::kFormat);
  static constexpr int kOf = kUnitK / kLayout.block;
  const MatmulCall& c;
  const int64_t of_row, last;
  int64_t panel, block = 0;
  const uint8_t* main;
  const uint8_t* tail;
  MemoryWalk(const MatmulCall& call, int64_t first, int64_t end)
      : c(call), of_row(blocks_of(c.cols, kLayout.block)), last(end), panel(first) {
    begin();
  }
  FRESHET_INLINE_MEMBER void begin() {
    const Packed<F> from(c, panel);
    main = from.main(0), tail = from.tail(0);
  }
  FRESHET_INLINE_MEMBER int count() const {
    return static_cast<int>(of_row - block * kOf < kOf ? of_row - block * kOf : kOf);
  }
  FRESHET_INLINE_MEMBER bool ends() const { return (block + 1) * kOf >= of_row; }
  // Stays on the last block once it gets there.
  FRESHET_INLINE_MEMBER void next() {
    if (!ends()) {
      ++block;
      main += kOf * kLayout.main;
      tail += kOf * kLayout.tail;
    } else if (panel + 1 < last) {
      ++panel;
      block = 0;
      begin();
    }
  }
  void fetch() const {
    for (int j = 0; j < 8; ++j) fetch(j);
  }
  // Prefetches eighth j of the block.
  FRESHET_INLINE_MEMBER void fetch(int j) const {
    constexpr int kEighth = (kLines + 7) / 8;
    prefetch_lines<kEighth>(main + j * kEighth * kLine);
    if (j * kLine < kOf * kLayout.tail) prefetch_near(tail + j * kLine);
  }
  static constexpr int kLines = kOf * kLayout.main / kLine;
};

// Prefetches what is needed while the first block is in use. A call covers a few of the panels that
// its thread takes in sequence, so prefetching continues past the call's last panel.
template <class F>
FRESHET_INLINE MemoryWalk<F> far_ahead(const MatmulCall& c, int64_t first) {
  MemoryWalk<F> far(c, first, blocks_of(c.rows, kPanelRows));
  far.fetch();
  far.next();
  far.fetch();
  for (int i = 2; i < kFarBlocks; ++i) far.next();
  return far;
}

// Prefetches to the L1 cache the lines shortly after eighth j of a block. They are already in
// flight to the L2 cache.
template <class F>
FRESHET_INLINE void fetch_near(const uint8_t* main, int j) {
  constexpr int kNear = 12, kLines = MemoryWalk<F>::kLines;
  for (int i = j * kLines / 8; i < (j + 1) * kLines / 8; ++i) {
    prefetch_near(main + (i + kNear) * kLine);
  }
}

// A block with its scales decoded, as Unit unpacks it.
template <class F>
struct OpenBlock {
  const uint8_t* main;
  int count;
  I32 both[8];
  F32 unit;
  FRESHET_INLINE_MEMBER void open(const MemoryWalk<F>& at) {
    main = at.main, count = at.count();
    unit = read_scales<F>(at.tail, count, [this](int g, I32 v) __attribute__((always_inline)) {
      both[g] = low_halves(v);
    });
  }
  FRESHET_INLINE_MEMBER int subs() const { return count; }
  FRESHET_INLINE_MEMBER auto sub(int j) const {
    return F::lines(main + j * panel_layout(F::kFormat).main);
  }
};

template <>
struct OpenBlock<RoundedQ4_K> : ByteBlockQ4_K {
  int count = 8;
  FRESHET_INLINE_MEMBER void open(const MemoryWalk<RoundedQ4_K>& at) { open_at(at.main); }
};

// Puts a scale's lower three bits in bits [3, 6) of each byte. The other bits of the byte are
// undefined.
FRESHET_INLINE I32 low_bits_of(I32 scale) {
#if defined(__AVX512VBMI__)  // otherwise the tiles are emulated, for tests on other processors
  const I32 from = _mm512_set1_epi64(0x1d1d1d1d3d3d3d3d);  // bit 29, or -3 with wrap-around
  return _mm512_multishift_epi64_epi8(from, scale);
#else
  return _mm512_mullo_epi32(and_i(scale, set_i(7)), bytes_i(8));
#endif
}

// The same for the vector kernels.
template <class F>
struct OpenVectors {
  const uint8_t* main;
  int count;
  I32 scale[8];
  I32 low_bits[8];
  F32 unit;
  FRESHET_INLINE_MEMBER void open(const MemoryWalk<F>& at) {
    main = at.main, count = at.count();
    unit = read_scales<F>(at.tail, count, [this](int g, I32 v) __attribute__((always_inline)) {
      scale[g] = and_i(v, set_i(0xffff));
      low_bits[g] = low_bits_of(v);
    });
  }
};

template <>
struct OpenVectors<RoundedQ4_K> {
  using F = RoundedQ4_K;
  const uint8_t* main;
  int count = 8;
  I32 scales[2], low_bits[2];  // one byte for each of four groups, and its lower two bits in [2, 4)
  F32 unit;
  FRESHET_INLINE_MEMBER void open(const MemoryWalk<F>& at) {
    main = at.main;
    unit = ByteBlockQ4_K::unit_at(main);
    FRESHET_UNROLL
    for (int k = 0; k < 2; ++k) {
      scales[k] = six_bit_scales(main + 32 * kLine, k);
      low_bits[k] = and_i(shl(scales[k], 2), bytes_i(12));
    }
  }
};

// At i = 8 s + n: the rounding error of eight times the rounded product of scale s and value n,
// plus three. It depends only on the lower three bits of s and n.
struct RoundingTable {
  uint8_t of[64];
  constexpr RoundingTable() : of() {
    for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(7 - ((i >> 3) * (i & 7) + 4) % 8);
  }
};
FRESHET_INLINE I32 rounding_of(I32 number, I32 low_bits) {
  alignas(64) static constexpr RoundingTable kTable;
  // (number & 7) | (low_bits & ~7)
  const I32 index = _mm512_ternarylogic_epi32(number, low_bits, bytes_i(7), 0xe4);
#if defined(__AVX512VBMI__)
  return _mm512_permutexvar_epi8(index, load_i(kTable.of));
#else
  alignas(64) uint8_t bytes[kLine];
  store_i(bytes, index);
  for (uint8_t& i : bytes) i = kTable.of[i & 63];
  return load_i(bytes);
#endif
}

inline constexpr int64_t kMostVectorCols = 65536;

// What the vector kernels need of T tokens' activations: the sums of groups and of blocks.
template <class F, int T>
struct VectorRows {
  using S = Starts<RoundedQ4_0, 1>;
  static constexpr int64_t kMostBlocks = kMostVectorCols / kUnitK;
  static constexpr int64_t kStartsBytes = kOffsets<F> ? 0 : kMostBlocks * S::kBlockBytes;
  const uint8_t* row[T];
  int64_t records;
  alignas(64) uint8_t starts[T][kStartsBytes + kLine];
  int32_t sums[T][kMostBlocks];

  FRESHET_INLINE_MEMBER int32_t start(int t, int64_t b, int g) const {
    return i32_at(starts[t] + b * S::kBlockBytes + g * 4);
  }
  explicit VectorRows(const MatmulCall& c) : records(q8x256_layout(c.cols).records) {
    const int64_t blocks = blocks_of(c.cols, kUnitK);
    tile_rows<T>(c, 0, c.tokens - 1, row);
    for (int t = 0; t < T; ++t) {
      if constexpr (kOffsets<F>) {
        for (int64_t b = 0; b < blocks; ++b) sums[t][b] = sum_of(row[t] + records + b * 2 * kLine);
        continue;
      }
      S::write(row[t], q8x256_layout(c.cols), 0, blocks, starts[t]);
      for (int64_t b = 0; b < blocks; ++b) {
        int32_t sum = 0;
        for (int g = 0; g < S::kGroups; ++g) sum += i32_at(starts[t] + b * S::kBlockBytes + g * 4);
        sums[t][b] = -(sum >> RoundedQ4_0::kShift);
      }
    }
  }
  static int32_t sum_of(const uint8_t* record) {
    Q8x256Record r;
    std::memcpy(&r, record, sizeof r);
    int32_t sum = 0;
    for (const int16_t of32 : r.sum32) sum += of32;
    return sum;
  }
};

// Multiplies one eighth of a block by T tokens' activations x. A `Sums` of the block.
template <class F, int T>
struct ExactEighths {  // sums exact products and, separately, the rounding errors
  using Opened = OpenVectors<F>;
  I32 sum[T], rest[T][2];
  FRESHET_INLINE_MEMBER ExactEighths(const VectorRows<F, T>& rows, int64_t b) {
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      sum[t] = rest[t][1] = zero_i();
      rest[t][0] = set_i(-3 * rows.sums[t][b]);
    }
  }
  FRESHET_INLINE_MEMBER void add(const Opened& block, int j, const VectorRows<F, T>& rows,
                                 int64_t b, const int8_t* const (&x)[T]) {
    const auto lines = F::lines(block.main + j * panel_layout(F::kFormat).main);
    I32 d[T];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      d[t] = set_i(rows.start(t, b, j));
    }
    FRESHET_UNROLL
    for (int q = 0; q < 4; ++q) {
      const I32 low = lines.raw(q), high = shr(low, 4);
      const I32 w[2] = {low_nibbles(low), low_nibbles(high)};
      const I32 r[2] = {rounding_of(low, block.low_bits[j]), rounding_of(high, block.low_bits[j])};
      FRESHET_UNROLL
      for (int t = 0; t < T; ++t) {
        FRESHET_UNROLL
        for (int h = 0; h < 2; ++h) {
          const int8_t* const quad = x[t] + j * 32 + h * 16 + q * 4;
          d[t] = dot_quad(d[t], w[h], quad);
          rest[t][h] = dot_quad(rest[t][h], r[h], quad);
        }
      }
    }
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) sum[t] = add_madd_i(sum[t], d[t], block.scale[j]);
  }
  FRESHET_INLINE_MEMBER I32 whole(int t) const {
    return sar(add_i(sum[t], add_i(rest[t][0], rest[t][1])), 3);
  }
};
template <class F, int T>
struct ByteEighths {  // sums rounded products, stored 128 too high
  using Opened = OpenBlock<F>;
  I32 sum[T][2];
  FRESHET_INLINE_MEMBER ByteEighths(const VectorRows<F, T>& rows, int64_t b) {
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      sum[t][0] = set_i(-128 * rows.sums[t][b]);
      sum[t][1] = zero_i();
    }
  }
  FRESHET_INLINE_MEMBER void add(const Opened& block, int j, const VectorRows<F, T>&, int64_t,
                                 const int8_t* const (&x)[T]) {
    const auto lines = block.sub(j);
    const I32 scale = block.both[j];
    FRESHET_UNROLL
    for (int q = 0; q < 4; ++q) {
      const I32 odd = lines.raw(q), even = _mm512_slli_epi16(odd, 8);
      const I32 w[2] = {low_bytes(_mm512_mulhrs_epi16(signed_nibbles<0>(even), scale),
                                  _mm512_mulhrs_epi16(signed_nibbles<0>(odd), scale)),
                        low_bytes(_mm512_mulhrs_epi16(signed_nibbles<4>(even), scale),
                                  _mm512_mulhrs_epi16(signed_nibbles<4>(odd), scale))};
      FRESHET_UNROLL
      for (int h = 0; h < 2; ++h) {
        const I32 unsigned_w = xor_i(w[h], _mm512_set1_epi8(-128));
        FRESHET_UNROLL
        for (int t = 0; t < T; ++t) {
          sum[t][h] = dot_quad(sum[t][h], unsigned_w, x[t] + j * 32 + h * 16 + q * 4);
        }
      }
    }
  }
  FRESHET_INLINE_MEMBER I32 whole(int t) const { return add_i(sum[t][0], sum[t][1]); }
};

// The same for Q4_K: exact products, and the rounding error of four times the rounded products,
// which depends only on the lower two bits of scale and value.
template <class F, int T>
struct ExactQuarters {
  using Opened = OpenVectors<F>;
  static constexpr int kChains = T == 1 ? 4 : 2;
  I32 sum[T], rest[T][kChains];
  FRESHET_INLINE_MEMBER ExactQuarters(const VectorRows<F, T>& rows, int64_t b) {
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      sum[t] = zero_i();
      rest[t][0] = set_i(-rows.sums[t][b]);  // the table's entries are one too high
      FRESHET_UNROLL
      for (int i = 1; i < kChains; ++i) rest[t][i] = zero_i();
    }
  }
  FRESHET_INLINE_MEMBER void add(const Opened& block, int j, const VectorRows<F, T>&, int64_t,
                                 const int8_t* const (&x)[T]) {
    // At 4 (s & 3) + (n & 3): 3 - (s n + 2) % 4, for a scale s and a value n.
    const I32 table = _mm512_set4_epi32(0x00030201, 0x03010301, 0x02030001, 0x01010101);
    const I32 kept = bytes_i(12);
    const auto lines = F::sub(block.main, j);
    const I32 scale = unsigned_byte(block.scales[j / 4], j % 4);
    const I32 low_bits = every_byte(block.low_bits[j / 4], j % 4);
    I32 d[2][T];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) d[0][t] = d[1][t] = zero_i();
    FRESHET_UNROLL
    for (int i = 0; i < 8; ++i) {
      const I32 number = lines.line(i);
      // low_bits | (number & 3)
      const I32 index = _mm512_ternarylogic_epi32(number, low_bits, kept, 0xd8);
      const I32 r = _mm512_shuffle_epi8(table, index);
      FRESHET_UNROLL
      for (int t = 0; t < T; ++t) {
        const int8_t* const quad = x[t] + j * 32 + i * 4;
        d[i / 4][t] = dot_quad(d[i / 4][t], number, quad);
        rest[t][i % kChains] = dot_quad(rest[t][i % kChains], r, quad);
      }
    }
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      FRESHET_UNROLL
      for (int i = 0; i < 2; ++i) sum[t] = add_madd_i(sum[t], d[i][t], scale);
    }
  }
  FRESHET_INLINE_MEMBER I32 whole(int t) const {
    I32 all = sum[t];
    FRESHET_UNROLL
    for (int i = 0; i < kChains; ++i) all = add_i(all, rest[t][i]);
    return sar(all, 2);
  }
};
template <class F, int T>
struct ByteQuarters {  // sums rounded products
  using Opened = OpenBlock<F>;
  I32 sum[T][2];
  FRESHET_INLINE_MEMBER ByteQuarters(const VectorRows<F, T>&, int64_t) {
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) sum[t][0] = sum[t][1] = zero_i();
  }
  FRESHET_INLINE_MEMBER void add(const Opened& block, int j, const VectorRows<F, T>&, int64_t,
                                 const int8_t* const (&x)[T]) {
    FRESHET_UNROLL
    for (int i = 0; i < 8; ++i) {
      const I32 w = block.bytes(j, i);
      FRESHET_UNROLL
      for (int t = 0; t < T; ++t) {
        sum[t][i % 2] = dot_quad(sum[t][i % 2], w, x[t] + j * 32 + i * 4);
      }
    }
  }
  FRESHET_INLINE_MEMBER I32 whole(int t) const { return add_i(sum[t][0], sum[t][1]); }
};

// Adds the offsets of consecutive blocks to the sums of T tokens, in vectors but bit-identical to
// tiles: a tile multiplication sums the even and the odd values separately, each from zero, and
// then adds both to its accumulator. Real tiles would be powered down when used this rarely;
// powering up took a third of a step.
template <class F, int T>
struct VectorOffsets {  // no offsets
  explicit VectorOffsets(const VectorRows<F, T>&, const MatmulCall&) {}
  FRESHET_INLINE_MEMBER void add(const MemoryWalk<F>&, F32 (&)[T]) {}
};
template <int T>
struct VectorOffsets<RoundedQ4_K, T> {
  using Walk = MemoryWalk<RoundedQ4_K>;
  alignas(64) float x[T][kMostVectorCols / kUnitK][8];
  F32 sum[T];

  VectorOffsets(const VectorRows<RoundedQ4_K, T>& rows, const MatmulCall& c) {
    for (int t = 0; t < T; ++t) {
      const uint8_t* const sums = rows.row[t] + q8x256_layout(c.cols).sums;
      for (int64_t b = 0; b < blocks_of(c.cols, kUnitK); ++b) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(sums + b * 16));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
        _mm256_storeu_ps(x[t][b], _mm256_castsi256_ps(bits));
      }
      sum[t] = zero_f();
    }
  }
  // Adds the offsets to acc after the blocks that end a group of offsets. Sums four blocks at a
  // time, because they are adjacent in memory.
  FRESHET_INLINE_MEMBER void add(const Walk& at, F32 (&acc)[T]) {
    const bool adds = ends_offsets(at.block, at.of_row);
    if (at.block % 4 != 3 && !adds) return;
    F32 apart[T][2];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) apart[t][0] = apart[t][1] = zero_f();
    const int64_t first = at.block & -4;
    const uint8_t* main = at.main - (at.block - first) * Walk::kLayout.main;
    for (int64_t b = first; b <= at.block; ++b, main += Walk::kLayout.main) {
      read_offsets(main, [&](int g, I32 bits) __attribute__((always_inline)) {
        const F32 w = bits_f(and_i(bits, set_i(-0x10000)));
        FRESHET_UNROLL
        for (int t = 0; t < T; ++t) apart[t][g % 2] = fma_f(w, set_f(x[t][b][g]), apart[t][g % 2]);
      });
    }
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      sum[t] = add_f(sum[t], add_f(apart[t][0], apart[t][1]));
      if (!adds) continue;
      acc[t] = add_f(acc[t], sum[t]);
      sum[t] = zero_f();
    }
  }
};

// GEMM of T tokens in vectors. Eight times the rounded product is the exact product of scale and
// value, which needs no multiplication per value, plus a rounding error. For one or two tokens that
// is less work than computing the rounded values.
template <template <class, int> class Sums, class F, int T>
void rounded_vectors(const MatmulCall& c, int64_t first, int64_t last) {
  const VectorRows<F, T> rows(c);
  VectorOffsets<F, T> offsets(rows, c);
  const int64_t products = (last - first) * blocks_of(c.cols, kUnitK);
  MemoryWalk<F> at(c, first, last), ahead = at;
  typename Sums<F, T>::Opened opened[2];
  MemoryWalk<F> far = far_ahead<F>(c, first);
  opened[0].open(at);
  ahead.next();
  F32 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = zero_f();
  for (int64_t i = 0; i < products; ++i) {
    const auto& block = opened[i & 1];
    opened[~i & 1].open(ahead);
    far.next();
    const int8_t* x[T];
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      x[t] = reinterpret_cast<const int8_t*>(rows.row[t]) + at.block * kUnitK;
    }
    Sums<F, T> sums(rows, at.block);
    const auto eighth = [&](int j) __attribute__((always_inline)) {
      asm volatile("" ::: "memory");  // keeps the prefetches spread out
      far.fetch(j);
      fetch_near<F>(block.main, j);
      sums.add(block, j, rows, at.block, x);
    };
    if (block.count == 8) {
      FRESHET_UNROLL
      for (int j = 0; j < 8; ++j) eighth(j);
    } else {
      for (int j = 0; j < block.count; ++j) eighth(j);
    }
    FRESHET_UNROLL
    for (int t = 0; t < T; ++t) {
      const F32 x_d = set_f(f32_at(rows.row[t] + rows.records + at.block * 2 * kLine));
      acc[t] = fma_f(to_f(sums.whole(t)), mul_f(block.unit, x_d), acc[t]);
    }
    offsets.add(at, acc);
    if (at.ends()) {
      for (int t = 0; t < T; ++t) {
        if (t < c.tokens) finish(c, at.panel, t, acc[t]);
        acc[t] = zero_f();
      }
    }
    at.next();
    ahead.next();
  }
}

// Adds the offsets of blocks, opened one after the other, to a tile of tokens.
template <class F>
class TileOffsets {  // no offsets
 public:
  explicit TileOffsets(const MatmulCall&) {}
  void open(const MemoryWalk<F>&) {}
  F32 added(const MemoryWalk<F>&, int, F32 acc) const { return acc; }
  void next(const MemoryWalk<F>&) {}
};
template <>
class TileOffsets<RoundedQ4_K> {
 public:
  using Walk = MemoryWalk<RoundedQ4_K>;
  explicit TileOffsets(const MatmulCall& c)
      : x(c.act + q8x256_layout(c.cols).sums), stride(c.act_row_bytes) {}
  // Multiplies the previous blocks' offsets once they fill a tile.
  FRESHET_INLINE_MEMBER void open(const Walk& at) {
    if (tile_ends) multiply();
    block = at.block;
    sum_ends = ends_offsets(block, at.of_row);
    tile_ends = sum_ends || block % 4 == 3;
    put_offsets(at.main, block, at.ends(), weights);
  }
  // Adds the offsets' sum after the blocks that end a group of offsets. next() moves on to the
  // following blocks.
  FRESHET_INLINE_MEMBER F32 added(const Walk& at, int t, F32 acc) const {
    if (!ends_offsets(at.block, at.of_row)) return acc;
    return add_f(acc, load_f(sums[reading] + t * kPanelRows));
  }
  FRESHET_INLINE_MEMBER void next(const Walk& at) {
    if (ends_offsets(at.block, at.of_row)) reading ^= 1;
  }

 private:
  FRESHET_INLINE_MEMBER void multiply() {
    tile_load<7>(weights, kLine);
    tile_load<5>(x + block / 4 * kLine, stride);
    tile_dp_bf16<2, 5, 7>();
    if (!sum_ends) return;
    tile_store<2>(sums[writing]);
    tile_zero<2>();
    writing ^= 1;
  }
  const uint8_t* const x;
  const int64_t stride;
  int64_t block = 0;
  bool tile_ends = false, sum_ends = false;
  int reading = 0, writing = 0;
  alignas(64) uint8_t weights[kOffsetTile];
  alignas(64) float sums[2][kTileInts];
};

// GEMM of one tile of tokens. A block is multiplied while the next one is unpacked, and its sums
// are scaled one block later.
template <class F>
void rounded_tiles(const MatmulCall& c, int64_t first, int64_t last) {
  using U = Unit<F>;
  alignas(64) uint8_t unit[2][U::kPlane] = {};
  alignas(64) int32_t stored[2 * kTileInts];
  alignas(64) float acc[kTileRows][kPanelRows] = {};
  const Q8x256Layout l = q8x256_layout(c.cols);
  const int64_t products = (last - first) * blocks_of(c.cols, kUnitK);
  Tiles tiles;
  tiles.configure(static_cast<int>(c.tokens), kLine);
  MemoryWalk<F> scaling(c, first, last), ahead = scaling;
  OpenBlock<F> opened[2];
  MemoryWalk<F> far = far_ahead<F>(c, first);
  opened[0].open(ahead);
  TileOffsets<F> offsets(c);
  offsets.open(ahead);
  ahead.next();
  int64_t unpacked = 0, multiplied = 0;  // block indices within their rows
  F32 d_multiplied = zero_f(), d_scaled = zero_f();
  for (int64_t i = 0; i < products + 2; ++i) {
    uint8_t* const to = unit[i & 1];
    const uint8_t* const w = unit[~i & 1];
    const uint8_t* const x = c.act + multiplied * kUnitK;
    const OpenBlock<F>& block = opened[i & 1];
    opened[~i & 1].open(ahead);
    if (i < products) offsets.open(ahead);
    far.next();
    // Two accumulators, so that multiplications wait less for one another.
    const auto quarter = [&]<int k>(std::integral_constant<int, k>) __attribute__((always_inline)) {
      far.fetch(2 * k);
      fetch_near<F>(block.main, 2 * k);
      if (i < products) U::unpack_sub(block, 2 * k, to);
      tile_load<6>(w + k * 16 * kLine, kLine);
      tile_load<4>(x + k * kLine, c.act_row_bytes);
      if constexpr (k < 2) {
        tile_store<k>(stored + k * kTileInts);
        tile_zero<k>();
      }
      rounded_product<F, k % 2, 4>();
      far.fetch(2 * k + 1);
      fetch_near<F>(block.main, 2 * k + 1);
      if (i < products) U::unpack_sub(block, 2 * k + 1, to);
    };
    quarter(std::integral_constant<int, 0>());
    quarter(std::integral_constant<int, 1>());
    quarter(std::integral_constant<int, 2>());
    quarter(std::integral_constant<int, 3>());
    if (i >= 2) {
      const uint8_t* record = c.act + l.records + scaling.block * 2 * kLine;
      const bool ends = scaling.ends();
      for (int t = 0; t < c.tokens; ++t, record += c.act_row_bytes) {
        const int32_t* const sums = stored + t * kPanelRows;
        const F32 sum = to_f(add_i(load_i(sums), load_i(sums + kTileInts)));
        const F32 before = fma_f(sum, mul_f(d_scaled, set_f(f32_at(record))), load_f(acc[t]));
        const F32 now = offsets.added(scaling, t, before);
        store_f(acc[t], ends ? zero_f() : now);
        if (ends) finish(c, scaling.panel, t, now);
      }
      offsets.next(scaling);
      scaling.next();
    }
    d_scaled = d_multiplied, d_multiplied = block.unit;
    multiplied = unpacked, unpacked = ahead.block;
    ahead.next();
  }
}

}  // namespace
}  // namespace freshet::cpu
