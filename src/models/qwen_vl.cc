// The language models of Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL:
// those of Qwen2 and Qwen3, with positions on three axes.
#include "models/architectures.h"
#include "models/decoder_config.h"

namespace freshet::models {
namespace qwen_vl_model {

// Which axis (time, row, column) each frequency has: by sections one after the other, or in turns
// (time, row, column, time ...) while a section lasts, the rest being time's.
void set_axes(Config& c, ModelSpec& s, std::vector<float> sections, bool in_turns) {
  RopeSpec& rope = s.ropes.front();
  for (const std::string_view key : {"rope_parameters", "rope_scaling"}) {
    const json::Value* const parameters = c.find({key});
    if (parameters == nullptr || !parameters->is_object()) continue;
    Config p(*parameters, std::string(key) + ".");
    if (p.has("mrope_section")) sections = p.floats({"mrope_section"});
    in_turns = p.flag({"mrope_interleaved"}, in_turns);
    c.fail(p.status());
  }
  const auto pairs = static_cast<size_t>(rope.rotary_dim / 2);
  size_t sum = 0;
  for (const float section : sections) sum += static_cast<size_t>(section);
  if (sections.size() != 3 || sum != pairs) {
    return c.fail(
        invalid_argument("the configuration's 'mrope_section' must be three numbers with "
                         "the sum {}",
                         pairs));
  }
  rope.axes.assign(pairs, 0);
  for (size_t i = 0; i < pairs && in_turns; ++i) {
    const size_t axis = i % 3;
    if (static_cast<float>(i / 3) < sections[axis]) rope.axes[i] = static_cast<int>(axis);
  }
  if (in_turns) return;
  auto next = rope.axes.begin();
  for (int axis = 0; axis < 3; ++axis)
    next = std::fill_n(next, static_cast<int>(sections[static_cast<size_t>(axis)]), axis);
}

ModelSpec qwen2(Config& c) {
  ModelSpec s =
      decoder_spec(c, "qwen2-vl", {.vocab = 152064, .kv_heads = 8, .ff = 29568, .context = 32768});
  if (c.flag({"use_sliding_window"}, false))
    c.fail(unsupported("sliding windows in a language model that reads pictures"));
  for (LayerSpec& layer : s.layers) layer.attention().qkv_bias = true;
  set_axes(c, s, {16, 24, 24}, false);
  return s;
}

ModelSpec qwen3(Config& c) {
  ModelSpec s = decoder_spec(c, "qwen3-vl",
                             {.vocab = 151936,
                              .kv_heads = 32,
                              .head_dim = 128,
                              .ff = 22016,
                              .context = 128000,
                              .rope = {.theta = 500000.0}});
  const bool bias = c.flag({"attention_bias"}, false);
  for (LayerSpec& layer : s.layers) {
    layer.attention().qk_norm = QkNorm::kHead;
    layer.attention().qkv_bias = layer.attention().out_bias = bias;
  }
  set_axes(c, s, {24, 20, 20}, true);
  return s;
}

}  // namespace qwen_vl_model

Architecture qwen2_vl() {
  return {.type = "qwen2_vl_text", .spec = qwen_vl_model::qwen2};
}
Architecture qwen2_5_vl() {
  return {.type = "qwen2_5_vl_text", .spec = qwen_vl_model::qwen2};
}
Architecture qwen3_vl() {
  return {.type = "qwen3_vl_text", .spec = qwen_vl_model::qwen3};
}

}  // namespace freshet::models
