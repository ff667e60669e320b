// How decode attention turns cached keys and values, from blocks in shared memory, into MMA
// operands.
#pragma once

#include "backend/cuda/attention/attention.cuh"

namespace freshet::cuda::single {

// An F16 cache: the part of a block that belongs to a KV head, and MMA operands from half a tile.
// - kFours: a lane's key operands hold four adjacent features out of 16, and tiles of values
//   interleave features.
// - kAdjacent: a lane's neighbours in a tile are adjacent features of the four.
// - kTogether: a pipeline stage holds the keys and values of half a tile, one copy per block;
//   otherwise it holds one of them.
template <int D>
struct HalfStored {
  static constexpr bool kBF16 = false, kFours = false, kTogether = false, kScaled = false;
  static constexpr bool kAdjacent = false;
  static constexpr CacheType kType = CacheType::kF16;
  static constexpr int kKeyBytes = head_bytes(kType, D), kBlockBytes = kKeyBytes, kResident = 2;
  static constexpr int kLeastSlots = 6;
  // What a lane loads for a block's 16 keys and features [16 k, 16 k + 32), and the operands made
  // of it: per 16 features, two columns of 8 keys. kAsRows: both columns are MMA rows, whose A
  // operand interleaves them.
  static constexpr int kKeyWords = 8;
  template <bool kAsRows>
  static __device__ __forceinline__ void load_keys(uint32_t (&v)[kKeyWords], const uint8_t* block,
                                                   int k) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int low = lane / 8 % 2, high = lane / 16;
    const auto* from = reinterpret_cast<const __half*>(block) + (kAsRows ? low : high) * 8 * D +
                       (kAsRows ? high : low) * 64 + lane % 8 * 8 + k * 128;
    ldmatrix4(reinterpret_cast<uint32_t(&)[4]>(v[0]), from);
    ldmatrix4(reinterpret_cast<uint32_t(&)[4]>(v[4]), from + 128);
  }
  template <bool kAsRows>
  static __device__ __forceinline__ void open_keys(uint32_t (&b)[2][4],
                                                   const uint32_t (&v)[kKeyWords], const uint8_t*,
                                                   int) {
#pragma unroll
    for (int i = 0; i < kKeyWords; ++i) b[i / 4][place<kAsRows>(i % 4)] = v[i];
  }
  // The same for values: keys [16 k, 16 k + 16) of a stage and kPairs times two columns of 8
  // features, from `column` on.
  static constexpr int kPairWords = 4;
  template <int kPairs, bool kAsRows>
  static __device__ __forceinline__ void load_values(uint32_t (&v)[kPairs * kPairWords],
                                                     const uint8_t* slot, int k, int column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int low = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      ldmatrix4_trans(reinterpret_cast<uint32_t(&)[4]>(v[i * 4]),
                      reinterpret_cast<const __half*>(slot) +
                          (k * 2 + (kAsRows ? high : low)) * 8 * D +
                          (column + i * 2 + (kAsRows ? low : high)) * 64 + lane % 8 * 8);
    }
  }
  template <int kPairs, bool kAsRows>
  static __device__ __forceinline__ void open_values(uint32_t (&b)[kPairs][4],
                                                     const uint32_t (&v)[kPairs * kPairWords],
                                                     const uint8_t*, int, int) {
#pragma unroll
    for (int i = 0; i < kPairs * 4; ++i) b[i / 4][place<kAsRows>(i % 4)] = v[i];
  }

 private:
  // The operand register of loaded word i of four.
  template <bool kAsRows>
  static constexpr __device__ __forceinline__ int place(int i) {
    return kAsRows ? i % 2 * 2 + i / 2 : i;
  }
};

// The same in BF16.
template <int D>
struct BF16Stored : HalfStored<D> {
  static constexpr bool kBF16 = true;
  static constexpr CacheType kType = CacheType::kBF16;
};

// One-byte codes: E4M3, or INT8 with scales.
template <int D, CacheType kCodes>
struct CodesStored {
  static constexpr CacheType kType = kCodes;
  static constexpr bool kBF16 = false, kFours = true, kTogether = true, kAdjacent = false;
  static constexpr bool kScaled = kType == CacheType::kInt8;
  static constexpr int kScales = scales_of(D), kNumbers = kBlockTokens * D;
  static constexpr int kKeyBytes = head_bytes(kType, D), kBlockBytes = 2 * kKeyBytes;
  static constexpr int kLeastSlots = 4, kResident = 3;
  static_assert(D % 64 == 0 && D <= 256);
  static constexpr int kKeyWords = 4;
  template <bool kAsRows>
  static __device__ __forceinline__ void load_keys(uint32_t (&codes)[kKeyWords],
                                                   const uint8_t* block, int k) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    ldmatrix4(codes, block + lane / 8 % 2 * 8 * D + (k + lane / 16) * 128 + lane % 8 * 16);
  }
  template <bool kAsRows>
  static __device__ __forceinline__ void open_keys(uint32_t (&b)[2][4],
                                                   const uint32_t (&codes)[kKeyWords],
                                                   [[maybe_unused]] const uint8_t* block, int k) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      __half2 scale{};
      if constexpr (kScaled) {
        // All scales of a key at once: one load for all k.
        struct alignas(2 * kScales) Scales {
          __half of[kScales];
        };
        const auto& all = *reinterpret_cast<const Scales*>(block + kNumbers +
                                                           (tile * 8 + lane / 4) * 2 * kScales);
        scale = __half2half2(all.of[k / 2]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t its = codes[i * 2 + tile];
        b[i][tile * 2] = kScaled ? scaled_codes<kLowCodes>(its, scale) : e4m3_to_half(its);
        b[i][tile * 2 + 1] =
            kScaled ? scaled_codes<kHighCodes>(its, scale) : e4m3_to_half(its >> 16);
      }
    }
  }
  // Two adjacent features of keys 8 i + 2 (lane % 4) and the next, from 32 features whose scales in
  // the block are given.
  static __device__ __forceinline__ void two(uint32_t& even, uint32_t& odd, uint32_t codes,
                                             const uint8_t* scales, int i) {
    if constexpr (kScaled) {
      const int lane = static_cast<int>(threadIdx.x % 32);
      const auto its = reinterpret_cast<const __half2*>(scales)[i * 4 + lane % 4];
      even = scaled_codes<kEvenCodes>(codes, its);
      odd = scaled_codes<kOddCodes>(codes, its);
    } else {
      const uint32_t turned = __byte_perm(codes, 0, 0x3120);
      even = e4m3_to_half(turned);
      odd = e4m3_to_half(turned >> 16);
    }
  }
  static constexpr int kPairWords = 2;
  template <int kPairs, bool kAsRows>
  static __device__ __forceinline__ void load_values(uint32_t (&codes)[kPairs * kPairWords],
                                                     const uint8_t* slot, int k, int column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint8_t* from = slot + k * kBlockBytes + kKeyBytes + lane / 8 % 2 * 8 * D +
                          (column / 2 + (kPairs == 2 ? lane / 16 : 0)) * 128 + lane % 8 * 16;
    if constexpr (kPairs == 2) {
      ldmatrix4_trans(codes, from);
    } else {
      ldmatrix2_trans(codes, from);
    }
  }
  template <int kPairs, bool kAsRows>
  static __device__ __forceinline__ void open_values(uint32_t (&b)[kPairs][4],
                                                     const uint32_t (&codes)[kPairs * kPairWords],
                                                     const uint8_t* slot, int k, int column) {
    const uint8_t* scales =
        slot + k * kBlockBytes + kKeyBytes + kNumbers + column / 4 * kBlockTokens * 2;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      two(b[i / 2][i % 2], b[i / 2][2 + i % 2], codes[i], scales, i % 2);
    }
  }
};
template <int D>
struct E4M3Stored : CodesStored<D, CacheType::kE4M3> {};
template <int D>
struct Int8Stored : CodesStored<D, CacheType::kInt8> {};

// INT4 values, and INT8 or INT4 keys. A word of codes is a quad of attention.cuh, whose pairs are
// already in operand order: for keys, four adjacent features of each half of 32 features; for
// values, two keys.
template <int D, bool kInt8Keys>
struct FourBitsStored {
  static constexpr CacheType kType = kInt8Keys ? CacheType::kK8V4 : CacheType::kInt4;
  static constexpr bool kBF16 = false, kFours = true, kTogether = true, kAdjacent = true;
  static constexpr bool kScaled = true;
  static constexpr int kScales = scales_of(D), kNumbers = numbers_bytes(CacheType::kInt4, D);
  static constexpr int kKeyBytes = head_bytes(part_of(kType, true), D);
  static constexpr int kBlockBytes = kKeyBytes + head_bytes(CacheType::kInt4, D);
  static constexpr int kEightBytes = 8 * kScales * 16;  // codes of eight slots
  static constexpr int kLeastSlots = 4, kResident = 3;
  static_assert(D % 64 == 0 && D <= 256 && kBlockBytes % 16 == 0);
  using Int8Keys = CodesStored<D, CacheType::kInt8>;
  static constexpr int kKeyWords = kInt8Keys ? Int8Keys::kKeyWords : 2;
  template <bool kAsRows>
  static __device__ __forceinline__ void load_keys(uint32_t (&codes)[kKeyWords],
                                                   const uint8_t* block, int k) {
    if constexpr (kInt8Keys) {
      Int8Keys::template load_keys<kAsRows>(codes, block, k);
    } else {
      const int lane = static_cast<int>(threadIdx.x % 32);
      ldmatrix2(codes, block + lane / 8 % 2 * kEightBytes + k / 2 * 128 + lane % 8 * 16);
    }
  }
  template <bool kAsRows>
  static __device__ __forceinline__ void open_keys(uint32_t (&b)[2][4],
                                                   const uint32_t (&codes)[kKeyWords],
                                                   const uint8_t* block, int k) {
    if constexpr (kInt8Keys) {
      Int8Keys::template open_keys<kAsRows>(b, codes, block, k);
    } else {
      const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        struct alignas(2 * kScales) Scales {
          __half of[kScales];
        };
        const auto& all = *reinterpret_cast<const Scales*>(block + kNumbers +
                                                           (tile * 8 + lane / 4) * 2 * kScales);
        const __half2 scale = __half2half2(all.of[k / 2]);
        b[0][tile * 2] = scaled_pair<0>(codes[tile], scale);
        b[0][tile * 2 + 1] = scaled_pair<1>(codes[tile], scale);
        b[1][tile * 2] = scaled_pair<2>(codes[tile], scale);
        b[1][tile * 2 + 1] = scaled_pair<3>(codes[tile], scale);
      }
    }
  }
  // A matrix has 32 features of eight keys, which include those of a single pair of columns.
  static constexpr int kPairWords = 2;
  template <int kPairs, bool kAsRows>
  static __device__ __forceinline__ void load_values(uint32_t (&codes)[kPairs * kPairWords],
                                                     const uint8_t* slot, int k, int column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    uint32_t of_eight[2];
    ldmatrix2_trans(of_eight, slot + k * kBlockBytes + kKeyBytes + lane / 8 % 2 * kEightBytes +
                                  column / 4 * 128 + lane % 8 * 16);
    codes[0] = of_eight[0], codes[1] = of_eight[1];
  }
  template <int kPairs, bool kAsRows>
  static __device__ __forceinline__ void open_values(uint32_t (&b)[kPairs][4],
                                                     const uint32_t (&codes)[kPairs * kPairWords],
                                                     const uint8_t* slot, int k, int column) {
    const uint8_t* scales =
        slot + k * kBlockBytes + kKeyBytes + kNumbers + column / 4 * kBlockTokens * 2;
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto scale = reinterpret_cast<const __half2*>(scales)[i * 4 + lane % 4];
      if constexpr (kPairs == 2) {
        b[0][i] = scaled_pair<0>(codes[i], scale);
        b[0][2 + i] = scaled_pair<1>(codes[i], scale);
        b[1][i] = scaled_pair<2>(codes[i], scale);
        b[1][2 + i] = scaled_pair<3>(codes[i], scale);
      } else {
        const uint32_t half = codes[i] >> column / 2 % 2 * 8;  // features 0 to 15 or 16 to 31
        b[0][i] = scaled_pair<0>(half, scale);
        b[0][2 + i] = scaled_pair<1>(half, scale);
      }
    }
  }
};
template <int D>
struct Int4Stored : FourBitsStored<D, false> {};
template <int D>
struct K8V4Stored : FourBitsStored<D, true> {};

}  // namespace freshet::cuda::single
