// Attention of a decoder's tokens to an encoder's output.
//
// Keys and values of the output are written once for each sequence (write_cross), before its first
// tokens run. Every token then attends to all of them.
#include "layers/branch_kinds.h"

namespace freshet {
namespace {

struct CrossAttentionKind {
  using Spec = CrossAttentionSpec;
  using Weights = CrossAttentionWeights;
  static constexpr std::string_view kName = "cross_attention";

  static int64_t width(const Spec& a) { return int64_t{a.heads} * a.head_dim; }

  static void run(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                  const ops::Input& in, const Into& into) {
    const Scratch scratch(step.arena);
    const Matrix q = step.arena.matrix(in.x.rows, width(spec));
    const Matrix mixed = step.arena.matrix(in.x.rows, width(spec));
    const ops::Product queries[] = {product_of(w.q, q)};
    step.ops.project(in, queries);
    ops::AttentionParams params;
    params.heads = spec.heads;
    params.scale = spec.scale;
    step.ops.attention(mixed, q, step.cache.layer(cache_layer), batch_of(step, cache_layer),
                       params);
    const ops::Product out[] = {product_of(w.out, into)};
    step.ops.matmul(mixed, out);
  }
  static void write_cross(Step& step, const Spec& spec, const Weights& w, int cache_layer,
                          const Matrix& states, const ops::AttentionBatch& batch) {
    const Scratch scratch(step.arena);
    const Matrix k = step.arena.matrix(states.rows, width(spec));
    const Matrix v = step.arena.matrix(states.rows, width(spec));
    const ops::Product products[] = {product_of(w.k, k), product_of(w.v, v)};
    step.ops.matmul(states, products);
    step.ops.store_kv(step.cache.layer(cache_layer), k, v, batch);
  }
  static BranchCache cache(const Spec& spec, ops::KvType type) {
    return {.shape = {type, spec.heads, spec.head_dim, spec.head_dim, false},
            .cross = spec.encoder_length};
  }
  static size_t bytes(const Spec& spec, int64_t, int64_t tokens) {
    return 2 * matrix_bytes(tokens, width(spec));
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
    if (model.encoder == nullptr || model.encoder->hidden_size != a.encoder_size ||
        !sane(a.encoder_length)) {
      return invalid_argument("layer {}: cross-attention without an encoder of {} features", layer,
                              a.encoder_size);
    }
    return {};
  }
  static Status supported(const Spec& spec, const ops::Device& device) {
    return device.supports(cache(spec, ops::KvType::kF16).shape);
  }
  static std::string describe(const Spec& a) {
    return fmt::format("{} heads of {} over the encoder's output", a.heads, a.head_dim);
  }
  static void fields(const Spec& a, json::Object& to) {
    to["cross_heads"] = a.heads;
    to["cross_head_dim"] = a.head_dim;
  }
};

}  // namespace

constinit const BranchKind kCrossAttentionKind = branch_kind<CrossAttentionKind>();

}  // namespace freshet
