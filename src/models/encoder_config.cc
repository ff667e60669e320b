#include "models/encoder_config.h"

#include <algorithm>

namespace freshet::models {

ModelSpec encoder_spec(Config& c, std::string_view name, const DecoderDefaults& d) {
  ModelSpec spec = decoder_spec(c, name, d);
  if (c.flag({"is_decoder"}, false) || c.flag({"add_cross_attention"}, false))
    c.fail(unsupported("a {} with is_decoder or add_cross_attention: only encoders run", name));
  const std::string positions = c.text({"position_embedding_type"}, "absolute");
  if (!d.rotary && positions != "absolute") {
    c.fail(unsupported("position_embedding_type '{}' of {}: only absolute positions are supported",
                       positions, name));
  }
  const NormSpec norm = *spec.final_norm;
  spec.final_norm.reset();
  spec.embedded_norm = norm;
  spec.generates = false;
  spec.tied_embeddings = true;
  spec.token_types = c.count({"type_vocab_size"}, 2);
  if (!d.rotary) spec.learned_positions = spec.max_context;
  for (LayerSpec& layer : spec.layers) {
    layer.attention().two_way = true;
    for (BranchSpec& branch : layer.branches) {
      branch.norms = {};
      branch.norms.after = norm;
    }
  }
  return spec;
}

void offset_positions(Config& c, ModelSpec& spec) {
  spec.position_offset = c.count({"pad_token_id"}, 1) + 1;
  spec.max_context = std::max<int64_t>(1, spec.learned_positions - spec.position_offset);
}

}  // namespace freshet::models
