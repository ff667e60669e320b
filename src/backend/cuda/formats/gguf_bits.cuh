// GGUF formats with fields of odd widths: Q5_0, IQ4_NL, Q4_1, Q5_1; Q5_K, IQ4_XS, Q3_K, Q2_K.
//
// A lane's code for operand k (0 to 3 of a piece), register j and half n starts at bit 16 n + x of
// a word, so that two adjacent codes are extracted together. Four-bit codes: x = 4 j, one word per
// operand. Two-bit codes: x = 8 (k % 2) + 2 j, two words. Three- and five-bit codes are arranged so
// that the fewest instructions extract them (Threes, Fives), and codes of lookup tables so that the
// fewest instructions look them up.
#pragma once

#include "backend/cuda/formats/blocks32.cuh"
#include "backend/cuda/formats/k_quants.cuh"

namespace freshet::cuda {

// The words of a unit's kBits-wide fields: [pieces][32 lanes][kBits].
template <int kBits>
struct Fields {
  static constexpr int kOperands = 4 / kBits;  // per word
  // Word i; stored(row, col) returns the stored code.
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
  // Packs all words of `pieces`, by the 256 threads of a block.
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
  // Both codes of register j of operand k, at bits 0 and 16; the bits around them are not cleared.
  static __device__ __forceinline__ uint32_t two(const uint32_t (&words)[kBits], int k, int j) {
    return words[k / kOperands] >> (k % kOperands * 4 + j) * kBits;
  }
};
using Nibbles = Fields<4>;
using Pairs = Fields<2>;

// Code of a column in a block of 32 four-bit codes, whose 16 bytes hold the first half in the low
// nibbles and the second half in the high ones.
__device__ __forceinline__ uint32_t nibble_of(const uint8_t* bytes, int col) {
  return (bytes[col % 16] >> (col % 32 / 16 * 4)) & 15;
}
__device__ __forceinline__ uint32_t bit_of(const uint8_t* bytes, int col) {
  return (bytes[col / 8] >> (col % 8)) & 1;
}

// Codes whose bits have individual positions (Its::part) in a lane's kWords words of a piece:
// [pieces][32 lanes][all words but the last], followed by the last words. After extraction codes of
// rows g begin at bit 0, those of rows g + 8 at bit kAtH.
template <class Its>
struct Packed {
  // The positions of code j of operand k: bits of half a word, in up to three parts.
  struct Part {
    int word, bit, from, count;
  };
  template <class Stored>
  static __device__ uint32_t word(const uint8_t* const* rows, int64_t left, int piece, int lane,
                                  int w, const Stored& stored) {
    uint32_t bits = 0;
    for (int k = 0; k < 4; ++k) {
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n), col = piece * 64 + k * 16 + operand_col(lane, n);
        if (rows[row] == nullptr || col >= left) continue;
        const uint32_t v = stored(rows[row], col);
        for (int i = 0; i < Its::kParts; ++i) {
          const Part p = Its::part(k, n / 2, i);
          if (p.word != w || p.count == 0) continue;
          bits |= (v >> p.from & ((1u << p.count) - 1)) << (n % 2 * 16 + p.bit);
        }
      }
    }
    return bits;
  }
  // Packs all pieces, by the 256 threads of a block: first words, then the last ones.
  template <class Stored>
  static __device__ void pack(uint8_t* to, const uint8_t* const* rows, int64_t left, int pieces,
                              int thread, const Stored& stored) {
    constexpr int kFirst = Its::kWords - 1;
    auto* words = reinterpret_cast<uint32_t*>(to);
    for (int i = thread; i < pieces * 32 * Its::kWords; i += 256) {
      const bool last = i >= pieces * 32 * kFirst;
      const int at = last ? i - pieces * 32 * kFirst : i / kFirst;
      words[i] = word(rows, left, at / 32, at % 32, last ? kFirst : i % kFirst, stored);
    }
  }
  static __device__ uint32_t at(const uint8_t* from, int pieces, int row, int col) {
    constexpr int kFirst = Its::kWords - 1;
    const auto* words = reinterpret_cast<const uint32_t*>(from);
    const int at = col / 64 * 32 + row % 8 * 4 + col % 8 / 2;
    uint32_t v = 0;
    for (int i = 0; i < Its::kParts; ++i) {
      const Part p = Its::part(col % 64 / 16, col % 16 / 8 * 2 + row / 8, i);
      const uint32_t w = words[p.word < kFirst ? at * kFirst + p.word : pieces * 32 * kFirst + at];
      v |= (w >> (col % 2 * 16 + p.bit) & ((1u << p.count) - 1)) << p.from;
    }
    return v;
  }
};

// Words 0 to 3: registers 0, 1 and 2 of operand k at bits 0, 5 and 10, and the highest bit of
// register 3. Word 4: the other bits of register 3, at bit 4 k.
struct Fives : Packed<Fives> {
  static constexpr int kWords = 5, kParts = 2, kAtH = 1;
  static __host__ __device__ Part part(int k, int j, int i) {
    if (j < 3) return {k, 5 * j, 0, i == 0 ? 5 : 0};
    return i == 0 ? Part{4, 4 * k, 0, 4} : Part{k, 15, 4, 1};
  }
  // a[k] = operand(k, codes of registers 0 to 3).
  template <class Operand>
  static __device__ __forceinline__ void decode(const uint4& q, uint32_t fours, uint4 (&a)[4],
                                                const Operand& operand) {
    constexpr uint32_t kFive = 0x001f001f;
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t w = words[k], next = w >> 10;
      const uint32_t four = k == 0 ? fours << kAtH : fours >> (4 * k - kAtH);
      a[k] = operand(k, make_uint4(w & kFive, w >> (5 - kAtH) & kFive << kAtH, next & kFive,
                                   (four & 0x001e001e) | (next & 0x00200020)));
    }
  }
};

// For each of operands 0 to 2 a word has registers 0 to 3 at bits 0, 3, 6 and 9. For operand 3,
// words 0 to 2 have registers 0 to 2, and one bit each of register 3.
struct Threes : Packed<Threes> {
  static constexpr int kWords = 3, kParts = 3, kAtH = 3;
  static __host__ __device__ Part part(int k, int j, int i) {
    if (k < 3) return {k, 3 * j, 0, i == 0 ? 3 : 0};
    if (j < 3) return {j, j == 1 ? 13 : 12, 0, i == 0 ? 3 : 0};
    return {i, i == 1 ? 12 : 15, i, 1};
  }
  // Like Fives::decode().
  template <class Operand>
  static __device__ __forceinline__ void decode(const uint4& q, uint4 (&a)[4],
                                                const Operand& operand) {
    constexpr uint32_t kThree = 0x00070007, kUpper = kThree << kAtH;
    const uint32_t words[3] = {q.x, q.y, q.z};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const uint32_t w = words[k], next = w >> 6;
      a[k] = operand(k, make_uint4(w & kThree, w & kUpper, next & kThree, next & kUpper));
    }
    const uint32_t w0 = q.x >> 12;
    a[3] = operand(
        3, make_uint4(w0 & kThree, q.y >> 10 & kUpper, q.z >> 12 & kThree,
                      (w0 & 0x00080008) | (q.y >> 8 & 0x00100010) | (q.z >> 10 & 0x00200020)));
  }
};

// Codes as in Fives, scales as in Q8_0.
struct Q5_0 : Whole {
  static constexpr Code kCode = Code::kQ5_0;
  static constexpr int kUnit = 64, kVectors = 2, kTileBytes = 512 + 128 + 64;
  static constexpr int kBlock = 32, kBytes = 22, kHeadAt = 0, kHeadBytes = 2;
  using Scales = Scaled<4, 0, Fives::kAtH>;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.q[1].x = From::get(reinterpret_cast<const uint32_t*>(tile + 512) + lane);
    const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + 640) + lane / 4);
    p.s.x = s.x;
    p.s.y = s.y;
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    Fives::decode(p.q[0], p.q[1].x, a, [&](int k, const uint4& n) {
      const auto [g, h] = Scales::lines(k < 2 ? p.s.x : p.s.y);
      return make_uint4(g(n.x), h(n.y), g(n.z), h(n.w));
    });
  }
  static __device__ uint32_t stored(const uint8_t* row, int col) {
    const uint8_t* block = row + col / 32 * kBytes;
    return nibble_of(block + 6, col) | bit_of(block + 2, col % 32) << 4;
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Fives::pack(tile, rows, left, 1, thread, stored);
    Q8_0::pack_used<Scales>(tile + 640, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return (static_cast<float>(Fives::at(tile, 1, row, col)) - 16.0f) *
           half_at(heads + row * 4 + col / 32 * 2);
  }
};

// Four-bit codes of non-uniform levels; the levels are stored plus 128.
constexpr uint32_t four_bytes(int a, int b, int c, int d) {
  return (a & 255u) | (b & 255u) << 8 | (c & 255u) << 16 | (d & 255u) << 24;
}
// prmt looks up a table of eight bytes by the lower three bits of a code; if the highest bit is
// set, it replicates the sign bit of that byte instead. Two tables, the second one indexed by 15 -
// code, together give the level: one returns the level or its inverse, the other one all zeros or
// all ones, and an exclusive or joins them. This requires a numbering of codes in which levels i
// and 8 + i have the same highest bit.
struct Levels {
  static constexpr uint32_t k0 = four_bytes(1, 24, 45, 63), k4 = four_bytes(129, 141, 153, 166);
  static constexpr uint32_t k8 = four_bytes(79, 93, 106, 118);
  static constexpr uint32_t k12 = four_bytes(181, 197, 217, 241);
  // The second table, which begins at code 15.
  static constexpr uint32_t k15 = ~four_bytes(241, 217, 197, 181);
  static constexpr uint32_t k11 = four_bytes(118, 106, 93, 79);
  static __device__ __forceinline__ uint32_t looked_up(uint32_t low, uint32_t high,
                                                       uint32_t codes) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(codes));
    return bytes;
  }
  // A stored code in this numbering.
  static __device__ __forceinline__ uint32_t ours(uint32_t code) {
    return code - 4 < 8 ? code ^ 12 : code;
  }
  static __device__ __forceinline__ float at(uint32_t ours) {
    const uint32_t four = ours < 8 ? ours < 4 ? k0 : k4 : ours < 12 ? k8 : k12;
    return static_cast<float>(static_cast<int>(four >> ours % 4 * 8 & 255) - 128);
  }
  // One word per operand: registers 0 and 1 of halves 0 and 1 at bits 0, 4, 8 and 12, then
  // registers 2 and 3 likewise.
  static __device__ int bit(int row, int col) {
    return col % 16 / 8 * 16 + col % 2 * 8 + row / 8 * 4;
  }
  // Packs the words of `pieces`, by the 256 threads of a block.
  template <class Stored>
  static __device__ void pack(uint8_t* to, const uint8_t* const* rows, int64_t left, int pieces,
                              int thread, const Stored& stored) {
    for (int i = thread; i < pieces * 128; i += 256) {
      const int lane = i / 4 % 32;
      uint32_t bits = 0;
      for (int n = 0; n < 8; ++n) {
        const int row = operand_row(lane, n),
                  col = i / 128 * 64 + i % 4 * 16 + operand_col(lane, n);
        if (rows[row] == nullptr || col >= left) continue;
        bits |= ours(stored(rows[row], col)) << bit(row, col);
      }
      reinterpret_cast<uint32_t*>(to)[i] = bits;
    }
  }
  static __device__ float at(const uint8_t* from, int row, int col) {
    const int lane = row % 8 * 4 + col % 8 / 2;
    const uint32_t w =
        reinterpret_cast<const uint32_t*>(from)[col / 64 * 128 + lane * 4 + col % 64 / 16];
    return at(w >> bit(row, col) & 15);
  }
  // ~v (using a number that is -1) and v >> 16, computed without the shift and logic pipe, which is
  // the bottleneck.
  static __device__ __forceinline__ uint32_t inverse(uint32_t v, uint32_t minus) {
    uint32_t of;
    asm("mad.lo.u32 %0, %1, %2, %2;" : "=r"(of) : "r"(v), "r"(minus));
    return of;
  }
  static __device__ __forceinline__ uint32_t upper(uint32_t v) {
    uint32_t of;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(of) : "r"(v), "r"(0x0100), "r"(0));
    return of;
  }
  template <class Of>  // of(k): the row words of an operand
  static __device__ __forceinline__ void decode(const uint4& q, uint4 (&a)[4], const Of& of) {
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    // A zero that the compiler can't see, so that the tables stay in registers.
    const uint32_t zero = threadIdx.z, first = k0 + zero, second = k15 + zero, minus = zero - 1;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t w = words[k], other = inverse(w, minus);
      const auto four = [&](uint32_t codes, uint32_t others) {
        return looked_up(first, k4, codes) ^ looked_up(second, k11, others);
      };
      const uint32_t low = four(w, other), high = four(upper(w), upper(other));
      const auto [g, h] = of(k);
      a[k] = make_uint4(g(low & 0x00ff00ff), h(__byte_perm(low, 0, 0x4341)), g(high & 0x00ff00ff),
                        h(__byte_perm(high, 0, 0x4341)));
    }
  }
};

// Codes as in Levels, scales as in Q8_0.
struct IQ4_NL : Whole {
  static constexpr Code kCode = Code::kIQ4_NL;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 64, kBlock = 32, kBytes = 18;
  static constexpr int kHeadAt = 0, kHeadBytes = 2;
  using Scales = Scaled<7>;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    Q4_0::load<From>(tile, piece, lane, p);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    Levels::decode(p.q[0], a, [&](int k) { return Scales::lines(k < 2 ? p.s.x : p.s.y); });
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Levels::pack(tile, rows, left, 1, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + col / 32 * kBytes + 2, col);
    });
    Q8_0::pack_used<Scales>(tile + 512, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return Levels::at(tile, row, col) * half_at(heads + row * 4 + col / 32 * 2);
  }
};

// Converted scales and minima of blocks of 32, in the order of KGroups for a piece.
template <class Groups>
__device__ __forceinline__ void pack_affine(uint8_t* to, const uint8_t* const* rows, int64_t left,
                                            int i, int block_bytes) {
  if (i >= 32) return;
  const uint8_t* row = rows[i / 4 + i % 2 * 8];
  const uint8_t* block = row + i / 2 % 2 * block_bytes;
  reinterpret_cast<uint32_t*>(to)[i] = row != nullptr && i / 2 % 2 * 32 < left
                                           ? Groups::used(half_at(block), -half_at(block + 2))
                                           : 0;
}
__device__ __forceinline__ float affine_at(const uint8_t* heads, int row, int col, uint32_t q) {
  const uint8_t* of = heads + row * 8 + col / 32 * 4;
  return __fadd_rn(__fmul_rn(static_cast<float>(q), half_at(of)), half_at(of + 2));
}

struct Q4_1 : Whole {
  static constexpr Code kCode = Code::kQ4_1;
  using Groups = KGroups<3>;
  static constexpr int kUnit = 64, kVectors = 1, kTileBytes = 512 + 128, kBlock = 32, kBytes = 20;
  static constexpr int kHeadAt = 0, kHeadBytes = 4;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.s = Groups::load<From>(tile + 512, 0, lane);
  }
  static __device__ void decode(const Piece& p, int piece, int lane, uint4 (&a)[4]) {
    Q4_K::decode(p, piece, lane, a);
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Nibbles::pack(tile, rows, left, 1, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + col / 32 * kBytes + 4, col);
    });
    pack_affine<Groups>(tile + 512, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return affine_at(heads, row, col, Nibbles::at(tile, row, col));
  }
};

// Codes as in Fives, with scales and minima per group (KGroups).
struct AffineFives : Whole {
  using Groups = KGroups<4>;
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    uint4 numbers[4];
    Fives::decode(p.q[0], p.q[1].x, numbers, [](int, const uint4& n) { return n; });
    Groups::decode(p.s, a, [&](int k, const auto& g, const auto& h) {
      constexpr int kAt = Fives::kAtH;
      const uint4& n = numbers[k];
      return make_uint4(g.template of<0>(n.x), h.template of<kAt>(n.y), g.template of<0>(n.z),
                        h.template of<kAt>(n.w));
    });
  }
};

struct Q5_1 : AffineFives {
  static constexpr Code kCode = Code::kQ5_1;
  static constexpr int kUnit = 64, kVectors = 2, kTileBytes = 512 + 128 + 128;
  static constexpr int kBlock = 32, kBytes = 24, kHeadAt = 0, kHeadBytes = 4;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + lane);
    p.q[1].x = From::get(reinterpret_cast<const uint32_t*>(tile + 512) + lane);
    p.s = Groups::load<From>(tile + 640, 0, lane);
  }
  static __device__ uint32_t stored(const uint8_t* row, int col) {
    const uint8_t* block = row + col / 32 * kBytes;
    return nibble_of(block + 8, col) | bit_of(block + 4, col % 32) << 4;
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Fives::pack(tile, rows, left, 1, thread, stored);
    pack_affine<Groups>(tile + 640, rows, left, thread, kBytes);
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return affine_at(heads, row, col, Fives::at(tile, 1, row, col));
  }
};

struct Q5_K : AffineFives {
  static constexpr Code kCode = Code::kQ5_K;
  static constexpr int kUnit = 256, kVectors = 2, kTileBytes = 4 * 512 + 512 + Groups::kBytes;
  static constexpr int kBlock = 256, kBytes = 176, kHeadAt = 0, kHeadBytes = 16;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    p.q[1].x = From::get(reinterpret_cast<const uint32_t*>(tile + 2048) + piece * 32 + lane);
    p.s = Groups::load<From>(tile + 2560, piece, lane);
  }
  static __device__ uint32_t stored(const uint8_t* row, int col) {
    return (uint32_t{row[48 + col / 64 * 32 + col % 32]} >> (col % 64 / 32 * 4) & 15) |
           (uint32_t{row[16 + col % 32]} >> (col / 32) & 1) << 4;
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Fives::pack(tile, rows, left, 4, thread, stored);
    Groups::pack(tile + 2560, rows, thread);
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* head, int row, int col) {
    return Q4_K::affine(head + row * kHeadBytes, col, Fives::at(tile, 4, row, col));
  }
};

// Codes as in Levels, then converted scales: [4 pieces][8 (g)][group] of rows g and g + 8.
struct IQ4_XS : Whole {
  static constexpr Code kCode = Code::kIQ4_XS;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 4 * 512 + 256;
  static constexpr int kBlock = 256, kBytes = 136, kHeadAt = 0, kHeadBytes = 8;
  using Scales = Scaled<7>;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    p.q[0] = From::get(reinterpret_cast<const uint4*>(tile) + piece * 32 + lane);
    const uint2 s = From::get(reinterpret_cast<const uint2*>(tile + 2048) + piece * 8 + lane / 4);
    p.s.x = s.x;
    p.s.y = s.y;
  }
  static __device__ void decode(const Piece& p, int piece, int lane, uint4 (&a)[4]) {
    IQ4_NL::decode(p, piece, lane, a);
  }
  // The scale of one of eight groups of a row; the block begins with d, the upper two bits of all
  // groups and their lower four.
  static __device__ float scale(const uint8_t* head, int group) {
    const uint32_t s = (head[4 + group / 2] >> (group % 2 * 4) & 15) |
                       (head[2 + group / 4] >> (group % 4 * 2) & 3) << 4;
    return half_at(head) * static_cast<float>(static_cast<int>(s) - 32);
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Levels::pack(tile, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return nibble_of(row + 8 + col / 32 * 16, col);
    });
    if (thread >= 64) return;
    const auto of = [&](const uint8_t* row) {
      return row != nullptr ? scale(row, thread / 16 * 2 + thread % 2) : 0.0f;
    };
    const int g = thread / 2 % 8;
    reinterpret_cast<uint32_t*>(tile + 2048)[thread] = Scales::pack(of(rows[g]), of(rows[g + 8]));
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return Levels::at(tile, row, col) * scale(heads + row * kHeadBytes, col / 32);
  }
};

// Codes as in Threes: [4 pieces][32 lanes] words 0 and 1, then all words 2; scales as in Q6_K.
struct Q3_K : Whole {
  static constexpr Code kCode = Code::kQ3_K;
  static constexpr int kUnit = 256, kVectors = 1, kTileBytes = 1024 + 512 + 512;
  static constexpr int kBlock = 256, kBytes = 110, kHeadAt = 96, kHeadBytes = 14;
  using Scales = Scaled<2, 0, Threes::kAtH>;
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    const uint2 two = From::get(reinterpret_cast<const uint2*>(tile) + piece * 32 + lane);
    p.q[0].x = two.x;
    p.q[0].y = two.y;
    p.q[0].z = From::get(reinterpret_cast<const uint32_t*>(tile + 1024) + piece * 32 + lane);
    p.s = From::get(reinterpret_cast<const uint4*>(tile + 1536) + piece * 8 + lane / 4);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const uint32_t s[4] = {p.s.x, p.s.y, p.s.z, p.s.w};
    Threes::decode(p.q[0], a, [&](int k, const uint4& n) {
      const auto [g, h] = Scales::lines(s[k]);
      return make_uint4(g(n.x), h(n.y), g(n.z), h(n.w));
    });
  }
  // Scale of one of 16 groups.
  static __device__ float scale(const uint8_t* head, int group) {
    const uint32_t s = (head[group % 8] >> (group / 8 * 4) & 15) |
                       (head[8 + group % 4] >> (group / 4 * 2) & 3) << 4;
    return half_at(head + 12) * static_cast<float>(static_cast<int>(s) - 32);
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    Threes::pack(tile, rows, left, 4, thread, [](const uint8_t* row, int col) {
      return (uint32_t{row[32 + col / 128 * 32 + col % 32]} >> (col % 128 / 32 * 2) & 3) |
             (uint32_t{row[col % 32]} >> (col / 32) & 1) << 2;
    });
    if (thread >= 128) return;
    const auto of = [&](const uint8_t* row) {
      return row != nullptr ? scale(row + kHeadAt, thread / 32 * 4 + thread % 4) : 0.0f;
    };
    const int g = thread / 4 % 8;
    reinterpret_cast<uint32_t*>(tile + 1536)[thread] = Scales::pack(of(rows[g]), of(rows[g + 8]));
  }
  static __device__ float at(const uint8_t* tile, const uint8_t* heads, int row, int col) {
    return (static_cast<float>(Threes::at(tile, 4, row, col)) - 4.0f) *
           scale(heads + row * kHeadBytes, col / 16);
  }
};

// Two-bit codes; then [16 rows][16 groups] scale and minimum of four bits each, and [16 rows] their
// factors. The elements of a row's group take one of four values, which are looked up.
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
        // Code q has bytes 2 q and 2 q + 1.
        const uint32_t both = Pairs::two(q, k, j) & 0x00030003;
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
