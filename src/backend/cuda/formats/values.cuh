// Formats whose codes are floating-point values, and FP8, as tiles (formats.cuh).
#pragma once

#include "backend/cuda/formats/lanes.cuh"

namespace freshet::cuda {

// Core matrices of 8 rows by 8 columns, 128 bytes each: [row / 8][col / 8][row % 8][col % 8]. wgmma
// reads them from shared memory; ldmatrix turns four of them into a lane's operand.
struct BF16 : Plain {
  static constexpr Code kCode = Code::kBF16;
  static constexpr int kUnit = 64, kVectors = 4, kTileBytes = 16 * 64 * 2, kBlock = 1, kBytes = 2;
  static __host__ __device__ int place(int row, int col) {  // in elements
    return (row / 8 * 8 + col / 8) * 64 + row % 8 * 8 + col % 8;
  }
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    const auto* numbers = reinterpret_cast<const uint16_t*>(tile);
    for (int i = 0; i < 4; ++i) {
      if constexpr (From::kShared) {
        uint32_t a[4];
        ldmatrix4(a, numbers + place(lane % 16, i * 16 + lane / 16 * 8));
        p.q[i] = make_uint4(a[0], a[1], a[2], a[3]);
      } else {
        const auto two = [&](int n) {
          return From::get(reinterpret_cast<const uint32_t*>(
              numbers + place(operand_row(lane, n), i * 16 + operand_col(lane, n))));
        };
        p.q[i] = make_uint4(two(0), two(2), two(4), two(6));
      }
    }
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) a[i] = p.q[i];
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const int row = i / 512 * 8 + i / 8 % 8, col = i / 64 % 8 * 8 + i % 8;
      reinterpret_cast<uint16_t*>(tile)[i] = rows[row] != nullptr && col < left
                                                 ? reinterpret_cast<const uint16_t*>(rows[row])[col]
                                                 : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return __uint_as_float(uint32_t{reinterpret_cast<const uint16_t*>(tile)[place(row, col)]}
                           << 16);
  }
};

// Tiles of 8 rows in the layout of FP8 activations: [16 columns][row][16], then [row] scales. Two
// of them make a tile of the kernels that multiply in BF16, in which E4M3 is exact.
struct FP8 : Plain {
  static constexpr Code kCode = Code::kFP8;
  static constexpr int kUnit = 128, kVectors = 4, kTileBytes = 2 * 8 * (128 + 4);
  static constexpr int kBlock = 128, kBytes = 132;
  static constexpr int kGroup = 4;
  static __host__ __device__ int place(int row, int col) {
    return row / 8 * (kTileBytes / 2) + col / 16 * 128 + row % 8 * 16 + col % 16;
  }
  static __host__ __device__ int scale_place(int row) {
    return row / 8 * (kTileBytes / 2) + 1024 + row % 8 * 4;
  }
  template <class From>
  static __device__ void load(const uint8_t* tile, int piece, int lane, Piece& p) {
    for (int i = 0; i < 4; ++i) {
      const auto two = [&](int n) {
        const int col = piece * 64 + i * 16 + operand_col(lane, n);
        return From::get(
            reinterpret_cast<const uint16_t*>(tile + place(operand_row(lane, n), col)));
      };
      p.q[i] = make_uint4(two(0), two(2), two(4), two(6));
    }
    const auto scale = [&](int row) {
      return From::get(reinterpret_cast<const uint32_t*>(tile + scale_place(row)));
    };
    p.s.x = scale(lane / 4);
    p.s.y = scale(lane / 4 + 8);
  }
  // An exponent and mantissa shifted to their place in an F16 are the value times 2^-8.
  static __device__ float value(uint32_t code) {
    return half_bits((code & 0x80) << 8 | (code & 0x7f) << 7) * 256.0f;
  }
  static __device__ uint32_t two(uint32_t w) { return pack_bf16(value(w & 255), value(w >> 8)); }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) {
      a[i] = make_uint4(two(p.q[i].x), two(p.q[i].y), two(p.q[i].z), two(p.q[i].w));
    }
  }
  static __device__ Scales scales(const Piece& p, int, int) {
    return {__uint_as_float(p.s.x), __uint_as_float(p.s.y)};
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t, int thread) {
    for (int i = thread; i < 16 * 128; i += 256) {
      const int row = i / 1024 * 8 + i % 128 / 16, col = i % 1024 / 128 * 16 + i % 16;
      tile[place(row, col)] = rows[row] != nullptr ? rows[row][col] : 0;
    }
    if (thread < 64) {
      const uint8_t* row = rows[thread / 4];
      tile[scale_place(thread / 4) + thread % 4] = row != nullptr ? row[128 + thread % 4] : 0;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return value(tile[place(row, col)]) * *reinterpret_cast<const float*>(tile + scale_place(row));
  }
};

// FP8 for GEMMs on Hopper: panels of 64 rows, one K step of 128 columns after the other. A step has
// all codes, in the order of wgmma's core matrices, then one scale per row. In most panels all
// rows, or all steps, share a scale; then few scales or none are read. A table behind all panels
// says what the scales of each panel share.
struct FP8Panels : FP8 {
  // What shares a scale: nothing; the rows of a step; the steps of a row.
  enum Scaled : int32_t { kOfBlocks, kOfSteps, kOfRows };
  static constexpr int kRows = 64, kCodes = kRows * kUnit, kStepBytes = kCodes + kRows * 4;
  static __host__ __device__ constexpr int place(int row, int col) {
    return row / 8 * 1024 + col / 16 * 128 + row % 8 * 16 + col % 16;
  }
  static __host__ __device__ constexpr int scale_place(int row) { return kCodes + row * 4; }
  // Offset of a step.
  static __host__ __device__ int64_t step_at(int64_t panel, int64_t step, int64_t cols) {
    return (panel * (cols / kUnit) + step) * kStepBytes;
  }
  static __host__ __device__ const int32_t* scaled_at(const uint8_t* packed, int64_t rows,
                                                      int64_t cols) {
    return reinterpret_cast<const int32_t*>(packed + step_at((rows + kRows - 1) / kRows, 0, cols));
  }
  // Packs rows [first, first + 16) of a panel.
  static __device__ void pack(uint8_t* step, int first, const uint8_t* const* rows, int thread) {
    for (int i = thread; i < 16 * kUnit; i += 256) {
      const int row = i / 1024 * 8 + i % 128 / 16, col = i % 1024 / 128 * 16 + i % 16;
      step[place(first + row, col)] = rows[row] != nullptr ? rows[row][col] : 0;
    }
    if (thread < 64) {
      const uint8_t* row = rows[thread / 4];
      step[scale_place(first + thread / 4) + thread % 4] =
          row != nullptr ? row[kUnit + thread % 4] : 0;
    }
  }
  static __device__ float at(const uint8_t* step, int row, int col) {
    return value(step[place(row, col)]) * *reinterpret_cast<const float*>(step + scale_place(row));
  }
};

// FP8 tiles for BF16 activations, as in expert GEMMs: codes become values. Their scale is rounded
// to BF16, and so is its product with the code.
struct FP8Values : FP8 {
  static constexpr int kGroup = 0;
  static constexpr int kDown = 16;  // values are stored times 2^-kDown, as in Whole
  static constexpr float kUp = 65536.0f;
  // An exponent and mantissa shifted to their place in a BF16 are the value times 2^-120.
  static __device__ uint32_t values(uint32_t w, uint32_t scale) {
    const uint32_t two = __byte_perm(w, 0, 0x1404);
    return mul2((two & 0x80008000) | (two >> 4 & 0x07f007f0), scale);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    const auto scale = [](uint32_t bits) {
      const float d = __uint_as_float(bits);
      return mul2(pack_bf16(d, d), power2(120 - kDown));
    };
    const uint32_t g = scale(p.s.x), h = scale(p.s.y);
    for (int i = 0; i < 4; ++i) {
      a[i] = make_uint4(values(p.q[i].x, g), values(p.q[i].y, h), values(p.q[i].z, g),
                        values(p.q[i].w, h));
    }
  }
};

struct F16 : Plain {
  static constexpr Code kCode = Code::kF16;
  static constexpr int kUnit = 64, kVectors = 4, kTileBytes = 16 * 64 * 2, kBlock = 1, kBytes = 2;
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    for (int i = 0; i < 4; ++i)
      p.q[i] = From::get(reinterpret_cast<const uint4*>(tile) + i * 32 + lane);
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) {
      a[i] = make_uint4(two(p.q[i].x), two(p.q[i].y), two(p.q[i].z), two(p.q[i].w));
    }
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const int k = i / 256, lane = i / 8 % 32, n = i % 8;
      const int col = k * 16 + operand_col(lane, n);
      const uint8_t* row = rows[operand_row(lane, n)];
      reinterpret_cast<uint16_t*>(tile)[i] =
          row != nullptr && col < left ? reinterpret_cast<const uint16_t*>(row)[col] : 0;
    }
  }
  static __device__ uint32_t two(uint32_t w) {
    return pack_bf16(half_bits(w & 0xffff), half_bits(w >> 16));
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    const int lane = row % 8 * 4 + col % 8 / 2, n = (col % 16 / 8) * 4 + (row / 8) * 2 + col % 2;
    return half_at(tile + 2 * (col / 16 * 256 + lane * 8 + n));
  }
};

// Consecutive rows of 64 values. Dense GEMMs compute in F32 (gemm_sm80_small_m.cu); expert GEMMs
// round to BF16 when they load.
struct F32 : Plain {
  static constexpr Code kCode = Code::kF32;
  static constexpr int kUnit = 64, kVectors = 8, kTileBytes = 16 * 64 * 4, kBlock = 1, kBytes = 4;
  template <class From>
  static __device__ uint32_t two(const uint8_t* tile, int row, int col) {
    const float2 v = From::get(reinterpret_cast<const float2*>(tile) + (row * 64 + col) / 2);
    return pack_bf16(v.x, v.y);
  }
  template <class From>
  static __device__ void load(const uint8_t* tile, int, int lane, Piece& p) {
    const int g = lane / 4, c = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      p.q[i] =
          make_uint4(two<From>(tile, g, i * 16 + c), two<From>(tile, g + 8, i * 16 + c),
                     two<From>(tile, g, i * 16 + c + 8), two<From>(tile, g + 8, i * 16 + c + 8));
    }
  }
  static __device__ void decode(const Piece& p, int, int, uint4 (&a)[4]) {
    for (int i = 0; i < 4; ++i) a[i] = p.q[i];
  }
  static __device__ void pack(uint8_t* tile, const uint8_t* const* rows, int64_t left, int thread) {
    for (int i = thread; i < 16 * 64; i += 256) {
      const uint8_t* row = rows[i / 64];
      const int col = i % 64;
      reinterpret_cast<float*>(tile)[i] =
          row != nullptr && col < left ? reinterpret_cast<const float*>(row)[col] : 0.0f;
    }
  }
  static __device__ float at(const uint8_t* tile, int row, int col) {
    return reinterpret_cast<const float*>(tile)[row * 64 + col];
  }
};

}  // namespace freshet::cuda
