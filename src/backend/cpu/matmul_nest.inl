// The loop nest around the tile kernels, and run(), the entry point per format in the IsaKernels
// tables.
//
// If the tokens fit one tile, each panel is read once, straight from its packed form. With more
// tokens, groups of panels are unpacked for a stretch of K that stays in the L2 cache. The tokens
// of each tile are multiplied by the whole group while their stretch of activations is in the L1
// cache; partial sums are kept in between.
#pragma once

#include "backend/cpu/matmul_int4.inl"
#include "backend/cpu/matmul_tiles.inl"

namespace freshet::cpu {
namespace {

FRESHET_INLINE const uint8_t* act_row(const MatmulCall& c, int64_t t) {
  return c.act + (c.rows_index ? c.rows_index[t] : t) * c.act_row_bytes;
}

// Rows t0 .. t0 + T. Row `last` is repeated past the end, so that every tile is full.
template <int T>
FRESHET_INLINE void tile_rows(const MatmulCall& c, int64_t t0, int64_t last,
                              const uint8_t* (&row)[T]) {
  for (int t = 0; t < T; ++t) row[t] = act_row(c, t0 + t < last ? t0 + t : last);
}

// The epilogue for a panel in which all rows exist: the final values from the sums.
FRESHET_INLINE F32 finished(const MatmulCall& c, int64_t panel, F32 acc) {
  if (c.bias) acc = add_f(acc, load_f(c.bias + panel * kPanelRows));
  return mul_f(acc, set_f(c.scale));
}

// Whether panels up to this one have no bias and no rows past the end.
FRESHET_INLINE bool ends_plainly(const MatmulCall& c, int64_t panel) {
  return c.bias == nullptr && (panel + 1) * kPanelRows <= c.rows;
}
// finish() for such panels. scale: c.scale.
template <bool kAdd>
FRESHET_INLINE void finish_plainly(float* out, F32 acc, F32 scale) {
  acc = mul_f(acc, scale);
  store_f(out, kAdd ? add_f(load_f(out), acc) : acc);
}

FRESHET_INLINE void finish(const MatmulCall& c, int64_t panel, int64_t t, F32 acc) {
  const int64_t r0 = panel * kPanelRows;
  float* out = c.out + t * c.out_stride + r0;
  if (r0 + kPanelRows <= c.rows) {
    acc = finished(c, panel, acc);
    if (c.add) acc = add_f(load_f(out), acc);
    store_f(out, acc);
    return;
  }
  alignas(64) float v[kPanelRows];
  store_f(v, acc);
  for (int64_t i = 0; i < c.rows - r0; ++i) {
    float x = v[i];
    if (c.bias) x += c.bias[r0 + i];
    x *= c.scale;
    out[i] = c.add ? out[i] + x : x;
  }
}

inline constexpr int kStretch = 2048;      // values of K that are unpacked at a time
inline constexpr int kGroupPanels = 8;     // panels that are unpacked at a time
inline constexpr int kTokenStretch = 512;  // tokens whose partial sums are kept

// A family of formats, as the loop nest sees it: how to open a panel (Source), unpack a stretch of
// it, prepare a tile's rows, and run a tile over blocks [b0, b1). kPlanes: planes of the
// activations.
struct FamilyBase {
  static constexpr int64_t kRowBytes = 0;     // bytes that prepare() writes per row and block
  static constexpr int64_t kMostCols = 8192;  // columns that are prepared at a time
  static constexpr bool kFlush = false;
  template <int T>
  static void prepare(const uint8_t* (&)[T], int64_t, int64_t, uint8_t*) {}
  // The value for the sum of token t and a panel.
  FRESHET_INLINE_MEMBER F32 result(const MatmulCall&, int64_t, int64_t, F32 acc) const {
    return acc;
  }
};

template <class F, int planes>
struct Family256 : FamilyBase {
  using Source = Packed256<F>;
  static constexpr int kBlock = 256, kTile = kMaxTile / planes;
  static constexpr int64_t kUnpackedBlock = Unpacked256<F>::kBytes;
  static constexpr int64_t kRowBytes = Starts<F, planes>::kBlockBytes, kMostCols = 65536;
  const Q8x256Layout layout;
  const uint8_t* starts = nullptr;
  explicit Family256(const MatmulCall& c) : layout(q8x256_layout(c.cols)) {}

  template <int T>
  void prepare(const uint8_t* (&row)[T], int64_t b0, int64_t b1, uint8_t* to) {
    starts = to;
    if constexpr (kStarts<F>) {
      for (int t = 0; t < T; ++t, to += (b1 - b0) * kRowBytes) {
        Starts<F, planes>::write(row[t], layout, b0, b1, to);
      }
    }
  }

  static void unpack(const MatmulCall& c, int64_t panel, int64_t b0, int64_t b1, uint8_t* to) {
    Unpacked256<F>::unpack(Source(c, panel), b0, b1, to);
  }
  template <int T>
  void unpacked_tile(const MatmulCall&, int64_t, const uint8_t* panel,
                     const uint8_t* const (&row)[T], int64_t b0, int64_t b1, F32 (&acc)[T]) const {
    tile256<Unpacked256<F>, T, planes>(Unpacked256<F>{panel}, layout, row, starts, b0, b1, acc);
  }
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    tile256<Source, T, planes>(w, layout, row, starts, b0, b1, acc);
  }
};

template <class F, int planes>
struct FamilyInt4 : FamilyBase {
  using Source = PackedInt4<F>;
  static constexpr int kBlock = F::kGroup, kTile = kMaxTile / planes;
  static constexpr int64_t kUnpackedBlock = UnpackedInt4<F>::kBytes;
  const Q8x256Layout layout;
  explicit FamilyInt4(const MatmulCall& c) : layout(q8x256_layout(c.cols)) {}

  static void unpack(const MatmulCall& c, int64_t panel, int64_t b0, int64_t b1, uint8_t* to) {
    UnpackedInt4<F>::unpack(Source(c, panel), b0, b1, to);
  }
  template <int T>
  void unpacked_tile(const MatmulCall&, int64_t, const uint8_t* panel,
                     const uint8_t* const (&row)[T], int64_t b0, int64_t b1, F32 (&acc)[T]) const {
    tile_int4<UnpackedInt4<F>, T, planes>(UnpackedInt4<F>{panel}, layout, row, b0, b1, acc);
  }
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    tile_int4<Source, T, planes>(w, layout, row, b0, b1, acc);
  }
};

// NVFP4: the levels are stored doubled, and each row has a scale of its own.
template <class F, int planes>
struct FamilyNvfp4 : FamilyInt4<F, planes> {
  using Source = PackedInt4<F>;
  explicit FamilyNvfp4(const MatmulCall& c) : FamilyInt4<F, planes>(c) {}
  FRESHET_INLINE_MEMBER F32 result(const MatmulCall& c, int64_t panel, int64_t, F32 acc) const {
    constexpr PanelLayout kLayout = Source::kLayout;
    const Source w(c, panel);
    const F32 scale = bits_f(load_i(w.tail_part + c.cols / kLayout.block * kLayout.tail));
    return mul_f(acc, mul_f(scale, set_f(0.5f)));
  }
};

// Plain values, multiplied as packed with F32 rows as they are.
template <class F, int planes>
struct FamilyF32 : FamilyBase {
  using Source = Packed<F>;
  static constexpr int kBlock = 32, kTile = kFloatTile;
  static constexpr int64_t kUnpackedBlock = 0;
  const int64_t cols;
  explicit FamilyF32(const MatmulCall& c) : cols(c.cols) {}

  static void unpack(const MatmulCall&, int64_t, int64_t, int64_t, uint8_t*) {}
  template <int T>
  void unpacked_tile(const MatmulCall& c, int64_t panel, const uint8_t*,
                     const uint8_t* const (&row)[T], int64_t b0, int64_t b1, F32 (&acc)[T]) const {
    packed_tile<T>(Source(c, panel), row, b0, b1, acc);
  }
  // Pads an incomplete last block first.
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    const int64_t whole = cols / 32 < b1 ? cols / 32 : b1;
    const uint8_t* x[T];
    for (int t = 0; t < T; ++t) x[t] = row[t] + b0 * 128;
    tile_float<F, T>(w, x, b0, whole, acc);
    if (whole == b1) return;
    float padded[T][32] = {};
    for (int t = 0; t < T; ++t) {
      std::memcpy(padded[t], row[t] + whole * 128, static_cast<size_t>(cols - whole * 32) * 4);
      x[t] = reinterpret_cast<const uint8_t*>(padded[t]);
    }
    tile_float<F, T>(w, x, whole, b1, acc);
  }
};

// Widens the BF16 values of blocks [b0, b1) of each plane to F32, block by block.
template <int planes>
FRESHET_INLINE void widen_row(const uint8_t* row, int64_t fine, int64_t b0, int64_t b1,
                              uint8_t* to) {
  for (int64_t b = b0; b < b1; ++b) {
    for (int p = 0; p < planes; ++p, to += 128) {
      const uint8_t* x = row + p * fine + b * 64;
      store_i(to, shl(load_u16(x), 16));
      store_i(to + 64, shl(load_u16(x + 32), 16));
    }
  }
}

template <class F, int planes>
struct FamilyBf16 : FamilyBase {
  using Source = Packed<F>;
  static constexpr int kBlock = 32, kTile = kFloatTile / planes;
  static constexpr int64_t kUnpackedBlock = 0, kRowBytes = 128 * planes;
  static constexpr bool kFlush = true;
  const int64_t fine;
  explicit FamilyBf16(const MatmulCall& c) : fine(bf16_layout(c.cols).fine) {}

  static void unpack(const MatmulCall&, int64_t, int64_t, int64_t, uint8_t*) {}
  template <int T>
  void prepare(const uint8_t* (&row)[T], int64_t b0, int64_t b1, uint8_t* to) const {
    for (int t = 0; t < T; ++t, to += (b1 - b0) * kRowBytes) {
      widen_row<planes>(row[t], fine, b0, b1, to);
      row[t] = to;
    }
  }
  template <int T>
  void unpacked_tile(const MatmulCall& c, int64_t panel, const uint8_t*,
                     const uint8_t* const (&row)[T], int64_t b0, int64_t b1, F32 (&acc)[T]) const {
    packed_tile<T>(Source(c, panel), row, b0, b1, acc);
  }
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    tile_float<F, T, planes>(w, row, b0, b1, acc);
  }
};

// The same for FP8 and for 4-bit levels, whose rows are whole blocks.
template <class F>
struct FamilyFp8 : FamilyBase {
  using Source = Packed<F>;
  static constexpr int kBlock = Source::kLayout.block, kTile = kFloatTile;
  static constexpr int64_t kUnpackedBlock = 0;
  explicit FamilyFp8(const MatmulCall&) {}

  static void unpack(const MatmulCall&, int64_t, int64_t, int64_t, uint8_t*) {}
  template <int T>
  void unpacked_tile(const MatmulCall& c, int64_t panel, const uint8_t*,
                     const uint8_t* const (&row)[T], int64_t b0, int64_t b1, F32 (&acc)[T]) const {
    packed_tile<T>(Source(c, panel), row, b0, b1, acc);
  }
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    if constexpr (kBlock == 64) {
      tile_levels<F, T>(w, row, b0, b1, acc);
    } else {
      tile_fp8<F, T>(w, row, b0, b1, acc);
    }
  }
};

struct FamilyInt8 : FamilyBase {
  using Source = Packed<LinesINT8>;
  static constexpr int kBlock = 64, kTile = kInt8Tile;
  static constexpr int64_t kUnpackedBlock = 0;
  const int64_t record;
  explicit FamilyInt8(const MatmulCall& c) : record(int8_layout(c.cols).record) {}

  static void unpack(const MatmulCall&, int64_t, int64_t, int64_t, uint8_t*) {}
  template <int T>
  void unpacked_tile(const MatmulCall& c, int64_t panel, const uint8_t*,
                     const uint8_t* const (&row)[T], int64_t b0, int64_t b1, F32 (&acc)[T]) const {
    tile_int8<T>(Source(c, panel), row, b0, b1, acc);
  }
  template <int T>
  void packed_tile(const Source& w, const uint8_t* const (&row)[T], int64_t b0, int64_t b1,
                   F32 (&acc)[T]) const {
    tile_int8<T>(w, row, b0, b1, acc);
  }
  FRESHET_INLINE_MEMBER F32 result(const MatmulCall& c, int64_t panel, int64_t t, F32 acc) const {
    return result_int8<kFlipSigned>(Source(c, panel), act_row(c, t) + record, acc);
  }
};

template <class Family, int T>
void run_few(const MatmulCall& c, int64_t first, int64_t last) {
  constexpr int64_t kMostBlocks = Family::kMostCols / Family::kBlock;
  alignas(64) uint8_t prepared[T * kMostBlocks * Family::kRowBytes + 64];
  Family family(c);
  const int64_t blocks = blocks_of(c.cols, Family::kBlock);
  const int64_t step = Family::kRowBytes == 0 || blocks < kMostBlocks ? blocks : kMostBlocks;
  int64_t ready = -1;  // the stretch that `prepared` holds
  const uint8_t* row[T];
  for (int64_t p = first; p < last; ++p) {
    const typename Family::Source w(c, p);
    F32 acc[T];
    for (int t = 0; t < T; ++t) acc[t] = zero_f();
    for (int64_t b0 = 0; b0 < blocks; b0 += step) {
      const int64_t b1 = b0 + step < blocks ? b0 + step : blocks;
      if (b0 != ready) {
        tile_rows<T>(c, 0, c.tokens - 1, row);
        family.template prepare<T>(row, b0, b1, prepared);
        ready = b0;
      }
      family.template packed_tile<T>(w, row, b0, b1, acc);
    }
    for (int t = 0; t < T && t < c.tokens; ++t) finish(c, p, t, family.result(c, p, t, acc[t]));
  }
}

template <class Family>
struct Scratch {
  static constexpr int64_t kBlocks = kStretch / Family::kBlock;
  static constexpr int64_t kPanelBytes = kBlocks * Family::kUnpackedBlock;
  alignas(64) uint8_t panels[kGroupPanels * kPanelBytes + 64];
  alignas(64) uint8_t rows[Family::kTile * kBlocks * Family::kRowBytes + 64];
  alignas(64) float sums[kGroupPanels * kTokenStretch * kPanelRows];
};

// The ranges that the tiles of one stretch cover.
struct Stretch {
  int64_t first, last;  // panels
  int64_t t0, t1;       // tokens
  int64_t b0, b1;       // blocks
  int64_t blocks;
};

// Prefetches for the next unpacking while the tiles multiply. Tokens [from, to) of `of` prefetch
// their share of the data that will be unpacked next in a panel's place: the panel's own next
// stretch, or a panel of the next group (which may belong to the next call).
struct Part {
  int64_t from, to, of;
  // Always inlined, because GCC takes a function that only prefetches for one without effects.
  FRESHET_INLINE_MEMBER void fetch(const uint8_t* p, int64_t bytes) const {
    const int64_t lines = (bytes + kLine - 1) / kLine, end = lines * to / of;
    for (int64_t i = lines * from / of; i < end; ++i) prefetch(p + i * kLine);
  }
};
template <class Family>
FRESHET_INLINE void fetch_next_stretch(const MatmulCall& c, const Stretch& at, int64_t panel,
                                       const Part& part) {
  if constexpr (Family::kUnpackedBlock > 0) {
    constexpr PanelLayout kLayout = Family::Source::kLayout;
    constexpr int64_t kOf = Family::kBlock / kLayout.block, kStep = kStretch / Family::kBlock;
    const bool ends = at.b1 == at.blocks;
    const int64_t next = ends ? panel + kGroupPanels : panel;
    if (next * kPanelRows >= c.rows) return;
    const int64_t b0 = ends ? 0 : at.b1;
    const int64_t blocks = (at.blocks - b0 < kStep ? at.blocks - b0 : kStep) * kOf;
    const typename Family::Source from(c, next);
    part.fetch(from.main(b0 * kOf), blocks * kLayout.main);
    part.fetch(from.tail(b0 * kOf), blocks * kLayout.tail);
  }
}

template <class Family, int T>
void run_tile(const MatmulCall& c, Family& family, Scratch<Family>& s, const Stretch& at,
              int64_t t0) {
  const uint8_t* row[T];
  tile_rows<T>(c, t0, at.t1 - 1, row);
  family.template prepare<T>(row, at.b0, at.b1, s.rows);
  const Part part{t0 - at.t0, (t0 + T < at.t1 ? t0 + T : at.t1) - at.t0, at.t1 - at.t0};
  for (int64_t p = at.first; p < at.last; ++p) {
    float* sums = s.sums + ((p - at.first) * kTokenStretch + (t0 - at.t0)) * kPanelRows;
    F32 acc[T];
    for (int t = 0; t < T; ++t) {
      acc[t] = at.b0 > 0 && t0 + t < at.t1 ? load_f(sums + t * kPanelRows) : zero_f();
    }
    const uint8_t* panel = s.panels + (p - at.first) * Scratch<Family>::kPanelBytes;
    fetch_next_stretch<Family>(c, at, p, part);
    family.template unpacked_tile<T>(c, p, panel, row, at.b0, at.b1, acc);
    for (int t = 0; t < T && t0 + t < at.t1; ++t) {
      if (at.b1 == at.blocks) {
        finish(c, p, t0 + t, family.result(c, p, t0 + t, acc[t]));
      } else {
        store_f(sums + t * kPanelRows, acc[t]);
      }
    }
  }
}

template <class Family>
void run_stretch(const MatmulCall& c, Family& family, Scratch<Family>& s, const Stretch& at) {
  constexpr int kTile = Family::kTile, kHalf = kTile > 1 ? kTile / 2 : 1;
  for (int64_t p = at.first; p < at.last; ++p) {
    Family::unpack(c, p, at.b0, at.b1, s.panels + (p - at.first) * Scratch<Family>::kPanelBytes);
  }
  int64_t t = at.t0;
  for (; at.t1 - t > kTile / 2; t += kTile) run_tile<Family, kTile>(c, family, s, at, t);
  if (t < at.t1) run_tile<Family, kHalf>(c, family, s, at, t);
}

template <class Family>
void run_many(const MatmulCall& c, int64_t first, int64_t last) {
  Family family(c);
  const int64_t blocks = blocks_of(c.cols, Family::kBlock);
  Scratch<Family> s;
  Stretch at{};
  at.blocks = blocks;
  constexpr int64_t kStep = kStretch / Family::kBlock;
  for (at.t0 = 0; at.t0 < c.tokens; at.t0 += kTokenStretch) {
    at.t1 = at.t0 + kTokenStretch < c.tokens ? at.t0 + kTokenStretch : c.tokens;
    for (at.first = first; at.first < last; at.first += kGroupPanels) {
      at.last = at.first + kGroupPanels < last ? at.first + kGroupPanels : last;
      for (at.b0 = 0; at.b0 < blocks; at.b0 += kStep) {
        at.b1 = at.b0 + kStep < blocks ? at.b0 + kStep : blocks;
        run_stretch(c, family, s, at);
      }
    }
  }
}

template <class Family>
void run_family(const MatmulCall& c, int64_t first, int64_t last) {
  constexpr int kTile = Family::kTile > 2 ? Family::kTile : 2;
  const unsigned before = Family::kFlush ? flush_denormals() : 0;
  if (c.tokens == 1) {
    run_few<Family, 1>(c, first, last);
  } else if (c.tokens == 2) {
    run_few<Family, 2>(c, first, last);
  } else if (c.tokens <= kTile / 2) {
    run_few<Family, kTile / 2>(c, first, last);
  } else if (c.tokens <= kTile) {
    run_few<Family, kTile>(c, first, last);
  } else {
    run_many<Family>(c, first, last);
  }
  if (Family::kFlush) restore_denormals(before);
}

template <template <class, int> class Family, class F>
void run(const MatmulCall& c, int64_t first, int64_t last) {
  if (uses_fine_plane(c.rows, c.cols)) {
    run_family<Family<F, 2>>(c, first, last);
  } else {
    run_family<Family<F, 1>>(c, first, last);
  }
}
template <class F>
void run_fp8(const MatmulCall& c, int64_t first, int64_t last) {
  run_family<FamilyFp8<F>>(c, first, last);
}
template <class F>
void run_f32(const MatmulCall& c, int64_t first, int64_t last) {
  run_family<FamilyF32<F, 1>>(c, first, last);
}

// The integer kernels, from Format::kINT8 on.
#define FRESHET_WHOLE_NUMBER_KERNELS                                                            \
  run_family<FamilyInt8>, run<Family256, BlockQ4_0>, run<Family256, BlockQ4_1>,                 \
      run<Family256, BlockQ5_0>, run<Family256, BlockQ5_1>, run<Family256, BlockQ8_0>,          \
      run<Family256, BlockQ2_K>, run<Family256, BlockQ3_K>, run<Family256, BlockQ4_K>,          \
      run<Family256, BlockQ5_K>, run<Family256, BlockQ6_K>, run<Family256, BlockIQ4_NL>,        \
      run<Family256, BlockIQ4_XS>, run<Family256, BlockMXFP4>, run<FamilyInt4, BlockInt4<128>>, \
      run<FamilyInt4, BlockInt4<32>>

// The same formats for an instruction set without such kernels.
#define FRESHET_NO_WHOLE_NUMBER_KERNELS                                                     \
  nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, \
      nullptr, nullptr, nullptr, nullptr, nullptr, nullptr

// From Format::kMXFP8 on: first the formats multiplied in F32, then the integer ones.
#define FRESHET_SMALL_FLOAT_KERNELS \
  run_fp8<LinesMXFP8>, run_fp8<LinesFP8G32>, run_fp8<LinesNF4>, run_fp8<LinesFP4>
#define FRESHET_NO_SMALL_FLOAT_KERNELS nullptr, nullptr, nullptr, nullptr
#define FRESHET_GROUP_KERNELS                                              \
  run<FamilyNvfp4, BlockNVFP4>, run<FamilyInt4, BlockInt<2, 128>>,         \
      run<FamilyInt4, BlockInt<2, 32>>, run<FamilyInt4, BlockInt<3, 128>>, \
      run<FamilyInt4, BlockInt<3, 32>>, run<FamilyInt4, BlockInt<8, 128>>, \
      run<FamilyInt4, BlockInt<8, 32>>

}  // namespace
}  // namespace freshet::cpu
