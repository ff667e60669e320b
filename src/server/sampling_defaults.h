// The sampling parameters that a model's generation_config.json or GGUF file (general.sampling.*)
// recommends. They apply to requests that leave them out, as in vLLM, and to run and chat.
#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"
#include "freshet/engine.h"

namespace freshet::server {

// `choice`: "auto" (those of the model at `model_path`, if any), "none" ("vllm" in vLLM), or a
// folder with a generation_config.json. Checked like the fields of a request.
Result<json::Object> read_sampling_defaults(const std::string& choice,
                                            const std::string& model_path);
// The parameters of a request that gives none itself.
SamplingParams params_of(const json::Object& defaults);

}  // namespace freshet::server
