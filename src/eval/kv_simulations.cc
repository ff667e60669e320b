#include "eval/kv_simulations.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tensor/dtype.h"

namespace freshet::eval {
namespace {

using ops::AttentionBatch;
using ops::AttentionParams;
using ops::KvShape;
using ops::KvView;

constexpr int64_t kGroup = 32;      // tokens of a key's channel, channels of a value
constexpr int64_t kResidual = 128;  // newest tokens that stay as they are

// What the query at a position reads coarsely: keys and values before these positions.
int64_t coarse_keys(int64_t position) {
  return position / kResidual * kResidual;
}
int64_t coarse_values(int64_t position) {
  return std::max<int64_t>(0, position - kResidual);
}

// Where a block keeps the key or the value of a token's head: [16, heads, key_dim], then values.
float* stored_row(const KvView& cache, const int32_t* table, int64_t position, int head,
                  bool value) {
  const KvShape& s = cache.shape;
  const auto block = static_cast<size_t>(table[position / ops::kBlockTokens]);
  auto* const data = reinterpret_cast<float*>(cache.data + block * s.block_bytes());
  const int64_t row = position % ops::kBlockTokens * s.kv_heads + head;
  if (!value) return data + row * s.key_dim;
  return data + int64_t{ops::kBlockTokens} * s.kv_heads * s.key_dim + row * s.value_dim;
}

void store_plain(const KvView& cache, const Matrix& k, const Matrix& v, const AttentionBatch& batch,
                 ThreadPool&) {
  const KvShape& s = cache.shape;
  for (int sequence = 0; sequence < batch.sequences(); ++sequence) {
    const auto i = static_cast<size_t>(sequence);
    const int32_t* const table = batch.block_tables + sequence * batch.table_stride;
    for (int64_t t = batch.query_start[i]; t < batch.query_start[i + 1]; ++t) {
      const int64_t position = batch.context_len[i] - (batch.query_start[i + 1] - t);
      for (int h = 0; h < s.kv_heads; ++h) {
        std::copy_n(k.row(t) + h * s.key_dim, s.key_dim,
                    stored_row(cache, table, position, h, false));
        std::copy_n(v.row(t) + h * s.value_dim, s.value_dim,
                    stored_row(cache, table, position, h, true));
      }
    }
  }
}

// Rounds `count` numbers that are `stride` apart.
void coarsen(float* x, int64_t count, int64_t stride, int bits) {
  float least = x[0], most = x[0];
  for (int64_t i = 0; i < count; ++i) {
    least = std::min(least, x[i * stride]);
    most = std::max(most, x[i * stride]);
  }
  const auto top = static_cast<float>((1 << bits) - 1);
  const float step = f16_to_f32(f32_to_f16((most - least) / top));
  const float minimum = f16_to_f32(f32_to_f16(least));
  for (int64_t i = 0; i < count; ++i) {
    float& v = x[i * stride];
    const float code = step > 0.0f ? std::nearbyint((v - minimum) / step) : 0.0f;
    v = std::clamp(code, 0.0f, top) * step + minimum;
  }
}

// The keys and values of one head of a sequence, exact and coarse.
struct Head {
  std::vector<float> keys, values, coarse_keys, coarse_values;

  Head(const KvView& cache, const int32_t* table, int64_t tokens, int head, int bits) {
    const KvShape& s = cache.shape;
    for (int64_t t = 0; t < tokens; ++t) {
      const float* const k = stored_row(cache, table, t, head, false);
      const float* const v = stored_row(cache, table, t, head, true);
      keys.insert(keys.end(), k, k + s.key_dim);
      values.insert(values.end(), v, v + s.value_dim);
    }
    coarse_keys = keys;
    coarse_values = values;
    for (int64_t t = 0; t + kGroup <= tokens; t += kGroup) {
      for (int d = 0; d < s.key_dim; ++d) {
        coarsen(coarse_keys.data() + t * s.key_dim + d, kGroup, s.key_dim, bits);
      }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t d = 0; d < s.value_dim; d += kGroup) {
        coarsen(coarse_values.data() + t * s.value_dim + d,
                std::min<int64_t>(kGroup, s.value_dim - d), 1, bits);
      }
    }
  }
};

void attend_one(const Head& head, const KvShape& s, const AttentionParams& params, const float* q,
                int64_t position, ops::KeyRange seen, const float* sink, float* out) {
  std::vector<double> weights;
  double most = sink != nullptr ? double{*sink} : -std::numeric_limits<double>::infinity();
  for (int64_t t = seen.first; t < seen.end; ++t) {
    const auto& keys = t < coarse_keys(position) ? head.coarse_keys : head.keys;
    const float* const k = keys.data() + t * s.key_dim;
    double score = 0.0;
    for (int d = 0; d < s.key_dim; ++d) score += double{q[d]} * double{k[d]};
    score *= params.scale;
    if (params.softcap > 0.0f) score = params.softcap * std::tanh(score / params.softcap);
    most = std::max(most, score);
    weights.push_back(score);
  }
  double sum = sink != nullptr ? std::exp(*sink - most) : 0.0;
  for (double& w : weights) sum += w = std::exp(w - most);
  std::vector<double> mixed(static_cast<size_t>(s.value_dim), 0.0);
  for (int64_t t = seen.first; t < seen.end; ++t) {
    const auto& values = t < coarse_values(position) ? head.coarse_values : head.values;
    const float* const v = values.data() + t * s.value_dim;
    const double w = weights[static_cast<size_t>(t - seen.first)] / sum;
    for (size_t d = 0; d < mixed.size(); ++d) mixed[d] += w * double{v[d]};
  }
  for (size_t d = 0; d < mixed.size(); ++d) out[d] = static_cast<float>(mixed[d]);
}

template <int kBits>
void attend_all(const Matrix& out, const Matrix& q, const KvView& cache,
                const AttentionBatch& batch, const AttentionParams& params, ThreadPool& pool,
                uint8_t*, size_t) {
  const KvShape& s = cache.shape;
  const int group = params.heads / s.kv_heads;
  pool.parallel_for(int64_t{batch.sequences()} * s.kv_heads, [&](int64_t i, int) {
    const auto sequence = static_cast<size_t>(i / s.kv_heads);
    const int kv_head = static_cast<int>(i % s.kv_heads);
    const int32_t* const table =
        batch.block_tables + static_cast<int64_t>(sequence) * batch.table_stride;
    const Head head(cache, table, batch.context_len[sequence], kv_head, kBits);
    const int32_t end = batch.query_start[sequence + 1];
    for (int64_t t = batch.query_start[sequence]; t < end; ++t) {
      const auto position = static_cast<int32_t>(batch.context_len[sequence] - (end - t));
      ops::KeyRange seen{0, position + 1};
      if (params.window > 0) seen.first = std::max(0, position + 1 - params.window);
      if (!batch.ranges.empty()) seen = batch.ranges[static_cast<size_t>(t)];
      for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        attend_one(head, s, params, q.row(t) + h * s.key_dim, position, seen,
                   params.sinks != nullptr ? params.sinks + h : nullptr,
                   out.row(t) + h * s.value_dim);
      }
    }
  });
}

template <int kBits>
const ops::KernelTable& table_of() {
  static constexpr ops::AttentionKernel kRows[] = {
      {kBits == 2 ? "attention.kivi2" : "attention.kivi4", ops::CpuIsa::kScalar,
       [](const KvShape& s, const AttentionParams&) {
         return s.type == ops::KvType::kF32 && !s.value_is_key_prefix;
       },
       store_plain, attend_all<kBits>,
       [](const KvShape&, int, int64_t, int64_t, int) { return size_t{0}; }}};
  static const ops::KernelTable kTable = [] {
    ops::KernelTable table = ops::reference_kernels();
    table.attention = kRows;
    return table;
  }();
  return kTable;
}

}  // namespace

Status check_simulated(const ModelSpec& spec) {
  for (const KvLayer& layer : kv_cache_spec(spec, ops::KvType::kF32).layers) {
    if (layer.shape.value_is_key_prefix) {
      return unsupported("latent attention (MLA) is not simulated; leave it out of --policies");
    }
  }
  return {};
}

const ops::KernelTable& kivi_kernels(int bits) {
  return bits == 2 ? table_of<2>() : table_of<4>();
}

double kivi_bytes_per_token(const ModelSpec& spec, int bits, int64_t tokens) {
  const double coarse = (bits + 32.0 / kGroup) / 8.0, exact = 2.0;  // bytes of a number
  const auto all = static_cast<double>(tokens);
  const auto keys = static_cast<double>(coarse_keys(tokens));
  const auto values = static_cast<double>(coarse_values(tokens));
  double bytes = 0.0;
  for (const auto& [s, state_bytes] : kv_cache_spec(spec, ops::KvType::kF32).layers) {
    if (state_bytes > 0) continue;
    const double heads = s.kv_heads;
    bytes += heads * s.key_dim * (keys * coarse + (all - keys) * exact) / all;
    bytes += heads * s.value_dim * (values * coarse + (all - values) * exact) / all;
  }
  return bytes;
}

}  // namespace freshet::eval
