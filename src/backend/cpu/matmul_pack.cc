#include "backend/cpu/matmul_pack.h"

#include <array>
#include <cstring>
#include <utility>

#include "backend/cpu/matmul_call.h"
#include "backend/cpu/matmul_layout.h"
#include "base/status.h"

namespace freshet::cpu {
namespace {

using quant::Format;

// Where a run of bytes of a stored block goes in a panel's block: `units` pieces of `unit` bytes,
// interleaved by row, so that piece u of row r lies at `to` + (u * 16 + r) * unit. With unit 4 a
// piece is a lane of a line.
struct Run {
  int from;
  int unit;
  int units;
  int to;
  bool tail = false;
};

constexpr int kMaxRuns = 5;
struct BlockMap {
  Run runs[kMaxRuns];
  int count;
};

constexpr BlockMap block_map(Format f) {
  switch (f) {
    case Format::kQ4_0:
    case Format::kIQ4_NL:
      return {{{2, 4, 4, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kQ4_1:
      return {{{4, 4, 4, 0}, {0, 2, 1, 256}, {2, 2, 1, 288}}, 3};
    case Format::kQ5_0:
      return {{{6, 4, 4, 0}, {2, 4, 1, 256}, {0, 2, 1, 0, true}}, 3};
    case Format::kQ5_1:
      return {{{8, 4, 4, 0}, {4, 4, 1, 256}, {0, 2, 1, 320}, {2, 2, 1, 352}}, 4};
    case Format::kQ8_0:
      return {{{2, 4, 8, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kMXFP4:
      return {{{1, 4, 4, 0}, {0, 1, 1, 0, true}}, 2};
    case Format::kInt4G128:
      return {{{3, 4, 16, 0}, {0, 2, 1, 0, true}, {2, 1, 1, 32, true}}, 3};
    case Format::kInt4G32:
      return {{{3, 4, 4, 0}, {0, 2, 1, 0, true}, {2, 1, 1, 32, true}}, 3};
    case Format::kQ2_K:
      return {{{16, 4, 16, 0}, {0, 4, 4, 1024}, {80, 2, 1, 1280}, {82, 2, 1, 1312}}, 4};
    case Format::kQ3_K:
      return {{{32, 4, 16, 0}, {0, 4, 8, 1024}, {96, 4, 3, 1536}, {108, 2, 1, 0, true}}, 4};
    case Format::kQ4_K:
      return {{{16, 4, 32, 0}, {4, 4, 3, 2048}, {0, 2, 1, 2240}, {2, 2, 1, 2272}}, 4};
    case Format::kQ5_K:
      return {{{48, 4, 32, 0}, {16, 4, 8, 2048}, {4, 4, 3, 2560}, {0, 2, 1, 2752}, {2, 2, 1, 2784}},
              5};
    case Format::kQ6_K:
      return {{{0, 4, 32, 0}, {128, 4, 16, 2048}, {192, 4, 4, 3072}, {208, 2, 1, 0, true}}, 4};
    case Format::kIQ4_XS:
      return {{{8, 4, 32, 0}, {4, 4, 1, 2048}, {0, 2, 1, 2112}, {2, 2, 1, 2144}}, 4};
    case Format::kIQ1_S:
      return {{{2, 4, 12, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kIQ1_M:
      return {{{0, 4, 14, 0}}, 1};
    case Format::kIQ2_XXS:
      return {{{2, 4, 16, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kIQ2_XS:
      return {{{2, 4, 18, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kIQ2_S:
      return {{{2, 4, 20, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kIQ3_XXS:
      return {{{2, 4, 24, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kIQ3_S:
      return {{{2, 4, 27, 0}, {0, 2, 1, 0, true}}, 2};
    case Format::kTQ1_0:
      return {{{0, 4, 13, 0}, {52, 2, 1, 0, true}}, 2};
    case Format::kTQ2_0:
      return {{{0, 4, 16, 0}, {64, 2, 1, 0, true}}, 2};
    case Format::kF32:
      return {{{0, 4, 32, 0}}, 1};
    case Format::kF16:
      return {{{0, 2, 32, 0}}, 1};
    case Format::kBF16:
      return {{{0, 4, 16, 0}}, 1};
    case Format::kINT8:
      return {{{0, 4, 16, 0}}, 1};
    case Format::kFP8:
      return {{{0, 2, 64, 0}, {128, 4, 1, 2048}}, 2};
    case Format::kMXFP8:
      return {{{0, 2, 16, 0}, {32, 1, 1, 0, true}}, 2};
    case Format::kFP8G32:
      return {{{0, 2, 16, 0}, {32, 4, 1, 512}}, 2};
    case Format::kNVFP4:
      return {{{1, 4, 2, 0}, {0, 1, 1, 0, true}}, 2};
    case Format::kNF4:
    case Format::kFP4:
    case Format::kInt2G128:
    case Format::kInt8G32:
      return {{{0, 4, 9, 0}}, 1};
    case Format::kInt2G32:
      return {{{0, 4, 3, 0}}, 1};
    case Format::kInt3G128:
      return {{{0, 4, 13, 0}}, 1};
    case Format::kInt3G32:
      return {{{0, 4, 4, 0}}, 1};
    case Format::kInt8G128:
      return {{{0, 4, 33, 0}}, 1};
  }
  return {};
}

// Whether the map places every stored byte of a block exactly once, and nothing else.
constexpr bool covers(Format f, int stored_block_bytes) {
  const BlockMap map = block_map(f);
  int bytes = 0;
  for (int i = 0; i < map.count; ++i) bytes += map.runs[i].unit * map.runs[i].units;
  return bytes == stored_block_bytes &&
         panel_layout(f).main + panel_layout(f).tail == 16 * stored_block_bytes;
}
static_assert(covers(Format::kQ4_0, 18) && covers(Format::kQ4_1, 20) && covers(Format::kQ5_0, 22));
static_assert(covers(Format::kQ5_1, 24) && covers(Format::kQ8_0, 34) && covers(Format::kQ2_K, 84));
static_assert(covers(Format::kQ3_K, 110) && covers(Format::kQ4_K, 144));
static_assert(covers(Format::kQ5_K, 176) && covers(Format::kQ6_K, 210));
static_assert(covers(Format::kIQ4_NL, 18) && covers(Format::kIQ4_XS, 136));
static_assert(covers(Format::kMXFP4, 17) && covers(Format::kF32, 128));
static_assert(covers(Format::kF16, 64) && covers(Format::kBF16, 64) && covers(Format::kFP8, 132));
static_assert(covers(Format::kInt4G128, 67) && covers(Format::kInt4G32, 19));
static_assert(covers(Format::kINT8, 64) && covers(Format::kMXFP8, 33));
static_assert(covers(Format::kFP8G32, 36) && covers(Format::kNF4, 36) && covers(Format::kFP4, 36));
static_assert(covers(Format::kNVFP4, 9) && covers(Format::kInt2G128, 36));
static_assert(covers(Format::kInt2G32, 12) && covers(Format::kInt3G128, 52));
static_assert(covers(Format::kInt3G32, 16) && covers(Format::kInt8G128, 132));
static_assert(covers(Format::kInt8G32, 36));
static_assert(covers(Format::kIQ1_S, 50) && covers(Format::kIQ1_M, 56));
static_assert(covers(Format::kIQ2_XXS, 66) && covers(Format::kIQ2_XS, 74));
static_assert(covers(Format::kIQ2_S, 82) && covers(Format::kIQ3_XXS, 98));
static_assert(covers(Format::kIQ3_S, 110) && covers(Format::kTQ1_0, 54));
static_assert(covers(Format::kTQ2_0, 66));

// Rearranges the 32 high bits of a row of Q5_0 or Q5_1: bit 4 p + j goes to bit p of byte j, so
// that they line up with quad p of a line.
uint32_t spread_high_bits(uint32_t x) {
  uint32_t out = 0;
  for (int j = 0; j < 4; ++j) {
    uint32_t t = x >> j & 0x11111111;
    t = (t | t >> 3) & 0x03030303;
    t = (t | t >> 6) & 0x000f000f;
    out |= ((t | t >> 12) & 0xff) << (8 * j);
  }
  return out;
}
uint32_t gather_high_bits(uint32_t x) {
  uint32_t out = 0;
  for (int j = 0; j < 4; ++j) {
    for (int p = 0; p < 8; ++p) out |= (x >> (8 * j + p) & 1) << (4 * p + j);
  }
  return out;
}
// Swaps the middle two of every four values in a block of BF16. Swapping again restores them.
void swap_middle(uint8_t* block) {
  for (int i = 0; i < 32; i += 4) {
    uint8_t t[2];
    std::memcpy(t, block + 2 * i + 2, 2);
    std::memcpy(block + 2 * i + 2, block + 2 * i + 4, 2);
    std::memcpy(block + 2 * i + 4, t, 2);
  }
}

constexpr bool has_spread_bits(Format f) {
  return f == Format::kQ5_0 || f == Format::kQ5_1;
}
constexpr int kSpreadLine = 256;  // offset of those bits in a panel's block

// Transposes four dwords of four rows.
using Quad = uint32_t __attribute__((vector_size(16)));
void transpose(const uint8_t* const* rows, int from, uint8_t* to) {
  Quad a, b, c, d;
  std::memcpy(&a, rows[0] + from, 16);
  std::memcpy(&b, rows[1] + from, 16);
  std::memcpy(&c, rows[2] + from, 16);
  std::memcpy(&d, rows[3] + from, 16);
  const Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Quad ab2 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Quad cd2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  const Quad columns[4] = {
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
      __builtin_shufflevector(ab2, cd2, 0, 1, 4, 5), __builtin_shufflevector(ab2, cd2, 2, 3, 6, 7)};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * kLine, &columns[i], 16);
}

// Scatters one run of all rows' blocks.
template <int kUnit, int kUnits>
void scatter(const uint8_t* const* blocks, int from, uint8_t* to) {
  constexpr int kQuads = kUnit == 4 ? kUnits / 4 : 0;
  for (int i = 0; i < kQuads; ++i) {
    for (int r = 0; r < kPanelRows; r += 4) {
      transpose(blocks + r, from + 16 * i, to + 4 * i * kLine + 4 * r);
    }
  }
  for (int r = 0; r < kPanelRows; ++r) {
    for (int u = 4 * kQuads; u < kUnits; ++u) {
      std::memcpy(to + (u * kPanelRows + r) * kUnit, blocks[r] + from + u * kUnit, kUnit);
    }
  }
}
template <int kUnit>
void gather(const uint8_t* from, int units, uint8_t* to, int row) {
  for (int u = 0; u < units; ++u) {
    std::memcpy(to + u * kUnit, from + (u * kPanelRows + row) * kUnit, kUnit);
  }
}

void gather_run(const Run& run, const uint8_t* from, uint8_t* block, int row) {
  switch (run.unit) {
    case 1:
      gather<1>(from + run.to, run.units, block + run.from, row);
      break;
    case 2:
      gather<2>(from + run.to, run.units, block + run.from, row);
      break;
    default:
      gather<4>(from + run.to, run.units, block + run.from, row);
      break;
  }
}

constexpr int kMaxStoredBlock = 256;

// Bytes of one row in a panel's block; plain formats count 32 values as a block.
constexpr int stored_block_bytes(Format f) {
  const PanelLayout l = panel_layout(f);
  return (l.main + l.tail) / kPanelRows;
}

struct Panel {
  uint8_t* main;
  uint8_t* tail;
  uint8_t* foot;
};
Panel panel_at(const PanelLayout& l, uint8_t* packed, int64_t panel, int64_t cols) {
  uint8_t* const start = packed + panel * panel_bytes(l, cols);
  const int64_t blocks = blocks_of(cols, l.block);
  return {start, start + blocks * l.main, start + blocks * (l.main + l.tail)};
}

// Copies stored blocks, one per row, to their places in a panel's block. The map is known at
// compile time, because loading a model spends most of its time here.
template <Format f>
void pack_blocks(const uint8_t* const* blocks, const Panel& to) {
  static constexpr BlockMap kMap = block_map(f);
  [&]<size_t... i>(std::index_sequence<i...>) {
    (scatter<kMap.runs[i].unit, kMap.runs[i].units>(
         blocks, kMap.runs[i].from, (kMap.runs[i].tail ? to.tail : to.main) + kMap.runs[i].to),
     ...);
  }(std::make_index_sequence<static_cast<size_t>(kMap.count)>());
  for (int r = 0; has_spread_bits(f) && r < kPanelRows; ++r) {
    uint8_t* const high = to.main + kSpreadLine + 4 * r;
    uint32_t bits;
    std::memcpy(&bits, high, 4);
    bits = spread_high_bits(bits);
    std::memcpy(high, &bits, 4);
  }
}

template <Format f>
void pack_panel_as(uint8_t* packed, int64_t panel, const uint8_t* const* rows, int64_t cols) {
  static constexpr PanelLayout kLayout = panel_layout(f);
  static constexpr int kStored = stored_block_bytes(f);
  static constexpr uint8_t kZeros[kMaxStoredBlock] = {};
  const int head = quant::info(f).head_bytes;
  const int64_t row_bytes = static_cast<int64_t>(quant::row_bytes(f, cols)) - head;
  const int64_t blocks = blocks_of(cols, kLayout.block);
  const int64_t whole = row_bytes / kStored;  // blocks; plain rows may end with a partial one
  const Panel at = panel_at(kLayout, packed, panel, cols);
  const int64_t used = blocks * (kLayout.main + kLayout.tail);
  std::memset(at.main + used, 0, static_cast<size_t>(panel_bytes(kLayout, cols) - used));
  for (int r = 0; head > 0 && r < kPanelRows; ++r) {
    std::memcpy(at.foot + r * head, rows[r] != nullptr ? rows[r] : kZeros,
                static_cast<size_t>(head));
  }
  uint8_t copies[kPanelRows][kMaxStoredBlock];
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* from[kPanelRows];
    for (int r = 0; r < kPanelRows; ++r) {
      from[r] = rows[r] != nullptr ? rows[r] + head + b * kStored : kZeros;
      if (rows[r] == nullptr || (b < whole && f != Format::kBF16)) continue;
      const int64_t left = row_bytes - b * kStored;
      std::memset(copies[r], 0, kStored);
      std::memcpy(copies[r], from[r], static_cast<size_t>(left < kStored ? left : kStored));
      if (f == Format::kBF16) swap_middle(copies[r]);
      from[r] = copies[r];
    }
    pack_blocks<f>(from, {at.main + b * kLayout.main, at.tail + b * kLayout.tail, nullptr});
  }
}

using Packer = void (*)(uint8_t*, int64_t, const uint8_t* const*, int64_t);
template <size_t... i>
constexpr std::array<Packer, sizeof...(i)> packers(std::index_sequence<i...>) {
  return {pack_panel_as<static_cast<Format>(i)>...};
}

}  // namespace

size_t packed_bytes(Format format, int64_t rows, int64_t cols) {
  const int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  return static_cast<size_t>(panels * panel_bytes(panel_layout(format), cols));
}

void pack_panel(Format format, uint8_t* packed, int64_t panel, const uint8_t* const* rows,
                int64_t cols) {
  static constexpr auto kPackers = packers(std::make_index_sequence<kFormats>());
  kPackers[static_cast<size_t>(format)](packed, panel, rows, cols);
}

void unpack_row(Format format, const uint8_t* packed, int64_t row, int64_t cols, float* out) {
  const PanelLayout l = panel_layout(format);
  const BlockMap map = block_map(format);
  const quant::FormatInfo& info = quant::info(format);
  const int r = static_cast<int>(row % kPanelRows);
  const Panel at = panel_at(l, const_cast<uint8_t*>(packed), row / kPanelRows, cols);
  alignas(8) uint8_t stored[kMaxStoredBlock];
  std::memcpy(stored, at.foot + r * info.head_bytes, static_cast<size_t>(info.head_bytes));
  uint8_t* const block = stored + info.head_bytes;
  for (int64_t b = 0; b < blocks_of(cols, l.block); ++b) {
    for (int i = 0; i < map.count; ++i) {
      const Run& run = map.runs[i];
      gather_run(run, run.tail ? at.tail + b * l.tail : at.main + b * l.main, block, r);
      if (has_spread_bits(format) && !run.tail && run.to == kSpreadLine) {
        uint32_t bits;
        std::memcpy(&bits, block + run.from, 4);
        bits = gather_high_bits(bits);
        std::memcpy(block + run.from, &bits, 4);
      }
    }
    if (format == Format::kBF16) swap_middle(block);
    const int64_t left = cols - b * l.block;
    info.decode(stored, out + b * l.block, left < l.block ? left : l.block);
  }
}

}  // namespace freshet::cpu
