// Tokens that a sequence keeps in 4 bits beside others (MiKV, arXiv:2402.18096): attention over
// both, and encoding.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "ops/ops_impl.h"

namespace freshet::ops {
namespace {

constexpr int32_t kRecodedAtOnce = 256;  // tokens

int32_t blocks_of(int32_t slots) {
  return (slots + kBlockTokens - 1) / kBlockTokens;
}

template <class List>
void grow(List& list, int64_t size) {
  list.resize(std::max(list.size(), static_cast<size_t>(size)));
}

// Where a part of a cache block begins.
size_t place_of(const KvShape& fine, const KvShape& coarse, int32_t block, int32_t part) {
  return static_cast<size_t>(block) * fine.block_bytes() +
         static_cast<size_t>(part) * coarse.block_bytes();
}

// The batch of attention over coarse tokens. Sequences without any read the first slot of the
// cache, and nobody reads their results.
AttentionBatch coarse_batch(const KvShape& fine, const AttentionBatch& batch,
                            const CoarseTokens& tokens, CoarseRoom& room) {
  const KvShape coarse = coarse_shape(fine);
  const int32_t most = *std::ranges::max_element(tokens.slots);
  const int64_t stride = std::max(1, blocks_of(most));
  room.context_len.clear();
  room.ranges.clear();
  room.tables.assign(static_cast<size_t>(batch.sequences() * stride), 0);
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    const auto i = static_cast<size_t>(s);
    const int32_t slots = tokens.slots[i], seen = std::max(1, slots);
    room.context_len.push_back(seen);
    const int32_t queries = batch.query_start[i + 1] - batch.query_start[i];
    room.ranges.insert(room.ranges.end(), static_cast<size_t>(queries), {0, seen});
    const int32_t* const blocks = tokens.blocks + s * tokens.stride;
    for (int32_t c = 0; c < blocks_of(slots); ++c) {
      const size_t at = place_of(fine, coarse, blocks[c / tokens.parts], c % tokens.parts);
      FRESHET_CHECK(at / kNestedUnit <= INT32_MAX, "a layer of {} bytes", at);
      room.tables[static_cast<size_t>(s * stride + c)] = static_cast<int32_t>(at / kNestedUnit);
    }
  }
  return {batch.query_start, room.context_len, room.tables.data(), stride, room.ranges};
}

// Merges a query head's attention over two sets of keys.
void merge(float* out, const float* sums, const float* other, const float* other_sums, int dim) {
  const float most = std::max(sums[0], other_sums[0]);
  const float mine = sums[1] * std::exp(sums[0] - most);
  const float its = other_sums[1] * std::exp(other_sums[0] - most);
  const float keep = mine / (mine + its), take = its / (mine + its);
  for (int d = 0; d < dim; ++d) out[d] = keep * out[d] + take * other[d];
}

// Decodes slots of a head to rows of all heads: keys[i * kv_heads * key_dim + head * key_dim].
struct RowReader {
  const KvView& cache;
  std::span<const int32_t> blocks;
  const AttentionKernel& layout;
  float* block_keys;    // [key_dim, kBlockTokens]
  float* block_values;  // [kBlockTokens, value_dim]

  void read(int head, const int32_t* slots, int32_t count, float* keys, float* values) const {
    const KvShape& s = cache.shape;
    for (int32_t i = 0, held = -1; i < count; ++i) {
      const int32_t b = slots[i] / kBlockTokens, slot = slots[i] % kBlockTokens;
      if (std::exchange(held, b) != b) {
        const uint8_t* const block =
            cache.data +
            static_cast<size_t>(blocks[static_cast<size_t>(b)]) * cache.shape.block_bytes();
        layout.read_keys(s, block, head, block_keys);
        layout.read_values(s, block, head, block_values);
      }
      float* const key = keys + (int64_t{i} * s.kv_heads + head) * s.key_dim;
      for (int d = 0; d < s.key_dim; ++d) key[d] = block_keys[d * kBlockTokens + slot];
      std::copy_n(block_values + int64_t{slot} * s.value_dim, s.value_dim,
                  values + (int64_t{i} * s.kv_heads + head) * s.value_dim);
    }
  }
};

}  // namespace

const float* Ops::attend_both(const Matrix& out, const Matrix& q, const KvView& cache,
                              const AttentionBatch& batch, const AttentionParams& params,
                              const CoarseTokens& coarse) {
  const KvShape& s = cache.shape;
  FRESHET_CHECK(device() == nullptr && params.window == 0 && batch.ranges.empty() && !s.biased &&
                    std::ssize(coarse.slots) == batch.sequences() && coarse.parts > 0 &&
                    coarse.parts <= coarse_parts(s),
                "attend_both of {} sequences, {} parts of a block: on a device, with a window, "
                "ranges or a bias",
                coarse.slots.size(), coarse.parts);
  CoarseRoom& room = impl_->coarse;
  const int64_t sums = out.rows * params.heads * 2;
  grow(room.fine_sums, sums);
  grow(room.sums, sums);
  grow(room.out, out.rows * out.cols);
  AttentionParams part = params;
  part.sums = room.fine_sums.data();
  attention(out, q, cache, batch, part);
  part.sinks = nullptr;  // counted once
  part.sums = room.sums.data();
  const Matrix rest{room.out.data(), out.rows, out.cols, out.cols};
  const KvView view{coarse_shape(s), cache.data, cache.blocks};
  attention(rest, q, view, coarse_batch(s, batch, coarse, room), part);
  impl_->pool.parallel_for(batch.sequences(), [&](int64_t sequence, int) {
    const auto i = static_cast<size_t>(sequence);
    for (int64_t row = int64_t{batch.query_start[i]} * params.heads;
         row < int64_t{batch.query_start[i + 1]} * params.heads; ++row) {
      float* const its = room.sums.data() + row * 2;
      const int64_t token = row / params.heads, at = row % params.heads * s.value_dim;
      if (coarse.slots[i] == 0) {
        its[1] = 0.0f;
      } else {
        merge(out.row(token) + at, room.fine_sums.data() + row * 2, rest.row(token) + at, its,
              s.value_dim);
      }
    }
  });
  return room.sums.data();
}

// Encodes the dropped tokens behind those in the last block of `recoding.from` that isn't full.
// Returns the coarse blocks from that block's first part on.
std::span<const uint8_t> Ops::encode_coarse(const KvView& cache, std::span<const int32_t> from,
                                            const Recoding& r) {
  CoarseRoom& room = impl_->coarse;
  KvShape shape = coarse_shape(cache.shape);
  shape.nested = false;
  const size_t bytes = shape.block_bytes();
  const int32_t first = r.before / (kBlockTokens * r.parts) * r.parts;  // coarse block
  const int32_t last = blocks_of(r.before + r.count), blocks = last - first;
  const size_t all = static_cast<size_t>(blocks) * bytes;
  if (room.blocks.size() < all) {
    auto buffer = Buffer::allocate(all);
    FRESHET_CHECK(buffer.ok(), "{} bytes to encode keys in: {}", all, buffer.status().message());
    room.blocks = std::move(*buffer);
  }
  uint8_t* const to = room.blocks.data();
  std::memset(to, 0, all);  // slots that stay empty must be finite
  for (int32_t c = first; c < blocks_of(r.before); ++c) {
    const int32_t block = r.from[static_cast<size_t>(c / r.parts)];
    std::memcpy(to + static_cast<size_t>(c - first) * bytes,
                cache.data + place_of(cache.shape, shape, block, c % r.parts), bytes);
  }
  std::vector<int32_t> table(static_cast<size_t>(blocks));
  std::iota(table.begin(), table.end(), 0);
  const int64_t key_cols = int64_t{shape.kv_heads} * shape.key_dim;
  const int64_t value_cols = int64_t{shape.kv_heads} * shape.value_dim;
  const int64_t scratch = int64_t{kBlockTokens} * (shape.key_dim + shape.value_dim);
  grow(room.keys, kRecodedAtOnce * key_cols);
  grow(room.values, kRecodedAtOnce * value_cols);
  grow(room.rows, impl_->pool.size() * scratch);
  const KvView view{shape, to, blocks};
  for (int32_t done = 0; done < r.count; done += kRecodedAtOnce) {
    const int32_t count = std::min(kRecodedAtOnce, r.count - done);
    impl_->pool.parallel_for(shape.kv_heads, [&](int64_t head, int worker) {
      float* const own = room.rows.data() + worker * scratch;
      const RowReader reader{cache, from, impl_->attention_for(cache.shape), own,
                             own + int64_t{kBlockTokens} * shape.key_dim};
      reader.read(static_cast<int>(head), r.dropped + head * r.count + done, count,
                  room.keys.data(), room.values.data());
    });
    const int32_t ends[] = {0, count};
    const int32_t context[] = {r.before - first * kBlockTokens + done + count};
    store_kv(view, {room.keys.data(), count, key_cols, key_cols},
             {room.values.data(), count, value_cols, value_cols},
             {ends, context, table.data(), blocks});
  }
  return {to, all};
}

void Ops::recode_kv(const KvView& cache, std::span<const int32_t> from, std::span<const int32_t> to,
                    const int32_t* kept, int32_t count, const Recoding& r) {
  FRESHET_CHECK(device() == nullptr && r.parts > 0 && r.parts <= coarse_parts(cache.shape) &&
                    blocks_of(r.before + r.count) <= std::ssize(r.to) * r.parts,
                "recode_kv of {} slots behind {} to {} blocks of {} parts", r.count, r.before,
                r.to.size(), r.parts);
  const KvShape shape = coarse_shape(cache.shape);
  const size_t bytes = shape.block_bytes();
  // The blocks of both results may be among those that are read.
  const std::span<const uint8_t> encoded = encode_coarse(cache, from, r);
  gather_kv(cache, from, to, kept, count);
  const int32_t first = r.before / (kBlockTokens * r.parts) * r.parts;
  for (size_t at = 0; at < encoded.size(); at += bytes) {
    const int32_t c = first + static_cast<int32_t>(at / bytes);
    const int32_t block = r.to[static_cast<size_t>(c / r.parts)];
    std::memcpy(cache.data + place_of(cache.shape, shape, block, c % r.parts), &encoded[at], bytes);
  }
}

}  // namespace freshet::ops
