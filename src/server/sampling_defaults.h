// What a model's generation_config.json, or a GGUF file (general.sampling.*), recommends for
// sampling: requests that leave these
// parameters out get them, as with vLLM, and so do run and chat.
#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"
#include "freshet/engine.h"

namespace freshet::server {

// `choice`: "auto" (of the model at `model_path`, if it has any), "none" (vLLM says "vllm"), or a
// folder that holds a generation_config.json. Checked as a request's would be.
Result<json::Object> read_sampling_defaults(const std::string& choice,
                                            const std::string& model_path);
// Those of a request that says nothing else.
SamplingParams params_of(const json::Object& defaults);

}  // namespace freshet::server
