// Attention over the paged cache, position by position. A block holds its keys, [16 tokens,
// kv_heads * key_dim], then its values, [16 tokens, kv_heads * value_dim]; with INT8 then the
// scales of the keys, [16 tokens, kv_heads], and of the values. Scores are summed in eight F32
// partial sums per chunk of 64 features; everything else is in double.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "ops/reference.h"
#include "quant/fp8.h"
#include "tensor/dtype.h"

namespace freshet::ops {
namespace {

constexpr float kF16Max = 65504.0f;

// Values beyond F16 saturate: an infinity would turn masked terms (0 * inf) into NaN.
void write(KvType type, uint8_t* base, int64_t i, float v, float to_code) {
  switch (type) {
    case KvType::kF32:
      reinterpret_cast<float*>(base)[i] = v;
      break;
    case KvType::kF16:
      reinterpret_cast<uint16_t*>(base)[i] =
          f32_to_f16(std::isnan(v) ? v : std::clamp(v, -kF16Max, kF16Max));
      break;
    case KvType::kBF16:
      reinterpret_cast<uint16_t*>(base)[i] = f32_to_bf16(v);
      break;
    case KvType::kFP8:
      base[i] = quant::f32_to_e4m3(v);
      break;
    case KvType::kInt8: {
      const float code = std::nearbyint(v * to_code);
      base[i] = static_cast<uint8_t>(code > -127.0f ? static_cast<int>(std::min(code, 127.0f))
                                                    : -127);  // NaN too
      break;
    }
  }
}

void write_row(KvType type, uint8_t* base, int64_t i, const float* x, int n, uint16_t* scales) {
  Int8Scale int8{};
  for (int d = 0; d < n; ++d) {
    if (type == KvType::kInt8 && d % kScaledFeatures == 0) {
      uint32_t largest = 0;
      for (int j = d; j < std::min(n, d + kScaledFeatures); ++j) {
        largest = std::max(largest, std::bit_cast<uint32_t>(x[j]) & 0x7fffffffu);
      }
      int8 = int8_scale(largest);
      scales[d / kScaledFeatures] = int8.bits;
    }
    write(type, base, i + d, x[d], int8.to_code);
  }
}

void read(KvType type, const uint8_t* base, int64_t i, int n, const uint16_t* scales, float* out) {
  for (int d = 0; d < n; ++d) {
    switch (type) {
      case KvType::kF32:
        out[d] = reinterpret_cast<const float*>(base)[i + d];
        break;
      case KvType::kF16:
        out[d] = f16_to_f32(reinterpret_cast<const uint16_t*>(base)[i + d]);
        break;
      case KvType::kBF16:
        out[d] = bf16_to_f32(reinterpret_cast<const uint16_t*>(base)[i + d]);
        break;
      case KvType::kFP8:
        out[d] = quant::e4m3_to_f32(base[i + d]);
        break;
      case KvType::kInt8:
        out[d] = static_cast<float>(static_cast<int8_t>(base[i + d])) *
                 f16_to_f32(scales[d / kScaledFeatures]);
        break;
    }
  }
}

struct Slot {
  uint8_t* block;
  int64_t index;  // within the block
};

Slot slot_of(const KvView& cache, const AttentionBatch& batch, int sequence, int64_t position) {
  const int32_t* table = batch.block_tables + sequence * batch.table_stride;
  const int32_t id = table[position / kBlockTokens];
  return {cache.data + static_cast<size_t>(id) * cache.shape.block_bytes(),
          position % kBlockTokens};
}

int64_t key_at(const KvShape& s, const Slot& slot, int head) {
  return (slot.index * s.kv_heads + head) * s.key_dim;
}

int64_t value_at(const KvShape& s, const Slot& slot, int head) {
  if (s.value_is_key_prefix) return key_at(s, slot, head);
  const int64_t keys = int64_t{kBlockTokens} * s.kv_heads * s.key_dim;
  return keys + (slot.index * s.kv_heads + head) * s.value_dim;
}

// The scales of one head of a token; nowhere for types without scales.
uint16_t* key_scales(const KvShape& s, const Slot& slot, int head) {
  const int64_t features = s.key_dim + (s.value_is_key_prefix ? 0 : s.value_dim);
  uint8_t* scales = slot.block + kBlockTokens * s.kv_heads * features;
  return reinterpret_cast<uint16_t*>(scales) +
         (slot.index * s.kv_heads + head) * scales_of(s.key_dim);
}

uint16_t* value_scales(const KvShape& s, const Slot& slot, int head) {
  if (s.value_is_key_prefix) return key_scales(s, slot, head);
  const Slot first{slot.block, 0};
  return key_scales(s, first, 0) + kBlockTokens * s.kv_heads * scales_of(s.key_dim) +
         (slot.index * s.kv_heads + head) * scales_of(s.value_dim);
}

struct Place {
  int sequence;
  int64_t position;
};

Place place_of(const AttentionBatch& batch, int64_t token) {
  const auto next = std::upper_bound(batch.query_start.begin(), batch.query_start.end(), token);
  const int s = static_cast<int>(next - batch.query_start.begin()) - 1;
  const size_t i = static_cast<size_t>(s);
  return {s, batch.context_len[i] - (batch.query_start[i + 1] - token)};
}

KeyRange seen_by(const AttentionBatch& batch, const AttentionParams& params, int64_t token) {
  if (!batch.ranges.empty()) return batch.ranges[static_cast<size_t>(token)];
  const auto position = static_cast<int32_t>(place_of(batch, token).position);
  return {params.window > 0 ? std::max(0, position - params.window + 1) : 0, position + 1};
}

void store(const KvView& cache, const Matrix& k, const Matrix& v, const AttentionBatch& batch,
           ThreadPool& pool) {
  const KvShape& s = cache.shape;
  pool.parallel_for(k.rows, [&](int64_t token, int) {
    const Place place = place_of(batch, token);
    const Slot slot = slot_of(cache, batch, place.sequence, place.position);
    for (int h = 0; h < s.kv_heads; ++h) {
      write_row(s.type, slot.block, key_at(s, slot, h), k.row(token) + h * s.key_dim, s.key_dim,
                key_scales(s, slot, h));
      if (s.value_is_key_prefix) continue;
      write_row(s.type, slot.block, value_at(s, slot, h), v.row(token) + h * s.value_dim,
                s.value_dim, value_scales(s, slot, h));
    }
  });
}

double dot(const float* a, const float* b, int n) {
  constexpr int kChunk = 64, kLanes = 8;
  double sum = 0.0;
  for (int d = 0; d < n; d += kChunk) {
    const int end = std::min(n, d + kChunk);
    float acc[kLanes] = {};
    int i = d;
    for (; i + kLanes <= end; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) acc[j] += a[i + j] * b[i + j];
    }
    for (; i < end; ++i) acc[0] += a[i] * b[i];
    sum += ((acc[0] + acc[4]) + (acc[2] + acc[6])) + ((acc[1] + acc[5]) + (acc[3] + acc[7]));
  }
  return sum;
}

// The state of one query head on its way through the context: a one-pass softmax. The sums so far
// are rescaled when a larger score appears.
struct Row {
  const float* q;
  float* out;
  double* acc;          // [value_dim]
  int64_t first, last;  // the positions it attends to
  double max, sum;

  void take(const AttentionParams& params, const KvShape& s, const float* key, const float* value) {
    double score = dot(q, key, s.key_dim) * params.scale;
    if (params.softcap > 0.0f) score = params.softcap * std::tanh(score / params.softcap);
    if (score > max) {
      const double shrink = std::exp(max - score);
      for (int d = 0; d < s.value_dim; ++d) acc[d] *= shrink;
      sum *= shrink;
      max = score;
    }
    const double weight = std::exp(score - max);
    sum += weight;
    for (int d = 0; d < s.value_dim; ++d) acc[d] += weight * value[d];
  }
};

// Rows that are processed together, so that keys and values are read once for all.
constexpr int kRows = 32;
int queries_together(int group) {
  return std::max(1, kRows / group);
}

struct Scratch {
  Row* rows;     // [kRows or more]
  double* acc;   // [rows, value_dim]
  float* key;    // [key_dim]
  float* value;  // [value_dim]

  static size_t rows_for(int heads) { return static_cast<size_t>(std::max(heads, kRows)); }
  static size_t bytes(const KvShape& s, int heads) {
    const auto k = static_cast<size_t>(s.key_dim), v = static_cast<size_t>(s.value_dim);
    return (rows_for(heads) * (sizeof(Row) + v * sizeof(double)) + (k + v) * sizeof(float) + 63) /
           64 * 64;
  }
  Scratch(uint8_t* at, const KvShape& s, int heads)
      : rows(reinterpret_cast<Row*>(at)),
        acc(reinterpret_cast<double*>(rows + rows_for(heads))),
        key(reinterpret_cast<float*>(acc + rows_for(heads) * static_cast<size_t>(s.value_dim))),
        value(key + s.key_dim) {}
};

// Attends queries [first, last) of the batch, all of one sequence, with the heads of one KV head.
void attend(const Matrix& out, const Matrix& q, const KvView& cache, const AttentionBatch& batch,
            const AttentionParams& params, int64_t first, int64_t last, int kv_head,
            Scratch scratch) {
  const KvShape& s = cache.shape;
  const int group = params.heads / s.kv_heads;
  int64_t n = 0;
  for (int64_t token = first; token < last; ++token) {
    const KeyRange seen = seen_by(batch, params, token);
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h, ++n) {
      double* acc = scratch.acc + n * s.value_dim;
      std::fill_n(acc, s.value_dim, 0.0);
      const bool sink = params.sinks != nullptr;
      scratch.rows[n] = {q.row(token) + h * s.key_dim,
                         out.row(token) + h * s.value_dim,
                         acc,
                         seen.first,
                         seen.end - 1,
                         sink ? double{params.sinks[h]} : -std::numeric_limits<double>::infinity(),
                         sink ? 1.0 : 0.0};
    }
  }
  const int sequence = place_of(batch, first).sequence;
  for (int64_t p = scratch.rows[0].first; p <= scratch.rows[n - 1].last; ++p) {
    const Slot slot = slot_of(cache, batch, sequence, p);
    read(s.type, slot.block, key_at(s, slot, kv_head), s.key_dim, key_scales(s, slot, kv_head),
         scratch.key);
    read(s.type, slot.block, value_at(s, slot, kv_head), s.value_dim,
         value_scales(s, slot, kv_head), scratch.value);
    for (Row* r = scratch.rows; r < scratch.rows + n; ++r) {
      if (r->first <= p && p <= r->last) r->take(params, s, scratch.key, scratch.value);
    }
  }
  for (const Row* r = scratch.rows; r < scratch.rows + n; ++r) {
    for (int d = 0; d < s.value_dim; ++d) r->out[d] = static_cast<float>(r->acc[d] / r->sum);
  }
}

void run(const Matrix& out, const Matrix& q, const KvView& cache, const AttentionBatch& batch,
         const AttentionParams& params, ThreadPool& pool, uint8_t* scratch, size_t) {
  const KvShape& s = cache.shape;
  const int64_t step = queries_together(params.heads / s.kv_heads);
  const size_t worker_bytes = Scratch::bytes(s, params.heads);
  // There is one index per query and KV head, but only the first query of each step of its sequence
  // does any work.
  pool.parallel_for(q.rows * s.kv_heads, [&](int64_t i, int worker) {
    const int64_t token = i / s.kv_heads;
    const auto sequence = static_cast<size_t>(place_of(batch, token).sequence);
    if ((token - batch.query_start[sequence]) % step != 0) return;
    const int64_t last = std::min<int64_t>(token + step, batch.query_start[sequence + 1]);
    attend(out, q, cache, batch, params, token, last, static_cast<int>(i % s.kv_heads),
           Scratch(scratch + static_cast<size_t>(worker) * worker_bytes, s, params.heads));
  });
}

size_t scratch_bytes(const KvShape& shape, int heads, int64_t, int64_t, int workers) {
  return static_cast<size_t>(workers) * Scratch::bytes(shape, heads);
}

constexpr AttentionKernel kKernels[] = {
    {"attention.reference", CpuIsa::kScalar,
     [](const KvShape&, const AttentionParams&) { return true; }, store, run, scratch_bytes}};

}  // namespace

std::span<const AttentionKernel> reference_attention() {
  return kKernels;
}

}  // namespace freshet::ops
