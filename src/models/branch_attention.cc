#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <numeric>

#include "base/log.h"
#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {
namespace {

using Order = std::vector<int64_t>;

Order range(int64_t first, int64_t count) {
  Order order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), first);
  return order;
}

// Rows of a head in the order (0, 2, 4 ... 1, 3, 5 ...), which turns llama.cpp's order for
// interleaved rotation back into halves.
Order halves(int heads, int head_dim) {
  Order order;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t part = 0; part < 2; ++part) {
      for (int64_t i = 0; i < head_dim / 2; ++i) order.push_back(h * head_dim + 2 * i + part);
    }
  }
  return order;
}

struct FusedOrders {
  Order q, k, v;
};

FusedOrders fused_orders(const AttentionSpec& a, FusedQkv layout) {
  const int64_t q = int64_t{a.heads} * a.head_dim;
  const int64_t k = int64_t{a.kv_heads} * a.head_dim;
  const int64_t v = int64_t{a.kv_heads} * a.value_dim;
  if (layout == FusedQkv::kStacked) return {range(0, q), range(q, k), range(q + k, v)};
  FusedOrders orders;
  int64_t next = 0;
  const auto take = [&](Order& part, int64_t count) {
    for (int64_t i = 0; i < count; ++i) part.push_back(next++);
  };
  for (int64_t group = 0; group < a.kv_heads; ++group) {
    take(orders.q, q / a.kv_heads);
    take(orders.k, a.head_dim);
    take(orders.v, a.value_dim);
  }
  return orders;
}

// Queries whose gates are behind them in the same matrix, head by head.
Status assemble_gated(WeightReader& reader, const AttentionSpec& a, int64_t hidden, int layer,
                      AttentionWeights& out) {
  const int64_t q = int64_t{a.heads} * a.head_dim, gates = int64_t{a.heads} * a.value_dim;
  Order queries, gate;
  for (int64_t h = 0; h < a.heads; ++h) {
    const int64_t first = h * (a.head_dim + a.value_dim);
    const Order own = range(first, a.head_dim), behind = range(first + a.head_dim, a.value_dim);
    queries.insert(queries.end(), own.begin(), own.end());
    gate.insert(gate.end(), behind.begin(), behind.end());
  }
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.q, Role::kQuery, layer, q + gates, hidden, a.qkv_bias, queries));
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.gate, Role::kQuery, layer, q + gates, hidden, a.qkv_bias, gate));
  FRESHET_RETURN_IF_ERROR(reader.linear(out.k, Role::kKey, layer, int64_t{a.kv_heads} * a.head_dim,
                                        hidden, a.qkv_bias));
  return reader.linear(out.v, Role::kValue, layer, int64_t{a.kv_heads} * a.value_dim, hidden,
                       a.qkv_bias);
}

Status assemble_qkv(WeightReader& reader, const AttentionSpec& a, int64_t hidden, int layer,
                    AttentionWeights& out) {
  const int64_t q = int64_t{a.heads} * a.head_dim;
  const int64_t k = int64_t{a.kv_heads} * a.head_dim;
  const int64_t v = int64_t{a.kv_heads} * a.value_dim;
  if (a.output_gate) return assemble_gated(reader, a, hidden, layer, out);
  const bool separate = reader.find(Role::kQuery, ".weight", layer) != nullptr ||
                        reader.find(Role::kQkv, ".weight", layer) == nullptr;
  if (separate) {
    Order q_order, k_order;
    if (reader.is_gguf() && reader.architecture().gguf_interleaves) {
      q_order = halves(a.heads, a.head_dim);
      k_order = halves(a.kv_heads, a.head_dim);
    }
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.q, Role::kQuery, layer, q, hidden, a.qkv_bias, q_order));
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.k, Role::kKey, layer, k, hidden, a.qkv_bias && a.key_bias, k_order));
    return reader.linear(out.v, Role::kValue, layer, v, hidden, a.qkv_bias);
  }
  const FusedQkv layout = reader.is_gguf() ? FusedQkv::kStacked : reader.architecture().fused_qkv;
  const FusedOrders orders = fused_orders(a, layout);
  const int64_t rows = q + k + v;
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.q, Role::kQkv, layer, rows, hidden, a.qkv_bias, orders.q));
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.k, Role::kQkv, layer, rows, hidden, a.qkv_bias, orders.k));
  return reader.linear(out.v, Role::kQkv, layer, rows, hidden, a.qkv_bias, orders.v);
}

// One weight for each head: a tensor [heads, head_dim], or one tensor for each head.
Status assemble_head_norms(WeightReader& reader, Role role, int layer, int heads, int head_dim,
                           float factor, NormWeights& out) {
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* first,
                           reader.require(role, ".weight", layer, 0));
  const int64_t all = int64_t{heads} * head_dim;
  std::vector<float> values;
  if (heads == 1 || first->elements() != head_dim) {
    FRESHET_ASSIGN_OR_RETURN(values, reader.values(*first, all));
  }
  for (int h = 0; std::ssize(values) < all; ++h) {
    FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                             reader.require(role, ".weight", layer, h));
    FRESHET_ASSIGN_OR_RETURN(const std::vector<float> head, reader.values(*tensor, head_dim));
    values.insert(values.end(), head.begin(), head.end());
  }
  for (float& v : values) v *= factor;
  return reader.store(out.weight, values);
}

// The norm of queries or keys, times `factor`.
Status assemble_qk_norm(WeightReader& reader, const AttentionSpec& a, Role role, int layer,
                        int heads, float factor, NormWeights& out) {
  if (a.qk_norm == QkNorm::kNone) return {};
  if (a.qk_norm == QkNorm::kHeadDistinct)
    return assemble_head_norms(reader, role, layer, heads, a.head_dim, factor, out);
  const int64_t size =
      a.qk_norm == QkNorm::kHead ? int64_t{a.head_dim} : int64_t{heads} * a.head_dim;
  if (!a.qk_norm_spec.weight && factor != 1.0f) {
    const std::vector<float> factors(static_cast<size_t>(size), factor);
    FRESHET_RETURN_IF_ERROR(reader.store(out.weight, factors));
  }
  return reader.norm(out, role, a.qk_norm_spec, layer, size, factor);
}

// The factor of a layer's keys or values in an FP8 cache, as compressed-tensors
// (`self_attn.k_scale`) and ModelOpt (`self_attn.k_proj.k_scale`) store it; 1 if there is none.
Result<float> kv_scale(const WeightReader& reader, Role role, int layer, const std::string& name) {
  const loader::TensorSource* t = find_kv_scale(reader, role, layer, name);
  if (t == nullptr) return 1.0f;
  if (t->elements() != 1) {
    log_warning("tensor '{}' is not used: an FP8 cache has one factor for a layer, not {}", t->name,
                t->elements());
    return 1.0f;
  }
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values, reader.values(*t, 1));
  if (!(values[0] > 0.0f) || !std::isfinite(1.0f / values[0]) || !std::isfinite(values[0]))
    return invalid_argument("tensor '{}' is {}: a factor of the cache is a positive number",
                            t->name, values[0]);
  return values[0];
}

Status assemble_kv_scales(WeightReader& reader, const AttentionSpec& a, int64_t hidden, int layer,
                          AttentionWeights& out) {
  const bool fused = reader.find(Role::kKey, ".weight", layer) == nullptr;
  KvScales& s = out.kv_scales;
  FRESHET_ASSIGN_OR_RETURN(s.k,
                           kv_scale(reader, fused ? Role::kQkv : Role::kKey, layer, ".k_scale"));
  FRESHET_ASSIGN_OR_RETURN(s.v,
                           kv_scale(reader, fused ? Role::kQkv : Role::kValue, layer, ".v_scale"));
  if (s.k != 1.0f) {
    FRESHET_RETURN_IF_ERROR(
        assemble_qk_norm(reader, a, Role::kKeyNorm, layer, a.kv_heads, 1.0f / s.k, s.k_norm));
  }
  if (s.v == 1.0f || !a.out_bias) return {};
  return reader.vector(s.out_bias, Role::kOutput, ".bias", layer, hidden, 0, 1.0f / s.v);
}

// Factors of the channels of keys (`self_attn.k_channel_scale`, [kv_heads * head_dim]), as
// `freshet calibrate --kv-scales` measures them.
Status assemble_key_channels(WeightReader& reader, const AttentionSpec& a, int layer,
                             KeyChannels& out) {
  const Role role = reader.find(Role::kKey, ".weight", layer) == nullptr ? Role::kQkv : Role::kKey;
  const loader::TensorSource* t = find_kv_scale(reader, role, layer, ".k_channel_scale");
  if (t == nullptr) return {};
  if (reader.ops().device() != nullptr) {
    static std::once_flag said;
    std::call_once(said, [] { log_info("factors of the channels of keys are not used on a GPU"); });
    return {};
  }
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> factors,
                           reader.values(*t, int64_t{a.kv_heads} * a.head_dim));
  std::vector<float> keys, queries;
  for (const float f : factors) {
    if (!(f > 0.0f) || !std::isfinite(f) || !std::isfinite(1.0f / f))
      return invalid_argument("tensor '{}' has a {}: a factor is a positive number", t->name, f);
    keys.push_back(1.0f / f);
  }
  for (int h = 0; h < a.heads; ++h) {
    const auto first = factors.begin() + int64_t{h / (a.heads / a.kv_heads)} * a.head_dim;
    queries.insert(queries.end(), first, first + a.head_dim);
  }
  FRESHET_RETURN_IF_ERROR(reader.store(out.keys, keys));
  return reader.store(out.queries, queries);
}

// The bucket of a distance (key minus query), as transformers' T5 computes it: in F32.
int64_t bucket_of(const AttentionSpec& a, int64_t distance) {
  int64_t buckets = a.bias_buckets, first = 0;
  if (a.two_way) {
    buckets /= 2;
    if (distance > 0) first = buckets;
    distance = std::abs(distance);
  } else {
    distance = -std::min<int64_t>(distance, 0);
  }
  const int64_t exact = buckets / 2;
  if (distance < exact) return first + distance;
  const float steps = static_cast<float>(std::log(double{1} * a.bias_distance / exact));
  const float log = std::log(static_cast<float>(distance) / static_cast<float>(exact)) / steps;
  const auto step = static_cast<int64_t>(log * static_cast<float>(buckets - exact));
  return first + std::min(exact + step, buckets - 1);
}

// The table [buckets, heads] of the first layer, which all share, by head and distance.
Status assemble_distance_bias(WeightReader& reader, const AttentionSpec& a, Vector& out) {
  if (a.bias_buckets == 0) return {};
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                           reader.require(Role::kDistanceBias, ".weight", 0));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> table,
                           reader.values(*tensor, int64_t{a.bias_buckets} * a.heads));
  std::vector<float> values;
  for (int64_t h = 0; h < a.heads; ++h) {
    for (int64_t d = -a.bias_distance; d <= a.bias_distance; ++d)
      values.push_back(table[static_cast<size_t>(bucket_of(a, d) * a.heads + h)]);
  }
  return reader.store(out, values);
}

Status assemble_adapters(WeightReader& reader, const AttentionSpec& a, int64_t input, int layer,
                         AttentionWeights& out) {
  const int64_t q = int64_t{a.heads} * a.head_dim, k = int64_t{a.kv_heads} * a.head_dim,
                v = int64_t{a.kv_heads} * a.value_dim;
  const struct {
    AdapterWeights& to;
    Role down, up;
    int64_t rows;
  } parts[] = {{out.q_adapter, Role::kQueryAdapterDown, Role::kQueryAdapterUp, q},
               {out.k_adapter, Role::kKeyAdapterDown, Role::kKeyAdapterUp, k},
               {out.v_adapter, Role::kValueAdapterDown, Role::kValueAdapterUp, v}};
  for (const auto& part : parts) {
    FRESHET_RETURN_IF_ERROR(reader.linear(part.to.down, part.down, layer, a.adapter_rank, input,
                                          false, {}, reader.shared_use()));
    FRESHET_RETURN_IF_ERROR(reader.linear(part.to.up, part.up, layer, part.rows, a.adapter_rank,
                                          false, {}, reader.shared_use()));
  }
  return {};
}

Status assemble(WeightReader& reader, const AttentionSpec& a, int64_t hidden, int layer,
                AttentionWeights& out) {
  const int64_t input = a.input_size > 0 ? a.input_size : hidden;
  FRESHET_RETURN_IF_ERROR(assemble_qkv(reader, a, input, layer, out));
  if (a.adapter_rank > 0) FRESHET_RETURN_IF_ERROR(assemble_adapters(reader, a, input, layer, out));
  FRESHET_RETURN_IF_ERROR(assemble_distance_bias(reader, a, out.distance_bias));
  FRESHET_RETURN_IF_ERROR(
      assemble_qk_norm(reader, a, Role::kQueryNorm, layer, a.heads, 1.0f, out.q_norm));
  FRESHET_RETURN_IF_ERROR(
      assemble_qk_norm(reader, a, Role::kKeyNorm, layer, a.kv_heads, 1.0f, out.k_norm));
  FRESHET_RETURN_IF_ERROR(assemble_kv_scales(reader, a, hidden, layer, out));
  FRESHET_RETURN_IF_ERROR(assemble_key_channels(reader, a, layer, out.key_channels));
  return assemble_attention_out(reader, a, hidden, layer, out);
}

Status make_adapter(DummyMaker& maker, int64_t rows, int64_t rank, int64_t input,
                    AdapterWeights& out) {
  FRESHET_RETURN_IF_ERROR(maker.linear(out.down, "attention.adapter_down", Role::kQueryAdapterDown,
                                       rank, input, false));
  return maker.linear(out.up, "attention.adapter_up", Role::kQueryAdapterUp, rows, rank, false);
}

Status make(DummyMaker& maker, const AttentionSpec& a, int64_t hidden, AttentionWeights& out) {
  const int64_t q = int64_t{a.heads} * a.head_dim;
  const int64_t k = int64_t{a.kv_heads} * a.head_dim;
  const int64_t input = a.input_size > 0 ? a.input_size : hidden;
  FRESHET_RETURN_IF_ERROR(maker.linear(out.q, "attention.q", Role::kQuery, q, input, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.k, "attention.k", Role::kKey, k, input, a.qkv_bias && a.key_bias));
  const int64_t v = int64_t{a.kv_heads} * a.value_dim;
  FRESHET_RETURN_IF_ERROR(maker.linear(out.v, "attention.v", Role::kValue, v, input, a.qkv_bias));
  if (a.adapter_rank > 0) {
    FRESHET_RETURN_IF_ERROR(make_adapter(maker, q, a.adapter_rank, input, out.q_adapter));
    FRESHET_RETURN_IF_ERROR(make_adapter(maker, k, a.adapter_rank, input, out.k_adapter));
    FRESHET_RETURN_IF_ERROR(make_adapter(maker, v, a.adapter_rank, input, out.v_adapter));
  }
  if (a.output_gate) {
    FRESHET_RETURN_IF_ERROR(maker.linear(out.gate, "attention.gate", Role::kQuery,
                                         int64_t{a.heads} * a.value_dim, input, a.qkv_bias));
  }
  FRESHET_RETURN_IF_ERROR(maker.linear(out.out, "attention.out", Role::kOutput, hidden,
                                       int64_t{a.heads} * a.value_dim, a.out_bias));
  if (a.qk_norm != QkNorm::kNone) {
    const bool one = a.qk_norm == QkNorm::kHead;
    FRESHET_RETURN_IF_ERROR(maker.norm(out.q_norm, a.qk_norm_spec, one ? a.head_dim : q));
    FRESHET_RETURN_IF_ERROR(maker.norm(out.k_norm, a.qk_norm_spec, one ? a.head_dim : k));
  }
  if (a.bias_buckets > 0) {
    FRESHET_RETURN_IF_ERROR(
        maker.vector(out.distance_bias, int64_t{a.heads} * (2 * a.bias_distance + 1), 0.0f));
  }
  return a.sinks ? maker.vector(out.sinks, a.heads, 0.0f) : Status();
}

}  // namespace

constinit const BranchLoading kAttentionLoading =
    branch_loading<AttentionSpec, AttentionWeights, assemble, make>(kAttentionNorms);

}  // namespace freshet::models
