#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "layers/branch_kinds.h"

namespace freshet {

ops::Norm norm_of(const NormSpec& spec, const NormWeights& weights) {
  return {spec.kind, weights.weight.data(), weights.bias.data(), spec.eps};
}

ops::Product product_of(const Linear& linear, const Matrix& out) {
  ops::Product product;
  product.weight = &linear.weight;
  product.out = out;
  product.bias = linear.bias.data();
  return product;
}

ops::Product product_of(const Linear& linear, const Into& into) {
  ops::Product product = product_of(linear, into.out);
  product.scale = into.scale;
  product.add = into.add;
  product.prefetch_next = into.prefetch_next;
  return product;
}

ops::AttentionBatch stored_batch_of(const Step& step, int cache_layer) {
  return step.batch.attention(step.cache.group_of(cache_layer));
}

const KeyView& view_of(const Step& step, int cache_layer) {
  return step.key_views[static_cast<size_t>(step.cache.group_of(cache_layer))];
}

ops::AttentionBatch batch_of(const Step& step, int cache_layer) {
  return view_of(step, cache_layer).batch(stored_batch_of(step, cache_layer));
}

std::span<const ops::ScoredQueries> scored_of(const Step& step, int cache_layer,
                                              std::vector<ops::ScoredQueries>& room) {
  room.clear();
  for (const ScoredTokens& tokens : step.batch.scored) {
    kv_cache::KeyScores::Layer& layer = tokens.scores->layers[static_cast<size_t>(cache_layer)];
    if (layer.sums.empty()) continue;
    room.push_back({tokens.sequence, tokens.queries, layer.sums.data(), layer.stride,
                    tokens.scores->queries > 1});
  }
  return room;
}

std::span<const ops::BlockSelection> selections_of(const Step& step, int cache_layer,
                                                   std::vector<ops::BlockSelection>& room) {
  room.clear();
  if (step.batch.sparse.empty()) return room;
  const ops::KvShape& shape = step.cache.layer(cache_layer).shape;
  const bool pattern = step.cache.spec().may_select(step.cache.group_of(cache_layer));
  bool any = false;
  for (const auto& [rule, dense_layers] : step.batch.sparse) {
    const bool kept = rule.window > 0       ? pattern
                      : rule.components > 0 ? shape.summed
                                            : shape.bounded;
    const bool selects = rule.selects() && kept && cache_layer >= dense_layers;
    room.push_back(selects ? rule : ops::BlockSelection{});
    any = any || selects;
  }
  if (!any) room.clear();
  return room;
}

ops::StateView states_of(const Step& step, int cache_layer) {
  return step.cache.states(cache_layer);
}

ops::StateBatch state_batch_of(const Step& step, int cache_layer) {
  return step.batch.states(step.cache.group_of(cache_layer));
}

const RopeSpec* rope_of(const Step& step, int rope) {
  return rope < 0 ? nullptr : &step.spec.ropes[static_cast<size_t>(rope)];
}

namespace {

// The part of queries or of keys. `norm` must outlive it.
ops::Heads::Part part_of(const Step& step, const AttentionSpec& spec, const Matrix& x, int heads,
                         const ops::Norm& norm) {
  ops::Heads::Part part;
  part.x = x;
  part.heads = heads;
  part.head_dim = spec.head_dim;
  if (spec.qk_norm != QkNorm::kNone) part.norm = &norm;
  part.norm_per_head = spec.qk_norm == QkNorm::kHeadDistinct;
  part.norm_all_heads = spec.qk_norm == QkNorm::kFull;
  part.norm_after = spec.norm_after_rope;
  if (const RopeSpec* rope = rope_of(step, spec.rope)) {
    part.rotary_dim = rope->rotary_dim;
    part.interleaved = rope->interleaved;
  }
  return part;
}

// Projections with adapters: out = scale * (W x + up(down(x))).
void run_adapted(Step& step, const AttentionSpec& spec, const AttentionWeights& w,
                 const ops::QkvAttention& all) {
  if (all.in.x.rows == 0) return;
  const struct {
    const ops::Product& product;
    const AdapterWeights& adapter;
  } parts[] = {{all.q, w.q_adapter}, {all.k, w.k_adapter}, {all.v, w.v_adapter}};
  std::array<ops::Product, 2 * std::size(parts)> products;
  std::array<Matrix, std::size(parts)> narrow;
  size_t count = 0;
  for (size_t i = 0; i < std::size(parts); ++i) {
    if (parts[i].product.weight == nullptr) continue;
    narrow[i] = step.arena.matrix(all.in.x.rows, spec.adapter_rank);
    products[count++] = parts[i].product;
    products[count++] = product_of(parts[i].adapter.down, narrow[i]);
  }
  step.ops.project(all.in, std::span(products).first(count));
  for (size_t i = 0; i < std::size(parts); ++i) {
    if (parts[i].product.weight == nullptr) continue;
    ops::Product up = product_of(parts[i].adapter.up, parts[i].product.out);
    up.add = true;
    up.scale = parts[i].product.scale;
    step.ops.matmul(narrow[i], {&up, 1});
  }
  if (all.attend.heads.q.x.data == nullptr) return step.ops.heads(all.attend.heads);
  step.ops.attend(all.attend);
}

// Stores keys and values, or attends, or both.
void run(Step& step, const AttentionSpec& spec, const AttentionWeights& w, int cache_layer,
         const ops::Input& in, bool attends, bool stores, const Into& into) {
  const Scratch scratch(step.arena);
  const int64_t tokens = in.x.rows;
  const ops::Norm q_norm = norm_of(spec.qk_norm_spec, w.q_norm);
  const bool scaled = step.cache.layer(cache_layer).shape.type == ops::KvType::kFP8;
  const float k_scale = scaled ? w.kv_scales.k : 1.0f;
  const float v_scale = scaled ? w.kv_scales.v : 1.0f;
  const ops::Norm k_norm =
      norm_of(spec.qk_norm_spec, k_scale != 1.0f ? w.kv_scales.k_norm : w.k_norm);
  const bool integers = ops::info(step.cache.layer(cache_layer).shape.type).key.group > 0;
  ops::QkvAttention all;
  all.in = in;
  ops::Heads& heads = all.attend.heads;
  heads.cache = step.cache.layer(cache_layer);
  heads.batch = attends ? batch_of(step, cache_layer) : stored_batch_of(step, cache_layer);
  if (spec.rope >= 0) heads.cos_sin = step.cos_sin[static_cast<size_t>(spec.rope)];
  if (attends) {
    const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim);
    all.q = product_of(w.q, q);
    heads.q = part_of(step, spec, q, spec.heads, q_norm);
    if (integers) heads.q.factors = w.key_channels.queries.data();
  }
  if (stores) {
    const Matrix k = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.head_dim);
    heads.v = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.value_dim);
    all.k = product_of(w.k, k);
    all.v = product_of(w.v, heads.v);
    heads.k = part_of(step, spec, k, spec.kv_heads, k_norm);
    if (!spec.rotates_keys) heads.k.rotary_dim = 0;
    if (integers) heads.k.factors = w.key_channels.keys.data();
    if (spec.qk_norm == QkNorm::kNone) all.k.scale = 1.0f / k_scale;
    all.v.scale = 1.0f / v_scale;
  }
  if (attends) {
    all.attend.out = step.arena.matrix(tokens, int64_t{spec.heads} * spec.value_dim);
    all.attend.params = {spec.heads, spec.scale, spec.softcap, spec.window, w.sinks.data()};
    all.attend.params.scale *= k_scale;
    if (spec.bias_buckets > 0) {
      all.attend.params.distance_bias = w.distance_bias.data();
      all.attend.params.bias_reach = spec.bias_distance;
    }
    if (!spec.slopes.empty()) all.attend.params.slopes = spec.slopes.data();
    all.attend.o = product_of(w.out, into);
    all.attend.o.scale *= v_scale;
    if (v_scale != 1.0f && w.out.bias.data() != nullptr)
      all.attend.o.bias = w.kv_scales.out_bias.data();
  }
  std::vector<ops::ScoredQueries> scored;
  std::vector<ops::BlockSelection> selections;
  if (attends) {
    all.attend.scored = scored_of(step, cache_layer, scored);
    all.attend.selections = selections_of(step, cache_layer, selections);
    all.attend.coarse = step.batch.coarse(step.cache.group_of(cache_layer));
  }
  if (spec.adapter_rank > 0) return run_adapted(step, spec, w, all);
  if (!attends || !spec.output_gate) return step.ops.qkv_attention(all);
  const Matrix gate = step.arena.matrix(tokens, all.attend.out.cols);
  const ops::Product gates[] = {product_of(w.gate, gate)};
  ops::EncodedForms forms;
  ops::Input shared = in;  // shared by the gate and the projections that follow
  if (shared.shared == nullptr) shared.shared = &forms;
  step.ops.project(shared, gates);
  all.in = {in.rows(), nullptr, {}, shared.shared};  // already normalised
  const ops::Product out[] = {std::exchange(all.attend.o, {})};
  step.ops.qkv_attention(all);
  step.ops.sigmoid_product(all.attend.out, gate);
  step.ops.matmul(all.attend.out, out);
}

}  // namespace

void gqa_store(Step& step, const AttentionSpec& spec, const AttentionWeights& w, int cache_layer,
               const ops::Input& in) {
  run(step, spec, w, cache_layer, in, false, true, {});
}

void gqa_attention(Step& step, const AttentionSpec& spec, const AttentionWeights& w,
                   int cache_layer, const ops::Input& in, const Into& into) {
  const bool stores = !step.stored;
  // The parts of a cut batch don't say where keys and values are stored.
  const bool apart = stores && view_of(step, cache_layer).cut();
  if (apart) run(step, spec, w, cache_layer, in, false, true, {});
  run(step, spec, w, cache_layer, in, true, stores && !apart, into);
}

size_t gqa_attention_bytes(const AttentionSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, int64_t{spec.heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.value_dim) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.value_dim) * (spec.output_gate ? 2 : 1) +
         (spec.adapter_rank > 0 ? 3 * matrix_bytes(tokens, spec.adapter_rank) : 0);
}

namespace {

struct GqaKind {
  using Spec = AttentionSpec;
  using Weights = AttentionWeights;
  static constexpr std::string_view kName = "gqa";

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    gqa_attention(step, spec, w, cache_layer, in, into);
  }
  static void store(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                    const ops::Input& in) {
    gqa_store(step, spec, w, cache_layer, in);
  }
  static Status supported(const Spec& spec, const ops::Device& device) {
    if (spec.slopes.empty()) return {};
    return unsupported("{} does not run ALiBi: use --device cpu", device.name());
  }
  static BranchCache cache(const Spec& spec, ops::KvType type) {
    return {.shape = {type, spec.kv_heads, spec.head_dim, spec.value_dim, false, spec.biased()},
            .window = spec.window,
            .chunk = spec.chunk,
            .two_way = spec.two_way,
            .spans = spec.spans};
  }
  static int64_t stored_outputs(const Spec& spec) {
    return int64_t{spec.kv_heads} * (spec.head_dim + spec.value_dim);
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return gqa_attention_bytes(spec, tokens);
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    l.max_cols = std::max({l.max_cols, int64_t{spec.input_size}, int64_t{spec.adapter_rank}});
    raise_attention_limits(spec.heads, spec.head_dim, spec.value_dim, spec.head_dim, l);
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.q.weight; }
  static Status validate(const Spec& a, const ModelSpec& model, size_t layer) {
    if (!sane(a.heads) || !sane(a.kv_heads) || a.heads % a.kv_heads != 0) {
      return invalid_argument("layer {}: {} attention heads cannot share {} key-value heads", layer,
                              a.heads, a.kv_heads);
    }
    if (!sane(a.head_dim) || !sane(a.value_dim) || a.heads > kMaxSize / a.head_dim) {
      return invalid_argument("layer {}: attention heads of {} and {} features", layer, a.head_dim,
                              a.value_dim);
    }
    if (a.bias_buckets < 0 || a.bias_buckets > kMaxSize || a.bias_distance < 0 ||
        a.bias_distance > kMaxSize || (a.bias_buckets > 0 && a.bias_distance < 2)) {
      return invalid_argument("layer {}: {} buckets for distances up to {}", layer, a.bias_buckets,
                              a.bias_distance);
    }
    if (!a.slopes.empty() &&
        (std::ssize(a.slopes) != a.heads || a.bias_buckets > 0 ||
         !std::ranges::all_of(a.slopes, [](float x) { return std::isfinite(x); }))) {
      return invalid_argument("layer {}: {} slopes of positions for {} heads", layer,
                              a.slopes.size(), a.heads);
    }
    if (a.adapter_rank < 0 || a.adapter_rank > kMaxSize || (a.adapter_rank > 0 && a.output_gate))
      return invalid_argument("layer {}: adapters of rank {}", layer, a.adapter_rank);
    if (a.window < 0) return invalid_argument("layer {}: sliding window of {}", layer, a.window);
    if (a.chunk < 0 || (a.chunk > 0 && (a.window > 0 || a.two_way))) {
      return invalid_argument("layer {}: attention in chunks of {} with a window or both ways",
                              layer, a.chunk);
    }
    return validate_rotation(model, a.rope, a.head_dim, layer);
  }
  static std::string describe(const Spec& a) {
    return fmt::format(
        "{} heads of {} over {} for keys and values{}{}{}", a.heads, a.head_dim, a.kv_heads,
        describe_attention_options(a.window, a.sinks, a.rotates_keys ? a.rope : -1) +
            (a.rotates_keys ? "" : ", queries scaled by position") +
            (a.chunk > 0 ? fmt::format(", chunks of {}", a.chunk) : "") +
            (a.slopes.empty() ? "" : ", ALiBi") + (a.two_way ? ", both directions" : "") +
            (a.spans == SpanUse::kAlso ? ", both directions in pictures" : ""),
        a.qk_norm != QkNorm::kNone ? ", norms on queries and keys" : "",
        a.output_gate        ? ", output gate"
        : a.adapter_rank > 0 ? fmt::format(", adapters of rank {}", a.adapter_rank)
                             : "");
  }
  static void fields(const Spec& a, json::Object& to) {
    to["attention"] = kName;
    to["heads"] = a.heads;
    to["kv_heads"] = a.kv_heads;
    to["head_dim"] = a.head_dim;
    to["window"] = a.window;
    if (a.chunk > 0) to["chunk"] = a.chunk;
    if (a.two_way) to["two_way"] = true;
  }
};

}  // namespace

constinit const BranchKind kAttentionKind = branch_kind<GqaKind>();

}  // namespace freshet
