// Attention over selected tokens (after SparQ, arXiv:2312.04985), and the sums of values that stand
// for the others.
//
// For each KV head: the features whose numbers in the queries of its query heads are largest,
// summed over these, are read of every key. They give each query head approximate weights, its
// scores being divided by the root of their share of the query's size. The newest quarter of the
// budget and the tokens with the largest weights, summed over the query heads, are read. Their
// attention counts with the weight that they have together; the mean of all values up to the last
// full block has the rest. Weights are whole numbers of 1 / kScoreUnits. Ties go to the earlier
// feature or token.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

constexpr size_t kGatheredBytes = size_t{64} << 20;  // of parts that are attended to at once
constexpr float kUnseen = -1e30f;

float* sums_of(const KvView& cache, int32_t block, int head) {
  const KvShape& s = cache.shape;
  uint8_t* const at = cache.data + static_cast<size_t>(block) * s.block_bytes() + s.sums_at();
  return reinterpret_cast<float*>(at) + int64_t{head} * s.value_dim;
}

int32_t newest_of(int32_t budget) {
  return budget / 4;
}

// Chooses and gathers the tokens of parts.
struct TokenChooser {
  const Matrix& q;
  const KvView& cache;
  const AttentionBatch& batch;
  const AttentionParams& params;
  std::span<const BlockSelection> selections;
  const AttentionKernel& layout;
  const ScoreKernel& kernel;

  // One worker's room.
  struct Room {
    std::vector<int32_t> features, tokens;
    std::vector<float> queries, keys, scores;
    std::vector<int64_t> weights, total;
  };

  int group() const { return params.heads / cache.shape.kv_heads; }

  // The query heads' numbers of the chosen features, [group, features], scaled.
  void choose_features(const SelectedBatch::Part& part, int head, Room& room) const {
    const int dim = cache.shape.key_dim;
    const int count = std::min(selections[static_cast<size_t>(part.sequence)].components, dim);
    const float* const query = q.row(part.token) + int64_t{head} * group() * dim;
    std::vector<float> size(static_cast<size_t>(dim), 0.0f);
    for (int h = 0; h < group(); ++h) {
      for (int d = 0; d < dim; ++d) size[static_cast<size_t>(d)] += std::abs(query[h * dim + d]);
    }
    room.features.resize(static_cast<size_t>(dim));
    std::iota(room.features.begin(), room.features.end(), 0);
    std::nth_element(room.features.begin(), room.features.begin() + count - 1, room.features.end(),
                     [&](int32_t a, int32_t b) {
                       const float x = size[static_cast<size_t>(a)];
                       const float y = size[static_cast<size_t>(b)];
                       return x != y ? x > y : a < b;
                     });
    room.features.resize(static_cast<size_t>(count));
    std::ranges::sort(room.features);
    room.queries.clear();
    for (int h = 0; h < group(); ++h) {
      const float* const from = query + h * dim;
      float all = 0.0f, chosen = 0.0f;
      for (int d = 0; d < dim; ++d) all += std::abs(from[d]);
      for (const int32_t d : room.features) chosen += std::abs(from[d]);
      const float scale = params.scale * (chosen > 0.0f ? std::sqrt(all / chosen) : 1.0f);
      for (const int32_t d : room.features) room.queries.push_back(from[d] * scale);
    }
  }

  // Leaves the weights of query head h in room.weights + h * padded, and their sum in room.total.
  void weigh(const SelectedBatch::Part& part, int head, Room& room) const {
    const KvShape& s = cache.shape;
    const auto count = static_cast<int>(room.features.size());
    const int64_t padded = int64_t{part.of} * kBlockTokens;
    const auto all = static_cast<size_t>(group() * padded);
    room.keys.resize(static_cast<size_t>(count * kBlockTokens));
    room.scores.resize(std::max(room.scores.size(), all));
    room.weights.assign(all, 0);
    room.total.assign(static_cast<size_t>(padded), 0);
    const int32_t* const table = batch.block_tables + part.sequence * batch.table_stride;
    for (int32_t b = 0; b < part.of; ++b) {
      const uint8_t* const block = cache.data + static_cast<size_t>(table[b]) * s.block_bytes();
      layout.read_features(s, block, head, room.features, room.keys.data());
      kernel.dots(room.queries.data(), group(), room.keys.data(), count,
                  room.scores.data() + int64_t{b} * kBlockTokens, padded);
    }
    for (int h = 0; h < group(); ++h) {
      float* const scores = room.scores.data() + h * padded;
      int64_t* const weights = room.weights.data() + h * padded;
      for (int64_t i = 0; params.softcap > 0.0f && i < part.slots; ++i)
        scores[i] = params.softcap * std::tanh(scores[i] / params.softcap);
      std::fill(scores + part.slots, scores + padded, kUnseen);
      const float* const sink =
          params.sinks == nullptr ? nullptr : params.sinks + head * group() + h;
      kernel.add_weights(scores, padded, sink, weights);
      for (int64_t i = 0; i < padded; ++i) room.total[static_cast<size_t>(i)] += weights[i];
    }
  }

  // Copies what the part reads with a head to its blocks. unread: [query heads].
  void gather(const SelectedBatch::Part& part, int head, Room& room, uint8_t* to, size_t to_bytes,
              float* unread) const {
    choose_features(part, head, room);
    weigh(part, head, room);
    const int32_t budget = part.blocks * kBlockTokens;
    const int32_t older = part.slots - newest_of(budget);
    room.tokens.resize(static_cast<size_t>(part.slots));
    std::iota(room.tokens.begin(), room.tokens.end(), 0);
    const auto chosen = room.tokens.begin() + (budget - newest_of(budget));
    std::nth_element(room.tokens.begin(), chosen, room.tokens.begin() + older,
                     [&](int32_t a, int32_t b) {
                       const int64_t x = room.total[static_cast<size_t>(a)];
                       const int64_t y = room.total[static_cast<size_t>(b)];
                       return x != y ? x > y : a < b;
                     });
    const int64_t padded = int64_t{part.of} * kBlockTokens;
    for (int h = 0; h < group(); ++h) {
      int64_t left = 0;
      for (auto i = chosen; i != room.tokens.begin() + older; ++i)
        left += room.weights[static_cast<size_t>(h * padded + *i)];
      unread[head * group() + h] = static_cast<float>(left) / kScoreUnits;
    }
    std::sort(room.tokens.begin(), chosen);
    std::iota(chosen, room.tokens.begin() + budget, older);
    const KvShape& s = cache.shape;
    const int32_t* const table = batch.block_tables + part.sequence * batch.table_stride;
    for (int32_t i = 0; i < budget; ++i) {
      const int32_t slot = room.tokens[static_cast<size_t>(i)];
      const auto block = static_cast<size_t>(table[slot / kBlockTokens]);
      layout.move_slot(s, cache.data + block * s.block_bytes(), slot % kBlockTokens,
                       to + static_cast<size_t>(i / kBlockTokens) * to_bytes, i % kBlockTokens,
                       head);
    }
  }

  // Mixes the attention of a part's query head with the mean of the values.
  void add_mean(const SelectedBatch::Part& part, int h, float unread, float* out) const {
    const int32_t* const table = batch.block_tables + part.sequence * batch.table_stride;
    const int32_t full = part.slots / kBlockTokens;
    const float* const sums = sums_of(cache, table[full - 1], h / group());
    const float each = unread / static_cast<float>(full * kBlockTokens);
    for (int d = 0; d < cache.shape.value_dim; ++d)
      out[d] = (1.0f - unread) * out[d] + each * sums[d];
  }
};

bool same_blocks(const KvShape& a, const KvShape& b) {
  return a.type == b.type && a.kv_heads == b.kv_heads && a.key_dim == b.key_dim &&
         a.value_dim == b.value_dim;
}

}  // namespace

// Of the blocks that the batch's tokens fill.
void Ops::sum_values(const KvView& cache, const AttentionBatch& batch) {
  const KvShape& s = cache.shape;
  const AttentionKernel& layout = impl_->attention_for(s);
  const size_t floats = static_cast<size_t>(kBlockTokens * s.value_dim);
  std::vector<float>& scratch = impl_->kv_scratch;
  scratch.resize(std::max(scratch.size(), floats * static_cast<size_t>(impl_->pool.size())));
  impl_->pool.parallel_for(int64_t{batch.sequences()} * s.kv_heads, [&](int64_t i, int worker) {
    const auto sequence = static_cast<size_t>(i / s.kv_heads);
    const auto head = static_cast<int>(i % s.kv_heads);
    const int32_t queries = batch.query_start[sequence + 1] - batch.query_start[sequence];
    const int32_t* const table = batch.block_tables + i / s.kv_heads * batch.table_stride;
    float* const values = scratch.data() + static_cast<size_t>(worker) * floats;
    const int32_t end = batch.context_len[sequence] / kBlockTokens;
    for (int32_t b = (batch.context_len[sequence] - queries) / kBlockTokens; b < end; ++b) {
      layout.read_values(s, cache.data + static_cast<size_t>(table[b]) * s.block_bytes(), head,
                         values);
      float* const sums = sums_of(cache, table[b], head);
      if (b > 0) {
        std::copy_n(sums_of(cache, table[b - 1], head), s.value_dim, sums);
      } else {
        std::fill_n(sums, s.value_dim, 0.0f);
      }
      for (int t = 0; t < kBlockTokens; ++t) {
        for (int d = 0; d < s.value_dim; ++d) sums[d] += values[t * s.value_dim + d];
      }
    }
  });
}

// Runs of parts that select share a call of attention(), and so do runs of parts that read all.
void Ops::selected_tokens(const Matrix& out, const Matrix& q, const KvView& cache,
                          const AttentionBatch& batch, const AttentionParams& params,
                          std::span<const BlockSelection> selections) {
  SelectedBatch& room = impl_->selected;
  const std::vector<SelectedBatch::Part>& parts = room.parts;
  KvShape shape = cache.shape;
  shape.bounded = shape.summed = false;
  const size_t block = shape.block_bytes();
  const TokenChooser chooser{
      q, cache, batch, params, selections, impl_->attention_for(cache.shape), *impl_->scores};
  std::vector<TokenChooser::Room> rooms(static_cast<size_t>(impl_->pool.size()));
  std::vector<int32_t> starts, tables;
  for (size_t first = 0, end = 0; first < parts.size(); first = end) {
    const bool selects = parts[first].selects();
    int64_t stride = 0;  // blocks of a part
    for (end = first; end < parts.size() && parts[end].selects() == selects; ++end) {
      const int64_t wider = std::max<int64_t>(stride, parts[end].blocks);
      const auto bytes = static_cast<size_t>(wider) * (end - first + 1) * block;
      if (selects && end > first && bytes > kGatheredBytes) break;
      stride = wider;
    }
    const auto count = static_cast<int64_t>(end - first);
    const int32_t row = room.query_start[first];
    starts.clear();
    for (size_t i = first; i <= end; ++i) starts.push_back(room.query_start[i] - row);
    const Matrix to = out.slice_rows(row, starts.back()), of = q.slice_rows(row, starts.back());
    const std::span lengths = std::span(room.context_len).subspan(first, end - first);
    tables.resize(static_cast<size_t>(count * stride));
    if (!selects) {
      for (int64_t i = 0; i < count; ++i) {
        const SelectedBatch::Part& part = parts[first + static_cast<size_t>(i)];
        std::copy_n(batch.block_tables + part.sequence * batch.table_stride, part.of,
                    tables.data() + i * stride);
      }
      attention(to, of, cache, {starts, lengths, tables.data(), stride}, params);
      continue;
    }
    const auto bytes = static_cast<size_t>(count * stride) * block;
    if (room.gathered.size() < bytes || !same_blocks(shape, room.gathered_shape)) {
      room.gathered = {};
      auto memory = Buffer::allocate(bytes);
      FRESHET_CHECK(memory.ok(), "{}", memory.status().message());
      room.gathered = std::move(*memory);
      room.gathered_shape = shape;
    }
    room.unread.resize(static_cast<size_t>(count * params.heads));
    std::iota(tables.begin(), tables.end(), 0);
    impl_->pool.parallel_for(count * shape.kv_heads, [&](int64_t i, int worker) {
      const int64_t p = i / shape.kv_heads;
      chooser.gather(parts[first + static_cast<size_t>(p)], static_cast<int>(i % shape.kv_heads),
                     rooms[static_cast<size_t>(worker)],
                     room.gathered.data() + static_cast<size_t>(p * stride) * block, block,
                     room.unread.data() + p * params.heads);
    });
    const KvView view{shape, room.gathered.data(), static_cast<int32_t>(tables.size())};
    attention(to, of, view, {starts, lengths, tables.data(), stride}, params);
    impl_->for_rows(count, params.heads * shape.value_dim, [&](int64_t from, int64_t last) {
      for (int64_t p = from; p < last; ++p) {
        for (int h = 0; h < params.heads; ++h) {
          chooser.add_mean(parts[first + static_cast<size_t>(p)], h,
                           room.unread[static_cast<size_t>(p * params.heads + h)],
                           to.row(p) + h * shape.value_dim);
        }
      }
    });
  }
}

}  // namespace freshet::ops
