// The sampling parameters that a model's generation_config.json or GGUF file (general.sampling.*)
// recommends. For a GGUF file without any, NAME.generation_config.json beside NAME.gguf counts.
// They apply to requests that leave them out, as in vLLM, and to run and chat.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "freshet/engine.h"

namespace freshet::server {

// `choice`: "auto" (those of the model at `model_path`, if any), "none" ("vllm" in vLLM), or a
// folder with a generation_config.json. Checked like the fields of a request.
Result<json::Object> read_sampling_defaults(const std::string& choice,
                                            const std::string& model_path);
// Whether a default is one that changes how tokens are sampled. The others (bad_words_ids,
// suppress_tokens, begin_suppress_tokens, no_repeat_ngram_size, and length_penalty, early_stopping
// and renormalize_logits of beam search) hold for every request, as transformers' generate() reads
// them.
bool recommends_sampling(std::string_view name);
bool recommend_sampling(const json::Object& defaults);  // any of them
// What the generation_config.json of the model asks for and is not done unless a request asks,
// as "num_beams 4, forced_eos_token_id 2"; empty: nothing.
std::string left_out_defaults(const std::string& choice, const std::string& model_path);
// The parameters of a request that gives none itself.
SamplingParams params_of(const json::Object& defaults);

// What run, chat and the web page use for a model whose authors recommend nothing. Requests to the
// API that leave a parameter out get OpenAI's values instead, as in vLLM.
inline constexpr float kChatTemperature = 0.7f;
inline constexpr float kChatTopP = 0.95f;
inline constexpr float kChatMinP = 0.05f;

// What run, chat and the web page use for a model with these `defaults`. Any recommendation turns
// the parameters that it leaves out off: our values were not tested together with the authors'.
SamplingParams chat_params_of(const json::Object& defaults);
// The same as JSON: temperature, top_k, top_p, min_p, typical_p, repetition_penalty.
json::Object chat_sampling(const json::Object& defaults);

}  // namespace freshet::server
