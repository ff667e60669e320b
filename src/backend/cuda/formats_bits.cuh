// GGUF's formats with fields of few bits: Q5_0, IQ4_NL, Q4_1, Q5_1; Q5_K, IQ4_XS, Q3_K, Q2_K.
//
// Of a lane's numbers those of operand k (of a piece's four), register j and half n lie at bit
// 16 n + x of a word, so that two neighbours come out together: four bits at x = 4 j, a word an
// operand; two bits at 8 (k % 2) + 2 j, two words; one bit at 4 k + j, one word.
#pragma once

#include "backend/cuda/formats_blocks.cuh"
#include "backend/cuda/formats_k.cuh"

namespace freshet::cuda {

// Words of a unit's fields of kBits: [pieces][32 lanes][kBits].
template <int kBits>
struct Fields {
  static constexpr int kOperands = 4 / kBits;  // of a word
  static constexpr int kPieceBytes = 32 * kBits * 4;
  // Word i; stored(row, col) is what a row has there.
  template <class Stored>
  static __device__ uint32_t word(const uint8_t* const* rows, int64_t left, int i,
                                  const Stored& stored) {
    const int lane = i / kBits % 32, piece = i / (32 * kBits);
    uint32_t bits = 0;
    for (int o = 0; o < kOperands; ++o) {
      const int first = piece * 64 + (i % kBits * kOperands + o) * 16;
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n), col = first + operand_col(lane, n);
        if (rows[row] == nullptr || col >= left) continue;
        bits |= static_cast<uint32_t>(stored(rows[row], col))
                << (n % 2 * 16 + (o * 4 + n / 2) * kBits);
      }
    }
    return bits;
  }
  // All words of `pieces`, by the 256 threads of a block.
  template <class Stored>
  static __device__ void pack(uint8_t* to, const uint8_t* const* rows, int64_t left, int pieces,
                              int thread, const Stored& stored) {
    for (int i = thread; i < pieces * 32 * kBits; i += 256) {
      reinterpret_cast<uint32_t*>(to)[i] = word(rows, left, i, stored);
    }
  }
  static __device__ uint32_t at(const uint8_t* from, int row, int col) {
    const int lane = row % 8 * 4 + col % 8 / 2, k = col % 64 / 16;
    const int j = col % 16 / 8 * 2 + row / 8;
    const int i = (col / 64 * 32 + lane) * kBits + k / kOperands;
    const int bit = col % 2 * 16 + (k % kOperands * 4 + j) * kBits;
    return reinterpret_cast<const uint32_t*>(from)[i] >> bit & ((1u << kBits) - 1);
  }
  // Both numbers of register j of operand k, at bits `to` and 16 + to, and others beside them.
  static __device__ __forceinline__ uint32_t two(const uint32_t (&words)[kBits], int k, int j,
                                                 int to) {
    const int shift = (k % kOperands * 4 + j) * kBits - to;
    const uint32_t w = words[k / kOperands];
    return shift >= 0 ? w >> shift : w << -shift;
  }
};
using Nibbles = Fields<4>;
using Pairs = Fields<2>;
using Bits = Fields<1>;

// a = two(k, j) for all registers of a piece.
template <class Two>
__device__ __forceinline__ void decode_each(uint4 (&a)[4], const Two& two) {
#pragma unroll
  for (int k = 0; k < 4; ++k) a[k] = make_uint4(two(k, 0), two(k, 1), two(k, 2), two(k, 3));
}
// Halves of blocks of 32 numbers in 16 bytes.
__device__ __forceinline__ uint32_t nibble_of(const uint8_t* bytes, int col) {
  return (bytes[col % 16] >> (col % 32 / 16 * 4)) & 15;
}
__device__ __forceinline__ uint32_t bit_of(const uint8_t* bytes, int col) {
  return (bytes[col / 8] >> (col % 8)) & 1;
}
__device__ __forceinline__ uint32_t fifth_bits(uint32_t w) {
  return w & 0x00100010;
}

// The operand whose numbers have five bits.
template <class Row>
__device__ __forceinline__ uint4 fives(const uint32_t (&low)[4], const uint32_t (&high)[1], int k,
                                       const Row& g, const Row& h) {
  const auto two = [&](int j) {
    return (Nibbles::two(low, k, j, 0) & 0x000f000f) | fifth_bits(Bits::two(high, k, j, 4));
  };
  return make_uint4(g.template of<0>(two(0)), h.template of<0>(two(1)), g.template of<0>(two(2)),
                    h.template of<0>(two(3)));
}

// Lines of rows g and g + 8 in the two blocks of a piece, whose scales lie as Q8_0's.
template <int kMiddle>
struct RowLines {
  Lines line[2];
  __device__ __forceinline__ explicit RowLines(const uint4& s) {
    for (int block = 0; block < 2; ++block) {
      const uint32_t both = block == 0 ? s.x : s.y;
      line[block] = lines_of<kMiddle, 0>(half_bits(both & 0xffff), half_bits(both >> 16));
    }
  }
  // Of register j of operand k.
  __device__ __forceinline__ const Line& of(int k, int j) const { return line[k / 2].of(j); }
};

// Four bits as Q4_0's, [32 lanes] words of fifth bits, scales as Q8_0's.
struct Q5_0 : Whole {
  static constexpr Code kCode = Code::kQ5_0;
  static constexpr int kUnit = 64, kVectors = 2, kTileBytes = 512 + 128 + 64;
  static constexpr int kBlock = 32, kBytes = 22;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.q[1].x = From::get(reinterpret_cast<const uint32_t*>(tile + 512) + lane);
    const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + 640) + lane / 4);
    p.s.x = s.x;
    p.s.y = s.y;
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t low[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w}, high[1] = {p.q[1].x};
    const RowLines<4> rows(p.s);
    decode_each(a, [&](int k, int j) {
      return rows.of(
          k, j)((Nibbles::two(low, k, j, 0) & 0x000f000f) | fifth_bits(Bits::two(high, k, j, 4)));
    });
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Nibbles::pack(tile, rows, left, 1, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + col / 32 * kBytes + 6, col);
    });
    Bits::pack(tile + 512, rows, left, 1, thread, [](const uint8_t* row, int col) {
      return bit_of(row + col / 32 * kBytes + 2, col % 32);
    });
    if (thread < 32) Q8_0::pack_scale(tile + 640, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const float d = half_at(tile + 640 + 2 * (row % 8 * 4 + col / 32 * 2 + row / 8));
    const uint32_t q = Nibbles::at(tile, row, col) | Bits::at(tile + 512, row, col) << 4;
    return (static_cast<float>(q) - 16.0f) * d;
  }
};

// Codes of four bits for uneven levels, which are kept plus 128.
constexpr uint32_t four_bytes(int a, int b, int c, int d) {
  return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | (d & 255u) << 24;
}
struct Levels {
  static constexpr uint32_t k0 = four_bytes(1, 24, 45, 63);
  static constexpr uint32_t k4 = four_bytes(79, 93, 106, 118);
  static constexpr uint32_t k8 = four_bytes(129, 141, 153, 166);
  static constexpr uint32_t k12 = four_bytes(181, 197, 217, 241);
  static __device__ __forceinline__ float at(uint32_t code) {
    const uint32_t four = code < 8 ? code < 4 ? k0 : k4 : code < 12 ? k8 : k12;
    return static_cast<float>(static_cast<int>(four >> code % 4 * 8 & 255) - 128);
  }
  // The levels of four codes at bits 0, 4, 8 and 12, as bytes.
  static __device__ __forceinline__ uint32_t four(uint32_t codes) {
    const uint32_t of = codes & 0x7777;
    return __byte_perm(__byte_perm(k0, k4, of), __byte_perm(k8, k12, of),
                       0x3210 + (codes >> 1 & 0x4444));
  }
  template <class Of>  // of(k, j): the line of a register's row
  static __device__ __forceinline__ void decode(const uint4& q, uint4 (&a)[4], const Of& of) {
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t even = four(words[k] & 0xffff), odd = four(words[k] >> 16);
      const uint32_t low = __byte_perm(even, odd, 0x5140), high = __byte_perm(even, odd, 0x7362);
      a[k] = make_uint4(of(k, 0)(Q8_0::two(low, 0)), of(k, 1)(Q8_0::two(low, 2)),
                        of(k, 2)(Q8_0::two(high, 0)), of(k, 3)(Q8_0::two(high, 2)));
    }
  }
};

// As Q4_0 lies.
struct IQ4_NL : Whole {
  static constexpr Code kCode = Code::kIQ4_NL;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 64, kBlock = 32, kBytes = 18;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    Q4_0::load<From>(tile, piece, lane, p);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const RowLines<7> rows(p.s);
    Levels::decode(p.q[0], a, [&](int k, int j) { return rows.of(k, j); });
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Q4_0::pack_numbers(tile, rows, left, thread);
    if (thread < 32) Q8_0::pack_scale(tile + 512, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const float d = half_at(tile + 512 + 2 * (row % 8 * 4 + col / 32 * 2 + row / 8));
    return Levels::at(Nibbles::at(tile, row, col)) * d;
  }
};

// [8 (g)][block] (scale and least value of row g, of row g + 8).
__device__ __forceinline__ void pack_affine(uint8_t* to, const uint8_t* const* rows, int64_t left,
                                            int i, int block_bytes) {
  const int row = i / 4 + i % 2 * 8, block = i / 2 % 2;
  const bool real = rows[row] != nullptr && block * 32 < left;
  for (int k = 0; k < 4; ++k) to[4 * i + k] = real ? rows[row][block * block_bytes + k] : 0;
}
__device__ __forceinline__ float affine_at(const uint8_t* from, int row, int col, uint32_t q) {
  const uint8_t* of = from + 4 * (row % 8 * 4 + col / 32 * 2 + row / 8);
  return __fadd_rn(__fmul_rn(static_cast<float>(q), half_at(of)), half_at(of + 2));
}

struct Q4_1 : Whole {
  static constexpr Code kCode = Code::kQ4_1;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 128, kBlock = 32, kBytes = 20;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.s = From::get(reinterpret_cast<const uint4*>(tile + 512) + lane / 4);
  }
  // a[k] = operand(k, rows g, rows g + 8).
  template <int kMiddle, class Operand>
  static __device__ void decode_affine(const Piece& p, uint4 (&a)[4], const Operand& operand) {
    for (int k = 0; k < 4; ++k) {
      const uint32_t g = k < 2 ? p.s.x : p.s.z, h = k < 2 ? p.s.y : p.s.w;
      using Rows = CentredRows<kMiddle>;
      const Rows rows(half_bits(g & 0xffff) * Rows::kScaleBy, half_bits(g >> 16) * -Rows::kLeastBy,
                      half_bits(h & 0xffff) * Rows::kScaleBy, half_bits(h >> 16) * -Rows::kLeastBy);
      a[k] = operand(k, rows.g, rows.h);
    }
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w};
    decode_affine<3>(
        p, a, [&](int k, const auto& g, const auto& h) { return Q4_K::nibbles(q[k], g, h); });
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Nibbles::pack(tile, rows, left, 1, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + col / 32 * kBytes + 4, col);
    });
    if (thread < 32) pack_affine(tile + 512, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return affine_at(tile + 512, row, col, Nibbles::at(tile, row, col));
  }
};

struct Q5_1 : Whole {
  static constexpr Code kCode = Code::kQ5_1;
  static constexpr int kUnit = 64, kVectors = 2, kTileBytes = 512 + 128 + 128;
  static constexpr int kBlock = 32, kBytes = 24;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.q[1].x = From::get(reinterpret_cast<const uint32_t*>(tile + 512) + lane);
    p.s = From::get(reinterpret_cast<const uint4*>(tile + 640) + lane / 4);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t low[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w}, high[1] = {p.q[1].x};
    Q4_1::decode_affine<4>(
        p, a, [&](int k, const auto& g, const auto& h) { return fives(low, high, k, g, h); });
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Nibbles::pack(tile, rows, left, 1, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + col / 32 * kBytes + 8, col);
    });
    Bits::pack(tile + 512, rows, left, 1, thread, [](const uint8_t* row, int col) {
      return bit_of(row + col / 32 * kBytes + 4, col % 32);
    });
    if (thread < 32) pack_affine(tile + 640, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return affine_at(tile + 640, row, col,
                     Nibbles::at(tile, row, col) | Bits::at(tile + 512, row, col) << 4);
  }
};

// Four bits as Q4_K's, [4 pieces][32 lanes] words of fifth bits, and the groups.
struct Q5_K : Whole {
  static constexpr Code kCode = Code::kQ5_K;
  using Groups = KGroups<4>;
  static constexpr int kUnit = 256, kVectors = 2, kTileBytes = 4 * 512 + 512 + Groups::kBytes;
  static constexpr int kBlock = 256, kBytes = 176, kHeadAt = 0, kHeadBytes = 16;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    p.q[1].x = From::get(reinterpret_cast<const uint32_t*>(tile + 2048) + piece * 32 + lane);
    p.s = Groups::load<From>(tile + 2560, piece, lane);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t low[4] = {p.q[0].x, p.q[0].y, p.q[0].z, p.q[0].w}, high[1] = {p.q[1].x};
    Groups::decode(p.s, a,
                   [&](int k, const auto& g, const auto& h) { return fives(low, high, k, g, h); });
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Nibbles::pack(tile, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return uint32_t{row[48 + col / 64 * 32 + col % 32]} >> (col % 64 / 32 * 4) & 15;
    });
    Bits::pack(tile + 2048, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return uint32_t{row[16 + col % 32]} >> (col / 32) & 1;
    });
    Groups::pack(tile + 2560, rows, thread);
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* head, int row, int col) {
    return Q4_K::affine(head + row * kHeadBytes, col,
                        Nibbles::at(tile, row, col) | Bits::at(tile + 2048, row, col) << 4);
  }
};

// Four bits as Q4_K's, and then what stored blocks begin with: [16 rows] d, the groups' upper pairs
// of bits, and their lower fours.
struct IQ4_XS : Whole {
  static constexpr Code kCode = Code::kIQ4_XS;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 4 * 512 + 16 * 8;
  static constexpr int kBlock = 256, kBytes = 136;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    const auto* heads = reinterpret_cast<const uint2*>(tile + 2048) + lane / 4;
    const uint2 one = From::get(heads), other = From::get(heads + 8);
    p.s = make_uint4(one.x, one.y, other.x, other.y);
  }
  static __device__ void decode(const Piece& p, int piece, int, uint4 (&a)[4]) {
    Lines lines[2];
    for (int group = 0; group < 2; ++group) {
      lines[group] = lines_of<7, 0>(scale(p.s.x, p.s.y, 2 * piece + group),
                                    scale(p.s.z, p.s.w, 2 * piece + group));
    }
    Levels::decode(p.q[0], a, [&](int k, int j) { return lines[k / 2].of(j); });
  }
  static __device__ float scale(uint32_t first, uint32_t second, int group) {
    const uint32_t s = (second >> 4 * group & 15) | (first >> (16 + 2 * group) & 3) << 4;
    return half_bits(first & 0xffff) * static_cast<float>(static_cast<int>(s) - 32);
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Nibbles::pack(tile, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + 8 + col / 32 * 16, col);
    });
    if (thread < 128) {
      const uint8_t* row = rows[thread / 8];
      tile[2048 + thread] = row != nullptr ? row[thread % 8] : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const uint2 head = reinterpret_cast<const uint2*>(tile + 2048)[row];
    return Levels::at(Nibbles::at(tile, row, col)) * scale(head.x, head.y, col / 32);
  }
};

// Two bits; third bits; of the groups' scales [16 rows][4 pieces] lower fours of bits, and upper
// pairs; d [16 rows].
struct Q3_K : Whole {
  static constexpr Code kCode = Code::kQ3_K;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 1024 + 512 + 128 + 64 + 32;
  static constexpr int kBlock = 256, kBytes = 110;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    const uint2 low = From::get(reinterpret_cast<const uint2*>(tile) + piece * 32 + lane);
    p.q[0].x = low.x;
    p.q[0].y = low.y;
    p.q[0].z = From::get(reinterpret_cast<const uint32_t*>(tile + 1024) + piece * 32 + lane);
    const auto* lows = reinterpret_cast<const uint16_t*>(tile + 1536);
    const uint8_t* highs = tile + 1664;
    const auto* d = reinterpret_cast<const uint16_t*>(tile + 1728);
    const int g = lane / 4, at = g * 4 + piece;
    p.s.x = From::get(lows + at) | uint32_t{From::get(highs + at)} << 16;
    p.s.y = From::get(lows + at + 32) | uint32_t{From::get(highs + at + 32)} << 16;
    p.s.z = From::get(d + g) | uint32_t{From::get(d + g + 8)} << 16;
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t low[2] = {p.q[0].x, p.q[0].y}, high[1] = {p.q[0].z};
    for (int k = 0; k < 4; ++k) {
      const auto [g, h] =
          lines_of<2, 0>(scale(p.s.z & 0xffff, p.s.x, k), scale(p.s.z >> 16, p.s.y, k));
      const auto two = [&](int j) {
        return (Pairs::two(low, k, j, 0) & 0x00030003) | (Bits::two(high, k, j, 2) & 0x00040004);
      };
      a[k] = make_uint4(g(two(0)), h(two(1)), g(two(2)), h(two(3)));
    }
  }
  static __device__ float scale(uint32_t d, uint32_t word, int group) {
    const uint32_t s = (word >> 4 * group & 15) | (word >> (16 + 2 * group) & 3) << 4;
    return half_bits(d) * static_cast<float>(static_cast<int>(s) - 32);
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Pairs::pack(tile, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return uint32_t{row[32 + col / 128 * 32 + col % 32]} >> (col % 128 / 32 * 2) & 3;
    });
    Bits::pack(tile + 1024, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return uint32_t{row[col % 32]} >> (col / 32) & 1;
    });
    if (thread < 64) {
      const uint8_t* row = rows[thread / 4];
      uint32_t low = 0, high = 0;
      for (int i = 0; i < 4 && row != nullptr; ++i) {
        const int group = thread % 4 * 4 + i;
        low |= (uint32_t{row[96 + group % 8]} >> (group / 8 * 4) & 15) << 4 * i;
        high |= (uint32_t{row[104 + group % 4]} >> (group / 4 * 2) & 3) << 2 * i;
      }
      reinterpret_cast<uint16_t*>(tile + 1536)[thread] = static_cast<uint16_t>(low);
      tile[1664 + thread] = static_cast<uint8_t>(high);
    }
    if (thread < 32) {
      const uint8_t* row = rows[thread / 2];
      tile[1728 + thread] = row != nullptr ? row[108 + thread % 2] : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const int i = row * 4 + col / 64;
    const uint32_t word =
        reinterpret_cast<const uint16_t*>(tile + 1536)[i] | uint32_t{tile[1664 + i]} << 16;
    const uint32_t d = reinterpret_cast<const uint16_t*>(tile + 1728)[row];
    const uint32_t q = Pairs::at(tile, row, col) | Bits::at(tile + 1024, row, col) << 2;
    return (static_cast<float>(q) - 4.0f) * scale(d, word, col % 64 / 16);
  }
};

// Two bits; [16 rows][16 groups] scale and least value, four bits each; [16 rows] their factors.
// Numbers of a row's group have one of four values, which are looked up.
struct Q2_K : Plain {
  static constexpr Code kCode = Code::kQ2_K;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 1024 + 256 + 64;
  static constexpr int kBlock = 256, kBytes = 84;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    const uint2 q = From::get(reinterpret_cast<const uint2*>(tile) + piece * 32 + lane);
    const auto* groups = reinterpret_cast<const uint32_t*>(tile + 1024) + lane / 4 * 4 + piece;
    const auto* factors = reinterpret_cast<const uint32_t*>(tile + 1280) + lane / 4;
    p.q[0].x = q.x;
    p.q[0].y = q.y;
    p.s = make_uint4(From::get(groups), From::get(groups + 32), From::get(factors),
                     From::get(factors + 8));
  }
  static __device__ float value(uint32_t factors, uint32_t group, uint32_t q) {
    const float d = half_bits(factors & 0xffff) * static_cast<float>(group & 15);
    return __fsub_rn(d * static_cast<float>(q),
                     half_bits(factors >> 16) * static_cast<float>(group >> 4 & 15));
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t q[2] = {p.q[0].x, p.q[0].y};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t of[2][2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t factors = r == 0 ? p.s.z : p.s.w;
        const uint32_t group = (r == 0 ? p.s.x : p.s.y) >> 8 * k;
        of[r][0] = pack_bf16(value(factors, group, 0), value(factors, group, 1));
        of[r][1] = pack_bf16(value(factors, group, 2), value(factors, group, 3));
      }
      const auto two = [&](int j) {
        // Number q has bytes 2 q and 2 q + 1.
        const uint32_t both = Pairs::two(q, k, j, 0) & 0x00030003;
        const uint32_t which = (both | both >> 8) & 0x0303;
        return __byte_perm(of[j % 2][0], of[j % 2][1], which * 0x22 + 0x1010);
      };
      a[k] = make_uint4(two(0), two(1), two(2), two(3));
    }
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Pairs::pack(tile, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return uint32_t{row[16 + col / 128 * 32 + col % 32]} >> (col % 128 / 32 * 2) & 3;
    });
    const uint8_t* row = rows[thread / 16];
    tile[1024 + thread] = row != nullptr ? row[thread % 16] : 0;
    if (thread < 64) {
      const uint8_t* of = rows[thread / 4];
      tile[1280 + thread] = of != nullptr ? of[80 + thread % 4] : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return value(reinterpret_cast<const uint32_t*>(tile + 1280)[row],
                 tile[1024 + row * 16 + col / 16], Pairs::at(tile, row, col));
  }
};

}  // namespace freshet::cuda
