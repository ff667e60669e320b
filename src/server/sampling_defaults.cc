#include "server/sampling_defaults.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "loader/checkpoint.h"
#include "server/openai_request.h"

namespace freshet::server {
namespace {

Parsed<CompletionRequest> parsed_with(const json::Object& defaults) {
  json::Object request;
  request["prompt"] = "";
  return parse_completion(json::Value(std::move(request)), {}, &defaults);
}

// llama.cpp's converter copies them from generation_config.json.
json::Object gguf_defaults(const std::string& model_path) {
  json::Object defaults;
  const auto checkpoint = loader::Checkpoint::open(model_path);
  if (!checkpoint.ok() || checkpoint->gguf() == nullptr)
    return defaults;  // loading the model reports the error
  for (const auto& [key, name] : {std::pair{"general.sampling.temp", "temperature"},
                                  {"general.sampling.top_k", "top_k"},
                                  {"general.sampling.top_p", "top_p"},
                                  {"general.sampling.min_p", "min_p"},
                                  {"general.sampling.penalty_repeat", "repetition_penalty"},
                                  {"freshet.sampling.typical_p", "typical_p"}}) {
    const auto value = checkpoint->gguf()->get_f32(key);
    if (!value) continue;
    std::string text = fmt::format("{}", *value);  // "0.95", not the digits of 0.95f as a double
    defaults[name] = std::isfinite(*value) ? json::Value::number_from_text(std::move(text))
                                           : json::Value(std::move(text));  // refused later
  }
  return defaults;
}

constexpr const char* kSampling[] = {"temperature", "top_k",     "top_p",
                                     "min_p",       "typical_p", "repetition_penalty"};
constexpr const char* kBans[] = {"bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
                                 "no_repeat_ngram_size", "length_penalty"};
constexpr const char* kFlags[] = {"early_stopping", "renormalize_logits"};
// What transformers' generate() would do, with the value that turns it off.
struct LeftOut {
  const char* name;
  double off;
};
constexpr LeftOut kLeftOut[] = {{"num_beams", 1},
                                {"num_beam_groups", 1},
                                {"forced_eos_token_id", -1},
                                {"min_length", 0},
                                {"min_new_tokens", 0},
                                {"encoder_no_repeat_ngram_size", 0},
                                {"encoder_repetition_penalty", 1},
                                {"diversity_penalty", 0},
                                {"penalty_alpha", 0},
                                {"epsilon_cutoff", 0},
                                {"eta_cutoff", 0},
                                {"guidance_scale", 1}};

// The size of the vocabulary in the config.json beside a file; the largest id if it isn't said.
int64_t vocabulary_beside(const std::string& path) {
  constexpr int64_t kNotSaid = std::numeric_limits<int32_t>::max();
  const auto file = std::filesystem::path(path).parent_path() / "config.json";
  const auto config = json::parse_file(file.string());
  if (!config.ok() || !config->is_object()) return kNotSaid;
  const json::Value* const text = config->find("text_config");
  const json::Value& own = text != nullptr && text->is_object() ? *text : *config;
  for (const char* name : {"decoder_vocab_size", "vocab_size"}) {
    const json::Value* const v = own.find(name);
    if (v != nullptr && v->as_int64().value_or(0) > 0) return *v->as_int64();
  }
  return kNotSaid;
}

// As transformers does: ids outside of the vocabulary ban nothing, nor does a bad word that is the
// end of the text.
void drop_idle_bans(json::Object& defaults, const json::Value& config, int64_t vocab) {
  const auto known = [&](const json::Value& id) {
    const auto n = id.as_int64();
    return !n || (*n >= 0 && *n < vocab);  // what isn't a number is refused later
  };
  for (const char* name : {"suppress_tokens", "begin_suppress_tokens"}) {
    json::Value* const found = defaults.find(name);
    if (found == nullptr || !found->is_array()) continue;
    std::erase_if(found->as_array(), [&](const json::Value& id) { return !known(id); });
  }
  json::Value* const words = defaults.find("bad_words_ids");
  if (words == nullptr || !words->is_array()) return;
  const json::Value* const end = config.find("eos_token_id");
  const auto ends = [&](const json::Value& id) {
    if (end == nullptr || !id.as_int64()) return false;
    if (!end->is_array()) return end->as_int64() == id.as_int64();
    return std::ranges::any_of(end->as_array(),
                               [&](const json::Value& e) { return e.as_int64() == id.as_int64(); });
  };
  std::erase_if(words->as_array(), [&](const json::Value& word) {
    if (!word.is_array() || word.as_array().empty()) return false;
    const json::Array& ids = word.as_array();
    return !std::ranges::all_of(ids, known) || (ids.size() == 1 && ends(ids.front()));
  });
}

// The parameters in the file that this server supports.
Result<json::Object> json_defaults(const std::string& path) {
  json::Object defaults;
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, json::parse_file(path));
  if (!config.is_object()) return invalid_argument("{} is not a JSON object", path);
  for (const std::span<const char* const> names :
       {std::span<const char* const>(kSampling), std::span<const char* const>(kBans)}) {
    for (const char* name : names) {
      const json::Value* v = config.find(name);
      if (v != nullptr && !v->is_null()) defaults[name] = *v;
    }
  }
  for (const char* name : kFlags) {  // early_stopping may be "never"
    const json::Value* v = config.find(name);
    if (v != nullptr && v->is_bool() && v->as_bool()) defaults[name] = *v;
  }
  drop_idle_bans(defaults, config, vocabulary_beside(path));
  return defaults;
}

// Files of a folder, and none of a GGUF file.
std::string config_path(const std::string& choice, const std::string& model_path) {
  const auto folder = std::filesystem::path(choice == "auto" ? model_path : choice);
  return (folder / "generation_config.json").string();
}

}  // namespace

Result<json::Object> read_sampling_defaults(const std::string& choice,
                                            const std::string& model_path) {
  json::Object defaults;
  if (choice == "none" || choice == "vllm") return defaults;
  std::string path = config_path(choice, model_path);
  std::error_code error;
  if (choice == "auto" && !std::filesystem::exists(path, error)) {
    path = model_path;
    defaults = gguf_defaults(path);
    auto beside = std::filesystem::path(model_path);
    beside.replace_extension("generation_config.json");
    if (defaults.empty() && model_path.ends_with(".gguf") &&
        std::filesystem::exists(beside, error)) {
      path = beside.string();
      FRESHET_ASSIGN_OR_RETURN(defaults, json_defaults(path));
    }
  } else if (auto read = json_defaults(path); read.ok()) {
    defaults = std::move(read).value();
  } else if (choice != "auto") {
    return read.status();
  }  // an unreadable file of the model counts as none: opening the model has reported it
  const auto parsed = parsed_with(defaults);
  if (const auto* wrong = std::get_if<ApiError>(&parsed)) {
    return invalid_argument("{}: {}; --generation-config none ignores it", path, wrong->message);
  }
  return defaults;
}

bool recommends_sampling(std::string_view name) {
  return std::ranges::find(kSampling, name) != std::end(kSampling);
}

bool recommend_sampling(const json::Object& defaults) {
  for (const auto& [name, value] : defaults) {
    if (recommends_sampling(name)) return true;
  }
  return false;
}

std::string left_out_defaults(const std::string& choice, const std::string& model_path) {
  if (choice == "none" || choice == "vllm") return {};
  const auto config = json::parse_file(config_path(choice, model_path));
  if (!config.ok() || !config->is_object()) return {};
  std::string text;
  for (const auto& [name, off] : kLeftOut) {
    const json::Value* v = config->find(name);
    if (v == nullptr || !v->is_number() || v->as_double() == off) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, json::write(*v));
  }
  return text;
}

SamplingParams params_of(const json::Object& defaults) {
  return std::get<CompletionRequest>(parsed_with(defaults)).params;
}

SamplingParams chat_params_of(const json::Object& defaults) {
  SamplingParams p = params_of(defaults);
  if (recommend_sampling(defaults)) return p;
  p.temperature = kChatTemperature;
  p.top_p = kChatTopP;
  p.min_p = kChatMinP;
  return p;
}

json::Object chat_sampling(const json::Object& defaults) {
  const SamplingParams p = chat_params_of(defaults);
  const auto number = [](float x) { return json::Value::number_from_text(fmt::format("{}", x)); };
  json::Object o;
  o["temperature"] = number(p.temperature);
  o["top_k"] = p.top_k;
  o["top_p"] = number(p.top_p);
  o["min_p"] = number(p.min_p);
  o["typical_p"] = number(p.typical_p);
  o["repetition_penalty"] = number(p.repetition_penalty);
  return o;
}

}  // namespace freshet::server
