#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace phi3_model {

constexpr NameRule kGgufNames[] = {{Role::kUp, ""}};  // ffn_up holds gate and up

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(
      c, "phi3", {.vocab = 32064, .hidden = 3072, .ff = 8192, .context = 4096, .eps = 1e-5});
  const int window = c.count({"sliding_window"}, 0);
  for (LayerSpec& layer : s.layers) layer.attention().window = window >= s.max_context ? 0 : window;
  // Early configurations call LongRoPE by other names.
  for (RopeSpec& rope : s.ropes) {
    if (rope.scaling == RopeSpec::Scaling::kYarn) rope.scaling = RopeSpec::Scaling::kLongRope;
  }
  return s;
}

}  // namespace phi3_model

Architecture phi3() {
  return {.type = "phi3", .spec = phi3_model::spec, .gguf_names = phi3_model::kGgufNames};
}

}  // namespace freshet::models
