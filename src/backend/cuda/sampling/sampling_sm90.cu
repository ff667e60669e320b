// Tokens drawn from rows of logits, as ops/sample.h's words say: the rule of sampling/sampler.h, to
// the bit (Hopper).
//
// A cluster of blocks keeps a row in shared memory: thread t of block b has `each` neighbouring
// columns from (b * kThreads + t) * each on; `each` is odd, so that the lanes of a warp find theirs
// in different banks. Shares are whole numbers, so no order of sums matters. Where top-k and top-p
// end is looked for in sixteenths of where it may be: a pass adds up what is in each, until all of
// the one that it must be in is wanted. The first sixteenths are equal steps of logits, the
// others of its distance from the largest as ordered integers. Once few columns of a block are in
// question, they are listed. Ties are dealt out in order of columns, by one scan over the cluster.
//
// In the race that draws (ops/race.h) a warp has a tile at a time, and a lane four of its columns.
// Each lane finds, by fast arithmetic that is never above the true one, the earliest times of its
// columns; only what may be first in its block is computed exactly.
#include <cfloat>
#include <climits>

#include "backend/cuda/runtime/cluster.cuh"
#include "backend/cuda/runtime/kernels.cuh"
#include "ops/sample.h"

namespace freshet::cuda {
namespace {

using ops::SampleRow;
using Weight = unsigned long long;

constexpr int kThreads = 256, kWarps = kThreads / 32, kBins = 16, kBatch = 8;
constexpr int kMostListed = 4096, kFewestListed = 1024;  // columns of a block
constexpr uint32_t kLeastKey = 0x00800000;               // key_of(-FLT_MAX)
constexpr unsigned kAll = 0xffffffff;
constexpr float kNone = -INFINITY;
// In octaves below the largest logit: from where a weight has less than 2^10 units of 2^-44, and
// from where it has none.
constexpr float kRoundedFrom = 34.0f, kNoShareFrom = 46.0f;

// Integers in the order of the numbers.
__device__ __forceinline__ uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// whole(exp_fraction(x)) of sampling/logits.cc.
__device__ __forceinline__ Weight weight_of(float x) {
  constexpr float kRound = 12582912.0f;
  const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), kRound);
  const float n = __fsub_rn(shifted, kRound);
  const float r = __fadd_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, 2.12194440e-4f));
  float p = __fadd_rn(__fmul_rn(r, 1.0f / 5040.0f), 1.0f / 720.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 120.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 24.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f / 6.0f);
  p = __fadd_rn(__fmul_rn(p, r), 0.5f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  p = __fadd_rn(__fmul_rn(p, r), 1.0f);
  const uint32_t bits =
      __float_as_uint(p) + ((__float_as_uint(shifted) - __float_as_uint(kRound)) << 23);
  // Below -31.5 it is less than half a unit.
  return x > -31.5f ? __float2ull_rn(__uint_as_float(bits) * 0x1p44f) : 0;
}

// 2^x, wrong by less than 2^-20.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ Weight sum_of_warp(Weight v) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(kAll, v, step);
  return v;
}
// Of this lane and those in front of it.
__device__ __forceinline__ Weight scan_of_warp(Weight v, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const Weight other = __shfl_up_sync(kAll, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

// A row in the hands of a cluster; everything here is done by all of its threads.
template <int kBlocks>
struct Row {
  float* v;              // [kThreads * each] of this block
  Weight* table;         // [kBins][kThreads], zeros between uses
  Weight (*box)[kBins];  // [2]: what blocks show each other, in turns
  Weight* of_warps;      // [kWarps]
  uint16_t* list;        // [room]
  int* listed;           // the number of columns to list
  int room;
  int each, first;  // columns of a thread; the block's first
  int rank, turn;
  float most, scale;  // the largest logit, 1 / temperature
  float steep;        // steps of a logit
  // Kept: what is above `least`, and equal to it up to column `last_tie`.
  float least;
  int last_tie;

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ int lane() const { return thread() % 32; }
  __device__ __forceinline__ int warp() const { return thread() / 32; }

  __device__ __forceinline__ bool keeps(float x, int at) const {
    return x > least || (x == least && first + at <= last_tie);
  }
  __device__ __forceinline__ Weight share(float x) const {
    return weight_of(__fmul_rn(__fsub_rn(x, most), scale));
  }
  // g(numbers, at): this thread's columns, kBatch at once; kNone beyond the last.
  template <class G>
  __device__ __forceinline__ void batches(const G& g) const {
    const int end = (thread() + 1) * each;
    for (int i = thread() * each; i < end; i += kBatch) {
      float x[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) x[j] = i + j < end ? v[i + j] : kNone;
      g(x, i);
    }
  }
  // The sum over blocks of what each put into box[turn][i], in lanes i < kBins.
  __device__ __forceinline__ Weight meet() {
    cluster_sync();
    Weight sum = 0;
    if (lane() < kBins) {
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) sum += from_block(&box[turn][lane()], r);
    }
    turn ^= 1;
    return sum;
  }
  // Of all threads' numbers.
  struct Ends {
    Weight largest;
    uint32_t smallest;
  };
  __device__ __forceinline__ Ends ends(Ends mine) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      mine.largest = max(mine.largest, __shfl_xor_sync(kAll, mine.largest, step));
    }
    mine.smallest = __reduce_min_sync(kAll, mine.smallest);
    if (lane() == 0) {
      of_warps[warp()] = mine.largest;
      box[turn][2 + warp()] = mine.smallest;
    }
    __syncthreads();
    if (thread() == 0) {
      for (int w = 0; w < kWarps; ++w) {
        mine.largest = max(mine.largest, of_warps[w]);
        mine.smallest = min(mine.smallest, static_cast<uint32_t>(box[turn][2 + w]));
      }
      box[turn][0] = mine.largest;
      box[turn][1] = mine.smallest;
    }
    cluster_sync();
    Ends all = {0, 0xffffffff};
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      all.largest = max(all.largest, from_block(&box[turn][0], r));
      all.smallest = min(all.smallest, static_cast<uint32_t>(from_block(&box[turn][1], r)));
    }
    turn ^= 1;
    return all;
  }
  // f deals shares to those columns that are `in`; of all of them together, number target_of(all)
  // is whose? -1 in all blocks but one, where the thread that knows has the column.
  template <class In, class F, class T>
  __device__ __forceinline__ int owner(const In& in, const F& f, const T& target_of) {
    Weight mine = 0;
    batches([&](const float(&x)[kBatch], int at) {
      bool any = false;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) any |= in(x[j], at + j);
      if (!any) return;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) mine += in(x[j], at + j) ? f(x[j]) : 0;
    });
    Weight before = scan_of_warp(mine, lane());
    if (lane() == 31) of_warps[warp()] = before;
    __syncthreads();
    before -= mine;
    Weight all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp()) before += of_warps[w];
      all += of_warps[w];
    }
    if (thread() == 0) box[turn][0] = all;
    cluster_sync();
    all = 0;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      const Weight of_block = from_block(&box[turn][0], r);
      if (r < rank) before += of_block;
      all += of_block;
    }
    turn ^= 1;
    const Weight target = target_of(all);
    const unsigned here = __ballot_sync(kAll, target >= before && target - before < mine);
    if (here == 0) return -1;
    const int whose = __ffs(static_cast<int>(here)) - 1;
    Weight left = target - __shfl_sync(kAll, before, whose);
    const int begin = (warp() * 32 + whose) * each;
    for (int i = 0; i < each; i += 32) {
      const int at = begin + i + lane();
      const bool its = i + lane() < each && in(v[at], at);
      const Weight sum = scan_of_warp(its ? f(v[at]) : 0, lane());
      const unsigned found = __ballot_sync(kAll, sum > left);
      if (found != 0) {
        return lane() == 0 ? first + begin + i + __ffs(static_cast<int>(found)) - 1 : -1;
      }
      left -= __shfl_sync(kAll, sum, 31);
    }
    return -1;
  }
  // The share of a logit as 2^-octaves.
  __device__ __forceinline__ float octaves(float x) const {
    return __fmul_rn(__fmul_rn(__fsub_rn(most, x), scale), 1.44269504f);
  }
  // Below the time of a column, for a share of 1 of the largest logit: E is above the first bits of
  // its noise. A weight of few units may be twice the exponential, since it is rounded, and one
  // below half a unit is 0.
  __device__ __forceinline__ float earliest(uint32_t high, float x) const {
    float away = octaves(x);
    if (away > kRoundedFrom) away -= 1.0f;
    const float v = __fmul_rz(__uint2float_rz(high), 0x1p-32f * 0.99f);
    return away < kNoShareFrom ? __fmul_rz(v, exp2_fast(away)) : INFINITY;
  }
  // Above it.
  __device__ __forceinline__ float latest(uint32_t high, float x) const {
    const float away = octaves(x);
    const float v = __fmul_ru(__uint2float_ru(high), 0x1p-32f) + 0x1p-32f;
    const float rest = __fmul_rz(__uint2float_rz(~high), 0x1p-32f);  // 1 - v
    const float e = v < 0.5f ? v + v * v : -__logf(rest);
    return away < kRoundedFrom ? e * exp2_fast(away) * 1.01f : INFINITY;
  }
  // Which of the kept columns wins the race; -1 in all threads of the cluster but one. `best` is
  // the column of the largest logit, which is kept.
  __device__ __forceinline__ int winner(const ops::RaceStream& stream, int best) {
    const auto word = [](const ops::RaceWords& w, int j) {
      return j == 0 ? w.of[0] : j == 1 ? w.of[1] : j == 2 ? w.of[2] : w.of[3];
    };
    const auto high_of = [&](int column) {
      const auto token = static_cast<uint32_t>(column);
      return word(ops::race_words(stream, ops::race_counter(token)),
                  static_cast<int>(ops::race_word(token)));
    };
    // This thread's columns: number n is the one in word n % 4 of the warp's tile n / 4.
    const int tiles = each * kThreads / ops::kRaceTile;
    const auto column_of = [&](int n) {
      return (warp() + n / 4 * kWarps) * ops::kRaceTile + n % 4 * 32 + lane();
    };
    // No logit below this is kept and has a weight: 46 octaves are a distance of 31.9.
    const float floor = fmaxf(least, __fsub_rn(most, __fdiv_rn(32.5f, scale)));
    float soonest = INFINITY, next = INFINITY, bound = latest(high_of(best), most);
    int its = 0;
    uint32_t its_high = 0;
    for (int tile = warp(), n = 0; tile < tiles; tile += kWarps, n += 4) {
      float x[4];
      bool any = false;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = v[tile * ops::kRaceTile + j * 32 + lane()];
        any |= x[j] >= floor;
      }
      if (!any) continue;
      const ops::RaceWords high = ops::race_words(
          stream, static_cast<uint32_t>(first / 4 + tile * ops::kRaceCounters + lane()));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool kept = keeps(x[j], tile * ops::kRaceTile + j * 32 + lane());
        const float time = kept ? earliest(high.of[j], x[j]) : INFINITY;
        next = fminf(next, fmaxf(time, soonest));
        if (time < soonest) soonest = time, its = n + j, its_high = high.of[j];
      }
    }
    if (soonest < INFINITY) bound = fminf(bound, latest(its_high, v[column_of(its)]));
    bound = __uint_as_float(__reduce_min_sync(kAll, __float_as_uint(bound)));
    if (lane() == 0) box[turn][warp()] = __float_as_uint(bound);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      bound = fminf(bound, __uint_as_float(static_cast<uint32_t>(box[turn][w])));
    }
    // Exactly: what may be first of the block; mostly one column, or one of a few threads.
    Weight time = ULLONG_MAX;
    uint32_t id = UINT_MAX;
    const bool one = next > bound;
    int n = one ? its : 0;
    const int end = soonest > bound || soonest == INFINITY ? 0
                    : one                                  ? its + 1
                          : (tiles - warp() + kWarps - 1) / kWarps * 4;
    for (; n < end; ++n) {
      const int at = column_of(n);
      const auto token = static_cast<uint32_t>(first + at);
      const uint32_t high = high_of(first + at);
      const Weight weight = keeps(v[at], at) ? share(v[at]) : 0;
      if (weight == 0 || earliest(high, v[at]) > bound) continue;
      const uint32_t low =
          word(ops::race_words(stream, ops::race_counter(token) | ops::kRaceLowBits),
               static_cast<int>(ops::race_word(token)));
      const Weight exact = ops::race_time(static_cast<Weight>(high) << 32 | low, weight);
      if (exact < time || (exact == time && token < id)) time = exact, id = token;
    }
    return first_of_cluster(time, id);
  }
  // The id with the lowest time in one thread of the cluster, -1 in the others. Ties go to the
  // lowest id.
  __device__ __forceinline__ int first_of_cluster(Weight time, uint32_t id) {
    Weight least = time;
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
      least = min(least, __shfl_xor_sync(kAll, least, step));
    }
    id = __reduce_min_sync(kAll, time == least ? id : UINT_MAX);
    if (lane() == 0) {
      of_warps[warp()] = least;
      box[turn][kWarps + warp()] = id;
    }
    __syncthreads();
    if (thread() == 0) {
      for (int w = 1; w < kWarps; ++w) {
        const auto other = static_cast<uint32_t>(box[turn][kWarps + w]);
        if (of_warps[w] < least || (of_warps[w] == least && other < id)) {
          least = of_warps[w], id = other;
        }
      }
      box[turn][0] = least;
      box[turn][1] = id;
    }
    cluster_sync();
    if (rank == 0 && thread() == 0) {
      for (int r = 1; r < kBlocks; ++r) {
        const Weight other = from_block(&box[turn][0], r);
        const auto its = static_cast<uint32_t>(from_block(&box[turn][1], r));
        if (other < least || (other == least && its < id)) least = other, id = its;
      }
    }
    turn ^= 1;
    return rank == 0 && thread() == 0 ? static_cast<int>(id) : -1;
  }
  // How far below the largest; the last step has all beyond.
  __device__ __forceinline__ int step_of(float x) const {
    return static_cast<int>(fminf(__fmul_rn(__fsub_rn(most, x), steep), kBins - 1));
  }
  // The least distance from the largest key of which the step is this one or a later one.
  __device__ __forceinline__ uint32_t distance_of(int step) const {
    const uint32_t top = key_of(most), furthest = top - kLeastKey;
    if (step_of(most) >= step) return 0;
    uint32_t nearer = 0;
    for (int shift = 27;; shift = shift > 5 ? shift - 5 : 0) {
      const uint32_t at = nearer + (static_cast<uint32_t>(lane()) << shift);
      const bool is =
          at >= nearer && at <= furthest && step_of(value_of(top - min(at, furthest))) < step;
      nearer += static_cast<uint32_t>(__popc(__ballot_sync(kAll, is)) - 1) << shift;
      if (shift == 0) return nearer + 1;
    }
  }
  // What is kept and has a distance in [near, near + span), if that is little enough to be listed.
  __device__ __forceinline__ int list_up(uint32_t near, uint32_t span) const {
    const uint32_t from = key_of(most) - near;
    if (thread() == 0) *listed = 0;
    __syncthreads();
    batches([&](const float(&x)[kBatch], int at) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const bool in = from - key_of(x[j]) < span && keeps(x[j], at + j);
        const unsigned all = __ballot_sync(kAll, in);
        if (all == 0) continue;
        int to = 0;
        if (lane() == 0) to = atomicAdd(listed, __popc(all));
        to = __shfl_sync(kAll, to, 0) + __popc(all & ((1u << lane()) - 1));
        if (in && to < room) list[to] = static_cast<uint16_t>(at + j);
      }
    });
    __syncthreads();
    return *listed <= room ? *listed : -1;
  }
  // Keeps the best, lowest columns first, until their f reach `target_of` all kept ones' f; nothing
  // changes where that says 0.
  template <class F, class T>
  __device__ __forceinline__ void keep_until(const F& f, const T& target_of) {
    const uint32_t top = key_of(most);
    uint32_t near = 0, span = top - kLeastKey + 1;  // where it must end
    Weight target = 0, nearer = 0, there = 0, of_least = 0;
    float end = -FLT_MAX;
    int count = -1;  // of those in the list
    for (bool coarse = true;; coarse = false) {
      const int shift = max(0, 28 - __clz(static_cast<int>(span - 1)));
      const auto put = [&](float x, Weight its) {
        const auto bin = coarse ? step_of(x) : static_cast<int>(top - near - key_of(x) >> shift);
        table[bin * kThreads + thread()] += its;
      };
      const auto in = [&](float x) { return top - near - key_of(x) < span; };
      for (int i = thread(); i < count; i += kThreads) {
        const float x = v[list[i]];
        if (in(x)) put(x, f(x));
      }
      if (count < 0) {
        batches([&](const float(&x)[kBatch], int at) {
          bool any = false, its[kBatch];
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            its[j] = in(x[j]) && keeps(x[j], at + j);
            any |= its[j];
          }
          if (!any) return;
          Weight shares[kBatch];
#pragma unroll
          for (int j = 0; j < kBatch; ++j) shares[j] = f(x[j]);
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            if (its[j]) put(x[j], shares[j]);
          }
        });
      }
      __syncthreads();
#pragma unroll
      for (int b = 0; b < kBins / kWarps; ++b) {
        const int of_warp = warp() * (kBins / kWarps) + b;
        Weight* sums = table + of_warp * kThreads + lane();
        Weight sum = 0;
#pragma unroll
        for (int i = 0; i < kThreads; i += 32) {
          sum += sums[i];
          sums[i] = 0;
        }
        sum = sum_of_warp(sum);
        if (lane() == 0) box[turn][of_warp] = sum;
      }
      const Weight mine = meet();
      const Weight sum = scan_of_warp(mine, lane());
      if (coarse) {
        target = target_of(__shfl_sync(kAll, sum, 31));
        if (target == 0) return;
      }
      const unsigned enough = __ballot_sync(kAll, nearer + sum >= target);
      const int bin = __ffs(static_cast<int>(enough)) - 1;
      there = __shfl_sync(kAll, mine, bin);
      nearer += __shfl_sync(kAll, sum, bin) - there;
      if (coarse) {
        near = distance_of(bin);
        if (bin + 1 < kBins) span = distance_of(bin + 1);
        span -= near;
      } else {
        near += static_cast<uint32_t>(bin) << shift;
        span = min(1u << shift, span - (static_cast<uint32_t>(bin) << shift));
      }
      end = value_of(top - (near + span - 1));
      of_least = f(end);
      if (nearer + there - target < of_least || span == 1) break;
      if (count < 0) count = list_up(near, span);
    }
    int last = INT_MAX;
    if (nearer + there - target >= of_least) {  // not all that are equal
      const Weight wanted = (target - nearer + of_least - 1) / of_least;
      const int its = owner([&](float x, int at) { return x == end && keeps(x, at); },
                            [](float) -> Weight { return 1; }, [&](Weight) { return wanted - 1; });
      if (thread() == 0) box[turn][0] = 0;
      __syncthreads();
      if (its >= 0) box[turn][0] = static_cast<Weight>(its);
      last = static_cast<int>(__shfl_sync(kAll, meet(), 0));
    } else if (end <= least) {  // no more is left out than before
      return;
    }
    least = end;
    last_tie = last;
  }
};

__device__ __forceinline__ void penalise(float& l, const SampleRow& row, int outputs) {
  l = l > 0.0f ? __fdiv_rn(l, row.repetition) : __fmul_rn(l, row.repetition);
  l = __fsub_rn(l, __fmul_rn(row.frequency, static_cast<float>(outputs)));
  if (outputs > 0) l = __fsub_rn(l, row.presence);
}

// What the lists of a row say, to the columns of this block. The row's last token, if it was not
// known when the lists were made, is one more of what was put out.
__device__ __forceinline__ void change(float* v, int first, int count, const SampleRow& row,
                                       const int32_t* words, const int32_t* tokens) {
  __shared__ int was_seen;
  const int tid = static_cast<int>(threadIdx.x);
  const int last = row.last >= 0 ? tokens[row.last] : -1;
  if (tid == 0) was_seen = 0;
  for (int i = tid; row.allowed.count > 0 && i < count; i += kThreads) {
    const int w = (first + i) / 32;
    if (w < row.allowed.count && (words[row.allowed.at + w] >> ((first + i) % 32) & 1) == 0) {
      v[i] = kNone;
    }
  }
  __syncthreads();
  const auto* seen = reinterpret_cast<const SampleRow::Seen*>(words + row.seen.at);
  for (int i = tid; i < row.seen.count; i += kThreads) {
    const SampleRow::Seen token = seen[i];
    const int at = token.id - first;
    const bool again = token.id == last;
    if (again) was_seen = 1;
    if (at >= 0 && at < count) penalise(v[at], row, token.outputs + (again ? 1 : 0));
  }
  __syncthreads();
  if (tid == 0 && was_seen == 0 && last >= first && last < first + count) {
    penalise(v[last - first], row, 1);
  }
  __syncthreads();
  const auto* biases = reinterpret_cast<const SampleRow::Bias*>(words + row.biases.at);
  for (int i = tid; i < row.biases.count; i += kThreads) {
    const int at = biases[i].id - first;
    if (at >= 0 && at < count) v[at] = __fadd_rn(v[at], biases[i].bias);
  }
  __syncthreads();
  for (int i = tid; i < row.barred.count; i += kThreads) {
    const int at = words[row.barred.at + i] - first;
    if (at >= 0 && at < count) v[at] = kNone;
  }
  __syncthreads();
}

__device__ __forceinline__ void load(float* v, const float* row, int first, int count, int cols,
                                     bool whole) {
  const int tid = static_cast<int>(threadIdx.x);
  if (whole && first + count <= cols) {
    for (int i = tid * 4; i < count; i += kThreads * 4) cp_async16(v + i, row + first + i);
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }
#pragma unroll 4
  for (int i = tid; i < count; i += kThreads) v[i] = first + i < cols ? row[first + i] : kNone;
}

template <int kBlocks>
__device__ __forceinline__ int draw(Row<kBlocks>& r, const SampleRow& row, int cols, int best) {
  r.least = kNone;
  r.last_tie = -1;
  if (row.min_p_cut > kNone) {
    r.least = __fadd_rn(r.most, row.min_p_cut);
    r.last_tie = INT_MAX;
  }
  if (row.top_k > 0 && row.top_k < cols) {
    r.keep_until(
        [](float) -> Weight { return 1; },
        [&](Weight all) -> Weight { return all > static_cast<Weight>(row.top_k) ? row.top_k : 0; });
  }
  const auto share = [&](float x) { return r.share(x); };
  if (row.top_p < 1.0f) {
    r.keep_until(share, [&](Weight all) -> Weight {
      const double mass = __dmul_rn(static_cast<double>(row.top_p), __ull2double_rn(all));
      const Weight units = __double2ull_rz(mass);
      return units > 1 ? units : 1;
    });
  }
  return r.winner(row.race, best);
}

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 2)
    sample_kernel(Rows logits, const int32_t* words, const int32_t* tokens, int32_t* ids, int each,
                  int listed_at_most) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ Weight box[2][kBins];
  __shared__ Weight of_warps[kWarps];
  __shared__ int32_t row_words[ops::kSampleRowWords];
  __shared__ int listed;
  Row<kBlocks> r;
  r.table = reinterpret_cast<Weight*>(shared);
  r.v = reinterpret_cast<float*>(r.table + kBins * kThreads);
  r.list = reinterpret_cast<uint16_t*>(r.v + each * kThreads);
  r.listed = &listed;
  r.room = listed_at_most;
  r.box = box;
  r.of_warps = of_warps;
  r.each = each;
  r.rank = static_cast<int>(blockIdx.x);
  r.turn = 0;
  const int count = each * kThreads, cols = static_cast<int>(logits.cols);
  r.first = r.rank * count;
  const int tid = r.thread();
  let_next_start();
  for (int b = 0; b < kBins; ++b) r.table[b * kThreads + tid] = 0;
  wait();
  if (tid < static_cast<int>(ops::kSampleRowWords)) {
    row_words[tid] = words[blockIdx.y * ops::kSampleRowWords + tid];
  }
  __syncthreads();
  const SampleRow& row = *reinterpret_cast<const SampleRow*>(row_words);
  if (row.how == SampleRow::kNotHere) {
    if (r.rank == 0 && tid == 0) ids[blockIdx.y] = SampleRow::kSeeLogits;
    return;
  }
  load(r.v, logits.data + blockIdx.y * logits.stride, r.first, count, cols,
       whole_rows(logits.data, logits.stride));
  __syncthreads();
  change(r.v, r.first, count, row, words, tokens);
  float most = kNone, least = INFINITY;
  int first_most = 0;
  r.batches([&](const float(&x)[kBatch], int at) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const bool real = x[j] > kNone;
      const float clean = real ? x[j] + 0.0f : kNone;  // no NaN, no -0
      if (at + j < (tid + 1) * each) r.v[at + j] = clean;
      first_most = clean > most ? at + j : first_most;
      most = fmaxf(most, clean);
      if (real) least = fminf(least, clean);
    }
  });
  const auto ends = r.ends(
      {static_cast<Weight>(key_of(most)) << 32 | ~static_cast<uint32_t>(r.first + first_most),
       key_of(least)});
  const Weight best = ends.largest;
  r.most = value_of(static_cast<uint32_t>(best >> 32));
  r.scale = row.scale;
  // Two powers of e are a step, or less where the smallest is nearer.
  const float nearer = __fdiv_rn(kBins - 0.125f, __fsub_rn(r.most, value_of(ends.smallest)));
  r.steep = __fmul_rn(row.scale, 0.5f);
  if (nearer > r.steep && nearer < FLT_MAX) r.steep = nearer;
  if (!(r.most > kNone) || row.how == SampleRow::kBest || r.most == INFINITY) {
    if (r.rank == 0 && tid == 0) {
      ids[blockIdx.y] = r.most > kNone ? static_cast<int32_t>(~static_cast<uint32_t>(best)) : -1;
    }
  } else {
    const int id = draw(r, row, cols, static_cast<int>(~static_cast<uint32_t>(best)));
    if (id >= 0) ids[blockIdx.y] = id;
  }
  cluster_sync();  // others may still read from here
}

__global__ void __launch_bounds__(kThreads)
    take_ids_kernel(int32_t* ids, const int32_t* from, int64_t count, const int32_t* named) {
  let_next_start();
  wait();
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < count && from[i] >= 0) ids[i] = named[from[i]];
}

// How a row is cut.
struct VocabularyCut {
  int each, listed;
  size_t shared;
};
VocabularyCut cut_of(int64_t cols, int blocks) {
  // Two blocks share a multiprocessor, less what each of them has besides.
  constexpr size_t kHalf = (kSharedOfSm + 1024) / 2 - 1024 - 512;
  VocabularyCut c = {static_cast<int>(ceil_div(cols, kThreads * blocks)) | 1, kMostListed, 0};
  const size_t all =
      kThreads * (kBins * sizeof(Weight) + static_cast<size_t>(c.each) * sizeof(float));
  const size_t fewest = all + kFewestListed * sizeof(uint16_t);
  if (fewest <= kHalf && all + kMostListed * sizeof(uint16_t) > kHalf) {
    c.listed = static_cast<int>((kHalf - all) / sizeof(uint16_t));
  }
  c.shared = all + static_cast<size_t>(c.listed) * sizeof(uint16_t);
  return c;
}
// Room for the kernel's static shared memory.
constexpr size_t kStaticShared = 4096;

// How many clusters run at once; 0: the device refuses.
template <int kBlocks>
int at_once(const Context& ctx, const VocabularyCut& cut) {
  const auto kernel = sample_kernel<kBlocks>;
  return known_of(ctx, reinterpret_cast<const void*>(kernel), cut.shared, [&] {
    // The most that any vocabulary needs: models of several vocabularies may share the device.
    if (raise_shared(kernel, kSharedOfSm - kStaticShared) != 0) return 0;
    if (leave_shared(kernel) != 0) return 0;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kBlocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = cut.shared;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kBlocks, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int count = 0;
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&count, kernel, &config);
    return error == cudaSuccess ? count : 0;
  });
}

template <int kBlocks>
int run(const Context& ctx, const VocabularyCut& cut, const Rows& logits, const int32_t* words,
        const int32_t* tokens, int32_t* ids) {
  return launch_cluster(
      ctx, sample_kernel<kBlocks>, dim3(kBlocks, static_cast<unsigned>(logits.rows)),
      dim3(kThreads), cut.shared, dim3(kBlocks), logits, words, tokens, ids, cut.each, cut.listed);
}

}  // namespace

int samples(const Context& ctx, int64_t cols) {
  return ctx.capability >= 90 && cols > 0 && cut_of(cols, 8).shared + kStaticShared <= kSharedOfSm
             ? 1
             : 0;
}

// Multiprocessors stand in uneven groups, of which a cluster takes one: of seven blocks more fit in
// than of eight, which are faster otherwise.
int sample(const Context& ctx, const Rows* logits, const int32_t* words, const int32_t* tokens,
           int32_t* ids) {
  const VocabularyCut seven = cut_of(logits->cols, 7), eight = cut_of(logits->cols, 8);
  const int eights = at_once<8>(ctx, eight);
  if (eights == 0) return static_cast<int>(cudaErrorInvalidConfiguration);
  const bool more = logits->rows > eights && seven.shared + kStaticShared <= kSharedOfSm;
  const int sevens = more ? at_once<7>(ctx, seven) : 0;
  return logits->rows > eights && logits->rows <= sevens
             ? run<7>(ctx, seven, *logits, words, tokens, ids)
             : run<8>(ctx, eight, *logits, words, tokens, ids);
}

int take_ids(const Context& ctx, int32_t* ids, const int32_t* from, int64_t count,
             const int32_t* named) {
  return launch(ctx, take_ids_kernel, dim3(static_cast<unsigned>(ceil_div(count, kThreads))),
                dim3(kThreads), 0, ids, from, count, named);
}

}  // namespace freshet::cuda
