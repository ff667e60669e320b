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
  return product;
}

const ops::Weight* reader_of(const ops::Ops& ops, int64_t rows,
                             std::initializer_list<const Linear*> products) {
  const ops::Weight* first = &(*products.begin())->weight;
  for (const Linear* l : products) {
    if (!ops.read_alike(l->weight.format, first->format, rows)) return nullptr;
  }
  return first;
}

ops::AttentionBatch batch_of(const Step& step, int cache_layer) {
  return step.batch.attention(step.cache.group_of(cache_layer));
}

void rotate(Step& step, int rope, const Matrix& x, int heads, int head_dim, int offset) {
  if (rope < 0) return;
  const auto index = static_cast<size_t>(rope);
  const RopeSpec& spec = step.spec.ropes[index];
  step.ops.rope(x, heads, head_dim, offset, spec.rotary_dim, spec.interleaved, step.cos_sin[index]);
}

namespace {

// Queries or keys.
void norm_and_rotate(Step& step, const AttentionSpec& spec, const NormWeights& w, const Matrix& x,
                     int heads) {
  const ops::Norm norm = norm_of(spec.qk_norm_spec, w);
  switch (spec.qk_norm) {
    case QkNorm::kNone:
      break;
    case QkNorm::kHead:
      step.ops.norm_heads(x, heads, spec.head_dim, norm, false);
      break;
    case QkNorm::kHeadDistinct:
      step.ops.norm_heads(x, heads, spec.head_dim, norm, true);
      break;
    case QkNorm::kFull:
      step.ops.norm(x, x, norm);
      break;
  }
  rotate(step, spec.rope, x, heads, spec.head_dim, 0);
}

}  // namespace

void gqa_store(Step& step, const AttentionSpec& spec, const AttentionWeights& w, int cache_layer,
               const Matrix& x) {
  const Scratch scratch(step.arena);
  const Matrix k = step.arena.matrix(x.rows, int64_t{spec.kv_heads} * spec.head_dim);
  const Matrix v = step.arena.matrix(x.rows, int64_t{spec.kv_heads} * spec.value_dim);
  const ops::Product products[] = {product_of(w.k, k), product_of(w.v, v)};
  step.ops.matmul(x, products);
  norm_and_rotate(step, spec, w.k_norm, k, spec.kv_heads);
  step.ops.store_kv(step.cache.layer(cache_layer), k, v, batch_of(step, cache_layer));
}

void gqa_attention(Step& step, const AttentionSpec& spec, const AttentionWeights& w,
                   int cache_layer, const Matrix& x, const Into& into) {
  const Scratch scratch(step.arena);
  const int64_t tokens = x.rows;
  const ops::KvView cache = step.cache.layer(cache_layer);
  const ops::AttentionBatch batch = batch_of(step, cache_layer);
  const Matrix q = step.arena.matrix(tokens, int64_t{spec.heads} * spec.head_dim);
  if (!step.stored) {
    const Matrix k = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.head_dim);
    const Matrix v = step.arena.matrix(tokens, int64_t{spec.kv_heads} * spec.value_dim);
    const ops::Product products[] = {product_of(w.q, q), product_of(w.k, k), product_of(w.v, v)};
    step.ops.matmul(x, products);
    norm_and_rotate(step, spec, w.q_norm, q, spec.heads);
    norm_and_rotate(step, spec, w.k_norm, k, spec.kv_heads);
    step.ops.store_kv(cache, k, v, batch);
  } else {
    const ops::Product products[] = {product_of(w.q, q)};
    step.ops.matmul(x, products);
    norm_and_rotate(step, spec, w.q_norm, q, spec.heads);
  }
  const Matrix mixed = step.arena.matrix(tokens, int64_t{spec.heads} * spec.value_dim);
  step.ops.attention(mixed, q, cache, batch,
                     {spec.heads, spec.scale, spec.softcap, spec.window, w.sinks.data(),
                      reader_of(step.ops, tokens, {&w.out})});
  const ops::Product out[] = {product_of(w.out, into)};
  step.ops.matmul(mixed, out);
}

size_t gqa_attention_bytes(const AttentionSpec& spec, int64_t tokens) {
  return matrix_bytes(tokens, int64_t{spec.heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.head_dim) +
         matrix_bytes(tokens, int64_t{spec.kv_heads} * spec.value_dim) +
         matrix_bytes(tokens, int64_t{spec.heads} * spec.value_dim);
}

namespace {

struct Kind {
  using Spec = AttentionSpec;
  using Weights = AttentionWeights;
  static constexpr std::string_view kName = "gqa";

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer, const Matrix& x,
                  const Into& into) {
    gqa_attention(step, spec, w, cache_layer, x, into);
  }
  static void store(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                    const Matrix& x) {
    gqa_store(step, spec, w, cache_layer, x);
  }
  static BranchCache cache(const Spec& spec, ops::KvType type) {
    return {{type, spec.kv_heads, spec.head_dim, spec.value_dim, false}, spec.window};
  }
  static int64_t stored_outputs(const Spec& spec) {
    return int64_t{spec.kv_heads} * (spec.head_dim + spec.value_dim);
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return gqa_attention_bytes(spec, tokens);
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    raise_attention_limits(spec.heads, spec.head_dim, spec.value_dim, spec.head_dim, l);
  }
  static const ops::Weight* reader(const ops::Ops& ops, int64_t rows, const Spec&, const Weights& w,
                                   Reads reads) {
    if (reads == Reads::kQueries) return reader_of(ops, rows, {&w.q});
    return reader_of(ops, rows, {reads == Reads::kAll ? &w.q : &w.k, &w.k, &w.v});
  }
  static Status validate(const Spec& a, const ModelSpec& model, size_t layer) {
    if (!sane(a.heads) || !sane(a.kv_heads) || a.heads % a.kv_heads != 0) {
      return invalid_argument("layer {}: {} attention heads cannot share {} key-value heads", layer,
                              a.heads, a.kv_heads);
    }
    if (!sane(a.head_dim) || !sane(a.value_dim) || a.heads > kMaxSize / a.head_dim) {
      return invalid_argument("layer {}: attention heads of {} and {} features", layer, a.head_dim,
                              a.value_dim);
    }
    if (a.window < 0) return invalid_argument("layer {}: sliding window of {}", layer, a.window);
    return validate_rotation(model, a.rope, a.head_dim, layer);
  }
  static std::string describe(const Spec& a) {
    return fmt::format("{} heads of {} over {} for keys and values{}{}", a.heads, a.head_dim,
                       a.kv_heads, describe_attention_options(a.window, a.sinks, a.rope),
                       a.qk_norm != QkNorm::kNone ? ", norms on queries and keys" : "");
  }
  static void fields(const Spec& a, json::Object& to) {
    to["attention"] = kName;
    to["heads"] = a.heads;
    to["kv_heads"] = a.kv_heads;
    to["head_dim"] = a.head_dim;
    to["window"] = a.window;
  }
};

}  // namespace

constinit const BranchKind kAttentionKind = branch_kind<Kind>();

}  // namespace freshet
