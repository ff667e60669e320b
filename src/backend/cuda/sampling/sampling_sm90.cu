// Samples tokens from rows of logits according to sampling descriptors (ops/sample.h);
// bit-identical to sampling/sampler.h (Hopper).
//
// A cluster of blocks holds one row of logits in shared memory: thread t of block b has `each`
// neighbouring columns from (b * kThreads + t) * each on; `each` is odd, which avoids bank
// conflicts between the lanes of a warp. Token weights (softmax numerators) are fixed-point
// integers, so the order of sums doesn't matter.
//
// The threshold of top-k and top-p is found by a radix search over histograms of 16 bins: each pass
// sums the weights per bin and goes on with the bin that holds the threshold, until the threshold
// is a single value or that whole bin is kept. The bins of the first pass are equal steps of the
// logit; those of later passes are equal steps of the distance from the largest logit, as ordered
// integers. As soon as few columns of a block are left in the bin, they are listed, and later
// passes read only the list. Ties at the threshold are kept in column order, by one scan over the
// cluster.
//
// The draw is an exponential race (ops/race.h), another form of the Gumbel-max trick: the token
// with the lowest time wins. A warp takes a tile of columns at a time, and each lane four of its
// columns. Fast arithmetic gives a lower bound of each column's time; only columns that may be
// first in their block are computed exactly.
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
// In octaves below the largest logit: from here on a weight has less than 2^10 units of 2^-44 (so
// that rounding matters), and from here on it is zero.
constexpr float kRoundedFrom = 34.0f, kNoShareFrom = 46.0f;

// Maps floats to integers of the same order.
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

// 2^x with an error below 2^-20.
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
// Inclusive prefix sum over the lanes of a warp.
__device__ __forceinline__ Weight scan_of_warp(Weight v, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const Weight other = __shfl_up_sync(kAll, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

// A row of logits held by a cluster; all threads of the cluster call every method together.
template <int kBlocks>
struct Row {
  float* v;              // [kThreads * each] of this block
  Weight* table;         // the histogram: [kBins][kThreads], zeros between uses
  Weight (*box)[kBins];  // [2]: what blocks exchange, double-buffered
  Weight* of_warps;      // [kWarps]
  uint16_t* list;        // [room]
  int* listed;           // the number of listed columns
  int room;
  int each, first;  // columns per thread; the block's first column
  int rank, turn;
  float most, scale;  // the largest logit, 1 / temperature
  float steep;        // bins per unit of logit in the first pass
  // Kept: logits above `least`, and those equal to it up to column `last_tie`.
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
  // Calls g(values, at) for this thread's columns, kBatch at a time; kNone beyond the last.
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
  // Cluster reduction: the sum over all blocks of box[turn][i], in lanes i < kBins.
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
  // Largest and smallest over all threads of the cluster.
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
  // f gives weights to the columns for which `in` holds. Returns the column in whose weight the
  // target_of(total weight)-th unit falls, in column order; only one thread of the cluster has it,
  // the others get -1.
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
  // Distance of a logit from the largest one, as octaves of weight.
  __device__ __forceinline__ float octaves(float x) const {
    return __fmul_rn(__fmul_rn(__fsub_rn(most, x), scale), 1.44269504f);
  }
  // Lower bound of a column's time, relative to the weight of the largest logit: E is above the
  // high bits of its noise. Weights are rounded to units, so a small one may be twice the
  // exponential, and one below half a unit is 0.
  __device__ __forceinline__ float earliest(uint32_t high, float x) const {
    float away = octaves(x);
    if (away > kRoundedFrom) away -= 1.0f;
    const float v = __fmul_rz(__uint2float_rz(high), 0x1p-32f * 0.99f);
    return away < kNoShareFrom ? __fmul_rz(v, exp2_fast(away)) : INFINITY;
  }
  // Upper bound of it.
  __device__ __forceinline__ float latest(uint32_t high, float x) const {
    const float away = octaves(x);
    const float v = __fmul_ru(__uint2float_ru(high), 0x1p-32f) + 0x1p-32f;
    const float rest = __fmul_rz(__uint2float_rz(~high), 0x1p-32f);  // 1 - v
    const float e = v < 0.5f ? v + v * v : -__logf(rest);
    return away < kRoundedFrom ? e * exp2_fast(away) * 1.01f : INFINITY;
  }
  // The kept column that wins the race; only one thread of the cluster has it, the others get -1.
  // `best`: the column of the largest logit, which is always kept.
  __device__ __forceinline__ int winner(const ops::RaceStream& stream, int best) {
    const auto word = [](const ops::RaceWords& w, int j) {
      return j == 0 ? w.of[0] : j == 1 ? w.of[1] : j == 2 ? w.of[2] : w.of[3];
    };
    const auto high_of = [&](int column) {
      const auto token = static_cast<uint32_t>(column);
      return word(ops::race_words(stream, ops::race_counter(token)),
                  static_cast<int>(ops::race_word(token)));
    };
    // This thread's columns: the n-th one belongs to word n % 4 of the warp's (n / 4)-th tile.
    const int tiles = each * kThreads / ops::kRaceTile;
    const auto column_of = [&](int n) {
      return (warp() + n / 4 * kWarps) * ops::kRaceTile + n % 4 * 32 + lane();
    };
    // No kept logit below this has a weight: 46 octaves are a distance of 31.9.
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
    // Exact times of the columns that may be first in the block: usually one column, or those of a
    // few threads.
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
  // Cluster-wide argmin: the id with the lowest time, in one thread of the cluster (-1 in the
  // others). Ties go to the lowest id.
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
  // First-pass bin of a logit, by its distance from the largest; the last bin takes all the rest.
  __device__ __forceinline__ int step_of(float x) const {
    return static_cast<int>(fminf(__fmul_rn(__fsub_rn(most, x), steep), kBins - 1));
  }
  // The smallest distance (in keys) from the largest logit that falls into this bin or a later one.
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
  // Lists the kept columns whose distance is in [near, near + span). Returns their number, or -1 if
  // they don't fit.
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
  // Keeps the largest logits (ties in column order) until the sum of their f reaches target_of(the
  // sum of all kept f). If that is 0, keeps everything.
  template <class F, class T>
  __device__ __forceinline__ void keep_until(const F& f, const T& target_of) {
    const uint32_t top = key_of(most);
    uint32_t near = 0, span = top - kLeastKey + 1;  // range of distances that holds the threshold
    Weight target = 0, nearer = 0, there = 0, of_least = 0;
    float end = -FLT_MAX;
    int count = -1;  // columns in the list; -1: no list yet
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
    if (nearer + there - target >= of_least) {  // only some of the ties are kept
      const Weight wanted = (target - nearer + of_least - 1) / of_least;
      const int its = owner([&](float x, int at) { return x == end && keeps(x, at); },
                            [](float) -> Weight { return 1; }, [&](Weight) { return wanted - 1; });
      if (thread() == 0) box[turn][0] = 0;
      __syncthreads();
      if (its >= 0) box[turn][0] = static_cast<Weight>(its);
      last = static_cast<int>(__shfl_sync(kAll, meet(), 0));
    } else if (end <= least) {  // nothing more is filtered out
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

// Applies a row's allowed tokens, penalties, biases and barred tokens to this block's columns. A
// last token that was not known when the lists were made counts as one more output.
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
  // A bin is two units of the scaled logit, or less if the smallest logit is near.
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
  cluster_sync();  // other blocks may still read this block's shared memory
}

__global__ void __launch_bounds__(kThreads)
    take_ids_kernel(int32_t* ids, const int32_t* from, int64_t count, const int32_t* named,
                    const int32_t* map) {
  let_next_start();
  wait();
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= count || from[i] < 0) return;
  // A row without a number gives -1; the host ends the text there when it sees it.
  const int32_t id = max(named[from[i]], 0);
  ids[i] = map != nullptr ? map[id] : id;
}

// How a row is split over blocks.
struct VocabularyCut {
  int each, listed;
  size_t shared;
};
VocabularyCut cut_of(int64_t cols, int blocks) {
  // So that two blocks fit on an SM, with their static shared memory and what the system reserves.
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
// Reserve for the kernel's static shared memory.
constexpr size_t kStaticShared = 4096;

// How many clusters are resident at once; 0: the device can't run the kernel.
template <int kBlocks>
int at_once(const Context& ctx, const VocabularyCut& cut) {
  const auto kernel = sample_kernel<kBlocks>;
  return known_of(ctx, reinterpret_cast<const void*>(kernel), cut.shared, [&] {
    // The limit for any vocabulary size, since models with different vocabularies may share the
    // device.
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

// SMs come in groups (GPCs) of uneven size, and a cluster must fit into one: more clusters of seven
// blocks fit than of eight, but eight are faster if they fit.
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
             const int32_t* named, const int32_t* map) {
  return launch(ctx, take_ids_kernel, dim3(static_cast<unsigned>(ceil_div(count, kThreads))),
                dim3(kThreads), 0, ids, from, count, named, map);
}

}  // namespace freshet::cuda
