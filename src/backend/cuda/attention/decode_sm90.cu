// Launches attention of one query per sequence, or of a few, for the usual head sizes
// (decode_sm90.cuh).
#include "backend/cuda/attention/decode_sm90.cuh"
#include "backend/cuda/runtime/kernels.cuh"

namespace freshet::cuda {
namespace {

using namespace single;

// The number of blocks that have written their KV splits, by tile.
[[maybe_unused]] __device__ unsigned arrived[kMostCounters];
[[maybe_unused]] __device__ Counters counters;

// Blocks: as many as are resident at once, at most one per task.
template <class T>
__global__ void __launch_bounds__(kThreads, T::kResident)
    single_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ Plan plan,
                  const __grid_constant__ HeadsArgs of) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  auto& s = *reinterpret_cast<Shared<T>*>(memory);
  // Otherwise when tasks run out: the next kernel's copies would slow this one's.
  if (plan.tasks <= static_cast<int>(gridDim.x)) let_next_start();
  // Lengths and tables were copied before the step's first kernel, and the step writes only the
  // query's own slot of the cache.
  if (threadIdx.x >= kSumming) {
    produce(s, a, plan, of, counters);
    return;
  }
  sync_block();
  wait();
  sum_tasks(s, a, plan, of, arrived);
#endif
}

// Blocks that an SM holds, by pipeline stages per block.
struct Resident {
  int few, many;  // with the fewest and with the most stages
};

Plan plan_single(const Context& ctx, const AttentionArgs& a, const Resident& resident,
                 int least_slots) {
  Plan p = {};
  p.slots = kMostSlots;
  p.heads = a.cache.kv_heads;
  p.group = a.heads / a.cache.kv_heads;
  p.queries = a.max_queries;
  p.tiles = static_cast<int>(ceil_div(int64_t{p.group} * p.queries, kRowsOfTile));
  p.all_tiles = a.batch.sequences * p.tiles.by;
  p.pieces = static_cast<int>(ceil_div(a.max_context, kPieceTokens));
  if (a.window > 0) {
    const auto seen = static_cast<int>(ceil_div(a.window + p.queries - 1, kPieceTokens)) + 1;
    p.pieces = p.pieces < seen ? p.pieces : seen;
  }
  // Chooses the number of KV splits per task that finishes soonest. Blocks share memory bandwidth,
  // but a few blocks alone take as long as each needs by itself. Starting and ending a task costs
  // about a tile.
  const int64_t tiles = int64_t{a.batch.sequences} * p.tiles.by * a.cache.kv_heads;
  const auto tasks = [&](int run) { return tiles * ceil_div(p.pieces, run); };
  int64_t least = INT64_MAX;
  const auto weigh_runs = [&](int blocks, int slots) {
    const int64_t wave = int64_t{blocks} * ctx.multiprocessors;
    for (int run = 1; run <= kMostRun && splits_context(a); ++run) {
      const int64_t rest = tasks(run) % wave, alone = int64_t{ctx.multiprocessors} * 4 / 3;
      const int64_t time = tasks(run) - rest + (rest == 0 || rest > alone ? rest : alone);
      const int64_t cost = time * (int64_t{run} * kTiles + 1);
      if (cost >= least) continue;
      least = cost;
      p.run = run;
      p.slots = slots;
    }
  };
  // Deep pipelines hide more latency than another block does.
  p.run = p.pieces;
  weigh_runs(resident.many, kMostSlots);
  if (resident.few > resident.many) weigh_runs(resident.few, least_slots);
  p.tasks = static_cast<int>(tasks(p.run.by));
  // In long runs, full pipelines of codes request more than memory can serve well.
  const int64_t keys = int64_t{p.run.by} * kPieceTokens;
  if (resident.few > resident.many && p.slots == kMostSlots &&
      (keys < a.max_context ? keys : a.max_context) >= 2 * kPieceTokens) {
    --p.slots;
  }
  return p;
}

template <class T>
int run(const Context& ctx, const AttentionArgs& a, bool cluster) {
  constexpr size_t kBytes = sizeof(Shared<T>);
  const auto kernel = single_kernel<T>;
  if (const int error = raise_shared(kernel, kBytes); error != 0) return error;
  constexpr int kLeast = T::Stored::kLeastSlots;
  const auto blocks_with = [&](int slots) {
    const size_t bytes = Shared<T>::bytes(slots);
    return known_of(ctx, reinterpret_cast<const void*>(kernel), bytes, [&] {
      int blocks = 1;
      (void)cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, bytes);
      return blocks > 1 ? blocks : 1;
    });
  };
  const Resident resident{blocks_with(kLeast), blocks_with(kMostSlots)};
  const Plan plan = plan_single(ctx, a, resident, kLeast);
  if (cluster) return attention_cluster(ctx, a, plan);
  const int most = ctx.multiprocessors * (plan.slots == kLeast ? resident.few : resident.many);
  const int blocks = plan.tasks < most ? plan.tasks : most;
  HeadsArgs of{};
  if (a.before != nullptr) of = *a.before;
  return launch(ctx, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                Shared<T>::bytes(plan.slots), a, plan, of);
}

template <int D, template <int> class Stored, bool kE4M3>
int run_rows(const Context& ctx, const AttentionArgs& a, bool cluster) {
  const bool eight = a.max_queries == 1 && a.heads / a.cache.kv_heads <= 8;
  return eight ? run<Kind<D, 1, Stored, kE4M3>>(ctx, a, cluster)
               : run<Kind<D, 2, Stored, kE4M3>>(ctx, a, cluster);
}
// attention() requests E4M3 only if heads are whole groups.
template <int D, template <int> class Stored>
int run_result(const Context& ctx, const AttentionArgs& a, bool cluster) {
  if constexpr (D % kE4M3Cols == 0) {
    if (a.act.e4m3 != 0) return run_rows<D, Stored, true>(ctx, a, cluster);
  }
  return run_rows<D, Stored, false>(ctx, a, cluster);
}
template <int D>
int run_heads(const Context& ctx, const AttentionArgs& a, bool cluster) {
  switch (a.cache.type) {
    case CacheType::kF16:
      return run_result<D, HalfStored>(ctx, a, cluster);
    case CacheType::kBF16:
      return run_result<D, BF16Stored>(ctx, a, cluster);
    case CacheType::kE4M3:
      return run_result<D, E4M3Stored>(ctx, a, cluster);
    case CacheType::kInt8:
      return run_result<D, Int8Stored>(ctx, a, cluster);
    // Their results are rotated back before they are encoded.
    case CacheType::kInt4:
      return run_rows<D, Int4Stored, false>(ctx, a, cluster);
    case CacheType::kK8V4:
      return run_rows<D, K8V4Stored, false>(ctx, a, cluster);
  }
  return static_cast<int>(cudaErrorInvalidValue);
}

}  // namespace

bool takes_heads(const Context& ctx, const AttentionArgs& a) {
  if (a.single != a.batch.sequences) return false;
  const AttentionKernel row = attention_kernel_of(ctx, a);
  if (row != kDecodeSm90) return row == kDecodeClusterSm90;
  bool are_usual = a.cache.key_dim == kUsualDim;
  for (int i = 0; i < a.before->count; ++i) are_usual = are_usual && usual(a.before->of[i]);
  return are_usual && !has_scales(part_of(a.cache.type, true)) && a.heads / a.cache.kv_heads <= 8;
}

int attention_single(const Context& ctx, const AttentionArgs& a, bool cluster) {
  switch (a.cache.key_dim) {
    case 64:
      return run_heads<64>(ctx, a, cluster);
    case 128:
      return run_heads<128>(ctx, a, cluster);
    default:
      return run_heads<256>(ctx, a, cluster);
  }
}

}  // namespace freshet::cuda
