#include "eval/kv_simulations.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "tensor/dtype.h"

namespace freshet::eval {
namespace {

using ops::AttentionBatch;
using ops::AttentionParams;
using ops::KvShape;
using ops::KvView;

constexpr int64_t kGroup = 32;  // tokens of a key's channel, channels of a value
constexpr int64_t kKiviExact = 128, kGearChunk = 64, kGearRank = 4;
constexpr int64_t kCalibration = 128, kFirstExact = 4;  // tokens

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

// `count` numbers that are `stride` apart.
struct Numbers {
  float* x;
  int64_t count, stride;
  float& operator[](int64_t i) const { return x[i * stride]; }
};

struct Range {
  float least, most;
};

// Without the `apart` least and the `apart` greatest numbers.
Range range_of(const Numbers& n, int64_t apart = 0) {
  std::vector<float> sorted;
  for (int64_t i = 0; i < n.count; ++i) sorted.push_back(n[i]);
  std::ranges::sort(sorted);
  apart = std::min(apart, (n.count - 1) / 2);
  return {sorted[static_cast<size_t>(apart)], sorted[static_cast<size_t>(n.count - 1 - apart)]};
}

// Rounds to 2^bits steps of a range, which is kept in F16. Numbers outside stay as they are if they
// are `exact`, and go to the ends otherwise.
void round_numbers(const Numbers& n, const Range& range, int bits, bool exact = false) {
  const auto top = static_cast<float>((1 << bits) - 1);
  const float step = f16_to_f32(f32_to_f16((range.most - range.least) / top));
  const float minimum = f16_to_f32(f32_to_f16(range.least));
  for (int64_t i = 0; i < n.count; ++i) {
    float& v = n[i];
    if (exact && (v < range.least || v > range.most)) continue;
    const float code = step > 0.0f ? std::nearbyint((v - minimum) / step) : 0.0f;
    v = std::clamp(code, 0.0f, top) * step + minimum;
  }
}

// Keys or values of one head of a sequence.
struct Rows {
  std::vector<float> x;
  int64_t tokens = 0, dim = 0;
  float* row(int64_t t) { return x.data() + t * dim; }
  const float* row(int64_t t) const { return x.data() + t * dim; }
  Numbers channel(int64_t first, int64_t count, int64_t d) { return {row(first) + d, count, dim}; }
};

// A published method, as far as it needs no training.
struct Method {
  const char* name;
  int bits;
  // The query at a position reads those before these positions coarsely.
  int64_t (*coarse_keys)(int64_t position);
  int64_t (*coarse_values)(int64_t position);
  void (*coarsen_keys)(Rows& rows, int bits);
  void (*coarsen_values)(Rows& rows, int bits);
  // Bytes of a coarse number of a key and of a value with this many features.
  double (*key_bytes)(int bits, double dim);
  double (*value_bytes)(int bits, double dim);
};

// ---- KIVI

void kivi_keys(Rows& rows, int bits) {
  for (int64_t t = 0; t + kGroup <= rows.tokens; t += kGroup) {
    for (int64_t d = 0; d < rows.dim; ++d) {
      const Numbers n = rows.channel(t, kGroup, d);
      round_numbers(n, range_of(n), bits);
    }
  }
}

void kivi_values(Rows& rows, int bits) {
  for (int64_t t = 0; t < rows.tokens; ++t) {
    for (int64_t d = 0; d < rows.dim; d += kGroup) {
      const Numbers n{rows.row(t) + d, std::min(kGroup, rows.dim - d), 1};
      round_numbers(n, range_of(n), bits);
    }
  }
}

// ---- GEAR

// What is left of a chunk after rounding is replaced by the nearest matrix of a low rank, found by
// power iteration. x: [tokens, dim] before rounding, rounded: after it.
void add_low_rank(const float* x, float* rounded, int64_t tokens, int64_t dim) {
  std::vector<double> rest(static_cast<size_t>(tokens * dim));
  for (size_t i = 0; i < rest.size(); ++i) rest[i] = double{x[i]} - double{rounded[i]};
  const auto at = [&](int64_t t, int64_t d) -> double& {
    return rest[static_cast<size_t>(t * dim + d)];
  };
  std::vector<double> left(static_cast<size_t>(tokens)), right(static_cast<size_t>(dim));
  for (int64_t rank = 0; rank < kGearRank; ++rank) {
    for (int64_t d = 0; d < dim; ++d)
      right[static_cast<size_t>(d)] = 1.0 + static_cast<double>((d * 7 + rank * 3) % 5);
    for (int turn = 0; turn < 8; ++turn) {
      double square = 0.0;
      for (int64_t t = 0; t < tokens; ++t) {
        double& l = left[static_cast<size_t>(t)] = 0.0;
        for (int64_t d = 0; d < dim; ++d) l += at(t, d) * right[static_cast<size_t>(d)];
        square += l * l;
      }
      if (square == 0.0) return;
      for (double& l : left) l /= std::sqrt(square);
      std::ranges::fill(right, 0.0);
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < dim; ++d)
          right[static_cast<size_t>(d)] += at(t, d) * left[static_cast<size_t>(t)];
      }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t d = 0; d < dim; ++d) {
        const double part = left[static_cast<size_t>(t)] * right[static_cast<size_t>(d)];
        rounded[t * dim + d] += static_cast<float>(part);
        at(t, d) -= part;
      }
    }
  }
}

template <class Round>
void gear_chunks(Rows& rows, const Round& round) {
  for (int64_t t = 0; t + kGearChunk <= rows.tokens; t += kGearChunk) {
    const std::vector<float> x(rows.row(t), rows.row(t + kGearChunk));
    round(t);
    add_low_rank(x.data(), rows.row(t), kGearChunk, rows.dim);
  }
}

void gear_keys(Rows& rows, int bits) {
  gear_chunks(rows, [&](int64_t t) {
    for (int64_t d = 0; d < rows.dim; ++d) {
      const Numbers n = rows.channel(t, kGearChunk, d);
      round_numbers(n, range_of(n, 1), bits, true);
    }
  });
}

void gear_values(Rows& rows, int bits) {
  gear_chunks(rows, [&](int64_t first) {
    for (int64_t t = first; t < first + kGearChunk; ++t) {
      const Numbers n{rows.row(t), rows.dim, 1};
      round_numbers(n, range_of(n, std::max<int64_t>(1, rows.dim / 100)), bits, true);
    }
  });
}

// ---- WKVQuant

// Channels are shifted and scaled to [-1, 1] by what the first tokens have, and a token's head is
// rounded as one group then.
void wkvquant_rows(Rows& rows, int bits) {
  const int64_t known = std::min(rows.tokens, kCalibration);
  std::vector<Range> ranges;
  for (int64_t d = 0; d < rows.dim; ++d) ranges.push_back(range_of(rows.channel(0, known, d)));
  for (int64_t t = 0; t < rows.tokens; ++t) {
    const Numbers n{rows.row(t), rows.dim, 1};
    const auto each = [&](auto&& change) {
      for (int64_t d = 0; d < n.count; ++d) {
        const Range& r = ranges[static_cast<size_t>(d)];
        const float half = 0.5f * (r.most - r.least);
        change(n[d], 0.5f * (r.least + r.most), half > 0.0f ? half : 1.0f);
      }
    };
    each([](float& v, float middle, float half) { v = (v - middle) / half; });
    round_numbers(n, range_of(n), bits);
    each([](float& v, float middle, float half) { v = v * half + middle; });
  }
}

// ---- KVQuant

// The range of a channel is that of the first tokens without the outermost percents; what lies
// outside is kept exactly.
void kvquant_keys(Rows& rows, int bits) {
  const int64_t known = std::min(rows.tokens, kCalibration);
  for (int64_t d = 0; d < rows.dim && rows.tokens > kFirstExact; ++d) {
    const Range r = range_of(rows.channel(0, known, d), known / 100);
    round_numbers(rows.channel(kFirstExact, rows.tokens - kFirstExact, d), r, bits, true);
  }
}

void kvquant_values(Rows& rows, int bits) {
  for (int64_t t = kFirstExact; t < rows.tokens; ++t) {
    const Numbers n{rows.row(t), rows.dim, 1};
    round_numbers(n, range_of(n, std::max<int64_t>(1, rows.dim / 100)), bits, true);
  }
}

// ---- the methods

// A step and a minimum of 16 bits for `group` numbers.
double grouped_bytes(int bits, double group) {
  return (bits + 32.0 / group) / 8.0;
}
// A number of 16 bits and its place, in one byte.
constexpr double kOutlierBytes = 3.0;
double outlier_share(double count) {
  return 2.0 * std::max(1.0, std::floor(count / 100.0)) / count;
}
double low_rank_bytes(double dim) {
  const auto chunk = static_cast<double>(kGearChunk);
  return 2.0 * static_cast<double>(kGearRank) * (chunk + dim) / (chunk * dim);
}

int64_t up_to_whole(int64_t position, int64_t chunk) {
  return position / chunk * chunk;
}

constexpr Method kivi(const char* name, int bits) {
  return {name,
          bits,
          [](int64_t position) { return up_to_whole(position, kKiviExact); },
          [](int64_t position) { return std::max<int64_t>(0, position - kKiviExact); },
          kivi_keys,
          kivi_values,
          [](int b, double) { return grouped_bytes(b, static_cast<double>(kGroup)); },
          [](int b, double) { return grouped_bytes(b, static_cast<double>(kGroup)); }};
}

constexpr Method gear(const char* name, int bits) {
  constexpr auto kBefore = [](int64_t position) { return up_to_whole(position, kGearChunk); };
  return {name,
          bits,
          kBefore,
          kBefore,
          gear_keys,
          gear_values,
          [](int b, double dim) {
            const auto chunk = static_cast<double>(kGearChunk);
            return grouped_bytes(b, chunk) + low_rank_bytes(dim) +
                   kOutlierBytes * outlier_share(chunk);
          },
          [](int b, double dim) {
            return grouped_bytes(b, dim) + low_rank_bytes(dim) + kOutlierBytes * outlier_share(dim);
          }};
}

constexpr Method kMethods[] = {
    kivi("kivi2", 2),
    kivi("kivi4", 4),
    gear("gear2", 2),
    gear("gear4", 4),
    {"wkvquant4", 4, [](int64_t position) { return position; },
     [](int64_t position) { return position; }, wkvquant_rows, wkvquant_rows, grouped_bytes,
     grouped_bytes},
    {"kvquant4", 4, [](int64_t position) { return position + 1; },
     [](int64_t position) { return position + 1; }, kvquant_keys, kvquant_values,
     [](int b, double) { return b / 8.0 + 0.02 * kOutlierBytes; },
     [](int b, double dim) { return grouped_bytes(b, dim) + kOutlierBytes * outlier_share(dim); }}};
constexpr int kMethodCount = static_cast<int>(std::size(kMethods));

// ---- attention

// The keys and values of one head of a sequence, exact and coarse.
struct Head {
  Rows keys, values, coarse_keys, coarse_values;

  Head(const KvView& cache, const int32_t* table, int64_t tokens, int head, const Method& method) {
    const KvShape& s = cache.shape;
    keys = {{}, tokens, s.key_dim};
    values = {{}, tokens, s.value_dim};
    for (int64_t t = 0; t < tokens; ++t) {
      const float* const k = stored_row(cache, table, t, head, false);
      const float* const v = stored_row(cache, table, t, head, true);
      keys.x.insert(keys.x.end(), k, k + s.key_dim);
      values.x.insert(values.x.end(), v, v + s.value_dim);
    }
    coarse_keys = keys;
    coarse_values = values;
    method.coarsen_keys(coarse_keys, method.bits);
    method.coarsen_values(coarse_values, method.bits);
  }
};

void attend_one(const Method& method, const Head& head, const KvShape& s,
                const AttentionParams& params, const float* q, int64_t position, ops::KeyRange seen,
                const float* sink, float* out) {
  std::vector<double> weights;
  double most = sink != nullptr ? double{*sink} : -std::numeric_limits<double>::infinity();
  for (int64_t t = seen.first; t < seen.end; ++t) {
    const float* const k = (t < method.coarse_keys(position) ? head.coarse_keys : head.keys).row(t);
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
    const bool coarse = t < method.coarse_values(position);
    const float* const v = (coarse ? head.coarse_values : head.values).row(t);
    const double w = weights[static_cast<size_t>(t - seen.first)] / sum;
    for (size_t d = 0; d < mixed.size(); ++d) mixed[d] += w * double{v[d]};
  }
  for (size_t d = 0; d < mixed.size(); ++d) out[d] = static_cast<float>(mixed[d]);
}

template <int kMethod>
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
    const Head head(cache, table, batch.context_len[sequence], kv_head, kMethods[kMethod]);
    const int32_t end = batch.query_start[sequence + 1];
    for (int64_t t = batch.query_start[sequence]; t < end; ++t) {
      const auto position = static_cast<int32_t>(batch.context_len[sequence] - (end - t));
      ops::KeyRange seen{0, position + 1};
      if (params.window > 0) seen.first = std::max(0, position + 1 - params.window);
      if (!batch.ranges.empty()) seen = batch.ranges[static_cast<size_t>(t)];
      for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        attend_one(kMethods[kMethod], head, s, params, q.row(t) + h * s.key_dim, position, seen,
                   params.sinks != nullptr ? params.sinks + h : nullptr,
                   out.row(t) + h * s.value_dim);
      }
    }
  });
}

template <int kMethod>
const ops::KernelTable& table_of() {
  static constexpr ops::AttentionKernel kRows[] = {
      {kMethods[kMethod].name, ops::CpuIsa::kScalar,
       [](const KvShape& s, const AttentionParams&) {
         return s.type == ops::KvType::kF32 && !s.value_is_key_prefix;
       },
       store_plain, attend_all<kMethod>,
       [](const KvShape&, int, int64_t, int64_t, int) { return size_t{0}; }}};
  static const ops::KernelTable kTable = [] {
    ops::KernelTable table = ops::reference_kernels();
    table.attention = kRows;
    return table;
  }();
  return kTable;
}

template <int... kMethod>
const ops::KernelTable& table_at(int method, std::integer_sequence<int, kMethod...>) {
  const ops::KernelTable* const tables[] = {&table_of<kMethod>()...};
  return *tables[method];
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

std::vector<std::string_view> simulated_methods() {
  std::vector<std::string_view> names;
  for (const Method& method : kMethods) names.emplace_back(method.name);
  return names;
}

const ops::KernelTable& simulated_kernels(int method) {
  return table_at(method, std::make_integer_sequence<int, kMethodCount>());
}

double simulated_bytes_per_token(const ModelSpec& spec, int method, int64_t tokens) {
  constexpr double kExact = 2.0;  // bytes of a number
  const Method& m = kMethods[method];
  const auto all = static_cast<double>(tokens);
  const auto keys = static_cast<double>(std::min(tokens, m.coarse_keys(tokens)));
  const auto values = static_cast<double>(std::min(tokens, m.coarse_values(tokens)));
  double bytes = 0.0;
  for (const auto& [s, state_bytes] : kv_cache_spec(spec, ops::KvType::kF32).layers) {
    if (state_bytes > 0) continue;
    const double heads = s.kv_heads, key = m.key_bytes(m.bits, s.key_dim);
    const double value = m.value_bytes(m.bits, s.value_dim);
    bytes += heads * s.key_dim * (keys * key + (all - keys) * kExact) / all;
    bytes += heads * s.value_dim * (values * value + (all - values) * kExact) / all;
  }
  return bytes;
}

}  // namespace freshet::eval
