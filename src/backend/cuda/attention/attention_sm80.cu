// Attention over the paged KV cache with mma.m16n8k16 in F16 (in BF16 for a BF16 cache) and F32
// sums: prefill, and decode of unusual head sizes. attention.cuh documents the order of sums.
#include "backend/cuda/attention/qk_norm_rope_store.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

constexpr int kSlice = 128;  // value features per block
constexpr int kMostShared = 220 << 10;

struct AttentionPlan {
  int warps, key_pad, value_pad, slices, splits;
  size_t shared;
};

// A block's tile when every sequence has one query.
__device__ __forceinline__ Tile single_tile(const BatchArgs& b, int group, int rows_per_block,
                                            int index) {
  const int tiles = (group + rows_per_block - 1) / rows_per_block;
  const int sequence = index / tiles;
  const int first = index % tiles * rows_per_block;
  return {sequence, first, min(rows_per_block, group - first), 1, b.context_len[sequence],
          sequence};
}

// The first and the last key that a query attends to.
struct Seen {
  int first, last;
};
__device__ __forceinline__ Seen seen_by(const AttentionArgs& a, const Tile& tile, int query) {
  if (a.ranges != nullptr) {
    const int32_t* range = a.ranges + 2 * (tile.query_start + query);
    return {range[0], range[1] - 1};
  }
  const int position = tile.context - tile.queries + query;
  return {a.window > 0 ? max(0, position - a.window + 1) : 0, position};
}

// The block ids of a chunk, one per lane: looking them up for each vector would pay the memory
// latency every time.
__device__ __forceinline__ int chunk_ids(const AttentionArgs& a, int sequence, int chunk,
                                         int high) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane >= kChunk / kBlockTokens || chunk * kChunk + lane * kBlockTokens > high) return -1;
  return a.batch.tables[sequence * a.batch.table_stride + chunk * (kChunk / kBlockTokens) + lane];
}

// Stores 16 bytes of the cache in shared memory in operand form.
template <CacheType kType>
__device__ __forceinline__ void put_features(__half* to, const uint8_t* from, const uint8_t* scale,
                                             bool valid) {
  if constexpr (kType == CacheType::kInt4) {
    uint4 v = {};
    if (valid) v = *reinterpret_cast<const uint4*>(from);
    int4_to_half(reinterpret_cast<uint4*>(to), v,
                 valid ? *reinterpret_cast<const __half*>(scale) : __half{});
  } else if constexpr (in_bytes(kType)) {
    uint4 v = {};
    if (valid) v = *reinterpret_cast<const uint4*>(from);
    auto* first = reinterpret_cast<uint4*>(to);
    if constexpr (kType == CacheType::kE4M3) {
      e4m3_to_half(first, first + 1, v);
    } else {
      int8_to_half(first, first + 1, v, valid ? *reinterpret_cast<const __half*>(scale) : __half{});
    }
  } else {
    cp_async16(to, from, valid);
  }
}

// Copies keys or values of a chunk to shared memory; zeros if they are masked for every row. kType:
// the type of this part.
template <CacheType kType>
__device__ __forceinline__ void load_chunk(__half* to, int pad, int features, int first,
                                           const AttentionArgs& a, int id, int head, int chunk,
                                           int low, int high, bool keys) {
  constexpr int kFeatures = kType == CacheType::kInt4 ? 32 : in_bytes(kType) ? 16 : 8;
  const int vectors = (pad - 8) / kFeatures;
  const int threads = static_cast<int>(blockDim.x);
  const int dim = keys || a.cache.shared != 0 ? a.cache.key_dim : a.cache.value_dim;
  const int key = static_cast<int>(threadIdx.x) % kChunk, p = chunk * kChunk + key;
  const int block = __shfl_sync(0xffffffff, id, key / kBlockTokens);
  const bool seen = p >= low && p <= high && block >= 0;
  const int64_t real = seen ? block : 0;
  const uint8_t* from = keys ? keys_at(a.cache, real, head) : values_at(a.cache, real, head);
  const ScalesAt scales = scales_at(kType, p % kBlockTokens, dim, keys || a.cache.shared != 0);
  const uint8_t* scale = from + scales.first;
  from += slot_at(kType, p % kBlockTokens, dim);
  for (int v = static_cast<int>(threadIdx.x) / kChunk; v < vectors; v += threads / kChunk) {
    const bool valid = seen && v * kFeatures < features;
    const int f = valid ? first + v * kFeatures : 0;
    put_features<kType>(to + key * pad + v * kFeatures, from + feature_at(kType, f),
                        scale + f / 32 * scales.apart, valid);
  }
}

// The same for a cache of type kType, which may store keys and values differently.
template <CacheType kType>
__device__ __forceinline__ void load_part(__half* to, int pad, int features, int first,
                                          const AttentionArgs& a, int id, int head, int chunk,
                                          int low, int high, bool keys) {
  if (kType != CacheType::kK8V4 || keys) {
    load_chunk<part_of(kType, true)>(to, pad, features, first, a, id, head, chunk, low, high, keys);
  } else {
    load_chunk<part_of(kType, false)>(to, pad, features, first, a, id, head, chunk, low, high,
                                      false);
  }
}

// Scores of a warp's 16 rows with a chunk's keys. `limit`: first and last visible position of rows
// g and g + 8.
template <bool kBF16>
__device__ __forceinline__ void score_chunk(float (*score)[4], const AttentionArgs& a,
                                            const __half* q, const __half* keys, int pad, int chunk,
                                            const int (&limit)[2][2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 2
  for (int k = 0; k < pad - 8; k += 16) {
    uint32_t qa[4];
    ldmatrix4(qa, q + (lane % 16) * pad + k + lane / 16 * 8);
    const uint4 operand = make_uint4(qa[0], qa[1], qa[2], qa[3]);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t kb[4];
      const int key = j * 8 + lane / 16 * 8 + lane % 8;
      ldmatrix4(kb, keys + key * pad + k + lane / 8 % 2 * 8);
      mma_numbers<kBF16>(score[j], operand, kb[0], kb[1]);
      mma_numbers<kBF16>(score[j + 1], operand, kb[2], kb[3]);
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int p = chunk * kChunk + j * 8 + lane % 4 * 2 + i % 2;
      const bool seen = p >= limit[i / 2][0] && p <= limit[i / 2][1];
      score[j][i] = seen ? score_of(a, score[j][i]) : -INFINITY;
    }
  }
}

// Adds the distance bias to the scores, which are not multiplied by the softmax scale yet.
__device__ __forceinline__ void add_distance_bias(float (*score)[4], const AttentionArgs& a,
                                                  const Tile& tile, int kv_head, int first_row,
                                                  int chunk) {
  const int lane = static_cast<int>(threadIdx.x % 32), group = a.heads / a.cache.kv_heads;
  for (int r = 0; r < 2; ++r) {
    const int row = tile.first_row + min(first_row + lane / 4 + r * 8, tile.rows - 1);
    const int position = tile.context - tile.queries + row / group;
    const int64_t head = kv_head * group + row % group;
    const float* bias = a.distance_bias + head * (2 * a.bias_reach + 1) + a.bias_reach;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      for (int i = 0; i < 2; ++i) {
        const int distance = chunk * kChunk + j * 8 + lane % 4 * 2 + i - position;
        const float its = bias[max(-a.bias_reach, min(distance, a.bias_reach))];
        score[j][r * 2 + i] = __fadd_rn(score[j][r * 2 + i], __fdiv_rn(its, a.scale));
      }
    }
  }
}

// Adds a chunk's weighted values.
template <bool kBF16, int VT>
__device__ __forceinline__ void add_values(Sums<VT>& sums, const uint32_t (*weights)[4],
                                           const __half* values, int pad) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint4 operand = make_uint4(weights[k][0], weights[k][1], weights[k][2], weights[k][3]);
#pragma unroll
    for (int j = 0; j < VT; j += 2) {
      uint32_t vb[4];
      ldmatrix4_trans(vb, values + (k * 16 + lane % 16) * pad + j * 8 + lane / 16 * 8);
      mma_numbers<kBF16>(sums.acc[j], operand, vb[0], vb[1]);
      mma_numbers<kBF16>(sums.acc[j + 1], operand, vb[2], vb[3]);
    }
  }
}

template <int VT>
__device__ __forceinline__ void write_rows(const Sums<VT>& sums, const AttentionArgs& a,
                                           const AttentionPlan& plan, const Tile& tile, int kv_head,
                                           int slice, int split) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int group = a.heads / a.cache.kv_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * 16 + lane / 4 + r * 8;
    if (row >= tile.rows) continue;
    const int token = tile.query_start + (tile.first_row + row) / group;
    const int head = kv_head * group + (tile.first_row + row) % group;
    float* to = a.out + token * a.out_stride + head * a.cache.value_dim;
    float end = 1.0f;
    if (split >= 0) {
      to = partial_at(a, token, head, split, plan.splits);
      if (slice == 0 && lane % 4 == 0) {
        to[a.cache.value_dim] = sums.m[r];
        to[a.cache.value_dim + 1] = sums.l[r];
      }
    } else {
      end = ending(sums.m[r], sums.l[r], a, head);
    }
#pragma unroll
    for (int j = 0; j < VT; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int d = slice * kSlice + j * 8 + lane % 4 * 2 + i;
        if (d >= a.cache.value_dim) continue;
        const float v = sums.acc[j][r * 2 + i];
        to[d] = split >= 0 ? v : __fmul_rn(v, end);
      }
    }
  }
}

// Grid: tiles, KV heads, slices of values x KV splits (KV splits only if `split`).
template <CacheType kType, int VT>
__global__ void __launch_bounds__(256)
    attention_kernel(const __grid_constant__ AttentionArgs a,
                     const __grid_constant__ AttentionPlan plan, int split) {
  constexpr bool kBF16 = kType == CacheType::kBF16;
  extern __shared__ __align__(16) uint8_t memory[];
  let_next_start();
  wait();
  const int group = a.heads / a.cache.kv_heads;
  const int rows_per_block = plan.warps * 16;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int slice = static_cast<int>(blockIdx.z) % plan.slices;
  const int index = static_cast<int>(blockIdx.x);
  const Tile tile = a.single != 0 ? single_tile(a.batch, group, rows_per_block, index)
                                  : find_tile(a.batch, group, rows_per_block, index);
  if (tile.sequence < 0) return;
  const int first_query = tile.first_row / group;
  const int last_query = (tile.first_row + tile.rows - 1) / group;
  const Seen first_seen = seen_by(a, tile, first_query), last_seen = seen_by(a, tile, last_query);
  const int low = first_seen.first, high = last_seen.last;
  int first_chunk = low / kChunk, last_chunk = high / kChunk;
  const int piece = split != 0 ? static_cast<int>(blockIdx.z) / plan.slices : -1;
  if (piece >= 0) {
    first_chunk = max(first_chunk, piece * kChunksOfPiece);
    last_chunk = min(last_chunk, piece * kChunksOfPiece + kChunksOfPiece - 1);
    if (first_chunk > last_chunk) return;
  }

  auto* q = reinterpret_cast<__half*>(memory);
  auto* buffers = q + rows_per_block * plan.key_pad;
  const int slot_size = kChunk * max(plan.key_pad, plan.value_pad);
  const int features = min(kSlice, a.cache.value_dim - slice * kSlice);
  // Half tiles go through two buffers: the keys of both halves, then the values of both.
  int next_chunk = first_chunk, fetched = 0;
  bool next_keys = true;
  const auto fetch = [&] {
    if (next_chunk <= last_chunk) {
      __half* to = buffers + (fetched++ % 2) * slot_size;
      const int id = chunk_ids(a, tile.sequence, next_chunk, high);
      const int first = next_keys ? 0 : slice * kSlice;
      load_part<kType>(to, next_keys ? plan.key_pad : plan.value_pad,
                       next_keys ? a.cache.key_dim : features, first, a, id, kv_head, next_chunk,
                       low, high, next_keys);
      if (next_chunk % kChunks == kChunks - 1 || next_chunk == last_chunk) {
        if (next_keys) {
          next_chunk = max(first_chunk, next_chunk / kChunks * kChunks);
        } else {
          ++next_chunk;
        }
        next_keys = !next_keys;
      } else {
        ++next_chunk;
      }
    }
    cp_async_commit();
  };
  int taken = 0;
  const auto take = [&] {  // waits for the next buffer and requests the one after it
    __syncthreads();       // all threads have finished with the buffer that is overwritten
    fetch();
    cp_async_wait<1>();
    __syncthreads();
    return buffers + (taken++ % 2) * slot_size;
  };
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  fetch();
  // Queries, four rows of a warp at a time so that their loads overlap.
  const int warps = static_cast<int>(blockDim.x / 32);
  for (int base = warp; base < rows_per_block; base += 4 * warps) {
    for (int d = lane; d < plan.key_pad - 8; d += 32) {
      float v[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = base + n * warps, r = tile.first_row + row;
        const bool real = row < tile.rows && d < a.cache.key_dim;
        v[n] = real ? a.q[(tile.query_start + r / group) * a.q_stride +
                          (kv_head * group + r % group) * a.cache.key_dim + d]
                    : 0.0f;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = base + n * warps;
        if (row < rows_per_block) {
          q[row * plan.key_pad + d] =
              __ushort_as_half(static_cast<uint16_t>(pack_numbers<kBF16>(v[n], 0.0f)));
        }
      }
    }
  }
  int limit[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(warp * 16 + lane / 4 + r * 8, tile.rows - 1);
    const Seen seen = seen_by(a, tile, (tile.first_row + row) / group);
    limit[r][0] = seen.first;
    limit[r][1] = seen.last;
  }
  const bool works = warp < plan.warps && warp * 16 < tile.rows;
  const float steep = steepness(a);
  Sums<VT> total, sums;
  total.clear();
  sums.clear();
  for (int t = first_chunk / kChunks; t <= last_chunk / kChunks; ++t) {
    float score[kKeyTiles][4] = {};
#pragma unroll
    for (int half = 0; half < kChunks; ++half) {
      const int chunk = t * kChunks + half;
      if (chunk >= first_chunk && chunk <= last_chunk) {
        const __half* keys = take();
        if (works) {
          score_chunk<kBF16>(score + half * 8, a, q + warp * 16 * plan.key_pad, keys, plan.key_pad,
                             chunk, limit);
          if (a.distance_bias != nullptr) {
            add_distance_bias(score + half * 8, a, tile, kv_head, warp * 16, chunk);
          }
        }
      } else {
        for (int j = half * 8; j < half * 8 + 8; ++j) {
          for (int i = 0; i < 4; ++i) score[j][i] = -INFINITY;
        }
      }
    }
    const bool begins = t % kTiles == 0 || t == first_chunk / kChunks;
    if (begins) {
      add_lanes(sums.l);
      total.merge(sums, steep);
      sums.clear();
    }
    uint32_t weights[kKeyTiles / 2][4];
    float factor[2];
    const bool raised = take_scores<2, kBF16>(
        sums, begins,
        [&](int r, int j) { return make_float2(score[j][r * 2], score[j][r * 2 + 1]); }, steep,
        factor, [&](int r, int j, uint32_t pair) { weights[j / 2][j % 2 * 2 + r] = pair; });
    if (raised) sums.scale(factor);
#pragma unroll
    for (int half = 0; half < kChunks; ++half) {
      const int chunk = t * kChunks + half;
      if (chunk < first_chunk || chunk > last_chunk) continue;
      const __half* values = take();
      if (works) add_values<kBF16, VT>(sums, weights + half * 4, values, plan.value_pad);
    }
  }
  add_lanes(sums.l);
  total.merge(sums, steep);
  if (works) write_rows<VT>(total, a, plan, tile, kv_head, slice, piece);
}

__device__ __forceinline__ void put_one(const Activations& act, int64_t row, int64_t col,
                                        int64_t cols, float v) {
  reinterpret_cast<__nv_bfloat16*>(act.data)[activation_at(act, row, col, cols)] =
      __float2bfloat16_rn(v);
}

// The sequence of a token, as a tile of this one query.
__device__ __forceinline__ Tile tile_of_token(const AttentionArgs& a, int token) {
  if (a.single != 0) return single_tile(a.batch, 1, 1, token);
  const int32_t* start = a.batch.query_start;
  int first = 0, end = a.batch.sequences;  // the sequence is in [first, end)
  while (end - first > 1) {
    const int middle = (first + end) / 2;
    (start[middle] <= token ? first : end) = middle;
  }
  return {first,
          token - start[first],
          1,
          start[first + 1] - start[first],
          a.batch.context_len[first],
          start[first]};
}

// Merges the KV splits of all queries. Blocks: [rows of activations, heads]. The first row is that
// of the batch's first sequence.
__global__ void merge_kernel(const __grid_constant__ AttentionArgs a, int splits) {
  let_next_start();
  wait();
  const int first = a.single != 0 ? 0 : a.batch.query_start[0];
  const int s = first + static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y);
  const int value_dim = a.cache.value_dim;
  const int64_t cols = static_cast<int64_t>(a.heads) * value_dim;
  const bool real = s < a.batch.tokens;
  if (a.act.data != nullptr && head == a.heads - 1) {
    const int64_t padded = (cols + kPadCols - 1) / kPadCols * kPadCols;
    for (int64_t c = cols + threadIdx.x; c < padded; c += blockDim.x) {
      put_one(a.act, s, c, cols, 0.0f);
    }
  }
  Seen seen = {};
  if (real) {
    const Tile tile = tile_of_token(a, s);
    seen = seen_by(a, tile, tile.first_row);
  }
  for (int d = static_cast<int>(threadIdx.x); d < value_dim; d += static_cast<int>(blockDim.x)) {
    float out = 0.0f;
    if (real) {
      const float steep = steepness(a);
      float m = -INFINITY, l = 0.0f, acc = 0.0f;
#pragma unroll 4
      for (int i = seen.first / kPieceTokens; i <= seen.last / kPieceTokens; ++i) {
        const float* p = partial_at(a, s, head, i, splits);
        const float its_m = p[value_dim], its_l = p[value_dim + 1];
        const float most = fmaxf(m, its_m);
        const float mine = shrink(m, most, steep), its = shrink(its_m, most, steep);
        m = most;
        l = __fmaf_rn(its_l, its, __fmul_rn(l, mine));
        acc = __fmaf_rn(p[d], its, __fmul_rn(acc, mine));
      }
      out = __fmul_rn(acc, ending(m, l, a, head));
      a.out[s * a.out_stride + head * value_dim + d] = out;
    }
    if (a.act.data != nullptr) {
      put_one(a.act, s, static_cast<int64_t>(head) * value_dim + d, cols, out);
    }
  }
}

AttentionPlan plan_of(const AttentionArgs& a) {
  AttentionPlan p = {};
  // Pad to whole vectors of the cache.
  const int unit = part_of(a.cache.type, true) == CacheType::kInt4 ? 32 : 16;
  p.key_pad = (a.cache.key_dim + unit - 1) / unit * unit + 8;
  const int slice = a.cache.value_dim < kSlice ? a.cache.value_dim : kSlice;
  p.value_pad = (slice <= 64 ? 64 : 128) + 8;
  p.slices = static_cast<int>(ceil_div(a.cache.value_dim, kSlice));
  p.splits = static_cast<int>(ceil_div(a.max_context, kPieceTokens));
  const int group = a.heads / a.cache.kv_heads;
  p.warps = static_cast<int>(ceil_div(static_cast<int64_t>(a.max_queries) * group, 16));
  p.warps = p.warps > 8 ? 8 : p.warps;
  const auto bytes = [&] {
    const int widest = p.key_pad > p.value_pad ? p.key_pad : p.value_pad;
    return 2 * static_cast<size_t>(p.warps * 16 * p.key_pad + 2 * kChunk * widest);
  };
  while (bytes() > kMostShared && p.warps > 1) p.warps = (p.warps + 1) / 2;
  p.shared = bytes();
  return p;
}

template <CacheType kType, int VT>
int run(const Context& ctx, const AttentionArgs& a, const AttentionPlan& plan, dim3 grid,
        dim3 block, int split) {
  const auto kernel = attention_kernel<kType, VT>;
  if (const int error = raise_shared(kernel, kMostShared); error != 0) return error;
  return launch(ctx, kernel, grid, block, plan.shared, a, plan, split);
}

int attend(const Context& ctx, const AttentionArgs& args);

// Sequences with one query come first and use the decode kernel. All kernels have the same order of
// sums, so this split affects speed only.
int attention_of_both(const Context& ctx, const AttentionArgs& a) {
  AttentionArgs ones = a, rest = a;
  ones.batch.sequences = ones.batch.tokens = a.single;
  ones.max_queries = 1;
  rest.batch.query_start += a.single;
  rest.batch.context_len += a.single;
  rest.batch.tables += a.single * a.batch.table_stride;
  rest.batch.sequences -= a.single;
  rest.single = 0;
  const AttentionKernel of_ones = attention_kernel_of(ctx, ones);
  const bool decodes = of_ones == kDecodeSm90 || of_ones == kDecodeClusterSm90;
  const AttentionKernel of_rest = attention_kernel_of(ctx, rest);
  const bool direct = decodes && (of_rest == kPrefillSm90 || of_rest == kExtendSm90) &&
                      (a.act.e4m3 == 0 || a.cache.value_dim % kE4M3Cols == 0);
  if (!direct) {
    ones.act = rest.act = {};
    ones.only_act = rest.only_act = 0;
  }
  ones.before = nullptr;
  int error = attend(ctx, ones);
  if (error == 0) error = attend(ctx, rest);
  if (error != 0 || direct || a.act.data == nullptr) return error;
  const Rows out = {a.out, a.batch.tokens, int64_t{a.heads} * a.cache.value_dim, a.out_stride};
  return encode(ctx, &a.act, &out, nullptr, nullptr, out.rows);
}

// Runs the operations in `before`, except for queries that a prefill kernel rotates when it loads
// them.
int do_before(const Context& ctx, const HeadsArgs& before, int64_t queries) {
  const auto some = [&](int from, int upto, int64_t tokens) {
    HeadsArgs some = before;
    some.count = upto - from, some.tokens = tokens;
    for (int i = from; i < upto; ++i) some.of[i - from] = before.of[i];
    return tokens > 0 ? heads_to_cache(ctx, some) : 0;
  };
  if (queries == before.tokens) return some(0, before.count, before.tokens);
  const int error = some(0, 1, queries);
  return error != 0 ? error : some(1, before.count, before.tokens);
}

// Implements attention(); a.before lists the operations that its kernel fuses.
int attend(const Context& ctx, const AttentionArgs& args) {
  AttentionArgs a = args;
  if (a.single > 0 && a.single < a.batch.sequences) return attention_of_both(ctx, a);
  const AttentionKernel row = attention_kernel_of(ctx, a);
  // E4M3 results need heads whose features are whole groups of 128.
  if (a.act.e4m3 != 0 && (a.cache.value_dim % kE4M3Cols != 0 || row == kAttentionSm80)) {
    a.act = {};
    a.only_act = 0;
    const Rows out = {a.out, a.batch.tokens, int64_t{a.heads} * a.cache.value_dim, a.out_stride};
    const int error = attend(ctx, a);
    return error != 0 ? error : encode(ctx, &args.act, &out, nullptr, nullptr, out.rows);
  }
  if (row == kDecodeSm90 || row == kDecodeClusterSm90 || row == kExtendSm90) {
    return attention_single(ctx, a, row == kDecodeClusterSm90);
  }
  if (row == kPrefillSm90) return attention_prompt(ctx, a);
  const AttentionPlan plan = plan_of(a);
  if (plan.shared > kMostShared) return static_cast<int>(cudaErrorInvalidValue);
  const int group = a.heads / a.cache.kv_heads;
  const bool split = splits_context(a) && (a.single != 0 || plan.splits > 1);
  const int64_t rows = plan.warps * 16;
  const int64_t tiles = a.single != 0 ? a.batch.sequences * ceil_div(group, rows)
                                      : a.batch.tokens * group / rows + a.batch.sequences;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.cache.kv_heads),
                  static_cast<unsigned>(plan.slices * (split ? plan.splits : 1)));
  const int warps = plan.warps <= 4 ? 4 : 8;  // warps without rows help to load
  const dim3 block(static_cast<unsigned>(warps * 32));
  const bool narrow = plan.value_pad == 64 + 8;
  const auto of = [&](auto kernel, auto wide) {
    return narrow ? kernel(ctx, a, plan, grid, block, split)
                  : wide(ctx, a, plan, grid, block, split);
  };
  int error = 0;
  switch (a.cache.type) {
    case CacheType::kF16:
      error = of(run<CacheType::kF16, 8>, run<CacheType::kF16, 16>);
      break;
    case CacheType::kBF16:
      error = of(run<CacheType::kBF16, 8>, run<CacheType::kBF16, 16>);
      break;
    case CacheType::kE4M3:
      error = of(run<CacheType::kE4M3, 8>, run<CacheType::kE4M3, 16>);
      break;
    case CacheType::kInt8:
      error = of(run<CacheType::kInt8, 8>, run<CacheType::kInt8, 16>);
      break;
    case CacheType::kInt4:
      error = of(run<CacheType::kInt4, 8>, run<CacheType::kInt4, 16>);
      break;
    case CacheType::kK8V4:
      error = of(run<CacheType::kK8V4, 8>, run<CacheType::kK8V4, 16>);
      break;
  }
  if (error == 0 && !split && a.act.data != nullptr) {
    const Rows out = {a.out, a.batch.tokens, int64_t{a.heads} * a.cache.value_dim, a.out_stride};
    return encode(ctx, &a.act, &out, nullptr, nullptr, out.rows);
  }
  if (error != 0 || !split) return error;
  const int64_t tokens = a.batch.tokens;
  const auto x = static_cast<unsigned>(
      a.act.data != nullptr ? ceil_div(tokens, kTokenTile) * kTokenTile : tokens);
  return launch(ctx, merge_kernel, dim3(x, static_cast<unsigned>(a.heads)), dim3(128), 0, a,
                plan.splits);
}

}  // namespace

AttentionKernel attention_kernel_of(const Context& ctx, const AttentionArgs& a) {
  AttentionProblem p;
  p.format = static_cast<int>(a.cache.type);
  p.tokens = a.max_queries;
  p.key_dim = a.cache.key_dim, p.value_dim = a.cache.value_dim;
  p.heads = a.heads, p.kv_heads = a.cache.kv_heads;
  p.sequences = a.batch.sequences;
  p.single = a.single != 0;
  p.shared_values = a.cache.shared != 0;
  p.partial = splits_context(a);
  p.window = a.window;
  p.max_context = a.max_context;
  p.ranged = a.ranges != nullptr || a.distance_bias != nullptr;
  p.decode_aligned = a.out_stride % 2 == 0 && whole_rows(a.q, a.q_stride);
  p.prefill_aligned =
      a.out_stride % 4 == 0 && reinterpret_cast<uintptr_t>(a.out) % 16 == 0 && a.q_stride % 4 == 0;
  return static_cast<AttentionKernel>(choose(kAttentionRows, ctx, p, ctx.forced[kForcedAttention]));
}

int64_t attention_partial_bytes(const Context&, int tokens, int heads, int value_dim,
                                int64_t context) {
  return static_cast<int64_t>(sizeof(float)) * tokens * heads * (value_dim + kPartialEnd) *
         ceil_div(context, kPieceTokens);
}

int attention(const Context& ctx, const AttentionArgs* args) {
  AttentionArgs a = *args;
  if (a.before != nullptr && !takes_heads(ctx, a)) {
    const HeadsArgs& before = *a.before;
    const bool turned = a.single < a.batch.sequences && prefill_rotates(ctx, a);
    if (!turned) a.before = nullptr;
    if (const int error = do_before(ctx, before, turned ? a.single : before.tokens); error != 0) {
      return error;
    }
  }
  return attend(ctx, a);
}

}  // namespace freshet::cuda
