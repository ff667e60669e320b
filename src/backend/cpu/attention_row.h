// A row of the attention table: cuts a batch into tiles, distributes them over the pool and writes
// the cache, using the kernels of an instruction set.
#pragma once

#include <algorithm>

#include "backend/cpu/attention_isa.h"
#include "backend/cpu/kv_layout.h"

namespace freshet::cpu {
namespace {

using ops::AttentionBatch;
using ops::AttentionParams;
using ops::KvShape;
using ops::KvView;

constexpr int kBlock = ops::kBlockTokens;
constexpr size_t kMaxPartialBytes = size_t{32} << 20;
constexpr int64_t kRunsPerWorker = 8;   // runs of splits per worker
constexpr int64_t kTilesPerWorker = 4;  // with fewer, several workers share the splits of a tile

bool supports(const AttentionIsa& isa, const KvShape& s) {
  if (isa.supports != nullptr && !isa.supports(s)) return false;
  if (!ops::check_shape(s).ok()) return false;
  return s.key_dim % 8 == 0 && s.value_dim % 8 == 0 && s.key_dim > 0 && s.value_dim > 0 &&
         s.key_dim <= kMostKeyDim && s.value_dim <= kMostKeyDim;
}

// Bytes of a KV head's keys in a block; its scales, if any, are between keys and values.
size_t key_bytes(const KvShape& s) {
  return kBlock * ops::code_bytes(ops::info(s.type).key, s.key_dim);
}
size_t values_at(const KvShape& s) {
  if (s.value_is_key_prefix) return 0;
  return s.head_bytes() - kBlock * ops::code_bytes(ops::info(s.type).value, s.value_dim);
}

int64_t queries_of(const AttentionBatch& b, int64_t sequence) {
  const auto s = static_cast<size_t>(sequence);
  return b.query_start[s + 1] - b.query_start[s];
}

template <class T>
void scatter(const void* key, int key_dim, int64_t slot, uint8_t* to) {
  for (int d = 0; d < key_dim; ++d) {
    reinterpret_cast<T*>(to)[d * kBlock + slot] = static_cast<const T*>(key)[d];
  }
}

void store_token(const AttentionIsa& isa, const KvShape& s, const float* k, const float* v,
                 int64_t slot, uint8_t* block) {
  const size_t element = ops::element_bytes(s.type);
  alignas(64) uint8_t key[kMostKeyDim * sizeof(float)];
  for (int h = 0; h < s.kv_heads; ++h, block += s.head_bytes()) {
    const auto store_head = ops::has_int4(s.type) ? isa.store_coded : isa.store_head;
    if (store_head != nullptr) {
      store_head(s, k + int64_t{h} * s.key_dim, v + int64_t{h} * s.value_dim, slot, values_at(s),
                 block);
      continue;
    }
    uint16_t* const scales = reinterpret_cast<uint16_t*>(block + key_bytes(s)) + slot;
    if (s.value_is_key_prefix) {
      isa.convert(s.type, k, s.key_dim, block + static_cast<size_t>(slot * s.key_dim) * element,
                  scales);
      continue;
    }
    isa.convert(s.type, k + int64_t{h} * s.key_dim, s.key_dim, key, scales);
    if (element == 4) {
      scatter<uint32_t>(key, s.key_dim, slot, block);
    } else if (element == 1) {
      scatter<uint8_t>(key, s.key_dim, slot, block);
    } else {
      scatter<uint16_t>(key, s.key_dim, slot, block);
    }
    isa.convert(s.type, v + int64_t{h} * s.value_dim, s.value_dim,
                block + values_at(s) + static_cast<size_t>(slot * s.value_dim) * element,
                scales + kBlock * ops::scales_of(s.key_dim));
  }
}

void store(const AttentionIsa& isa, const KvView& cache, const Matrix& k, const Matrix& v,
           const AttentionBatch& batch, ThreadPool& pool) {
  const KvShape& s = cache.shape;
  const auto store_rows = [&](int64_t first, int64_t last) {
    auto next = std::upper_bound(batch.query_start.begin(), batch.query_start.end(), first);
    for (int64_t token = first; token < last; ++token) {
      while (*next <= token) ++next;  // skips sequences without queries
      const auto sequence = next - batch.query_start.begin() - 1;
      const int64_t position = batch.context_len[static_cast<size_t>(sequence)] - (*next - token);
      const int32_t id = batch.block_tables[sequence * batch.table_stride + position / kBlock];
      store_token(isa, s, k.row(token), s.value_is_key_prefix ? nullptr : v.row(token),
                  position % kBlock, cache.data + static_cast<size_t>(id) * s.block_bytes());
    }
  };
  if (k.rows * k.cols < 16 << 10) return store_rows(0, k.rows);
  pool.parallel_for((k.rows + kBlock - 1) / kBlock, [&](int64_t i, int) {
    store_rows(i * kBlock, std::min(k.rows, (i + 1) * kBlock));
  });
}

// The tiles of a batch in order: by sequence, by KV head, then by rows. Later rows come first,
// because they attend to more.
class Tiles {
 public:
  Tiles(const Matrix& out, const Matrix& q, const KvView& cache, const AttentionBatch& batch,
        const AttentionParams& params, int64_t* ends)
      : out_(out), q_(q), cache_(cache), batch_(batch), params_(params), ends_(ends) {
    for (int64_t s = 0; s < batch.sequences(); ++s) {
      const int64_t queries = queries_of(batch, s);
      const int64_t context = batch.context_len[static_cast<size_t>(s)];
      int64_t first_seen = 0;
      if (!batch.ranges.empty()) {
        first_seen =
            batch.ranges[static_cast<size_t>(batch.query_start[static_cast<size_t>(s)])].first;
      } else if (params.window > 0) {
        first_seen = std::max<int64_t>(0, context - queries - params.window + 1);
      }
      count_ += tiles_of(s) * cache.shape.kv_heads;
      ends_[s] = count_;
      most_splits_ = std::max(most_splits_, (context - 1) / kSplit - first_seen / kSplit + 1);
      most_rows_ = std::max(most_rows_, std::min<int64_t>(kAttendRows, queries * group()));
    }
  }

  int64_t count() const { return count_; }
  int64_t most_splits() const { return most_splits_; }
  int64_t most_rows() const { return most_rows_; }  // of one tile

  AttentionTile tile(int64_t i) const {
    const KvShape& shape = cache_.shape;
    const int64_t s = std::upper_bound(ends_, ends_ + batch_.sequences(), i) - ends_;
    const int64_t tiles = tiles_of(s);
    const int64_t in_sequence = i - (s > 0 ? ends_[s - 1] : 0);
    const int64_t head = in_sequence / tiles;
    const int64_t queries = queries_of(batch_, s);
    AttentionTile t;
    t.shape = shape;
    t.block_bytes = shape.id_bytes();
    t.data = cache_.data + static_cast<size_t>(head) * shape.head_bytes();
    t.scales_at = key_bytes(shape);
    t.values_at = values_at(shape);
    t.value_scales_at = t.scales_at;
    if (!shape.value_is_key_prefix) {
      t.value_scales_at +=
          sizeof(uint16_t) * kBlock * static_cast<size_t>(ops::scales_of(shape.key_dim));
    }
    t.table = batch_.block_tables + s * batch_.table_stride + head * batch_.head_stride;
    t.group = group();
    const int64_t token = batch_.query_start[static_cast<size_t>(s)];
    t.q = q_.row(token) + head * t.group * shape.key_dim;
    t.q_stride = q_.stride;
    t.out = out_.row(token) + head * t.group * shape.value_dim;
    t.out_stride = out_.stride;
    t.sums_stride = int64_t{2} * params_.heads;
    if (params_.sums != nullptr) t.sums = params_.sums + token * t.sums_stride + head * t.group * 2;
    t.sinks = params_.sinks != nullptr ? params_.sinks + head * t.group : nullptr;
    t.first_row = (tiles - 1 - in_sequence % tiles) * kAttendRows;
    t.rows = static_cast<int>(std::min<int64_t>(kAttendRows, queries * t.group - t.first_row));
    t.first_position = batch_.context_len[static_cast<size_t>(s)] - queries;
    t.scale = params_.scale;
    t.softcap = params_.softcap;
    t.window = params_.window;
    if (!batch_.ranges.empty()) t.ranges = batch_.ranges.data() + token;
    if (params_.distance_bias != nullptr) {
      t.bias_reach = params_.bias_reach;
      t.bias = params_.distance_bias + head * t.group * (2 * t.bias_reach + 1);
    }
    if (params_.slopes != nullptr) t.slopes = params_.slopes + head * t.group;
    t.until = t.last_split();
    return t;
  }

 private:
  int group() const { return params_.heads / cache_.shape.kv_heads; }
  int64_t tiles_of(int64_t s) const {
    return (queries_of(batch_, s) * group() + kAttendRows - 1) / kAttendRows;
  }

  const Matrix& out_;
  const Matrix& q_;
  const KvView& cache_;
  const AttentionBatch& batch_;
  const AttentionParams& params_;
  int64_t* ends_;  // [sequences]
  int64_t count_ = 0;
  int64_t most_splits_ = 1;
  int64_t most_rows_ = 1;
};

size_t aligned(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

size_t worker_bytes(const KvShape& s) {
  return aligned(static_cast<size_t>(attention_scratch_floats(s)) * sizeof(float));
}

size_t partial_bytes(const KvShape& s, int64_t rows, int64_t tiles, int64_t splits) {
  return static_cast<size_t>(tiles * splits * attention_partial_floats(s, rows)) * sizeof(float);
}

size_t scratch_bytes(const KvShape& s, int heads, int64_t tokens, int64_t context, int workers) {
  const int64_t tiles = kTilesPerWorker * workers;
  const int64_t rows = std::min<int64_t>(kAttendRows, tokens * heads);
  const int64_t splits = (context + kSplit - 1) / kSplit;
  const size_t partials =
      workers > 1 ? std::min(partial_bytes(s, rows, tiles, splits), kMaxPartialBytes) : 0;
  return aligned(static_cast<size_t>(tokens) * sizeof(int64_t)) +
         static_cast<size_t>(workers) * worker_bytes(s) + partials;
}

void run(const AttentionIsa& isa, const Matrix& out, const Matrix& q, const KvView& cache,
         const AttentionBatch& batch, const AttentionParams& params, ThreadPool& pool,
         uint8_t* scratch, size_t bytes) {
  const KvShape& s = cache.shape;
  const size_t lists = aligned(static_cast<size_t>(batch.sequences()) * sizeof(int64_t));
  const Tiles tiles(out, q, cache, batch, params, reinterpret_cast<int64_t*>(scratch));
  uint8_t* const workers = scratch + lists;
  const auto tile_for = [&](int64_t i, int worker) {
    AttentionTile t = tiles.tile(i);
    t.scratch = reinterpret_cast<float*>(workers + static_cast<size_t>(worker) * worker_bytes(s));
    return t;
  };
  const size_t used = lists + static_cast<size_t>(pool.size()) * worker_bytes(s);
  const int64_t splits = tiles.most_splits();
  if (pool.size() == 1 || splits == 1 || tiles.count() >= kTilesPerWorker * pool.size() ||
      used + partial_bytes(s, tiles.most_rows(), tiles.count(), splits) > bytes) {
    pool.parallel_for(tiles.count(),
                      [&](int64_t i, int worker) { isa.attend(tile_for(i, worker)); });
    return;
  }
  auto* const partials = reinterpret_cast<float*>(scratch + used);
  const int64_t stride = attention_partial_floats(s, tiles.most_rows());
  // A worker takes several consecutive splits, so that it can prefetch the next one.
  const int64_t run =
      std::clamp<int64_t>(tiles.count() * splits / (kRunsPerWorker * pool.size()), 1, splits);
  const int64_t runs = (splits + run - 1) / run;
  pool.parallel_for(tiles.count() * runs, [&](int64_t i, int worker) {
    AttentionTile t = tile_for(i / runs, worker);
    const int64_t first = i % runs * run, count = t.last_split() - t.first_split() + 1;
    t.until = t.first_split() + std::min(first + run, count) - 1;
    float* partial = partials + (i / runs * splits + first) * stride;
    isa.attend_splits(t, t.first_split() + first, partial, stride);
  });
  pool.parallel_for(tiles.count(), [&](int64_t i, int worker) {
    isa.merge(tile_for(i, worker), partials + i * splits * stride, stride);
  });
}

template <const AttentionIsa& kIsa>
constexpr ops::AttentionKernel row(const char* name, ops::CpuIsa isa) {
  return {name,
          isa,
          [](const KvShape& shape, const AttentionParams&) { return supports(kIsa, shape); },
          [](const KvView& cache, const Matrix& k, const Matrix& v, const AttentionBatch& batch,
             ThreadPool& pool) { store(kIsa, cache, k, v, batch, pool); },
          [](const Matrix& out, const Matrix& q, const KvView& cache, const AttentionBatch& batch,
             const AttentionParams& params, ThreadPool& pool, uint8_t* scratch,
             size_t bytes) { run(kIsa, out, q, cache, batch, params, pool, scratch, bytes); },
          scratch_bytes,
          [](const KvShape& shape, const uint8_t* block, int head, float* keys) {
            if (ops::has_int4(shape.type)) return KvCodes(shape).read_keys(block, head, keys);
            if (kIsa.store_head != nullptr) return KvTiles(shape).read_keys(block, head, keys);
            KvRows(shape).read_keys(block, head, keys);
          },
          [](const KvShape& shape, const uint8_t* from, int from_slot, uint8_t* to, int to_slot,
             int head) {
            if (ops::has_int4(shape.type))
              return KvCodes(shape).move(from, from_slot, to, to_slot, head);
            if (kIsa.store_head != nullptr)
              return KvTiles(shape).move(from, from_slot, to, to_slot, head);
            KvRows(shape).move(from, from_slot, to, to_slot, head);
          },
          [](const KvShape& shape, const uint8_t* block, int head,
             std::span<const int32_t> features, float* keys) {
            if (kIsa.store_head != nullptr)
              return KvTiles(shape).read_features(block, head, features, keys);
            KvRows(shape).read_features(block, head, features, keys);
          },
          [](const KvShape& shape, const uint8_t* block, int head, float* values) {
            if (kIsa.store_head != nullptr) return KvTiles(shape).read_values(block, head, values);
            KvRows(shape).read_values(block, head, values);
          }};
}

}  // namespace
}  // namespace freshet::cpu
