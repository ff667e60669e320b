// Attention of one query per sequence, or of a few. It is limited by bandwidth, so keys and values
// are streamed through a pipeline.
//
// A task is a run of KV splits of one sequence's context, for a tile of rows that share a KV head:
// the query heads of a query, or (16 rows) of several adjacent ones. The
// grid has as many blocks as are resident at once; each takes one task and claims further ones from
// a counter. The producer warp finds tasks and fills the pipeline in shared memory by TMA bulk
// copies, half a tile of keys or values per stage, one copy per block of the KV cache. It copies
// the first stages of a task while the previous task is computed, and those of the first task
// before the previous kernel ends, except blocks that this step's kernels write. Four consumer
// warps share a tile: each takes some keys for the scores and softmax weights, which the warps
// exchange through shared memory as MMA operands, and some features for the values. If a block has
// the whole context, it writes the result; otherwise the last block to finish merges all splits
// from left to right. So neither the cut into runs nor the order of blocks changes a bit.
//
// Usual heads may be normalised, rotated and stored in the same kernel (decode_sm90_qkv.cuh). A
// Stored type says how values of the cache become operands (decode_kv_operands.cuh).
#pragma once

#include "backend/cuda/attention/decode_sm90_qkv.cuh"
#include "backend/cuda/attention/decode_split_kv.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda::single {

// Pipeline stages: kMostSlots, or fewer if one more block then fits on an SM.
inline constexpr int kMostSlots = 6;
template <class T>
struct Shared {
  static constexpr int kBlocks = kChunk / kBlockTokens;
  // What warps exchange for a tile, double-buffered: softmax weights as MMA operands, partial sums
  // of the weights per lane, and the largest scores.
  struct alignas(16) Tile {
    uint32_t weights[kTileTokens / 16][32][2 * T::kRows];
    float sums[T::kRows][32][kWarps];
    float most[8 * T::kRows][kWarps];
  } tiles[2];
  uint64_t full[kMostSlots], empty[kMostSlots];
  uint64_t told[2], done[2], read;  // pipeline of tasks; `read`: queries were read
  Range ranges[2];  // this task and the next one; sequence < 0 means that there is none
  // The next task's queries, padded to avoid bank conflicts.
  static constexpr int kQueryStride = T::D + 16;
  alignas(16) float queries[T::kAhead ? 8 * T::kRows : 1][kQueryStride];
  alignas(16) float turn[kTakesHeads<T> ? T::D : 1];  // cosines and sines of the query's position
  int last;
  alignas(128) uint8_t slots[kMostSlots][kBlocks * T::Stored::kBlockBytes];
  static constexpr size_t bytes(int count) {
    return sizeof(Shared) - static_cast<size_t>(kMostSlots - count) * sizeof(slots[0]);
  }
};

// Tasks claimed beyond each block's first, and finished blocks.
struct Counters {
  unsigned handed_out, done;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Pipelines: of keys and values (slots); of tasks; and of the next task's queries, which arrive
// with the task and are released before its end.
template <class T>
__device__ __forceinline__ Pipeline slots_of(Shared<T>& s) {
  return {s.full, s.empty};
}
template <class T>
__device__ __forceinline__ Pipeline tasks_of(Shared<T>& s) {
  return {s.told, s.done};
}
template <class T>
__device__ __forceinline__ Pipeline queries_of(Shared<T>& s) {
  return {nullptr, &s.read};
}
using TaskCount = PipelineCount<2>;

// Barrier for all threads of the block; may be reached from different places in the code.
__device__ __forceinline__ void sync_block() {
  asm volatile("bar.sync 0;" ::: "memory");
}

// The halves of a tile that belong to a run.
struct Halves {
  int first, last;
};
__device__ __forceinline__ Halves halves_of(const Range& w, int tile) {
  return {max(w.first_chunk, tile * kChunks), min(w.last_chunk, tile * kChunks + kChunks - 1)};
}

// Producer warp: finds tasks, passes them on to the consumers and fills the pipeline with a tile's
// keys, then its values, or both together. Cache blocks that the query can't see are replaced by
// visible ones. This code is cold in the instruction cache at each step, so nothing is unrolled or
// duplicated.
template <class T>
__device__ __forceinline__ void produce(Shared<T>& s, const AttentionArgs& a, const Plan& plan,
                                        const HeadsArgs& of, Counters& counters) {
  constexpr int kBlocks = Shared<T>::kBlocks, kBlockBytes = T::Stored::kBlockBytes;
  constexpr int kBlocksOfTile = kTileTokens / kBlockTokens;
  constexpr int kBlocksOfPiece = kPieceTokens / kBlockTokens;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool counts = plan.tasks > static_cast<int>(gridDim.x);
  int claimed = static_cast<int>(blockIdx.x);  // lane 0: the next task; every claim is checked
  // The previous kernels may use the counters until they have ended.
  bool waited = false;
  const auto wait_and_claim = [&] {
    if (!waited) wait();
    waited = true;
    if (lane != 0) return;
    claimed = plan.tasks;
    if (counts) claimed = static_cast<int>(gridDim.x + atomicAdd(&counters.handed_out, 1u));
  };
  const Pipeline slots = slots_of(s), tasks = tasks_of(s);
  PipelineRound at;
  uint32_t told = 0;
  for (bool begun = false;; begun = true) {
    const int task = __shfl_sync(0xffffffff, claimed, 0);
    if (task >= plan.tasks) break;
    // Key heads vary fastest, then tiles, then runs.
    const int row = plan.heads.quotient(task), y = task - row * plan.heads.by;
    const int z = plan.all_tiles.quotient(row), x = row - z * plan.all_tiles.by;
    const int sequence = plan.tiles.quotient(x);
    const int32_t* table = a.batch.tables + sequence * a.batch.table_stride;
    // The first tile's block ids are loaded together with the length; with a window the first tile
    // depends on the length.
    const int early_block = z * plan.run.by * kBlocksOfPiece + lane % kBlocksOfTile;
    const int early = table[min(early_block, static_cast<int>(a.batch.table_stride) - 1)];
    const int context = a.batch.context_len[sequence];
    const Queries queries = sequence_queries<T>(a, plan, sequence);
    if (!begun) {
      if (lane == 0) {
        for (int i = 0; i < plan.slots; ++i) slots.init_stage(i, kWarps);
        for (int i = 0; i < 2; ++i) tasks.init_stage(i, kWarps);
        barrier_init(&s.read, kWarps);
        barriers_ready();
      }
      sync_block();
    }
    const Range w = find_range(a, plan, x, y, z, sequence, queries, context);
    if (waited || w.last_chunk < w.first_chunk) wait_and_claim();
    const auto block_of = [&](int tile) {
      const int block = tile * kBlocksOfTile + lane % kBlocksOfTile;
      return min(max(block, w.low / kBlockTokens), w.position / kBlockTokens);
    };
    const int first = w.first_chunk / kChunks, last = w.last_chunk / kChunks;
    int next_ids = __shfl_sync(0xffffffff, early, block_of(first) % kBlocksOfTile);
    if (a.window > 0) next_ids = table[block_of(first)];
    bool said = false;
    // Only the run that ends at the query's position stores its key and value.
    bool stores = kTakesHeads<T> && of.count > 0 && w.last_chunk == w.position / kChunk;
    bool loaded = false;
    Newest newest;
    for (int tile = first; tile <= last; ++tile) {
      const Halves halves = halves_of(w, tile);
      const int ids = next_ids;
      if (tile < last) next_ids = table[block_of(tile + 1)];
      for (int part = 0; part < (T::Stored::kTogether ? 1 : 2); ++part) {
        for (int chunk = halves.first; chunk <= halves.last; ++chunk, at.next(plan.slots)) {
          if (!waited && (at.round > 0 || chunk >= w.written / kChunk)) wait_and_claim();
          if constexpr (kTakesHeads<T>) {
            if (stores && waited && !loaded) newest = load_newest(of, w), loaded = true;
            if (stores && chunk == w.last_chunk) {
              const int block = w.position / kBlockTokens % kBlocksOfTile;
              store_newest<T>(newest, of, a.cache, w, __shfl_sync(0xffffffff, ids, block));
              stores = false;
            }
          }
          const int slot = at.stage;
          if (at.round > 0) slots.acquire(at);
          const int64_t id =
              __shfl_sync(0xffffffff, ids, chunk % kChunks * kBlocks + lane % kBlocks);
          if (lane == 0) slots.expect(slot, kBlocks * kBlockBytes);
          __syncwarp();
          if (lane < kBlocks) {
            bulk_copy(
                s.slots[slot] + lane * kBlockBytes,
                part == 0 ? keys_at(a.cache, id, w.kv_head) : values_at(a.cache, id, w.kv_head),
                kBlockBytes, slots.filled(slot));
          }
          if (said) continue;
          // After the first copies, since the previous task may still be running.
          said = true;
          const TaskCount task_at{told};
          const int turn = task_at.stage();
          const bool copies = T::kAhead && told > 0;
          if (told > 1) tasks.acquire(task_at);
          if (copies) queries_of(s).acquire({0, static_cast<int>(told & 1)});
          const bool turns = kTakesHeads<T> && copies && of.count > 0 && of.of[0].rotary_dim != 0;
          if (lane == 0) {
            s.ranges[turn] = w;
            if (copies) {
              tasks.expect(turn, (w.rows + (turns ? 1 : 0)) * T::D * sizeof(float));
            } else {
              tasks.arrive(turn);
            }
          }
          __syncwarp();
          if (copies && lane < w.rows) {
            bulk_copy(s.queries[lane], a.q + sequence * a.q_stride + (w.first_head + lane) * T::D,
                      T::D * sizeof(float), tasks.filled(turn));
          }
          if (turns && lane == 31) {
            bulk_copy(s.turn, of.cos_sin + sequence * T::D, sizeof(s.turn), tasks.filled(turn));
          }
          ++told;
        }
      }
    }
    if (!waited) wait_and_claim();
  }
  if (counts) let_next_start();
  const TaskCount end{told};
  if (told > 1) tasks.acquire(end);
  if (lane == 0) {
    s.ranges[end.stage()].sequence = -1;
    tasks.arrive(end.stage());
    if (counts && atomicAdd(&counters.done, 1u) + 1 == gridDim.x) counters = {0, 0};
  }
}

// Loads a task's queries as MMA operands; from_row(row) is where a row begins.
template <class T, class FromRow>
__device__ __forceinline__ void load_queries(uint4 (&q)[T::D / 16], const FromRow& from_row,
                                             int rows) {
  constexpr int D = T::D, kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  constexpr bool kFours = T::Stored::kFours;
  float2 v[kRows][D / 8];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float* from = from_row(g + 8 * r) + (kFours ? 4 : 2) * t;
#pragma unroll
    for (int k = 0; k < D / 8; ++k) {
      v[r][k] = make_float2(0.0f, 0.0f);
      const int at = kFours ? k / 2 * 16 + k % 2 * 2 : k * 8;
      if (g + 8 * r < rows) v[r][k] = *reinterpret_cast<const float2*>(from + at);
    }
  }
  const auto pair = [](const float2& f) { return pack_numbers<T::Stored::kBF16>(f.x, f.y); };
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    q[k] = make_uint4(pair(v[0][2 * k]), 0, pair(v[0][2 * k + 1]), 0);
    if constexpr (kRows == 2) {
      q[k].y = pair(v[1][2 * k]);
      q[k].w = pair(v[1][2 * k + 1]);
    }
  }
}

// Multiplies the rows by two column tiles of 8 keys or features. Up to 8 rows (kRows == 1) are put
// on the 8-column side of mma, so that no MMA row is empty; both products are then in `first`.
template <class T>
__device__ __forceinline__ void multiply(float (&first)[4], float (&second)[4], const uint4& rows,
                                         const uint32_t (&b)[4]) {
  if constexpr (T::kRows == 1) {
    mma_numbers<T::Stored::kBF16>(first, make_uint4(b[0], b[2], b[1], b[3]), rows.x, rows.z);
  } else {
    mma_numbers<T::Stored::kBF16>(first, rows, b[0], b[1]);
    mma_numbers<T::Stored::kBF16>(second, rows, b[2], b[3]);
  }
}
// Transposes a result of multiply() for 8 rows into the layout of 16 rows, where a lane holds
// neighbouring columns of row lane / 4.
__device__ __forceinline__ void turn_blocks(float (&first)[4], float (&second)[4]) {
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const bool odd = g % 2 != 0;
  const int from = (t * 2 + g % 2) * 4 + g / 2;
  float v[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float low = first[i * 2], high = first[i * 2 + 1];
    const float got = __shfl_xor_sync(0xffffffff, odd ? low : high, 4);
    v[i * 2] = __shfl_sync(0xffffffff, odd ? got : low, from);
    v[i * 2 + 1] = __shfl_sync(0xffffffff, odd ? high : got, from);
  }
  first[0] = v[0], first[1] = v[1], second[0] = v[2], second[1] = v[3];
}

// Scores of a warp's 16 keys in each half of a tile, for rows g and g + 8.
using Scores = float[kChunks][2][4];

// The keys that a lane's rows g and g + 8 see, and those that all rows of the task see.
struct Visible {
  int low[2], high[2];
  int all_low, all_high;
};
template <class T>
__device__ __forceinline__ Visible visible_to(const AttentionArgs& a, const Plan& plan,
                                              const Range& w) {
  Visible v;
  const int g = static_cast<int>(threadIdx.x % 32) / 4;
  for (int r = 0; r < 2; ++r) {
    v.high[r] = w.written + row_of<T>(w, plan.group, min(g + 8 * r, w.rows - 1)).query;
    v.low[r] = a.window > 0 ? max(0, v.high[r] - a.window + 1) : 0;
  }
  v.all_high = w.written + row_of<T>(w, plan.group, 0).query;
  v.all_low = a.window > 0 ? max(0, w.position - a.window + 1) : 0;
  return v;
}

// Scores of a warp's 16 keys in each half of a tile, for all rows. A half that the query can't see
// may use the other half's slot.
template <class T>
__device__ __forceinline__ void score_keys(Scores& score, const Shared<T>& s,
                                           const AttentionArgs& a, const Range& w,
                                           const Visible& visible, const uint4 (&q)[T::D / 16],
                                           int tile, const int (&slots)[kChunks]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  // Loads run two steps ahead of the MMAs.
  constexpr int kAhead = 2, kSteps = T::D / 32;
  uint32_t loaded[kAhead][kChunks][T::Stored::kKeyWords];
  const auto block_of = [&](int n) { return s.slots[slots[n]] + warp * T::Stored::kBlockBytes; };
  const auto load = [&](int step) {
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      T::Stored::template load_keys<T::kAsRows>(loaded[step % kAhead][n], block_of(n), step * 2);
    }
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step);
#pragma unroll
  for (int n = 0; n < kChunks; ++n) {
#pragma unroll
    for (int i = 0; i < 8; ++i) score[n][i / 4][i % 4] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t b[kChunks][2][4];
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      T::Stored::template open_keys<T::kAsRows>(b[n], loaded[step % kAhead][n], block_of(n),
                                                step * 2);
    }
    if (step + kAhead < kSteps) load(step + kAhead);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        multiply<T>(score[n][0], score[n][1], q[step * 2 + i], b[n][i]);
      }
    }
  }
  if constexpr (T::kRows == 1) {
#pragma unroll
    for (int n = 0; n < kChunks; ++n) turn_blocks(score[n][0], score[n][1]);
  }
  // Calls f(score, key, r) for each score, of row g + 8 r.
  const auto each = [&](const auto& f) {
    const int from = tile * kTileTokens + warp * 16 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2 * T::kRows; ++i) {
          f(score[n][j][i], from + n * kChunk + j * 8 + i % 2, i / 2);
        }
      }
    }
  };
  if (a.softcap > 0.0f) {
    const float steep = cap_steepness(a);
    each([&](float& v, int, int) { v = capped(v, steep); });
  }
  // Masking: most tiles are fully visible.
  if constexpr (T::kRows == 1) {
    const int low = w.low, position = w.position;
    if (tile * kTileTokens < low || (tile + 1) * kTileTokens > position + 1) {
      each([&](float& v, int key, int) { v = key >= low && key <= position ? v : -INFINITY; });
    }
  } else if (tile * kTileTokens < visible.all_low ||
             (tile + 1) * kTileTokens > visible.all_high + 1) {
    each([&](float& v, int key, int r) {
      v = key >= visible.low[r] && key <= visible.high[r] ? v : -INFINITY;
    });
  }
}

// Turns the warp's scores into softmax weights and shares them with all warps as MMA operands in
// `told`. `told` was last used two tiles ago, and all warps have finished with it.
template <class T>
__device__ __forceinline__ void weigh_tile(Sums<T::D / 32, T::kRows>& sums, bool begins,
                                           typename Shared<T>::Tile& told, const Scores& score,
                                           float steep) {
  constexpr int kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const auto mine = [&](int r, int i) {
    return make_float2(score[i / 2][i % 2][r * 2], score[i / 2][i % 2][r * 2 + 1]);
  };
  const auto four = [](const float(&v)[kWarps]) { return *reinterpret_cast<const float4*>(v); };
  float factor[kRows];
  const bool raised = take_tile_in_turn(
      sums, begins, steep, factor,
      [&](float(&sum)[kRows], const float(&offset)[kRows]) {
        uint32_t operand[kChunks][2 * kRows];
        weigh_quarter(sum, mine, steep, offset, [&](int r, int i, float low, float high) {
          operand[i / 2][i % 2 * kRows + r] = pack_weights<T::Stored::kBF16>(low, high);
        });
#pragma unroll
        for (int half = 0; half < kChunks; ++half) {
          uint32_t* to = told.weights[half * kWarps + warp][lane];
          if constexpr (kRows == 1) {
            *reinterpret_cast<uint2*>(to) = make_uint2(operand[half][0], operand[half][1]);
          } else {
            *reinterpret_cast<uint4*>(to) =
                make_uint4(operand[half][0], operand[half][1], operand[half][2], operand[half][3]);
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) told.sums[r][lane][warp] = sum[r];
        sync_summing();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 v = four(told.sums[r][lane]);
          sum[r] = __fadd_rn(__fadd_rn(__fadd_rn(v.x, v.y), v.z), v.w);
        }
      },
      [&] {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float most = largest_of<kEightsOfQuarter>(mine, r);
          if (lane % 4 == 0) told.most[lane / 4 + r * 8][warp] = most;
        }
        sync_summing();
      },
      [&](int r) {
        const float4 v = four(told.most[lane / 4 + r * 8]);
        return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
      });
  if (!raised) return;
  if constexpr (kRows == 1) {  // rows are MMA columns here
    const float low = __shfl_sync(0xffffffff, factor[0], lane % 4 * 8);
    const float high = __shfl_sync(0xffffffff, factor[0], lane % 4 * 8 + 4);
#pragma unroll
    for (int j = 0; j < T::D / 32; j += 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums.acc[j][i] = __fmul_rn(sums.acc[j][i], i % 2 == 0 ? low : high);
      }
    }
  } else {
    sums.scale(factor);
  }
}

// Adds the weighted values of half a tile for a warp's features.
template <class T>
__device__ __forceinline__ void add_values(Sums<T::D / 32, T::kRows>& sums, const uint8_t* slot,
                                           const uint32_t (*weights)[32][2 * T::kRows]) {
  constexpr int kMine = T::D / 32;  // tiles of 8 features
  constexpr int kPairs = kMine % 4 == 0 ? 2 : 1, kParts = kMine / (2 * kPairs);
  constexpr int kSteps = kChunk / 16 * kParts, kAhead = 2;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  uint32_t loaded[kAhead][kPairs * T::Stored::kPairWords];
  uint32_t operands[kAhead][2 * T::kRows];
  const auto load = [&](int step) {
    T::Stored::template load_values<kPairs, T::kAsRows>(loaded[step % kAhead], slot, step / kParts,
                                                        warp * kMine + step % kParts * 2 * kPairs);
    const uint32_t* from = weights[step / kParts][lane];
    if constexpr (T::kRows == 1) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      operands[step % kAhead][0] = v.x, operands[step % kAhead][1] = v.y;
    } else {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      operands[step % kAhead][0] = v.x, operands[step % kAhead][1] = v.y;
      operands[step % kAhead][2] = v.z, operands[step % kAhead][3] = v.w;
    }
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(step);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const auto& o = operands[step % kAhead];
    uint4 operand;
    if constexpr (T::kRows == 1) {
      operand = make_uint4(o[0], 0, o[1], 0);
    } else {
      operand = make_uint4(o[0], o[1], o[2], o[3]);
    }
    const int j = step % kParts * 2 * kPairs;
    uint32_t b[kPairs][4];
    T::Stored::template open_values<kPairs, T::kAsRows>(b, loaded[step % kAhead], slot,
                                                        step / kParts, warp * kMine + j);
    if (step + kAhead < kSteps) load(step + kAhead);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      multiply<T>(sums.acc[j + 2 * i], sums.acc[j + 2 * i + 1], operand, b[i]);
    }
  }
}

// Writes the sums of a KV split as a partial result, or (kAll) the sums of the whole context as the
// result.
template <class T, bool kAll>
__device__ __forceinline__ void write_sums(const Sums<T::D / 32, T::kRows>& sums,
                                           const AttentionArgs& a, const Range& w, const Plan& plan,
                                           int piece) {
  constexpr int D = T::D, kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    const auto [token, head, query] = row_of<T>(w, plan.group, row);
    const int first = warp * (D / kWarps) + first_of_lane<T>();
    if constexpr (kAll) {
      const float end = ending(sums.m[r], sums.l[r], a, head);
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        const float2 v = pair_of<T>(sums, r, j);
        put_result(a, token, static_cast<int64_t>(head) * D + first + pair_apart<T>(j),
                   __fmul_rn(v.x, end), __fmul_rn(v.y, end));
      }
    } else {
      float* to = partial_at(a, token, head, piece, plan.pieces);
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        *reinterpret_cast<float2*>(to + first + pair_apart<T>(j)) = pair_of<T>(sums, r, j);
      }
      if (warp == 0 && lane % 4 == 0) {
        *reinterpret_cast<float2*>(to + D) = make_float2(sums.m[r], sums.l[r]);
      }
    }
  }
}

// Writes the sums of the whole context as the result in E4M3. The largest magnitudes of each warp's
// features go to the `most` array of the last tile (`turn`); the next task begins with the other
// one.
template <class T>
__device__ __forceinline__ void put_sums(Shared<T>& s, const Sums<T::D / 32, T::kRows>& sums,
                                         const AttentionArgs& a, const Range& w, const Plan& plan,
                                         int turn) {
  constexpr int D = T::D, kMine = D / 32, kWarpsOfGroup = kWarps * kE4M3Cols / D;
  static_assert(D % kE4M3Cols == 0);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  auto& room = s.tiles[turn].most;
  sync_summing();  // all warps have finished reading it
  float2 v[T::kRows][kMine];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const bool real = lane / 4 + r * 8 < w.rows;
    const int head = row_of<T>(w, plan.group, min(lane / 4 + r * 8, w.rows - 1)).head;
    const float end = real ? ending(sums.m[r], sums.l[r], a, head) : 0.0f;
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const float2 pair = pair_of<T>(sums, r, j);
      v[r][j] = make_float2(__fmul_rn(pair.x, end), __fmul_rn(pair.y, end));
    }
    float most = largest_of(v[r]);
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
    if (lane % 4 == 0) room[lane / 4 + r * 8][warp] = most;
  }
  sync_summing();
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const int row = lane / 4 + r * 8, group = warp / kWarpsOfGroup;
    if (row >= w.rows) continue;
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarpsOfGroup; ++i) {
      most = fmaxf(most, room[row][group * kWarpsOfGroup + i]);
    }
    const int first = warp % kWarpsOfGroup * (D / kWarps) + first_of_lane<T>();
    const auto [token, head, query] = row_of<T>(w, plan.group, row);
    const int64_t all = static_cast<int64_t>(head) * (D / kE4M3Cols) + group;
    const auto apart = [](int j) { return pair_apart<T>(j); };
    put_row(a, token, all * kE4M3Cols + first, apart, v[r]);
    put_e4m3_pairs(a.act, token, all, first, apart, v[r], most);
  }
}

// Zero rows that pad the encoded activations to a whole token tile, by the tile that has the KV
// head's last row.
template <class T>
__device__ __forceinline__ void pad_rows(const AttentionArgs& a, const Range& w, int group) {
  constexpr int D = T::D;
  if (a.act.data == nullptr || w.query_start + w.queries != a.batch.tokens ||
      w.first_row + w.rows != w.queries * group || a.batch.tokens % kTokenTile == 0) {
    return;
  }
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
  const int64_t first = static_cast<int64_t>(w.kv_head) * group * D;
  if constexpr (T::kE4M3) {
    pad_e4m3(a.act, a.batch.tokens, first / kE4M3Cols, group * D / kE4M3Cols,
             static_cast<int>(threadIdx.x), kSumming);
    return;
  }
  const int end = (a.batch.tokens + kTokenTile - 1) / kTokenTile * kTokenTile;
  for (int row = a.batch.tokens; row < end; ++row) {
    for (int c = static_cast<int>(threadIdx.x) * 2; c < group * D; c += kSumming * 2) {
      put_pair(a.act, row, first + c, cols, 0.0f, 0.0f);
    }
  }
}

// True in the last block of a tile to arrive here, which also resets the counter.
__device__ __forceinline__ bool comes_last(int& last, unsigned& count, int blocks) {
  __threadfence();
  sync_summing();
  if (threadIdx.x == 0) {
    last = atomicAdd(&count, 1u) + 1 == static_cast<unsigned>(blocks);
    if (last != 0) count = 0;
  }
  sync_summing();
  __threadfence();
  return last != 0;
}

// Consumer warps: all KV splits of all tasks. `arrived` counts the finished tasks of a tile.
template <class T>
__device__ __forceinline__ void sum_tasks(Shared<T>& s, const AttentionArgs& a, const Plan& plan,
                                          const HeadsArgs& of, unsigned* arrived) {
  const float steep = steepness(a);
  const Pipeline slots_pipe = slots_of(s), tasks = tasks_of(s);
  PipelineState at;  // the first slot that isn't released yet
  const auto take = [&] {
    slots_pipe.wait(at);
    return at.stage;
  };
  const auto leave = [&] {
    __syncwarp();
    slots_pipe.release(at.stage);
    at.next(plan.slots);
  };
  int turn = 1;
#pragma unroll 1
  for (uint32_t task = 0;; ++task) {
    const TaskCount task_at{task};
    tasks.wait(task_at);
    const Range& w = s.ranges[task_at.stage()];
    if (w.sequence < 0) return;
    uint4 q[T::D / 16];
    bool ahead = T::kAhead && task > 0;
    if constexpr (kTakesHeads<T>) {
      if (of.count > 0) {
        finish_queries(s, a, of, w, ahead);
        ahead = true;
      }
    }
    Visible visible{};
    if constexpr (T::kRows == 1) {
      const float* queries =
          ahead ? s.queries[0] : a.q + w.sequence * a.q_stride + w.first_head * T::D;
      const int stride = ahead ? s.kQueryStride : T::D;
      load_queries<T>(q, [&](int row) { return queries + row * stride; }, w.rows);
    } else {
      const auto of_row = [&](int row) {
        const Row its = row_of<T>(w, plan.group, row);
        return a.q + its.token * a.q_stride + its.head * T::D;
      };
      load_queries<T>(q, of_row, w.rows);
      visible = visible_to<T>(a, plan, w);
    }
    if constexpr (T::kAhead) {
      __syncwarp();
      queries_of(s).release(0);
    }
    Sums<T::D / 32, T::kRows> total, sums;
    total.clear();
    sums.clear();
    const int first = w.first_chunk / kChunks, last = w.last_chunk / kChunks;
#pragma unroll 1
    for (int tile = first; tile <= last; ++tile) {
      const Halves halves = halves_of(w, tile);
      static_assert(kChunks == 2);
      const bool both = halves.first < halves.last;
      turn ^= 1;
      auto& told = s.tiles[turn];
      // Slots of both halves; if there is only one, its slot twice.
      int slots[kChunks];
      const auto take_halves = [&] {
        slots[0] = slots[1] = take();
        if (!both) return;
        PipelineState second = at;
        second.next(plan.slots);
        slots[1] = second.stage;
        slots_pipe.wait(second);
      };
      Scores score;
      take_halves();
      score_keys(score, s, a, w, visible, q, tile, slots);
      if constexpr (!T::Stored::kTogether) {
        leave();
        if (both) leave();
      }
      weigh_tile<T>(sums, tile % kTiles == 0 || tile == first, told, score, steep);
      if constexpr (!T::Stored::kTogether) take_halves();
#pragma unroll 1
      for (int chunk = halves.first; chunk <= halves.last; ++chunk) {
        const int half = chunk % kChunks;
        add_values<T>(sums, s.slots[half == 0 ? slots[0] : slots[1]], told.weights + half * kWarps);
        leave();
      }
      if (tile % kTiles != kTiles - 1 && tile != last) continue;
      add_lanes(sums.l);
      if constexpr (T::kRows == 1) {
#pragma unroll
        for (int j = 0; j < T::D / 32; j += 2) turn_blocks(sums.acc[j], sums.acc[j + 1]);
      }
      if (w.runs == 1) {
        total.merge(sums, steep);
      } else {
        write_sums<T, false>(sums, a, w, plan, tile / kTiles - w.first_piece);
      }
      sums.clear();
    }
    bool ends = true;
    if (w.runs == 1) {
      if constexpr (T::kE4M3) {
        put_sums<T>(s, total, a, w, plan, turn);
      } else {
        write_sums<T, true>(total, a, w, plan, 0);
      }
    } else {
      ends = comes_last(s.last, arrived[w.tile], w.runs);
      if (ends) merge_pieces<T>(a, w, plan);
    }
    if (ends) pad_rows<T>(a, w, plan.group);
    __syncwarp();
    tasks.release(task_at.stage());
  }
}
#endif

}  // namespace freshet::cuda::single
