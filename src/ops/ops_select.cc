// Attention over selected blocks (after Quest), and the bounds of keys that select them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/hadamard.h"
#include "ops/ops_impl.h"
#include "tensor/dtype.h"

namespace freshet::ops {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A block's promise is the score of the middle between its bounds, plus this share of the most that
// its bounds could add. The full share, an upper bound, favours blocks of dissimilar keys: reading
// 512 of 2,048 tokens, it loses twice as much.
constexpr float kSpread = 0.15f;
// Blocks that are always read: the newest ones besides the query's own, this many. The first block
// is always read too, because it is the attention sink.
int32_t newest_read(int32_t blocks) {
  return std::min(3, blocks / 8);
}

int32_t blocks_for(int64_t slots) {
  return static_cast<int32_t>((slots + kBlockTokens - 1) / kBlockTokens);
}

// The smallest BF16 value that isn't below x.
uint16_t bf16_above(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto high = static_cast<uint16_t>(bits >> 16);
  const bool exact = (bits & 0xFFFF) == 0;
  return exact || (bits >> 31) != 0 ? high : static_cast<uint16_t>(high + 1);
}
uint16_t bf16_below(float x) {
  return static_cast<uint16_t>(bf16_above(-x) ^ 0x8000);
}

// keys: [key_dim, kBlockTokens]. A NaN key makes its bounds infinite.
void write_bounds(const float* keys, int key_dim, uint16_t* least, uint16_t* greatest) {
  for (int d = 0; d < key_dim; ++d, keys += kBlockTokens) {
    float low = kInfinity, high = -kInfinity;
    for (int t = 0; t < kBlockTokens; ++t) {
      const bool number = !std::isnan(keys[t]);
      low = std::min(low, number ? keys[t] : -kInfinity);
      high = std::max(high, number ? keys[t] : kInfinity);
    }
    least[d] = bf16_below(low);
    greatest[d] = bf16_above(high);
  }
}

uint16_t* bounds_of(const KvShape& s, uint8_t* block, int head) {
  return reinterpret_cast<uint16_t*>(block + s.bounds_at()) + int64_t{head} * 2 * s.key_dim;
}

// Prefetch distance in blocks: they are too far apart for the hardware prefetcher.
constexpr int32_t kAhead = 8;  // blocks
void prefetch(const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const uint8_t*>(from) + i);
}

// How many blocks the query in a slot reads.
int32_t blocks_read(const BlockSelection& rule, int32_t slot) {
  const int32_t own = slot / kBlockTokens;
  if (!rule.selects() || (slot >= rule.before && slot < rule.from)) return own + 1;
  if (rule.window == 0) return std::min(own + 1, rule.blocks);
  const int32_t newest = std::max(0, own - rule.window + 1), sinks = std::min(rule.sinks, newest);
  const int32_t between =
      rule.stride > 0 ? (own - sinks) / rule.stride - (own - newest) / rule.stride : 0;
  return own + 1 - newest + sinks + between;
}

// Lists the blocks of a fixed pattern for queries in block `own`, ascending.
void list_pattern(const BlockSelection& rule, int32_t own, const int32_t* table, int32_t* to) {
  const int32_t newest = std::max(0, own - rule.window + 1), sinks = std::min(rule.sinks, newest);
  for (int32_t b = 0; b <= own; ++b) {
    const bool strided = rule.stride > 0 && (own - b) % rule.stride == 0;
    if (b < sinks || b >= newest || strided) *to++ = table[b];
  }
}

// Moves the `count` best blocks to the front, in ascending order. Ties go to the earlier block.
void choose(std::span<const float> scores, std::span<int32_t> blocks, int32_t count) {
  std::iota(blocks.begin(), blocks.end(), 0);
  std::ranges::nth_element(blocks, blocks.begin() + count, [&](int32_t a, int32_t b) {
    const float x = scores[static_cast<size_t>(a)], y = scores[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  });
  std::sort(blocks.begin(), blocks.begin() + count);
}

// Fills the block tables of parts.
struct BlockChooser {
  const Matrix& q;
  const KvView& cache;
  const AttentionBatch& batch;
  std::span<const BlockSelection> selections;
  const ScoreKernel& kernel;
  int group;     // query heads per KV head
  int64_t most;  // blocks per part
  SelectedBatch& room;

  // The queries of the heads; rotated if keys are.
  const float* queries(const SelectedBatch::Part& part, int head, int worker) const {
    const int dim = cache.shape.key_dim;
    const float* const from = q.row(part.token) + int64_t{head} * group * dim;
    if (!info(cache.shape.type).key.rotated) return from;
    float* const rotated = room.queries.data() + int64_t{worker} * group * dim;
    std::copy_n(from, group * dim, rotated);
    for (int h = 0; h < group; ++h) hadamard(rotated + h * dim, dim);
    return rotated;
  }

  void fill(const SelectedBatch::Part& part, int head, int worker, int32_t* to) const {
    const KvShape& s = cache.shape;
    const int32_t* const from = batch.block_tables + part.sequence * batch.table_stride;
    if (!part.selects()) {
      std::copy_n(from, part.of, to);
      return;
    }
    const BlockSelection& rule = selections[static_cast<size_t>(part.sequence)];
    if (rule.window > 0) return list_pattern(rule, part.of - 1, from, to);
    const int32_t others = part.of - 1;  // all but the query's own block
    float* const scores = room.scores.data() + worker * most;
    int32_t* const ranked = room.ranked.data() + worker * most;
    const float* const query = queries(part, head, worker);
    const size_t bounds_bytes = sizeof(uint16_t) * 2 * static_cast<size_t>(s.key_dim);
    const auto bounds_in = [&](int32_t b) {
      return bounds_of(s, cache.data + static_cast<size_t>(from[b]) * s.block_bytes(), head);
    };
    for (int32_t b = 0; b < others; ++b) {
      if (b + kAhead < others) prefetch(bounds_in(b + kAhead), bounds_bytes);
      const uint16_t* const bounds = bounds_in(b);
      scores[b] = kernel.promise(query, group, bounds, bounds + s.key_dim, s.key_dim, kSpread);
    }
    scores[0] = kInfinity;
    std::fill(scores + others - newest_read(part.blocks), scores + others, kInfinity);
    choose({scores, static_cast<size_t>(others)}, {ranked, static_cast<size_t>(others)},
           part.blocks - 1);
    for (int32_t b = 0; b + 1 < part.blocks; ++b) to[b] = from[ranked[b]];
    to[part.blocks - 1] = from[others];
  }
};

}  // namespace

void SelectedBatch::split(const AttentionBatch& batch, std::span<const BlockSelection> selections) {
  parts.clear();
  query_start.assign(1, 0);
  context_len.clear();
  for (size_t s = 0; s < batch.context_len.size(); ++s) {
    const BlockSelection& rule = selections[s];
    const int32_t end = batch.query_start[s + 1];
    const int32_t behind = batch.context_len[s] - end;  // a query's slot minus its token
    for (int32_t token = batch.query_start[s], next; token < end; token = next) {
      const int32_t own = (token + behind) / kBlockTokens,
                    reads = blocks_read(rule, token + behind);
      const bool whole = reads > own;
      for (next = token + 1; next < end && (whole || rule.window > 0); ++next) {
        const int32_t other = (next + behind) / kBlockTokens;
        if ((blocks_read(rule, next + behind) > other) != whole || (!whole && other != own)) break;
      }
      const int32_t slots = next + behind, of = blocks_for(slots);
      const int32_t blocks = whole ? of : reads;
      parts.push_back({static_cast<int32_t>(s), next - 1, blocks, of, slots});
      query_start.push_back(next);
      const bool tokens = !whole && rule.components > 0;  // in blocks of their own, all full
      context_len.push_back(tokens ? blocks * kBlockTokens : slots - (of - blocks) * kBlockTokens);
    }
  }
}

// Bounds the blocks that the batch's tokens fill.
void Ops::bound_keys(const KvView& cache, const AttentionBatch& batch) {
  const KvShape& s = cache.shape;
  const AttentionKernel& layout = impl_->attention_for(s);
  std::vector<int32_t>& full = impl_->selected.tables;
  full.clear();
  for (size_t i = 0; i < batch.context_len.size(); ++i) {
    const int32_t queries = batch.query_start[i + 1] - batch.query_start[i];
    const int32_t* table = batch.block_tables + static_cast<int64_t>(i) * batch.table_stride;
    const int32_t end = batch.context_len[i] / kBlockTokens;
    for (int32_t b = (batch.context_len[i] - queries) / kBlockTokens; b < end; ++b)
      full.push_back(table[b]);
  }
  if (full.empty()) return;
  const size_t floats = static_cast<size_t>(kBlockTokens * s.key_dim);
  std::vector<float>& scratch = impl_->kv_scratch;
  scratch.resize(std::max(scratch.size(), floats * static_cast<size_t>(impl_->pool.size())));
  impl_->pool.parallel_for(std::ssize(full) * s.kv_heads, [&](int64_t i, int worker) {
    const auto head = static_cast<int>(i % s.kv_heads);
    uint8_t* const block =
        cache.data +
        static_cast<size_t>(full[static_cast<size_t>(i / s.kv_heads)]) * s.block_bytes();
    float* const keys = scratch.data() + static_cast<size_t>(worker) * floats;
    layout.read_keys(s, block, head, keys);
    uint16_t* const bounds = bounds_of(s, block, head);
    write_bounds(keys, s.key_dim, bounds, bounds + s.key_dim);
  });
}

void Ops::selected_attention(const Matrix& out, const Matrix& q, const KvView& cache,
                             const AttentionBatch& batch, const AttentionParams& params,
                             std::span<const BlockSelection> selections) {
  const KvShape& s = cache.shape;
  const auto served = [&](const BlockSelection& rule) {
    return rule.window > 0 || !rule.selects() || (rule.components > 0 ? s.summed : s.bounded);
  };
  FRESHET_CHECK(device() == nullptr && params.window == 0 && batch.ranges.empty() &&
                    batch.head_stride == 0 && selections.size() == batch.context_len.size() &&
                    std::ranges::all_of(selections, served),
                "selected_attention of {} selections for {} sequences: on a device, without "
                "bounds or sums, or with a window or ranges",
                selections.size(), batch.context_len.size());
  SelectedBatch& room = impl_->selected;
  room.split(batch, selections);
  const std::vector<SelectedBatch::Part>& parts = room.parts;
  if (std::ranges::none_of(parts, &SelectedBatch::Part::selects))
    return attention(out, q, cache, batch, params);
  const auto by_components = [](const BlockSelection& rule) { return rule.components > 0; };
  if (std::ranges::any_of(selections, by_components))
    return selected_tokens(out, q, cache, batch, params, selections);
  int64_t head_stride = 0, most = 0;
  for (const SelectedBatch::Part& part : parts) {
    head_stride = std::max<int64_t>(head_stride, part.blocks);
    most = std::max<int64_t>(most, part.of);
  }
  const int64_t stride = head_stride * s.kv_heads;
  const int group = params.heads / s.kv_heads;
  const int64_t workers = impl_->pool.size();
  const auto grow = [](auto& list, int64_t size) {
    list.resize(std::max(list.size(), static_cast<size_t>(size)));
  };
  grow(room.tables, stride * std::ssize(parts));
  grow(room.scores, most * workers);
  grow(room.ranked, most * workers);
  grow(room.queries, group * s.key_dim * workers);
  const BlockChooser chooser{q, cache, batch, selections, *impl_->scores, group, most, room};
  impl_->pool.parallel_for(std::ssize(parts) * s.kv_heads, [&](int64_t i, int worker) {
    chooser.fill(parts[static_cast<size_t>(i / s.kv_heads)], static_cast<int>(i % s.kv_heads),
                 worker, room.tables.data() + i * head_stride);
  });
  attention(out, q, cache,
            {room.query_start, room.context_len, room.tables.data(), stride, {}, head_stride},
            params);
}

}  // namespace freshet::ops
