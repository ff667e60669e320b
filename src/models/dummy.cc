#include "models/dummy.h"

#include <algorithm>

#include "layers/decoder.h"
#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {

namespace {

Status make_weights(DummyMaker& make, const ModelSpec& spec, ModelWeights& w) {
  const int64_t hidden = spec.hidden_size, width = spec.embedding_size;
  const bool experts = std::ranges::any_of(
      spec.layers, [](const LayerSpec& layer) { return layer.find<MoeSpec>() != nullptr; });
  FRESHET_RETURN_IF_ERROR(make.matrix(w.embedding, "embedding", Role::kEmbedding, spec.vocab_size,
                                      width, experts ? Fill::kEmbedding : Fill::kPlain,
                                      ops::Use::kTable));
  if (spec.learned_positions > 0) {
    FRESHET_RETURN_IF_ERROR(make.matrix(w.positions, "positions", Role::kPositions,
                                        spec.learned_positions, hidden, Fill::kPlain,
                                        ops::Use::kTable));
  }
  if (spec.token_types > 0) {
    FRESHET_RETURN_IF_ERROR(make.matrix(w.token_types, "token_types", Role::kTokenTypes,
                                        spec.token_types, hidden, Fill::kPlain, ops::Use::kTable));
  }
  FRESHET_RETURN_IF_ERROR(make.norm(w.embedded_norm, spec.embedded_norm, hidden));
  if (width != hidden) {
    FRESHET_RETURN_IF_ERROR(
        make.linear(w.embedding_in, "embedding_in", Role::kEmbeddingIn, hidden, width, false));
    FRESHET_RETURN_IF_ERROR(
        make.linear(w.embedding_out, "embedding_out", Role::kEmbeddingOut, width, hidden, false));
  }
  w.layers.resize(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    make.set_layer(static_cast<int>(i));
    for (const BranchSpec& branch : spec.layers[i].branches) {
      BranchWeights& out = w.layers[i].branches.emplace_back();
      const int64_t read = branch.side == Side::kOpens ? 2 * hidden : hidden;
      FRESHET_RETURN_IF_ERROR(make.norm(out.norms.in, branch.norms.in, read));
      FRESHET_RETURN_IF_ERROR(make.norm(out.norms.out, branch.norms.out, hidden));
      FRESHET_RETURN_IF_ERROR(make.norm(out.norms.after, branch.norms.after, hidden));
      FRESHET_RETURN_IF_ERROR(loading_of(branch).make(make, branch, hidden, out));
    }
  }
  FRESHET_RETURN_IF_ERROR(make.norm(w.final_norm, spec.final_norm, hidden));
  if (!spec.tied_embeddings && spec.generates) {
    FRESHET_RETURN_IF_ERROR(make.linear(w.head, "head", Role::kHead, spec.vocab_size, width,
                                        spec.logits_bias, experts ? Fill::kHead : Fill::kPlain));
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Model>> dummy_model(const ModelSpec& spec, DummyFormat format,
                                           ops::Ops& ops) {
  DummyMaker make(spec, format, ops);
  ModelWeights w;
  FRESHET_RETURN_IF_ERROR(make_weights(make, spec, w));
  return std::unique_ptr<Model>(new Decoder(spec, std::move(w), make.take_infos(), ops));
}

Result<size_t> dummy_bytes(const ModelSpec& spec, DummyFormat format, ops::Ops& ops) {
  DummyMaker make(spec, format, ops, true);
  ModelWeights w;
  FRESHET_RETURN_IF_ERROR(make_weights(make, spec, w));
  return make.bytes();
}

}  // namespace freshet::models
