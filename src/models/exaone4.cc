#include <algorithm>

#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace exaone4_model {

constexpr NameRule kNames[] = {
    {Role::kAttentionOut, "model.layers.{}.post_attention_layernorm"},
    {Role::kMlpOut, "model.layers.{}.post_feedforward_layernorm"},
};

ModelSpec spec(Config& c) {
  ModelSpec s = decoder_spec(
      c, "exaone4",
      {.vocab = 102400, .kv_heads = 32, .ff = 16384, .eps = 1e-5, .rope = {.theta = 1e4}});
  // The pattern is a number or one period in letters, such as "LLLG".
  const json::Value* pattern = c.find({"sliding_window_pattern"});
  const int period = pattern != nullptr && pattern->is_string()
                         ? std::max(1, static_cast<int>(pattern->as_string().size()))
                         : c.size({"sliding_window_pattern"}, 4);
  const bool windows = !c.has_null("sliding_window");
  const auto local =
      local_layers(c, [&](int layer) { return windows && (layer + 1) % period != 0; });
  set_windows(c, s, windows ? c.count({"sliding_window"}, 4096) : 0, local);
  for (size_t i = 0; i < s.layers.size(); ++i) {
    AttentionSpec& a = s.layers[i].attention();
    a.qk_norm = QkNorm::kHead;
    // Without windows, all layers rotate.
    if (windows && !local(static_cast<int>(i))) a.rope = -1;
    for (BranchSpec& branch : s.layers[i].branches) branch.norms = {.out = branch.norms.in};
  }
  return s;
}

}  // namespace exaone4_model

Architecture exaone4() {
  return {.type = "exaone4", .spec = exaone4_model::spec, .names = exaone4_model::kNames};
}

}  // namespace freshet::models
