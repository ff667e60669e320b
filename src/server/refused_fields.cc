#include "server/refused_fields.h"

#include <fmt/format.h>

namespace freshet::server {
namespace {

bool is_above(const json::Value& v, double least) {
  return v.is_number() && v.as_double() > least;
}
bool is_any(const json::Value& v) {
  if (v.is_bool()) return v.as_bool();
  if (v.is_string()) return !v.as_string().empty();
  if (v.is_array()) return !v.as_array().empty();
  return true;
}
bool is_given_object(const json::Value& v) {
  return v.is_object() ? !v.as_object().empty() : is_any(v);
}

struct Refusal {
  const char* name;
  bool (*asks)(const json::Value& v);  // whether the value asks for something unsupported
  const char* advice;
};

constexpr Refusal kRefusals[] = {
    // OpenAI's.
    {"audio", is_any, "this model writes text"},
    {"functions", is_any, "send 'tools'"},
    {"function_call",
     [](const json::Value& v) { return v != json::Value("none") && v != json::Value("auto"); },
     "send 'tools' and 'tool_choice'"},
    {"modalities",
     [](const json::Value& v) { return v != json::Value(json::Array{json::Value("text")}); },
     "this model writes text: leave it out or send [\"text\"]"},
    {"moderation", is_any, "this server has no moderation"},
    {"web_search_options", is_any, "this server does not search the web"},
    // vLLM's.
    {"guided_whitespace_pattern", is_any, "a 'guided_grammar' may say what stands between tokens"},
    {"kv_transfer_params", is_given_object, "there is no cache elsewhere"},
    {"logits_processors", is_any, "'logit_bias' changes logits"},
    {"prompt_embeds", is_any, "send 'prompt'"},
    {"repetition_detection", is_any, "leave it out"},
    {"thinking_token_budget", is_any, "'max_tokens' limits thought and answer together"},
    {"truncation_side", [](const json::Value& v) { return v != json::Value("left"); },
     "prompts are cut at their beginning: leave it out or send \"left\""},
    {"vllm_xargs", is_given_object, "leave it out"},
    // llama-server's.
    {"adaptive_target", [](const json::Value& v) { return is_above(v, -1e-9); },
     "leave it out or send -1"},
    {"dry_multiplier", [](const json::Value& v) { return is_above(v, 0); },
     "leave it out or send 0"},
    {"dynatemp_range", [](const json::Value& v) { return is_above(v, 0); },
     "leave it out or send 0"},
    {"grammar_lazy", is_any, "a grammar holds from the first token of the answer"},
    {"lora", is_any, "this server has no adapters"},
    {"min_keep", [](const json::Value& v) { return is_above(v, 1); }, "leave it out or send 0"},
    {"mirostat", [](const json::Value& v) { return is_above(v, 0); }, "leave it out or send 0"},
    {"n_cmpl", [](const json::Value& v) { return is_above(v, 1); }, "send 'n' to /v1/completions"},
    {"n_indent", [](const json::Value& v) { return is_above(v, 0); }, "leave it out or send 0"},
    {"tfs_z", [](const json::Value& v) { return v.is_number() && v.as_double() < 1; },
     "leave it out or send 1"},
    {"top_n_sigma", [](const json::Value& v) { return is_above(v, 0); }, "leave it out or send -1"},
};

}  // namespace

void refuse_unsupported_fields(Fields& fields) {
  for (const Refusal& r : kRefusals) {
    const json::Value* v = fields.get(r.name);
    if (v != nullptr && r.asks(*v))
      fields.fail(r.name, fmt::format("'{}' is not supported: {}", r.name, r.advice));
  }
  // Above one half, llama-server's threshold turns the sampler off.
  const json::Value* xtc = fields.get("xtc_probability");
  const json::Value* threshold = fields.get("xtc_threshold");
  if (xtc != nullptr && is_above(*xtc, 0) && (threshold == nullptr || !is_above(*threshold, 0.5)))
    fields.fail("xtc_probability", "'xtc_probability' is not supported: leave it out or send 0");
}

}  // namespace freshet::server
