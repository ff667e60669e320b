#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace mistral_model {

ModelSpec spec(Config& c) {
  ModelSpec s =
      decoder_spec(c, "mistral", {.kv_heads = 8, .ff = 14336, .context = int64_t{4096} * 32});
  const int window = c.has_null("sliding_window") ? 0 : c.count({"sliding_window"}, 4096);
  for (LayerSpec& layer : s.layers) layer.attention().window = window >= s.max_context ? 0 : window;
  return s;
}

}  // namespace mistral_model

Architecture mistral() {
  return {.type = "mistral", .spec = mistral_model::spec, .gguf_interleaves = true};
}

}  // namespace freshet::models
