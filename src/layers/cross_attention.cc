// Attention of a decoder's tokens to an encoder's output.
//
// Keys and values of the encoder's output are written once per sequence (write_cross), before its
// first tokens run. Every token then attends to all of them.
#include <algorithm>
#include <cmath>

#include "layers/branch_kinds.h"

namespace freshet {
namespace {

// softmax(scale * q k) over all keys [positions, dim].
void weigh_keys(const float* q, const std::vector<float>& keys, int dim, float scale, float* out) {
  const int64_t positions = std::ssize(keys) / dim;
  float most = -INFINITY;
  for (int64_t p = 0; p < positions; ++p) {
    float sum = 0.0f;
    for (int i = 0; i < dim; ++i) sum += q[i] * keys[static_cast<size_t>(p * dim + i)];
    out[p] = scale * sum;
    most = std::max(most, out[p]);
  }
  double total = 0.0;
  for (int64_t p = 0; p < positions; ++p) total += double{out[p] = std::exp(out[p] - most)};
  for (int64_t p = 0; p < positions; ++p) out[p] = static_cast<float>(out[p] / total);
}

// Gives the weights of a layer to those who read them (CrossWeights). On the host only.
void give_weights(const Step& step, const CrossAttentionSpec& spec, int cache_layer,
                  const Matrix& q) {
  const int group = step.cache.group_of(cache_layer);
  const std::vector<int>& layers = step.cache.spec().groups[static_cast<size_t>(group)].layers;
  const auto layer = static_cast<int>(std::ranges::find(layers, cache_layer) - layers.begin());
  const BlockTables& tables = step.batch.tables[static_cast<size_t>(group)];
  const int kv_heads = spec.kv_heads > 0 ? spec.kv_heads : spec.heads;
  for (const auto& [sequence, out] : step.batch.cross_readers) {
    const auto s = static_cast<size_t>(sequence);
    const int32_t positions = step.batch.slots(group)[s];
    const auto blocks =
        std::span(tables.ids)
            .subspan(s * static_cast<size_t>(tables.stride), static_cast<size_t>(tables.stride));
    out->positions = positions;
    out->weights.resize(out->heads.size());
    std::vector<float> keys(static_cast<size_t>(positions) * static_cast<size_t>(spec.head_dim));
    for (size_t i = 0; i < out->heads.size(); ++i) {
      const auto [of_layer, head] = out->heads[i];
      if (of_layer != layer || head >= spec.heads) continue;
      step.ops.read_keys(step.cache.layer(cache_layer), blocks, head * kv_heads / spec.heads,
                         positions, keys.data());
      std::vector<float>& to = out->weights[i];
      for (int32_t t = step.batch.query_start[s]; t < step.batch.query_start[s + 1]; ++t) {
        const auto row = static_cast<size_t>(step.batch.positions[static_cast<size_t>(t)]);
        const size_t end = (row + 1) * static_cast<size_t>(positions);
        to.resize(std::max(to.size(), end));
        weigh_keys(q.row(t) + int64_t{head} * spec.head_dim, keys, spec.head_dim, spec.scale,
                   to.data() + end - static_cast<size_t>(positions));
      }
    }
  }
}

struct CrossAttentionKind {
  using Spec = CrossAttentionSpec;
  using Weights = CrossAttentionWeights;
  static constexpr std::string_view kName = "cross_attention";

  static int64_t width(const Spec& a) { return int64_t{a.heads} * a.head_dim; }
  static int kv_heads(const Spec& a) { return a.kv_heads > 0 ? a.kv_heads : a.heads; }

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    if (!spec.pictures) return attend(step, spec, w, cache_layer, in, into);
    // The tokens of sequences with pictures.
    const std::vector<int32_t>& tokens = view_of(step, cache_layer).tokens;
    FRESHET_CHECK(into.add, "cross-attention to pictures adds to the stream");
    if (tokens.empty()) return;
    if (std::ssize(tokens) == in.x.rows) return attend(step, spec, w, cache_layer, in, into);
    const Scratch scratch(step.arena);
    const auto rows = std::ssize(tokens);
    const Matrix x = step.arena.matrix(rows, in.x.cols);
    step.ops.gather_rows(x, in.x, tokens);
    ops::Input some{x, in.norm};
    if (in.norm != nullptr) some.normed = step.arena.matrix(rows, in.x.cols);
    const Matrix out = step.arena.matrix(rows, into.out.cols);
    attend(step, spec, w, cache_layer, some, {out, false, into.scale});
    step.ops.put_rows(into.out, tokens, out, true);
  }
  static void attend(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                     const ops::Input& in, const Into& into) {
    const Scratch scratch(step.arena);
    const Matrix q = step.arena.matrix(in.x.rows, width(spec));
    const Matrix mixed = step.arena.matrix(in.x.rows, width(spec));
    const ops::Product queries[] = {product_of(w.q, q)};
    step.ops.project(in, queries);
    if (spec.qk_norm) {
      step.ops.norm_heads(q, spec.heads, spec.head_dim, norm_of(*spec.qk_norm, w.q_norm), false);
    }
    if (!step.batch.cross_readers.empty() && !spec.pictures)
      give_weights(step, spec, cache_layer, q);
    ops::AttentionParams params;
    params.heads = spec.heads;
    params.scale = spec.scale;
    step.ops.attention(mixed, q, step.cache.layer(cache_layer), batch_of(step, cache_layer),
                       params);
    ops::Product out[] = {product_of(w.out, into)};
    out[0].scale *= w.scale;
    step.ops.matmul(mixed, out);
  }
  static void write_cross(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                          const Matrix& states, const ops::AttentionBatch& batch) {
    const Scratch scratch(step.arena);
    const int64_t stored = int64_t{kv_heads(spec)} * spec.head_dim;
    const Matrix k = step.arena.matrix(states.rows, stored);
    const Matrix v = step.arena.matrix(states.rows, stored);
    const ops::Product products[] = {product_of(w.k, k), product_of(w.v, v)};
    step.ops.matmul(states, products);
    if (spec.qk_norm) {
      step.ops.norm_heads(k, kv_heads(spec), spec.head_dim, norm_of(*spec.qk_norm, w.k_norm),
                          false);
    }
    step.ops.store_kv(step.cache.layer(cache_layer), k, v, batch);
  }
  static BranchCache cache(const Spec& spec, ops::KvType type) {
    return {.shape = {type, kv_heads(spec), spec.head_dim, spec.head_dim, false},
            .cross = spec.encoder_length,
            .spans = spec.pictures ? SpanUse::kOnly : SpanUse::kNone};
  }
  static size_t bytes(const Spec& spec, int64_t hidden, int64_t tokens) {
    const size_t some = spec.pictures ? 3 * matrix_bytes(tokens, hidden) : 0;
    return 2 * matrix_bytes(tokens, width(spec)) + some;
  }
  static void limits(const Spec& spec, int64_t, ops::Ops::ShapeLimits& l) {
    raise_attention_limits(spec.heads, spec.head_dim, spec.head_dim, spec.head_dim, l);
    l.max_cols = std::max<int64_t>(l.max_cols, spec.encoder_size);
    l.max_context = std::max<int64_t>(l.max_context, spec.encoder_length);
  }
  static const ops::Weight& input_weight(const Spec&, const Weights& w) { return w.q.weight; }
  static Status validate(const Spec& a, const ModelSpec& model, size_t layer) {
    if (!sane(a.heads) || !sane(a.head_dim) || a.heads > kMaxSize / a.head_dim) {
      return invalid_argument("layer {}: {} heads of {} features attend to the encoder", layer,
                              a.heads, a.head_dim);
    }
    if (a.kv_heads < 0 || a.heads % kv_heads(a) != 0) {
      return invalid_argument("layer {}: {} heads cannot share {} key-value heads", layer, a.heads,
                              a.kv_heads);
    }
    if (a.pictures) return sane(a.encoder_length) ? Status() : no_encoder(a, layer);
    if (model.encoder == nullptr || model.encoder->hidden_size != a.encoder_size ||
        !sane(a.encoder_length)) {
      return no_encoder(a, layer);
    }
    return {};
  }
  static Status no_encoder(const Spec& a, size_t layer) {
    return invalid_argument("layer {}: cross-attention without an encoder of {} features", layer,
                            a.encoder_size);
  }
  static Status supported(const Spec& a, const ops::Device& device) {
    if (a.pictures)
      return unsupported("{} does not run cross-attention to pictures: use --device cpu",
                         device.name());
    return device.supports(cache(a, ops::KvType::kF16).shape);
  }
  static std::string describe(const Spec& a) {
    return fmt::format("{} heads of {} over {}", a.heads, a.head_dim,
                       a.pictures ? "pictures" : "the encoder's output");
  }
  static void fields(const Spec& a, json::Object& to) {
    to["cross_heads"] = a.heads;
    to["cross_head_dim"] = a.head_dim;
  }
};

}  // namespace

constinit const BranchKind kCrossAttentionKind = branch_kind<CrossAttentionKind>();

}  // namespace freshet
