#include "models/dummy.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <tuple>
#include <vector>

#include "layers/decoder.h"
#include "quant/fp8.h"
#include "tensor/dtype.h"

namespace freshet::models {
namespace {

constexpr int64_t kPoolRows = 64;
constexpr int64_t kWordRows = 2048;  // of embeddings and heads: few of many tokens are alike

// As FP8 checkpoints are published: a scale a row.
void one_scale(uint8_t* row, int64_t cols) {
  constexpr size_t kBytes = sizeof(quant::FP8::Block), kScale = offsetof(quant::FP8::Block, scale);
  for (int64_t b = 1; b < cols / quant::FP8::kBlockSize; ++b) {
    std::memcpy(row + static_cast<size_t>(b) * kBytes + kScale, row + kScale, sizeof(float));
  }
}

// What a pool's rows are for. Words of models with experts are so large that what layers add to
// them is little, so that a router, whose rows are all its own, sees a token's own row and chooses
// experts evenly; and a token's own logit is mostly a greedy step's largest, so that sequences keep
// to tokens of theirs.
enum class Rows { kPlain, kRouter, kEmbedding, kHead };

class Maker {
 public:
  Maker(const ModelSpec& spec, DummyFormat format, ops::Ops& ops)
      : spec_(spec), format_(format), ops_(ops) {}

  Status matrix(ops::Weight& out, const std::string& name, Role role, int64_t rows, int64_t cols,
                Rows of = Rows::kPlain, ops::Use use = ops::Use::kProducts) {
    const bool head = role == Role::kHead || (role == Role::kEmbedding && spec_.tied_embeddings);
    return matrix(out, name, format_(role, layer_, cols, head), rows, cols, of, use);
  }
  Status matrix(ops::Weight& out, const std::string& name, quant::Format format, int64_t rows,
                int64_t cols, Rows of, ops::Use use) {
    if (quant::info(format).encode == nullptr) {
      return unsupported("random weights of type {}: nothing here writes it",
                         quant::info(format).name);
    }
    const std::vector<uint8_t>& pool = pool_of(format, rows, cols, of);
    const size_t bytes = quant::row_bytes(format, cols);
    std::vector<const uint8_t*> pointers(static_cast<size_t>(rows));
    const size_t pool_rows = pool.size() / bytes;
    for (size_t i = 0; i < pointers.size(); ++i)
      pointers[i] = pool.data() + (of == Rows::kPlain ? next() : i) % pool_rows * bytes;
    FRESHET_ASSIGN_OR_RETURN(out, ops_.pack(format, pointers, cols, ops::Ops::kNoLook, use));
    out.name = name;
    out.id = static_cast<int32_t>(infos_.size());
    infos_.push_back({name, format, rows, cols, out.packed.size(), ops_.kernel_names(out)});
    return {};
  }
  Status vector(Vector& out, int64_t size, float value) {
    FRESHET_ASSIGN_OR_RETURN(out.buffer,
                             ops_.upload(std::vector<float>(static_cast<size_t>(size), value)));
    out.size = size;
    return {};
  }
  Status linear(Linear& out, const std::string& name, Role role, int64_t rows, int64_t cols,
                bool bias, Rows of = Rows::kPlain) {
    FRESHET_RETURN_IF_ERROR(matrix(out.weight, name, role, rows, cols, of));
    return bias ? vector(out.bias, rows, 0.0f) : Status();
  }
  Status norm(NormWeights& out, const std::optional<NormSpec>& spec, int64_t size) {
    if (!spec) return {};
    if (spec->weight) FRESHET_RETURN_IF_ERROR(vector(out.weight, size, 1.0f));
    return spec->bias ? vector(out.bias, size, 0.0f) : Status();
  }
  Status layer(LayerWeights& out, int index);
  std::vector<Model::WeightInfo> take_infos() { return std::move(infos_); }

 private:
  Status attention(AttentionWeights& out, const AttentionSpec& a, int64_t hidden);
  Status experts(MoeWeights& out, const MoeSpec& m, int64_t hidden);
  Status mlp(MlpWeights& out, const MlpSpec& m, int64_t hidden, const std::string& prefix);
  static uint64_t next(uint64_t& state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
  }
  uint64_t next() { return next(state_); }
  static float number(uint64_t& state) {
    return 0.07f * (static_cast<float>(next(state) % 65536) / 65536.0f - 0.5f);
  }
  // A router's is made anew for each.
  const std::vector<uint8_t>& pool_of(quant::Format format, int64_t rows, int64_t cols, Rows of) {
    std::vector<uint8_t>& pool = pools_[{format, cols, of}];
    if (!pool.empty() && of != Rows::kRouter) return pool;
    const quant::FormatInfo& info = quant::info(format);
    const size_t bytes = quant::row_bytes(format, cols);
    if (of != Rows::kRouter) rows = of == Rows::kPlain ? kPoolRows : kWordRows;
    pool.resize(bytes * static_cast<size_t>(rows));
    std::vector<float> row(static_cast<size_t>(cols));
    uint64_t word = 0x9e3779b97f4a7c15u;  // the same in the embedding and in the head
    for (int64_t r = 0; r < rows; ++r) {
      for (float& v : row) {
        const float of_word = number(word);
        v = of == Rows::kEmbedding ? 5000.0f * of_word : number(state_);
        if (of == Rows::kHead) v += 0.12f * of_word;
        // As routers are published.
        if (format == quant::Format::kF32) v = bf16_to_f32(f32_to_bf16(v));
      }
      uint8_t* to = pool.data() + static_cast<size_t>(r) * bytes;
      info.encode(row.data(), to, cols, nullptr);
      if (format == quant::Format::kFP8) one_scale(to, cols);
    }
    return pool;
  }

  const ModelSpec& spec_;
  DummyFormat format_;
  ops::Ops& ops_;
  int layer_ = 0;
  std::map<std::tuple<quant::Format, int64_t, Rows>, std::vector<uint8_t>> pools_;
  std::vector<Model::WeightInfo> infos_;
  uint64_t state_ = 1;
};

Status Maker::attention(AttentionWeights& out, const AttentionSpec& a, int64_t hidden) {
  if (a.kind == AttentionSpec::Kind::kMla)
    return unsupported("random weights for latent attention");
  const int64_t q = int64_t{a.heads} * a.head_dim;
  const int64_t k = int64_t{a.kv_heads} * a.head_dim;
  FRESHET_RETURN_IF_ERROR(linear(out.q, "attention.q", Role::kQuery, q, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(linear(out.k, "attention.k", Role::kKey, k, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(linear(out.v, "attention.v", Role::kValue,
                                 int64_t{a.kv_heads} * a.value_dim, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(linear(out.out, "attention.out", Role::kOutput, hidden,
                                 int64_t{a.heads} * a.value_dim, a.out_bias));
  if (a.qk_norm != QkNorm::kNone) {
    const bool one = a.qk_norm == QkNorm::kHead;
    FRESHET_RETURN_IF_ERROR(norm(out.q_norm, a.qk_norm_spec, one ? a.head_dim : q));
    FRESHET_RETURN_IF_ERROR(norm(out.k_norm, a.qk_norm_spec, one ? a.head_dim : k));
  }
  return a.sinks ? vector(out.sinks, a.heads, 0.0f) : Status();
}

Status Maker::mlp(MlpWeights& out, const MlpSpec& m, int64_t hidden, const std::string& prefix) {
  if (m.gated)
    FRESHET_RETURN_IF_ERROR(linear(out.gate, prefix + ".gate", Role::kGate, m.ff, hidden, m.bias));
  FRESHET_RETURN_IF_ERROR(linear(out.up, prefix + ".up", Role::kUp, m.ff, hidden, m.bias));
  return linear(out.down, prefix + ".down", Role::kDown, hidden, m.ff, m.bias);
}

Status Maker::experts(MoeWeights& out, const MoeSpec& m, int64_t hidden) {
  const auto n = static_cast<size_t>(m.routing.experts);
  // In F32, as the loader keeps it.
  FRESHET_RETURN_IF_ERROR(matrix(out.router.weight, "router", quant::Format::kF32,
                                 m.routing.experts, hidden, Rows::kRouter, ops::Use::kProducts));
  if (m.router_bias) FRESHET_RETURN_IF_ERROR(vector(out.router.bias, m.routing.experts, 0.0f));
  if (m.router_correction) FRESHET_RETURN_IF_ERROR(vector(out.correction, m.routing.experts, 0.0f));
  out.gate_up.resize(n);
  out.down.resize(n);
  for (size_t e = 0; e < n; ++e) {
    FRESHET_RETURN_IF_ERROR(matrix(out.gate_up[e], "experts.gate_up", Role::kExpertsGateUp,
                                   2 * int64_t{m.expert_ff}, hidden, Rows::kPlain,
                                   ops::Use::kExperts));
    FRESHET_RETURN_IF_ERROR(matrix(out.down[e], "experts.down", Role::kExpertsDown, hidden,
                                   m.expert_ff, Rows::kPlain, ops::Use::kExperts));
  }
  if (m.expert_bias) {
    const auto count = static_cast<int64_t>(n);
    FRESHET_RETURN_IF_ERROR(vector(out.gate_up_bias, count * 2 * m.expert_ff, 0.0f));
    FRESHET_RETURN_IF_ERROR(vector(out.down_bias, count * hidden, 0.0f));
  }
  if (m.shared_ff == 0) return {};
  MlpSpec shared;
  shared.ff = m.shared_ff;
  FRESHET_RETURN_IF_ERROR(mlp(out.shared, shared, hidden, "shared"));
  return m.shared_gate
             ? linear(out.shared_gate, "shared_gate", Role::kSharedScale, 1, hidden, false)
             : Status();
}

Status Maker::layer(LayerWeights& out, int index) {
  layer_ = index;
  const LayerSpec& spec = spec_.layers[static_cast<size_t>(index)];
  const int64_t hidden = spec_.hidden_size;
  FRESHET_RETURN_IF_ERROR(attention(out.attention, spec.attention, hidden));
  const auto norms = [&](const BranchNorms& of, BranchNormWeights& w) -> Status {
    FRESHET_RETURN_IF_ERROR(norm(w.in, of.in, hidden));
    FRESHET_RETURN_IF_ERROR(norm(w.out, of.out, hidden));
    return norm(w.after, of.after, hidden);
  };
  FRESHET_RETURN_IF_ERROR(norms(spec.attention_norms, out.attention_norms));
  FRESHET_RETURN_IF_ERROR(norms(spec.mlp_norms, out.mlp_norms));
  if (spec.moe) return experts(out.moe, *spec.moe, hidden);
  return mlp(out.mlp, spec.mlp, hidden, "mlp");
}

}  // namespace

Result<std::unique_ptr<Model>> dummy_model(const ModelSpec& spec, DummyFormat format,
                                           ops::Ops& ops) {
  Maker make(spec, format, ops);
  ModelWeights w;
  const int64_t hidden = spec.hidden_size, width = spec.embedding_size;
  const bool words = std::any_of(spec.layers.begin(), spec.layers.end(),
                                 [](const LayerSpec& layer) { return layer.moe.has_value(); });
  FRESHET_RETURN_IF_ERROR(make.matrix(w.embedding, "embedding", Role::kEmbedding, spec.vocab_size,
                                      width, words ? Rows::kEmbedding : Rows::kPlain,
                                      ops::Use::kTable));
  if (spec.learned_positions > 0) {
    FRESHET_RETURN_IF_ERROR(make.matrix(w.positions, "positions", Role::kPositions,
                                        spec.learned_positions, hidden, Rows::kPlain,
                                        ops::Use::kTable));
  }
  if (width != hidden) {
    FRESHET_RETURN_IF_ERROR(
        make.linear(w.embedding_in, "embedding_in", Role::kEmbeddingIn, hidden, width, false));
    FRESHET_RETURN_IF_ERROR(
        make.linear(w.embedding_out, "embedding_out", Role::kEmbeddingOut, width, hidden, false));
  }
  w.layers.resize(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i)
    FRESHET_RETURN_IF_ERROR(make.layer(w.layers[i], static_cast<int>(i)));
  FRESHET_RETURN_IF_ERROR(make.norm(w.final_norm, spec.final_norm, hidden));
  if (!spec.tied_embeddings) {
    FRESHET_RETURN_IF_ERROR(make.linear(w.head, "head", Role::kHead, spec.vocab_size, width,
                                        spec.logits_bias, words ? Rows::kHead : Rows::kPlain));
  }
  return std::unique_ptr<Model>(new Decoder(spec, std::move(w), make.take_infos(), ops));
}

}  // namespace freshet::models
