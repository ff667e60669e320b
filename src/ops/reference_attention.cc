// Attention over the paged cache, position by position. A block holds its keys, [16 tokens,
// kv_heads, codes], then its values in the same order; in formats with scales, these are followed
// by the scales of the keys, [16 tokens, kv_heads, groups], and of the values. Rotated formats are
// read as they are stored: the query is rotated, too, and the result is rotated back. Scores are
// summed in eight F32 partial sums per chunk of 64 features; everything else is in double.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/hadamard.h"
#include "ops/reference.h"
#include "quant/fp8.h"
#include "tensor/dtype.h"

namespace freshet::ops {
namespace {

constexpr float kF16Max = 65504.0f;

// Values beyond F16 saturate: an infinity would turn masked terms (0 * inf) into NaN.
float clamped_to_f16(float v) {
  return std::isnan(v) ? v : std::clamp(v, -kF16Max, kF16Max);
}

// Codes are rounded to nearest; a NaN, whose scale is NaN, gets the lowest code.
int code_of(float v, float to_code, float least, float most) {
  const float code = std::nearbyint(v * to_code);
  return static_cast<int>(code > least ? std::min(code, most) : least);
}

// The scale of a group of n elements.
KvScale scale_of(KvCode code, const float* x, int n) {
  if (code == KvCode::kInt8) {
    uint32_t largest = 0;
    for (int i = 0; i < n; ++i) {
      largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
    }
    return int8_scale(largest);
  }
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i];
  return int4_scale(*std::min_element(x, x + n), *std::max_element(x, x + n), sum);
}

// Writes n features of a token; `at` is where its codes begin.
void write_row(const KvFormat& f, uint8_t* at, const float* x, int n, uint16_t* scales) {
  KvScale scale{};
  for (int d = 0; d < n; ++d) {
    if (f.group > 0 && d % f.group == 0) {
      scale = scale_of(f.code, x + d, std::min(n - d, f.group));
      scales[d / f.group] = scale.bits;
    }
    switch (f.code) {
      case KvCode::kF32:
        reinterpret_cast<float*>(at)[d] = x[d];
        break;
      case KvCode::kF16:
        reinterpret_cast<uint16_t*>(at)[d] = f32_to_f16(clamped_to_f16(x[d]));
        break;
      case KvCode::kBF16:
        reinterpret_cast<uint16_t*>(at)[d] = f32_to_bf16(x[d]);
        break;
      case KvCode::kE4M3:
        at[d] = quant::f32_to_e4m3(x[d]);
        break;
      case KvCode::kInt8:
        at[d] = static_cast<uint8_t>(code_of(x[d], scale.to_code, -127.0f, 127.0f));
        break;
      case KvCode::kInt4: {
        const int code = code_of(x[d], scale.to_code, -8.0f, 7.0f) + 8;
        at[d / 2] = static_cast<uint8_t>(d % 2 == 0 ? code : at[d / 2] | code << 4);
        break;
      }
    }
  }
}

void read_row(const KvFormat& f, const uint8_t* at, int n, const uint16_t* scales, float* out) {
  for (int d = 0; d < n; ++d) {
    const float scale = f.group > 0 ? f16_to_f32(scales[d / f.group]) : 1.0f;
    switch (f.code) {
      case KvCode::kF32:
        out[d] = reinterpret_cast<const float*>(at)[d];
        break;
      case KvCode::kF16:
        out[d] = f16_to_f32(reinterpret_cast<const uint16_t*>(at)[d]);
        break;
      case KvCode::kBF16:
        out[d] = bf16_to_f32(reinterpret_cast<const uint16_t*>(at)[d]);
        break;
      case KvCode::kE4M3:
        out[d] = quant::e4m3_to_f32(at[d]);
        break;
      case KvCode::kInt8:
        out[d] = static_cast<float>(static_cast<int8_t>(at[d])) * scale;
        break;
      case KvCode::kInt4:
        out[d] = static_cast<float>((at[d / 2] >> d % 2 * 4 & 15) - 8) * scale;
        break;
    }
  }
}

struct Slot {
  uint8_t* block;
  int64_t index;  // within the block
};

Slot slot_of(const KvView& cache, const AttentionBatch& batch, int sequence, int64_t position,
             int head) {
  const int32_t* table =
      batch.block_tables + sequence * batch.table_stride + head * batch.head_stride;
  const int32_t id = table[position / kBlockTokens];
  return {cache.data + static_cast<size_t>(id) * cache.shape.id_bytes(), position % kBlockTokens};
}

// Where a token's key or value of a head is: its codes and its scales. A block has keys, then
// values, then the scales of the keys and of the values.
struct Stored {
  uint8_t* codes;
  uint16_t* scales;
};

Stored stored_at(const KvShape& s, const Slot& slot, int head, bool value) {
  const KvTypeInfo& type = info(s.type);
  const auto heads = static_cast<size_t>(s.kv_heads);
  const auto row = static_cast<size_t>(slot.index) * heads + static_cast<size_t>(head);
  const size_t tokens = kBlockTokens * heads;
  const size_t key = code_bytes(type.key, s.key_dim);
  const size_t own = s.value_is_key_prefix ? 0 : code_bytes(type.value, s.value_dim);
  const auto key_scales = static_cast<size_t>(scales_of(s.key_dim));
  auto* const scales = reinterpret_cast<uint16_t*>(slot.block + tokens * (key + own));
  if (!value || s.value_is_key_prefix) return {slot.block + row * key, scales + row * key_scales};
  const auto value_scales = static_cast<size_t>(scales_of(s.value_dim));
  return {slot.block + tokens * key + row * own,
          scales + (type.key.group > 0 ? tokens * key_scales : 0) + row * value_scales};
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
  const KvTypeInfo& type = info(s.type);
  pool.parallel_for(k.rows, [&](int64_t token, int) {
    const Place place = place_of(batch, token);
    const Slot slot = slot_of(cache, batch, place.sequence, place.position, 0);
    std::vector<float> rotated;
    const auto put = [&](const KvFormat& f, const float* x, int n, const Stored& to) {
      if (f.rotated) {
        rotated.assign(x, x + n);
        hadamard(rotated.data(), n);
        x = rotated.data();
      }
      write_row(f, to.codes, x, n, to.scales);
    };
    for (int h = 0; h < s.kv_heads; ++h) {
      put(type.key, k.row(token) + h * s.key_dim, s.key_dim, stored_at(s, slot, h, false));
      if (s.value_is_key_prefix) continue;
      put(type.value, v.row(token) + h * s.value_dim, s.value_dim, stored_at(s, slot, h, true));
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

// The state of one query head while its context is processed: a one-pass softmax. The sums so far
// are rescaled when a larger score appears.
struct Row {
  const float* q;
  float* out;
  double* acc;          // [value_dim]
  int64_t first, last;  // the positions it attends to
  double max, sum;
  const float* bias;  // by distance; nullptr: none
  int64_t position;
  double slope;

  void take(const AttentionParams& params, const KvShape& s, const float* key, const float* value,
            int64_t p) {
    double score = dot(q, key, s.key_dim) * params.scale;
    if (params.softcap > 0.0f) score = params.softcap * std::tanh(score / params.softcap);
    if (bias != nullptr) {
      const int64_t reach = params.bias_reach;
      score += double{bias[reach + std::clamp(p - position, -reach, reach)]};
    }
    if (slope != 0.0) score += slope * static_cast<double>(p - position);
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
  Row* rows;       // [kRows or more]
  double* acc;     // [rows, value_dim]
  float* queries;  // [rows, key_dim]: rotated
  float* key;      // [key_dim]
  float* value;    // [value_dim]

  static size_t rows_for(int heads) { return static_cast<size_t>(std::max(heads, kRows)); }
  static size_t bytes(const KvShape& s, int heads) {
    const auto k = static_cast<size_t>(s.key_dim), v = static_cast<size_t>(s.value_dim);
    return (rows_for(heads) * (sizeof(Row) + v * sizeof(double) + k * sizeof(float)) +
            (k + v) * sizeof(float) + 63) /
           64 * 64;
  }
  Scratch(uint8_t* at, const KvShape& s, int heads)
      : rows(reinterpret_cast<Row*>(at)),
        acc(reinterpret_cast<double*>(rows + rows_for(heads))),
        queries(reinterpret_cast<float*>(acc + rows_for(heads) * static_cast<size_t>(s.value_dim))),
        key(queries + rows_for(heads) * static_cast<size_t>(s.key_dim)),
        value(key + s.key_dim) {}
};

// Attends queries [first, last) of the batch, all of one sequence, with the heads of one KV head.
void attend(const Matrix& out, const Matrix& q, const KvView& cache, const AttentionBatch& batch,
            const AttentionParams& params, int64_t first, int64_t last, int kv_head,
            Scratch scratch) {
  const KvShape& s = cache.shape;
  const KvTypeInfo& type = info(s.type);
  const int group = params.heads / s.kv_heads;
  int64_t n = 0;
  for (int64_t token = first; token < last; ++token) {
    const KeyRange seen = seen_by(batch, params, token);
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h, ++n) {
      double* acc = scratch.acc + n * s.value_dim;
      std::fill_n(acc, s.value_dim, 0.0);
      const bool sink = params.sinks != nullptr;
      const float* query = q.row(token) + h * s.key_dim;
      if (type.key.rotated) {
        float* const rotated = scratch.queries + n * s.key_dim;
        std::copy_n(query, s.key_dim, rotated);
        hadamard(rotated, s.key_dim);
        query = rotated;
      }
      scratch.rows[n] = {query,
                         out.row(token) + h * s.value_dim,
                         acc,
                         seen.first,
                         seen.end - 1,
                         sink ? double{params.sinks[h]} : -std::numeric_limits<double>::infinity(),
                         sink ? 1.0 : 0.0,
                         params.distance_bias != nullptr
                             ? params.distance_bias + int64_t{h} * (2 * params.bias_reach + 1)
                             : nullptr,
                         place_of(batch, token).position,
                         params.slopes != nullptr ? double{params.slopes[h]} : 0.0};
    }
  }
  const int sequence = place_of(batch, first).sequence;
  for (int64_t p = scratch.rows[0].first; p <= scratch.rows[n - 1].last; ++p) {
    const Slot slot = slot_of(cache, batch, sequence, p, kv_head);
    const Stored key = stored_at(s, slot, kv_head, false);
    const Stored value = stored_at(s, slot, kv_head, true);
    read_row(type.key, key.codes, s.key_dim, key.scales, scratch.key);
    read_row(type.value, value.codes, s.value_dim, value.scales, scratch.value);
    for (Row* r = scratch.rows; r < scratch.rows + n; ++r) {
      if (r->first <= p && p <= r->last) r->take(params, s, scratch.key, scratch.value, p);
    }
  }
  for (const Row* r = scratch.rows; r < scratch.rows + n; ++r) {
    for (int d = 0; d < s.value_dim; ++d) r->out[d] = static_cast<float>(r->acc[d] / r->sum);
    if (type.value.rotated) hadamard(r->out, s.value_dim);
    if (params.sums == nullptr) continue;
    const auto row = r - scratch.rows;
    const int64_t token = first + row / group, head = kv_head * group + row % group;
    float* const sums = params.sums + (token * params.heads + head) * 2;
    sums[0] = static_cast<float>(r->max);
    // Exact in what the rounding of the maximum leaves.
    sums[1] = static_cast<float>(r->sum * std::exp(r->max - double{sums[0]}));
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

// Rotated keys stay rotated.
void read_keys(const KvShape& s, const uint8_t* block, int head, float* keys) {
  std::vector<float> key(static_cast<size_t>(s.key_dim));
  for (int t = 0; t < kBlockTokens; ++t) {
    const Stored at = stored_at(s, {const_cast<uint8_t*>(block), t}, head, false);
    read_row(info(s.type).key, at.codes, s.key_dim, at.scales, key.data());
    for (int d = 0; d < s.key_dim; ++d) keys[d * kBlockTokens + t] = key[static_cast<size_t>(d)];
  }
}

void move_slot(const KvShape& s, const uint8_t* from, int from_slot, uint8_t* to, int to_slot,
               int head) {
  const auto move = [&](const KvFormat& f, int n, bool value) {
    const Stored at = stored_at(s, {const_cast<uint8_t*>(from), from_slot}, head, value);
    const Stored into = stored_at(s, {to, to_slot}, head, value);
    std::memcpy(into.codes, at.codes, code_bytes(f, n));
    if (f.group > 0) std::copy_n(at.scales, scales_of(n), into.scales);
  };
  move(info(s.type).key, s.key_dim, false);
  if (!s.value_is_key_prefix) move(info(s.type).value, s.value_dim, true);
}

void read_features(const KvShape& s, const uint8_t* block, int head,
                   std::span<const int32_t> features, float* keys) {
  std::vector<float> all(static_cast<size_t>(s.key_dim * kBlockTokens));
  read_keys(s, block, head, all.data());
  for (const int32_t d : features)
    keys = std::copy_n(&all[static_cast<size_t>(d * kBlockTokens)], kBlockTokens, keys);
}

void read_values(const KvShape& s, const uint8_t* block, int head, float* values) {
  for (int t = 0; t < kBlockTokens; ++t, values += s.value_dim) {
    const Stored at = stored_at(s, {const_cast<uint8_t*>(block), t}, head, true);
    read_row(info(s.type).value, at.codes, s.value_dim, at.scales, values);
  }
}

constexpr AttentionKernel kKernels[] = {
    {"attention.reference", CpuIsa::kScalar,
     [](const KvShape& shape, const AttentionParams&) { return check_shape(shape).ok(); }, store,
     run, scratch_bytes, read_keys, move_slot, read_features, read_values}};

}  // namespace

std::span<const AttentionKernel> reference_attention() {
  return kKernels;
}

}  // namespace freshet::ops
