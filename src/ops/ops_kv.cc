// Operations on stored keys and values other than attention: the weights that queries give them
// (scores), and moving them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/hadamard.h"
#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

constexpr int kScoredRows = 32;     // query rows of a task
constexpr float kNoScore = -1e30f;  // for a key that the query doesn't see

int32_t blocks_of(int32_t slots) {
  return (slots + kBlockTokens - 1) / kBlockTokens;
}

// Some rows of the scored queries of one sequence with the heads of one KV head.
struct ScoreTask {
  const Matrix& q;
  const KvView& cache;
  const AttentionBatch& batch;
  const AttentionParams& params;
  const AttentionKernel& layout;
  const ScoreKernel& kernel;
  const ScoredQueries& scored;
  int kv_head;
  const float* others;  // as in key_scores()

  int group() const { return params.heads / cache.shape.kv_heads; }
  int32_t slots() const { return batch.context_len[static_cast<size_t>(scored.sequence)]; }
  // How many sums a task has: of each query of which it has a row, or one.
  int64_t touched() const {
    return scored.apart ? std::min((kScoredRows - 1) / group() + 2, scored.queries) : 1;
  }
  static size_t floats(const KvShape& s, int64_t slots) {
    const int64_t padded = blocks_of(static_cast<int32_t>(slots)) * int64_t{kBlockTokens};
    return static_cast<size_t>(kScoredRows * (padded + s.key_dim) + kBlockTokens * s.key_dim);
  }

  // From row `first` on; row r is query r / group() of the scored ones with head r % group() of the
  // KV head. sums: [touched(), stride], of these rows.
  void run(int64_t first, float* scratch, int64_t* sums, int64_t stride) const {
    const auto rows =
        static_cast<int>(std::min<int64_t>(kScoredRows, int64_t{scored.queries} * group() - first));
    const KvShape& s = cache.shape;
    const int64_t padded = blocks_of(slots()) * int64_t{kBlockTokens};
    float* const keys = scratch;
    float* const queries = keys + int64_t{kBlockTokens} * s.key_dim;
    float* const scores = queries + int64_t{rows} * s.key_dim;
    const auto sequence = static_cast<size_t>(scored.sequence);
    const int64_t token = batch.query_start[sequence + 1] - scored.queries;
    for (int r = 0; r < rows; ++r) {
      const int64_t row = first + r;
      const float* from =
          q.row(token + row / group()) + (kv_head * group() + row % group()) * s.key_dim;
      float* const query = queries + int64_t{r} * s.key_dim;
      std::memcpy(query, from, static_cast<size_t>(s.key_dim) * sizeof(float));
      if (info(s.type).key.rotated) hadamard(query, s.key_dim);
    }
    const int32_t* table = batch.block_tables + scored.sequence * batch.table_stride;
    for (int32_t b = 0; b < blocks_of(slots()); ++b) {
      const uint8_t* block = cache.data + static_cast<size_t>(table[b]) * s.block_bytes();
      layout.read_keys(s, block, kv_head, keys);
      kernel.dots(queries, rows, keys, s.key_dim, scores + int64_t{b} * kBlockTokens, padded);
    }
    for (int r = 0; r < rows; ++r) {
      const int64_t row = first + r;
      const int64_t seen = slots() - scored.queries + row / group() + 1;
      float* const mine = scores + r * padded;
      for (int64_t i = 0; i < seen; ++i) {
        mine[i] *= params.scale;
        if (params.softcap > 0.0f) mine[i] = params.softcap * std::tanh(mine[i] / params.softcap);
      }
      const int64_t end = (seen + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
      std::fill(mine + seen, mine + end, kNoScore);
      float sink = 0.0f;
      const bool has = sink_of(token + row / group(), kv_head * group() + row % group(), sink);
      int64_t* const to = sums + (scored.apart ? row / group() - first / group() : 0) * stride;
      kernel.add_weights(mine, end, has ? &sink : nullptr, to);
    }
  }

  // The logit that stands for the sink and the other keys of a query head; false: there is none.
  bool sink_of(int64_t query, int64_t head, float& sink) const {
    if (params.sinks != nullptr) sink = params.sinks[head];
    const float* const other =
        others == nullptr ? nullptr : others + (query * params.heads + head) * 2;
    if (other == nullptr || other[1] == 0.0f) return params.sinks != nullptr;
    double all = double{other[0]} + std::log(double{other[1]});
    if (params.sinks != nullptr) {
      const double most = std::max(all, double{sink});
      all = most + std::log(std::exp(all - most) + std::exp(double{sink} - most));
    }
    sink = static_cast<float>(all);
    return true;
  }
};

}  // namespace

void Ops::key_scores(const Matrix& q, const KvView& cache, const AttentionBatch& batch,
                     const AttentionParams& params, std::span<const ScoredQueries> scored,
                     const float* others) {
  const KvShape& s = cache.shape;
  FRESHET_CHECK(params.window == 0 && batch.ranges.empty() && !s.biased,
                "key_scores with a window, ranges or a bias");
  int32_t most = 0;
  for (const ScoredQueries& part : scored) {
    const auto i = static_cast<size_t>(part.sequence);
    const int32_t slots = batch.context_len[i];
    const int64_t padded = blocks_of(slots) * int64_t{kBlockTokens};
    FRESHET_CHECK(part.queries > 0 && part.stride >= padded &&
                      part.queries <= batch.query_start[i + 1] - batch.query_start[i],
                  "key_scores sequence={} queries={} stride={} slots={}", i, part.queries,
                  part.stride, slots);
    most = std::max(most, slots);
  }
  if (Device* d = device()) {
    FRESHET_CHECK(others == nullptr, "key_scores of merged attention on a device");
    return d->key_scores(q, cache, batch, params, scored);
  }
  const size_t floats = ScoreTask::floats(s, most);
  std::vector<float>& scratch = impl_->kv_scratch;
  scratch.resize(std::max(scratch.size(), floats * static_cast<size_t>(impl_->pool.size())));
  const AttentionKernel& layout = impl_->attention_for(s);
  // Tasks have sums of their own, which are whole numbers: their order changes nothing.
  const int64_t padded = blocks_of(most) * int64_t{kBlockTokens};
  const int64_t group = params.heads / s.kv_heads;
  for (const ScoredQueries& part : scored) {
    const int64_t pieces = (part.queries * group + kScoredRows - 1) / kScoredRows;
    const ScoreTask any{q, cache, batch, params, layout, *impl_->scores, part, 0, others};
    const int64_t touched = any.touched();
    std::vector<int64_t>& sums = impl_->score_sums;
    sums.assign(static_cast<size_t>(pieces * s.kv_heads * touched * padded), 0);
    impl_->pool.parallel_for(pieces * s.kv_heads, [&](int64_t i, int worker) {
      ScoreTask task = any;
      task.kv_head = static_cast<int>(i / pieces);
      task.run(i % pieces * kScoredRows, scratch.data() + static_cast<size_t>(worker) * floats,
               sums.data() + i * touched * padded, padded);
    });
    const int32_t slots = any.slots();
    impl_->pool.parallel_for(s.kv_heads, [&](int64_t head, int) {
      for (int64_t i = 0; i < pieces * touched; ++i) {
        const int64_t query = part.apart ? i / touched * kScoredRows / group + i % touched : 0;
        if (query >= part.queries) continue;
        const int64_t* const from = sums.data() + (head * pieces * touched + i) * padded;
        int64_t* const to = part.sums + (query * s.kv_heads + head) * part.stride;
        for (int32_t slot = 0; slot < slots; ++slot) to[slot] += from[slot];
      }
    });
  }
}

void Ops::take_scores() {
  if (Device* d = device()) d->take_scores(impl_->pool);
}

void Ops::gather_kv(const KvView& cache, std::span<const int32_t> from, std::span<const int32_t> to,
                    const int32_t* kept, int32_t count) {
  const KvShape& s = cache.shape;
  FRESHET_CHECK(blocks_of(count) <= std::ssize(to), "gather_kv of {} slots to {} blocks", count,
                to.size());
  if (Device* d = device()) return d->gather_kv(cache, from, to, kept, count);
  // Through a copy, because a block may be read after it is written.
  const size_t bytes = s.block_bytes();
  std::vector<float>& scratch = impl_->kv_scratch;
  scratch.resize(std::max(scratch.size(), to.size() * bytes / sizeof(float)));
  auto* const copy = reinterpret_cast<uint8_t*>(scratch.data());
  // Slots that stay empty are multiplied by zero weights and must be finite.
  if (count > 0) {
    const auto last = static_cast<size_t>(blocks_of(count)) - 1;
    std::memset(copy + last * bytes, 0, (to.size() - last) * bytes);
  }
  const AttentionKernel& layout = impl_->attention_for(s);
  impl_->pool.parallel_for(s.kv_heads, [&](int64_t head, int) {
    const int32_t* mine = kept + head * count;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t slot = mine[i];
      const int32_t block = from[static_cast<size_t>(slot / kBlockTokens)];
      layout.move_slot(s, cache.data + static_cast<size_t>(block) * bytes, slot % kBlockTokens,
                       copy + static_cast<size_t>(i / kBlockTokens) * bytes, i % kBlockTokens,
                       static_cast<int>(head));
    }
  });
  for (size_t i = 0; i < to.size(); ++i) {
    std::memcpy(cache.data + static_cast<size_t>(to[i]) * bytes, copy + i * bytes, bytes);
  }
}

void Ops::read_keys(const KvView& cache, std::span<const int32_t> blocks, int head, int32_t slots,
                    float* keys) const {
  const KvShape& s = cache.shape;
  FRESHET_CHECK(blocks_of(slots) <= std::ssize(blocks), "read_keys of {} slots in {} blocks", slots,
                blocks.size());
  if (Device* d = device()) return d->read_keys(cache, blocks, head, slots, keys);
  const AttentionKernel& layout = impl_->attention_for(s);
  std::vector<float> block(static_cast<size_t>(kBlockTokens * s.key_dim));
  for (int32_t b = 0; b < blocks_of(slots); ++b) {
    const auto id = static_cast<size_t>(blocks[static_cast<size_t>(b)]);
    layout.read_keys(s, cache.data + id * s.block_bytes(), head, block.data());
    const int32_t first = b * kBlockTokens;
    for (int32_t t = first; t < std::min(slots, first + kBlockTokens); ++t) {
      for (int d = 0; d < s.key_dim; ++d) {
        keys[int64_t{t} * s.key_dim + d] = block[static_cast<size_t>(d * kBlockTokens + t - first)];
      }
    }
  }
}

}  // namespace freshet::ops
