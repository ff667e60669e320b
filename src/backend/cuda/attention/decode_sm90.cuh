// Decode attention, with one query per sequence: bandwidth limits it, so keys and values stream.
//
// A task is a run of KV splits of one sequence's context, for all heads of a key head. The grid has
// as many blocks as run at once; each takes one task, and further ones from a counter. One warp
// finds tasks and keeps a pipeline in shared memory filled by TMA bulk copies, half a tile's keys
// or values at a time, with a copy for each block of the cache: the first halves of a task are
// copied while the previous task is worked on, and those of the first task, except what kernels of
// this step write, before the previous kernel ends. Four warps share a tile: by keys for scores and
// softmax weights, which they exchange through shared memory as operands, and by features for the
// values. A block that has the whole context writes the result; of several blocks, the one that
// ends last merges all splits from left to right. So neither the cut into runs nor the order of
// blocks changes a bit.
//
// Heads of the usual sizes may be normalised, rotated and stored on the way (decode_sm90_qkv.cuh).
// A Stored type says how numbers of the cache become operands (decode_kv_operands.cuh).
#pragma once

#include "backend/cuda/attention/decode_sm90_qkv.cuh"
#include "backend/cuda/attention/decode_split_kv.cuh"
#include "backend/cuda/runtime/pipeline.cuh"

namespace freshet::cuda::single {

// A pipeline of kMostSlots, or of fewer for a block more a multiprocessor.
inline constexpr int kMostSlots = 6;
template <class T>
struct Shared {
  static constexpr int kBlocks = kChunk / kBlockTokens;
  // What warps leave to each other of a tile, and of the next one: operands of weights, sums of a
  // lane's, and the largest scores.
  struct alignas(16) Tile {
    uint32_t weights[kTileTokens / 16][32][2 * T::kRows];
    float sums[T::kRows][32][kWarps];
    float most[8 * T::kRows][kWarps];
  } tiles[2];
  uint64_t full[kMostSlots], empty[kMostSlots];
  uint64_t told[2], done[2], read;  // tasks, and that a task's queries were read
  Range ranges[2];                  // this task and the next one; sequence < 0: there is none
  // The next task's queries, a gap behind each for the sake of banks.
  static constexpr int kQueryStride = T::D + 16;
  alignas(16) float queries[T::kAhead ? 8 * T::kRows : 1][kQueryStride];
  alignas(16) float turn[kTakesHeads<T> ? T::D : 1];  // cosines and sines of their token
  int last;
  alignas(128) uint8_t slots[kMostSlots][kBlocks * T::Stored::kBlockBytes];
  static constexpr size_t bytes(int count) {
    return sizeof(Shared) - static_cast<size_t>(kMostSlots - count) * sizeof(slots[0]);
  }
};

// Tasks handed out beyond the first of each block, and blocks that are done.
struct Counters {
  unsigned handed_out, done;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// The pipeline of slots, with keys or values; that of tasks; and that of the next task's queries,
// which come with the task and are released before its end.
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

// The block's threads, wherever they are.
__device__ __forceinline__ void sync_block() {
  asm volatile("bar.sync 0;" ::: "memory");
}

// The halves of a tile that a run has.
struct Halves {
  int first, last;
};
__device__ __forceinline__ Halves halves_of(const Range& w, int tile) {
  return {max(w.first_chunk, tile * kChunks), min(w.last_chunk, tile * kChunks + kChunks - 1)};
}

// One warp: finds tasks, tells them to those who sum, and fills the pipeline: a tile's keys, then
// its values, or both together. Blocks of which nothing is seen are replaced by others. In a step
// this code is cold, so each of its parts is there once.
template <class T>
__device__ __forceinline__ void produce(Shared<T>& s, const AttentionArgs& a, const Plan& plan,
                                        const HeadsArgs& of, Counters& counters) {
  constexpr int kBlocks = Shared<T>::kBlocks, kBlockBytes = T::Stored::kBlockBytes;
  constexpr int kBlocksOfTile = kTileTokens / kBlockTokens;
  constexpr int kBlocksOfPiece = kPieceTokens / kBlockTokens;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool counts = plan.tasks > static_cast<int>(gridDim.x);
  int claimed = static_cast<int>(blockIdx.x);  // lane 0: the next task; every claim is looked at
  // Kernels in front may use the counters until they have ended.
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
    // Key heads come first, then tiles, then runs.
    const int row = plan.heads.quotient(task), y = task - row * plan.heads.by;
    const int z = plan.all_tiles.quotient(row), x = row - z * plan.all_tiles.by;
    const int sequence = plan.tiles.quotient(x);
    const int32_t* table = a.batch.tables + sequence * a.batch.table_stride;
    // The first tile's blocks come with the length, unless a window says which tile that is.
    const int early_block = z * plan.run.by * kBlocksOfPiece + lane % kBlocksOfTile;
    const int early = table[min(early_block, static_cast<int>(a.batch.table_stride) - 1)];
    const int context = a.batch.context_len[sequence];
    if (!begun) {
      if (lane == 0) {
        for (int i = 0; i < plan.slots; ++i) slots.init_stage(i, kWarps);
        for (int i = 0; i < 2; ++i) tasks.init_stage(i, kWarps);
        barrier_init(&s.read, kWarps);
        barriers_ready();
      }
      sync_block();
    }
    const Range w = find_range(a, plan, x, y, z, sequence, context);
    if (waited || w.last_chunk < w.first_chunk) wait_and_claim();
    const auto block_of = [&](int tile) {
      const int block = tile * kBlocksOfTile + lane % kBlocksOfTile;
      return min(max(block, w.low / kBlockTokens), w.position / kBlockTokens);
    };
    const int first = w.first_chunk / kChunks, last = w.last_chunk / kChunks;
    int next_ids = __shfl_sync(0xffffffff, early, block_of(first) % kBlocksOfTile);
    if (a.window > 0) next_ids = table[block_of(first)];
    bool said = false;
    // A run that ends with the query's place.
    bool stores = kTakesHeads<T> && of.count > 0 && w.last_chunk == w.position / kChunk;
    bool loaded = false;
    Newest newest;
    for (int tile = first; tile <= last; ++tile) {
      const Halves halves = halves_of(w, tile);
      const int ids = next_ids;
      if (tile < last) next_ids = table[block_of(tile + 1)];
      for (int part = 0; part < (T::Stored::kTogether ? 1 : 2); ++part) {
        for (int chunk = halves.first; chunk <= halves.last; ++chunk, at.next(plan.slots)) {
          if (!waited && (at.round > 0 || chunk >= w.position / kChunk)) wait_and_claim();
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
          // Behind the first copies, since a task in front may not have begun.
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

// The operands of a task's queries, `stride` apart.
template <class T>
__device__ __forceinline__ void load_queries(uint4 (&q)[T::D / 16], const float* queries,
                                             int stride, int rows) {
  constexpr int D = T::D, kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  constexpr bool kFours = T::Stored::kFours;
  const float* from = queries + g * stride + (kFours ? 4 : 2) * t;
  float2 v[kRows][D / 8];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < D / 8; ++k) {
      v[r][k] = make_float2(0.0f, 0.0f);
      const int at = kFours ? k / 2 * 16 + k % 2 * 2 : k * 8;
      if (g + 8 * r < rows) v[r][k] = *reinterpret_cast<const float2*>(from + r * 8 * stride + at);
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

// The product of rows and two columns of 8 keys or features. Of 8 rows (kRows 1) these are the
// columns, so that no row of mma is empty, and both products are in `first`.
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
// The result of multiply() for 8 rows takes the layout of that for 16: a lane's neighbours of row
// lane / 4.
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

// Scores of a warp's 16 keys of half a tile, rows g and g + 8, of a tile's halves.
using Scores = float[kChunks][2][4];

// A warp's 16 keys of each half of a tile against all rows. Half a tile of which nothing is seen
// may have the other's slot.
template <class T>
__device__ __forceinline__ void score_keys(Scores& score, const Shared<T>& s,
                                           const AttentionArgs& a, const Range& w,
                                           const uint4 (&q)[T::D / 16], int tile,
                                           const int (&slots)[kChunks]) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  // Loads are two steps ahead of the products.
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
  // f(score, key) for each.
  const auto each = [&](const auto& f) {
    const int from = tile * kTileTokens + warp * 16 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2 * T::kRows; ++i) {
          f(score[n][j][i], from + n * kChunk + j * 8 + i % 2);
        }
      }
    }
  };
  if (a.softcap > 0.0f) {
    const float steep = cap_steepness(a);
    each([&](float& v, int) { v = capped(v, steep); });
  }
  // In most tiles nothing is hidden.
  const int low = w.low, position = w.position;
  if (tile * kTileTokens < low || (tile + 1) * kTileTokens > position + 1) {
    each([&](float& v, int key) { v = key >= low && key <= position ? v : -INFINITY; });
  }
}

// The warp's scores become operands of weights that are there for all. `told` is for this tile, and
// was for the last but one, which all have left.
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
  if constexpr (kRows == 1) {  // rows are columns
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

// Adds a warp's features of the values of half a tile.
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

// A piece's sums as partial results, or (kAll) the sums of all as the result.
template <class T, bool kAll>
__device__ __forceinline__ void write_sums(const Sums<T::D / 32, T::kRows>& sums,
                                           const AttentionArgs& a, const Range& w, int piece,
                                           int pieces) {
  constexpr int D = T::D, kRows = T::kRows;
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = lane / 4 + r * 8;
    if (row >= w.rows) continue;
    const int head = w.first_head + row;
    const int first = warp * (D / kWarps) + first_of_lane<T>();
    if constexpr (kAll) {
      const float end = ending(sums.m[r], sums.l[r], a, head);
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        const float2 v = pair_of<T>(sums, r, j);
        put_result(a, w.sequence, static_cast<int64_t>(head) * D + first + pair_apart<T>(j),
                   __fmul_rn(v.x, end), __fmul_rn(v.y, end));
      }
    } else {
      float* to = partial_at(a, w.sequence, head, piece, pieces);
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

// The sums of all as the result in E4M3. The room of largest scores of the last tile, which was
// `turn`, takes the largest numbers of each warp's features: the next task begins with the other.
template <class T>
__device__ __forceinline__ void put_sums(Shared<T>& s, const Sums<T::D / 32, T::kRows>& sums,
                                         const AttentionArgs& a, const Range& w, int turn) {
  constexpr int D = T::D, kMine = D / 32, kWarpsOfGroup = kWarps * kE4M3Cols / D;
  static_assert(D % kE4M3Cols == 0);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int head = w.first_head + lane / 4;
  auto& room = s.tiles[turn].most;
  sync_summing();  // all have left it
  float2 v[T::kRows][kMine];
#pragma unroll
  for (int r = 0; r < T::kRows; ++r) {
    const bool real = lane / 4 + r * 8 < w.rows;
    const float end = real ? ending(sums.m[r], sums.l[r], a, head + r * 8) : 0.0f;
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
    const int64_t all = static_cast<int64_t>(head + r * 8) * (D / kE4M3Cols) + group;
    const auto apart = [](int j) { return pair_apart<T>(j); };
    put_row(a, w.sequence, all * kE4M3Cols + first, apart, v[r]);
    put_e4m3_pairs(a.act, w.sequence, all, first, apart, v[r], most);
  }
}

// Zeros for the rows that fill up the activations' last tile.
template <class T>
__device__ __forceinline__ void pad_rows(const AttentionArgs& a, const Range& w) {
  constexpr int D = T::D;
  if (a.act.data == nullptr || w.sequence + 1 != a.batch.sequences ||
      a.batch.sequences % kTokenTile == 0) {
    return;
  }
  const int64_t cols = static_cast<int64_t>(a.heads) * D;
  const int64_t first = static_cast<int64_t>(w.first_head) * D;
  if constexpr (T::kE4M3) {
    pad_e4m3(a.act, a.batch.sequences, first / kE4M3Cols, w.rows * D / kE4M3Cols,
             static_cast<int>(threadIdx.x), kSumming);
    return;
  }
  const int end = (a.batch.sequences + kTokenTile - 1) / kTokenTile * kTokenTile;
  for (int row = a.batch.sequences; row < end; ++row) {
    for (int c = static_cast<int>(threadIdx.x) * 2; c < w.rows * D; c += kSumming * 2) {
      put_pair(a.act, row, first + c, cols, 0.0f, 0.0f);
    }
  }
}

// Whether this block is the last of its tile's to come here; the last one leaves a zero.
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

// Four warps: all pieces of all tasks. `arrived` counts a tile's tasks that have ended.
template <class T>
__device__ __forceinline__ void sum_tasks(Shared<T>& s, const AttentionArgs& a, const Plan& plan,
                                          const HeadsArgs& of, unsigned* arrived) {
  const float steep = steepness(a);
  const Pipeline slots_pipe = slots_of(s), tasks = tasks_of(s);
  PipelineState at;  // the first slot that is not released yet
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
    load_queries<T>(q, ahead ? s.queries[0] : a.q + w.sequence * a.q_stride + w.first_head * T::D,
                    ahead ? s.kQueryStride : T::D, w.rows);
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
      // Slots of both halves, or of one twice.
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
      score_keys(score, s, a, w, q, tile, slots);
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
        write_sums<T, false>(sums, a, w, tile / kTiles - w.first_piece, plan.pieces);
      }
      sums.clear();
    }
    bool ends = true;
    if (w.runs == 1) {
      if constexpr (T::kE4M3) {
        put_sums<T>(s, total, a, w, turn);
      } else {
        write_sums<T, true>(total, a, w, 0, 0);
      }
    } else {
      ends = comes_last(s.last, arrived[w.tile], w.runs);
      if (ends) merge_pieces<T>(a, w, plan.pieces);
    }
    if (ends) pad_rows<T>(a, w);
    __syncwarp();
    tasks.release(task_at.stage());
  }
}
#endif

}  // namespace freshet::cuda::single
