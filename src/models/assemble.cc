#include "models/assemble.h"

namespace freshet::models {
namespace {

using loader::TensorSource;

Status assemble_table(WeightReader& reader, Role role, int64_t rows, int64_t cols,
                      ops::Weight& out) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor, reader.require(role, ".weight"));
  FRESHET_ASSIGN_OR_RETURN(const Rows source, reader.rows(*tensor, rows, cols));
  FRESHET_RETURN_IF_ERROR(reader.pack(out, tensor->name, source, {}, ops::Use::kTable));
  reader.release(*tensor);
  return {};
}

Status assemble_norms(WeightReader& reader, const ModelSpec& spec, int layer, bool attention,
                      BranchNormWeights& out) {
  const LayerSpec& l = spec.layers[static_cast<size_t>(layer)];
  const BranchNorms& norms = attention ? l.attention_norms : l.mlp_norms;
  struct Place {
    const std::optional<NormSpec>& norm;
    Role role;
    NormWeights& weights;
  };
  const Place places[] = {
      {norms.in, attention ? Role::kAttentionIn : Role::kMlpIn, out.in},
      {norms.out, attention ? Role::kAttentionOut : Role::kMlpOut, out.out},
      {norms.after, attention ? Role::kAttentionAfter : Role::kMlpAfter, out.after},
  };
  for (const Place& place : places) {
    if (!place.norm) continue;
    FRESHET_RETURN_IF_ERROR(
        reader.norm(place.weights, place.role, *place.norm, layer, spec.hidden_size));
  }
  return {};
}

Status assemble_ends(WeightReader& reader, const ModelSpec& spec, ModelWeights& out) {
  const int64_t width = spec.embedding_size;
  const int64_t hidden = spec.hidden_size;
  FRESHET_RETURN_IF_ERROR(
      assemble_table(reader, Role::kEmbedding, spec.vocab_size, width, out.embedding));
  if (spec.learned_positions > 0) {
    FRESHET_RETURN_IF_ERROR(
        assemble_table(reader, Role::kPositions, spec.learned_positions, hidden, out.positions));
  }
  if (width != hidden) {
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.embedding_in, Role::kEmbeddingIn, -1, hidden, width, false));
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.embedding_out, Role::kEmbeddingOut, -1, width, hidden, false));
  }
  if (spec.final_norm) {
    FRESHET_RETURN_IF_ERROR(
        reader.norm(out.final_norm, Role::kFinalNorm, *spec.final_norm, -1, hidden));
  }
  if (spec.tied_embeddings) return {};
  return reader.linear(out.head, Role::kHead, -1, spec.vocab_size, width, spec.logits_bias);
}

}  // namespace

Result<ModelWeights> assemble(WeightReader& reader, const ModelSpec& spec) {
  ModelWeights out;
  FRESHET_RETURN_IF_ERROR(assemble_ends(reader, spec, out));
  out.layers.resize(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const int layer = static_cast<int>(i);
    LayerWeights& w = out.layers[i];
    FRESHET_RETURN_IF_ERROR(assemble_norms(reader, spec, layer, true, w.attention_norms));
    FRESHET_RETURN_IF_ERROR(assemble_attention(reader, spec, layer, w.attention));
    FRESHET_RETURN_IF_ERROR(assemble_norms(reader, spec, layer, false, w.mlp_norms));
    if (spec.layers[i].moe) {
      FRESHET_RETURN_IF_ERROR(assemble_experts(reader, spec, layer, w.moe));
    } else {
      FRESHET_RETURN_IF_ERROR(assemble_mlp(reader, spec, layer, w.mlp));
    }
  }
  return out;
}

}  // namespace freshet::models
