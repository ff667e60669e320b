#include "server/sampling_defaults.h"

#include <filesystem>
#include <utility>

#include "server/openai_request.h"

namespace freshet::server {
namespace {

Parsed<CompletionRequest> parsed_with(const json::Object& defaults) {
  json::Object request;
  request["prompt"] = "";
  return parse_completion(json::Value(std::move(request)), {}, &defaults);
}

}  // namespace

Result<json::Object> read_sampling_defaults(const std::string& choice,
                                            const std::string& model_path) {
  json::Object defaults;
  if (choice == "none" || choice == "vllm") return defaults;
  const auto path =
      std::filesystem::path(choice == "auto" ? model_path : choice) / "generation_config.json";
  std::error_code error;
  if (choice == "auto" && !std::filesystem::exists(path, error)) return defaults;
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, json::parse_file(path.string()));
  if (!config.is_object()) return invalid_argument("{} is not a JSON object", path.string());
  for (const char* name :
       {"temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"}) {
    const json::Value* v = config.find(name);
    if (v != nullptr && !v->is_null()) defaults[name] = *v;
  }
  const auto parsed = parsed_with(defaults);
  if (const auto* wrong = std::get_if<ApiError>(&parsed)) {
    return invalid_argument("{}: {}; --generation-config none ignores it", path.string(),
                            wrong->message);
  }
  return defaults;
}

SamplingParams params_of(const json::Object& defaults) {
  return std::get<CompletionRequest>(parsed_with(defaults)).params;
}

}  // namespace freshet::server
