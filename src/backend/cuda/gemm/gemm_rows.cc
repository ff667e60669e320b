#include "backend/cuda/gemm/gemm_rows.h"

#include <initializer_list>

namespace freshet::cuda {
namespace {

constexpr int kWarps = 8, kPair = 2, kSlices = 8;  // blocks of a cluster that share K; K's slices
constexpr uint64_t kPairFormats = bit(Code::kQ4_K) | bit(Code::kQ5_K);
constexpr uint64_t kMmaFormats =
    kBlockFormats | bit(Code::kF16) | bit(Code::kBF16) | bit(Code::kFP8);

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
int64_t first_cols(const GemmProblem& p) {
  return p.of[0].cols;
}

bool always(const DeviceLimits&, const GemmProblem&) {
  return true;
}
bool is_aligned(const DeviceLimits&, const GemmProblem& p) {
  return p.aligned;
}
bool eight_slices(const DeviceLimits&, const GemmProblem& p) {
  return leaves(first_cols(p)) == kSlices;
}

// ---- Block formats, up to 8 tokens

bool one_shot(const GemmProblem& p) {
  constexpr int64_t kMostCols = 8192;
  const int64_t cols = first_cols(p);
  for (int i = 0; i < p.count; ++i) {
    if (p.of[i].cols != cols || p.of[i].rows % 16 != 0) return false;
  }
  return p.same_tokens && leaves(cols) == kSlices && cols <= kMostCols;
}
// Bytes of 16 rows.
int64_t one_shot_bytes(Code code, int64_t cols) {
  return ceil_div(cols, unit_of(code)) * tile_bytes(code);
}
// Whether a multiprocessor has room for two blocks of `first` and `second` bytes each.
bool one_shot_room(int64_t first, int64_t second) {
  return 2 * (first + second + kOneShotBeside) <= kOneShotShared;
}
bool takes_small_n(const DeviceLimits& limits, const GemmProblem& p) {
  const int64_t tile = one_shot_bytes(p.of[0].code, first_cols(p)), tiles = blocks_of(p, 16);
  return one_shot(p) && tiles <= 4 * limits.multiprocessors &&
         one_shot_room(tile, tiles > 2 * limits.multiprocessors ? tile : kOneShotNext);
}
bool takes_long_k(const DeviceLimits& limits, const GemmProblem& p) {
  const GemmWeight& w = p.of[0];
  return p.count == 1 && w.rows % 16 == 0 && w.rows <= 32 * limits.multiprocessors &&
         w.cols >= 4096;
}
bool takes_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  const GemmWeight& w = p.of[0];
  return p.count == 1 && eight_slices(limits, p) && w.rows % 32 == 0 &&
         w.rows >= 4 * 16 * limits.multiprocessors;
}

// ---- Block formats, 9 to 16 tokens

// Fewer tiles would leave warps without work.
bool fills_warps(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int kTiles = 2;
  return even_share(limits, p) > kWarps * kTiles * 3 / 4;
}
bool takes_m9_16_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  return eight_slices(limits, p) && fills_warps(limits, p);
}

// ---- Block formats, more tokens

// Clusters of two blocks split K; each cluster has `rows` rows.
int64_t split_blocks(const GemmProblem& p, int64_t rows) {
  return blocks_of(p, rows) * kPair;
}
bool takes_splitk8(const DeviceLimits& limits, const GemmProblem& p) {
  return eight_slices(limits, p) && split_blocks(p, 64) <= limits.multiprocessors;
}
bool takes_splitk4(const DeviceLimits& limits, const GemmProblem& p) {
  return leaves(first_cols(p)) >= 4 && split_blocks(p, 128) <= 2 * limits.multiprocessors;
}
bool takes_m17_64_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  return blocks_of(p, 256) > limits.multiprocessors;
}

// Blocks of 128 rows and 64 tokens, rather than few or two waves of larger ones.
bool takes_half_tokens(const DeviceLimits& limits, const GemmProblem& p) {
  return 2 * blocks_of(p, 128) * ceil_div(p.tokens, 128) <= limits.multiprocessors;
}
bool takes_m65_splitk4(const DeviceLimits& limits, const GemmProblem& p) {
  if (leaves(first_cols(p)) < 4) return false;
  const int64_t pairs = split_blocks(p, 64) * ceil_div(p.tokens, 128);
  return pairs <= limits.multiprocessors ||
         (pairs <= 2 * limits.multiprocessors && !takes_half_tokens(limits, p));
}

// ---- Two formats

// Where the weights in Q6_K begin; 0: the list is of one format.
int second_format(const GemmProblem& p) {
  int i = 1;
  while (i < p.count && p.of[i].code == p.of[0].code) ++i;
  return i < p.count && p.of[i].code == Code::kQ6_K ? i : 0;
}
bool pair_takes_m1_8(const DeviceLimits& limits, const GemmProblem& p) {
  GemmProblem first = p;
  first.count = second_format(p);
  if (first.count == 0 || !one_shot(p)) return false;
  const int64_t cols = first_cols(p), most = 2 * limits.multiprocessors;
  const int64_t tiles = blocks_of(first, 16), blocks = tiles < most ? tiles : most;
  return one_shot_room(one_shot_bytes(p.of[0].code, cols), one_shot_bytes(Code::kQ6_K, cols)) &&
         blocks_of(p, 16) <= 2 * blocks;
}
bool pair_takes_m9_16(const DeviceLimits& limits, const GemmProblem& p) {
  return second_format(p) > 0 && eight_slices(limits, p) && !fills_warps(limits, p);
}
bool pair_takes_m17_64(const DeviceLimits& limits, const GemmProblem& p) {
  return second_format(p) > 0 && eight_slices(limits, p) && pair_fits_one_wave(limits, p, 128);
}
bool pair_takes_m65(const DeviceLimits& limits, const GemmProblem& p) {
  return second_format(p) > 0 &&
         blocks_of(p, 128) * ceil_div(p.tokens, 64) <= limits.multiprocessors;
}

// ---- BF16

bool bf16_takes_splitk2(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int64_t kMostTiles = 6;  // of 16 rows, a pair of blocks
  return eight_slices(limits, p) &&
         ceil_div(blocks_of(p, 16), limits.multiprocessors / 2) <= kMostTiles;
}
bool bf16_takes_balanced(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int kMostTiles = 4;
  return p.tokens <= 64 || even_share(limits, p) <= kMostTiles;
}

// ---- FP8

bool fp8_takes_splitk2(const DeviceLimits& limits, const GemmProblem& p) {
  // Where panels of 64 rows would need two waves.
  const int64_t panels = blocks_of(p, 64) * ceil_div(p.tokens, 64);
  return panels > limits.multiprocessors / 2 && fp8_splitk_tiles(limits, p) != 0;
}
bool fp8_takes_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  if (fp8_claims(limits, p)) return false;
  bool whole = true;
  for (int i = 0; i < p.count; ++i) whole = whole && whole_in_k(p.of[i].rows);
  if (whole) return true;
  const int64_t tiles = blocks_of(p, 128), most = limits.multiprocessors;
  return tiles >= 2 * most && tiles * 10 >= ceil_div(tiles, most) * most * 9;
}
bool fp8_takes_few(const DeviceLimits& limits, const GemmProblem& p) {
  return p.tokens <= 64 || blocks_of(p, 64) < limits.multiprocessors;
}

// ---- Any GPU

// On Hopper weights of block formats and FP8 have kernels of their own, and this one's code is not
// built for them, but for two tiles of tokens of block formats whose K is short.
bool takes_small_m(const DeviceLimits& limits, const GemmProblem& p) {
  if (limits.capability != 90 || p.of[0].code == Code::kF16) return true;
  if (p.of[0].code == Code::kFP8) return false;
  return p.of[0].code == Code::kBF16 ? p.tokens <= 32 : p.tokens > 8 && p.tokens <= 16;
}
bool takes_large_m(const DeviceLimits& limits, const GemmProblem& p) {
  const uint64_t format = bit(p.of[0].code);
  return limits.capability != 90 || (format & (bit(Code::kF16) | bit(Code::kBF16))) != 0;
}

// ---- Gate and up

GemmProblem only_gate(const GemmProblem& p, int64_t rows_to) {
  GemmProblem gate = p;
  gate.count = 1;
  gate.of[0].rows = ceil_div(p.of[0].rows, rows_to) * rows_to;
  return gate;
}
bool whole_lines(const GemmProblem& p) {
  return p.of[0].rows % kPadCols == 0;
}
bool swiglu_m1_8_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  return whole_lines(p) && swiglu_large_n_takes(limits, p.of[0].rows, first_cols(p));
}
bool swiglu_m1_8(const DeviceLimits&, const GemmProblem& p) {
  return whole_lines(p);
}
bool swiglu_m9_16(const DeviceLimits& limits, const GemmProblem& p) {
  return whole_lines(p) && eight_slices(limits, p) &&
         even_share(limits, only_gate(p, 1)) > kWarps / 2;
}
// Gate and up as one list would fill more than two waves of pairs of blocks.
bool swiglu_fills(const DeviceLimits& limits, const GemmProblem& p, int64_t tokens_of_block) {
  const int64_t pairs = blocks_of(p, 64) * ceil_div(p.tokens, tokens_of_block) * kPair;
  return whole_lines(p) && pairs > 2 * limits.multiprocessors;
}
bool swiglu_m17_64(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_fills(limits, p, 64);
}
// The number of rows of a tile, in order of preference, that gives the busiest multiprocessor the
// fewest rows. 96 and 160 rows are three and five warpgroups.
int64_t swiglu_tile_rows(const DeviceLimits& limits, const GemmProblem& p) {
  int64_t best = 0, least = INT64_MAX;
  for (const int64_t rows : {128, 64, 96, 160}) {
    if (p.tokens > 32 && rows % 64 != 0) continue;  // no registers for the sums of more tokens
    const int64_t waves = ceil_div(blocks_of(only_gate(p, 1), rows), limits.multiprocessors);
    if (waves * rows < least) {
      best = rows;
      least = waves * rows;
    }
  }
  return best;
}
template <int64_t kRows>
bool swiglu_m17_64_rows(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_m17_64(limits, p) && swiglu_tile_rows(limits, p) == kRows;
}
bool swiglu_m17_64_large_n(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_m17_64_rows<128>(limits, p);
}
bool swiglu_m17_32_rows160(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_m17_64_rows<160>(limits, p);
}
bool swiglu_m17_32_rows96(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_m17_64_rows<96>(limits, p);
}
bool swiglu_m65(const DeviceLimits& limits, const GemmProblem& p) {
  return swiglu_fills(limits, p, 128);
}
bool swiglu_bf16_m1_32(const DeviceLimits& limits, const GemmProblem& p) {
  return whole_lines(p) && eight_slices(limits, p);
}
bool swiglu_bf16_m65_128(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int64_t kMostTiles = 7;  // of 16 rows, in a pass over K
  const int share = even_share(limits, only_gate(p, 64));
  return share * 4 > ceil_div(share, kMostTiles) * kMostTiles * 3;
}
// Whole groups of features, and two thirds of the multiprocessors have work until the end.
bool swiglu_fp8(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int64_t kTileRows = 128, kTileTokens = 128;
  const int64_t rows = p.of[0].rows, most = limits.multiprocessors;
  const int64_t tiles =
      ceil_div(rows, kTileRows) * (p.tokens <= 64 ? 1 : ceil_div(p.tokens, kTileTokens));
  return rows % kTileRows == 0 && whole_in_k(rows) && tiles * 3 >= ceil_div(tiles, most) * most * 2;
}

}  // namespace

const GemmRow kGemmRows[kGemmKernels] = {
    {"q_pair_sm90_m1_8", 90, kPairFormats, 1, 8,
     "Q6_K behind the others, K from 2,048 to 8,192, two waves of tiles", pair_takes_m1_8},
    {"q_pair_sm90_m9_16", 90, kPairFormats, 9, 16, "Q6_K behind the others, few rows",
     pair_takes_m9_16},
    {"q_pair_sm90_m17_64", 90, kPairFormats, 17, 64, "Q6_K behind the others, few rows",
     pair_takes_m17_64},
    {"q_pair_sm90_m65", 90, kPairFormats, 65, kAnyTokens, "Q6_K behind the others, few rows",
     pair_takes_m65},

    {"q_sm90_m1_8_small_n", 90, kBlockFormats, 1, 8, "K from 2,048 to 8,192, few rows",
     takes_small_n},
    {"q_sm90_m1_8_long_k", 90, kBlockFormats, 1, 8, "one weight, K of 4,096 or more, few rows",
     takes_long_k},
    {"q_sm90_m1_8_large_n", 90, kManyWarps, 1, 8, "one weight, K of 2,048 or more, many rows",
     takes_large_n},
    {"q_sm90_m1_8", 90, kBlockFormats, 1, 8, "", always},
    {"q_sm90_m9_16_large_n", 90, kBlockFormats, 9, 16, "K of 2,048 or more, many rows",
     takes_m9_16_large_n},
    {"q_sm90_m9_16", 90, kBlockFormats, 9, 16, "K of 2,048 or more", eight_slices},
    {"q_sm90_m17_64_splitk8", 90, kBlockFormats, 17, 64, "K of 2,048 or more, fewest rows",
     takes_splitk8},
    {"q_sm90_m17_64_splitk4", 90, kBlockFormats, 17, 64, "K of 1,024 or more, few rows",
     takes_splitk4},
    {"q_sm90_m17_64_large_n", 90, kDeepGroups, 17, 64, "many rows", takes_m17_64_large_n},
    {"q_sm90_m17_64", 90, kBlockFormats, 17, 64, "", always},
    {"q_sm90_m65_splitk4", 90, kBlockFormats, 65, kAnyTokens,
     "K of 1,024 or more, few rows and tokens", takes_m65_splitk4},
    {"q_sm90_m65_half_tokens", 90, kBlockFormats, 65, kAnyTokens, "few rows and tokens",
     takes_half_tokens},
    {"q_sm90_m65", 90, kBlockFormats, 65, kAnyTokens, "", always},

    {"bf16_sm90_m1_32", 90, bit(Code::kBF16), 1, 32, "K of 2,048 or more", eight_slices},
    {"bf16_sm90_m33_128_splitk2", 90, bit(Code::kBF16), 33, 128, "K of 2,048 or more, few rows",
     bf16_takes_splitk2},
    {"bf16_sm90_m33_128_balanced", 90, bit(Code::kBF16), 33, 128, "up to 64 tokens, or few rows",
     bf16_takes_balanced},
    {"bf16_sm90_m33", 90, bit(Code::kBF16), 33, kAnyTokens, "", always},

    {"fp8_sm90_m65_128_splitk2", 90, bit(Code::kFP8), 65, 128, "K in slices, few rows",
     fp8_takes_splitk2},
    {"fp8_sm90_m1_64_large_n", 90, bit(Code::kFP8), 1, 64, "many rows", fp8_takes_large_n},
    {"fp8_sm90_m1_128", 90, bit(Code::kFP8), 1, 128, "up to 64 tokens, or few rows", fp8_takes_few},
    {"fp8_sm90_m65", 90, bit(Code::kFP8), 65, kAnyTokens, "", always},

    {"int8_sm90_m1_32", 90, bit(Code::kInt8), 1, 32, "", always},
    {"int8_sm90_m33", 90, bit(Code::kInt8), 33, kAnyTokens, "", always},
    {"int8_sm80", 80, bit(Code::kInt8), 1, kAnyTokens, "", always},

    {"f32_bf16x3_sm90_m513", 90, bit(Code::kExactF32), kMaxRouterTokens + 1, kAnyTokens,
     "aligned rows", is_aligned},
    {"f32_bf16x3_sm80", 80, bit(Code::kExactF32), 1, kAnyTokens, "", always},
    {"f32_sm80_m9_512", 80, bit(Code::kF32), kWarps + 1, kMaxRouterTokens, "aligned rows",
     is_aligned},
    {"f32_sm80_m513", 80, bit(Code::kF32), kMaxRouterTokens + 1, kAnyTokens, "aligned rows",
     is_aligned},
    {"f32_sm80", 80, bit(Code::kF32), 1, kAnyTokens, "", always},

    {"sm80_small_m", 80, kMmaFormats, 1, 64, "on Hopper F16, and shapes that no row above takes",
     takes_small_m},
    {"sm80_large_m", 80, kMmaFormats, 65, kAnyTokens, "on Hopper F16 and BF16", takes_large_m},
};

const GemmRow kSwigluRows[kSwigluKernels] = {
    {"swiglu_q_sm90_m1_8_large_n", 90, kManyWarps, 1, 8, "K of 2,048 or more, many rows",
     swiglu_m1_8_large_n},
    {"swiglu_q_sm90_m1_8", 90, kTwoTiles, 1, 8, "whole 64 rows", swiglu_m1_8},
    {"swiglu_q_sm90_m9_16", 90, kBlockFormats, 9, 16, "K of 2,048 or more, many rows",
     swiglu_m9_16},
    {"swiglu_q_sm90_m17_64_large_n", 90, kBlockFormats, 17, 64,
     "many rows, which tiles of 128 balance best", swiglu_m17_64_large_n},
    {"swiglu_q_sm90_m17_32_rows160", 90, kBlockFormats, 17, 32,
     "many rows, which tiles of 160 balance best", swiglu_m17_32_rows160},
    {"swiglu_q_sm90_m17_32_rows96", 90, kBlockFormats, 17, 32,
     "many rows, which tiles of 96 balance best", swiglu_m17_32_rows96},
    {"swiglu_q_sm90_m17_64", 90, kBlockFormats, 17, 64, "many rows", swiglu_m17_64},
    {"swiglu_q_sm90_m65", 90, kBlockFormats, 65, kAnyTokens, "many rows or tokens", swiglu_m65},

    {"swiglu_bf16_sm90_m1_16", 90, bit(Code::kBF16), 1, 16, "K of 2,048 or more",
     swiglu_bf16_m1_32},
    {"swiglu_bf16_sm90_m17_32", 90, bit(Code::kBF16), 17, 32, "K of 2,048 or more",
     swiglu_bf16_m1_32},
    {"swiglu_bf16_sm90_m33_64", 90, bit(Code::kBF16), 33, 64, "", always},
    {"swiglu_bf16_sm90_m65_128", 90, bit(Code::kBF16), 65, 128, "rows that fill passes",
     swiglu_bf16_m65_128},
    {"swiglu_bf16_sm90_m65", 90, bit(Code::kBF16), 65, kAnyTokens, "", always},

    {"swiglu_fp8_sm90_m1_64", 90, bit(Code::kFP8), 1, 64, "many rows", swiglu_fp8},
    {"swiglu_fp8_sm90_m65", 90, bit(Code::kFP8), 65, kAnyTokens, "many rows", swiglu_fp8},

    {"swiglu_int8_sm90_m33", 90, bit(Code::kInt8), 33, kAnyTokens, "", always},
};

Order activation_order(const DeviceLimits& limits, Code code, int64_t tokens) {
  constexpr int64_t kLanes = 64, kLanesOfBf16 = 32, kLanesOfBlocks = 16;
  if (code == Code::kFP8 && limits.capability == 90) return Order::kE4M3;
  if (code == Code::kInt8) return Order::kInt8;
  int64_t most = kLanes;
  if (limits.capability == 90 && code == Code::kBF16) most = kLanesOfBf16;
  if (limits.capability == 90 && unit_of(code) != 0) most = kLanesOfBlocks;
  return tokens > most ? Order::kCores : Order::kLanes;
}

int64_t blocks_of(const GemmProblem& p, int64_t rows) {
  int64_t blocks = 0;
  for (int i = 0; i < p.count; ++i) blocks += ceil_div(p.of[i].rows, rows);
  return blocks;
}

int even_share(const DeviceLimits& limits, const GemmProblem& p) {
  int share = 1;
  while (blocks_of(p, int64_t{16} * share) > limits.multiprocessors && share < 1 << 16) ++share;
  return share;
}

bool pair_fits_one_wave(const DeviceLimits& limits, const GemmProblem& p, int64_t rows_of_q6_k) {
  int64_t tiles = 0;
  for (int i = 0; i < p.count; ++i) {
    tiles += ceil_div(p.of[i].rows, p.of[i].code == Code::kQ6_K ? rows_of_q6_k : 128);
  }
  return tiles * kPair <= limits.multiprocessors;
}

bool swiglu_large_n_takes(const DeviceLimits& limits, int64_t rows, int64_t cols) {
  return leaves(cols) == kSlices && rows % 16 == 0 && rows >= 2 * 16 * limits.multiprocessors;
}

bool fp8_claims(const DeviceLimits& limits, const GemmProblem& p) {
  constexpr int kTold = 8;  // claims that are remembered
  const GemmWeight& w = p.of[0];
  const int slices = fp8_leaves(w.rows, w.cols);
  const int64_t steps = ceil_div(ceil_div(w.cols, kE4M3Cols), slices);
  return p.tokens <= kTokenTile && slices == 1 && blocks_of(p, 64) >= 4 * limits.multiprocessors &&
         p.same_tokens && steps * kTold / 2 >= kFp8ClaimStages &&
         steps * kE4M3TileBytes <= kFp8ClaimRoom / 2;
}

int fp8_splitk_tiles(const DeviceLimits& limits, const GemmProblem& p) {
  if (p.tokens <= 64 || p.tokens > 128 || fp8_leaves(p.of[0].rows, p.of[0].cols) < 2) return 0;
  for (const int tiles : {8, 12}) {
    if (2 * blocks_of(p, tiles * kTokenTile) <= limits.multiprocessors) return tiles;
  }
  return 0;
}

}  // namespace freshet::cuda
