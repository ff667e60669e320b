#include "speech/speech_model.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "layers/model.h"
#include "speech/languages.h"
#include "tokenizer/tokenizer.h"

namespace freshet::speech {
namespace {

// A file of the model's folder; null if it is not there.
Result<json::Value> read_optional(const std::string& folder, const char* name) {
  const std::string path = (std::filesystem::path(folder) / name).string();
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return json::Value();
  return json::parse_file(path);
}

int32_t id_at(const json::Value* v) {
  if (v == nullptr || !v->is_number()) return -1;
  const auto id = v->as_int64();
  return id && *id >= 0 && *id <= INT32_MAX ? static_cast<int32_t>(*id) : -1;
}

std::vector<int32_t> ids_at(const json::Value& from, std::string_view key) {
  std::vector<int32_t> ids;
  const json::Value* list = from.is_object() ? from.find(key) : nullptr;
  if (list == nullptr || !list->is_array()) return ids;
  for (const json::Value& v : list->as_array()) {
    if (const int32_t id = id_at(&v); id >= 0) ids.push_back(id);
  }
  return ids;
}

// A token's id: under a key of the configuration, or by one of its names in the vocabulary.
int32_t token_id(const json::Value& generation, std::string_view key, const Tokenizer& tokenizer,
                 std::initializer_list<std::string_view> names) {
  const int32_t id = generation.is_object() && !key.empty() ? id_at(generation.find(key)) : -1;
  if (id >= 0) return id;
  for (const std::string_view name : names) {
    if (const auto found = tokenizer.token_to_id(name)) return *found;
  }
  return -1;
}

// "<|en|>" is English.
std::string_view code_in(std::string_view token) {
  if (token.size() < 5 || !token.starts_with("<|") || !token.ends_with("|>")) return {};
  token = token.substr(2, token.size() - 4);
  return language_code(token) == token ? token : std::string_view();
}

}  // namespace

int32_t SpeechTokens::language(std::string_view code) const {
  for (const auto& [known, id] : languages) {
    if (known == code) return id;
  }
  return -1;
}

std::string_view SpeechTokens::code_of(int32_t token) const {
  for (const auto& [code, id] : languages) {
    if (id == token) return code;
  }
  return {};
}

Result<SpeechTokens> read_speech_tokens(const json::Value& generation, const Tokenizer& tokenizer) {
  SpeechTokens t;
  const auto id = [&](std::string_view key, std::initializer_list<std::string_view> names) {
    return token_id(generation, key, tokenizer, names);
  };
  t.start = id("decoder_start_token_id", {"<|startoftranscript|>"});
  t.end = id("eos_token_id", {"<|endoftext|>"});
  t.previous = id("prev_sot_token_id", {"<|startofprev|>"});
  t.no_timestamps = id("no_timestamps_token_id", {"<|notimestamps|>"});
  t.no_speech = id("", {"<|nospeech|>", "<|nocaptions|>"});
  if (t.no_speech < 0 && t.no_timestamps > 0) t.no_speech = t.no_timestamps - 1;
  for (const auto& [value, name] : {std::pair{t.start, "<|startoftranscript|>"},
                                    {t.end, "<|endoftext|>"},
                                    {t.no_timestamps, "<|notimestamps|>"}}) {
    if (value < 0) return invalid_argument("the model has no token {}", name);
  }
  const json::Value* known = generation.is_object() ? generation.find("lang_to_id") : nullptr;
  if (known != nullptr && known->is_object()) {
    for (const auto& [name, value] : known->as_object()) {
      const std::string_view code = code_in(name);
      if (!code.empty() && id_at(&value) >= 0) t.languages.emplace_back(code, id_at(&value));
    }
  } else {
    // Between the start and the tasks; English models end with a single one, which they never use.
    for (int32_t token = t.start + 1; token < t.no_timestamps; ++token) {
      const std::string_view code = code_in(tokenizer.token_text(token));
      if (!code.empty()) t.languages.emplace_back(code, token);
    }
  }
  const json::Value* multilingual =
      generation.is_object() ? generation.find("is_multilingual") : nullptr;
  if (multilingual != nullptr && multilingual->is_bool() && !multilingual->as_bool())
    t.languages.clear();
  if (!t.languages.empty()) {
    const json::Value* tasks = generation.is_object() ? generation.find("task_to_id") : nullptr;
    const json::Value none{json::Object{}};
    const json::Value& by_name = tasks != nullptr && tasks->is_object() ? *tasks : none;
    t.transcribe = token_id(by_name, "transcribe", tokenizer, {"<|transcribe|>"});
    t.translate = token_id(by_name, "translate", tokenizer, {"<|translate|>"});
    if (t.transcribe < 0) return invalid_argument("the model has no token <|transcribe|>");
  }
  t.suppressed = ids_at(generation, "suppress_tokens");
  t.suppressed_at_begin = ids_at(generation, "begin_suppress_tokens");
  t.max_initial_timestamp =
      generation.is_object() ? id_at(generation.find("max_initial_timestamp_index")) : -1;
  return t;
}

Result<media::MelSettings> read_mel_settings(const std::string& folder, const ModelSpec& spec) {
  const int bins = spec.encoder->stem->mel_bins;
  media::MelSettings settings;
  settings.mels = bins;
  FRESHET_ASSIGN_OR_RETURN(const json::Value preprocessor,
                           read_optional(folder, "preprocessor_config.json"));
  if (preprocessor.is_object()) {
    auto read = media::mel_settings(preprocessor);
    if (!read.ok()) return read.status().with_context("preprocessor_config.json");
    settings = *read;
  }
  if (settings.mels != bins) {
    return invalid_argument("preprocessor_config.json makes {} mel bands, the model reads {}",
                            settings.mels, bins);
  }
  const int64_t frames = 2 * spec.encoder->max_context;
  if (frames * settings.hop > INT32_MAX) return unsupported("a window of {} frames", frames);
  settings.samples = static_cast<int>(frames) * settings.hop;
  return settings;
}

namespace {

// alignment_heads: [[layer, head], ...]
Status read_alignment(const json::Value& generation, const json::Value& config,
                      const ModelSpec& spec, SpeechModel& model) {
  if (config.is_object()) {
    const int32_t width = id_at(config.find("median_filter_width"));
    if (width > 0) model.median_filter = width;
    if (model.median_filter % 2 == 0 || model.median_filter > 1001)
      return invalid_argument("config.json: 'median_filter_width' must be odd");
  }
  const json::Value* list = generation.is_object() ? generation.find("alignment_heads") : nullptr;
  if (list == nullptr || !list->is_array()) return {};
  const auto layers = static_cast<int>(spec.layers.size());
  for (const json::Value& pair : list->as_array()) {
    const bool two = pair.is_array() && pair.as_array().size() == 2;
    const int layer = two ? id_at(&pair.as_array()[0]) : -1;
    const int head = two ? id_at(&pair.as_array()[1]) : -1;
    const CrossAttentionSpec* const cross =
        layer >= 0 && layer < layers
            ? spec.layers[static_cast<size_t>(layer)].find<CrossAttentionSpec>()
            : nullptr;
    if (cross == nullptr || head < 0 || head >= cross->heads)
      return invalid_argument(
          "generation_config.json: 'alignment_heads' names a head that is not in the decoder");
    model.alignment_heads.emplace_back(layer, head);
  }
  return {};
}

}  // namespace

Result<SpeechModel> read_speech_model(const Engine& engine) {
  const ModelSpec& spec = engine.model().spec();
  if (spec.encoder == nullptr || !spec.encoder->stem)
    return unsupported("this model reads no sound: speech needs a Whisper model");
  if (!engine.has_tokenizer())
    return invalid_argument("the model's folder has no tokenizer.json, which speech needs");
  SpeechModel model;
  FRESHET_ASSIGN_OR_RETURN(const json::Value generation,
                           read_optional(engine.model_path(), "generation_config.json"));
  auto tokens = read_speech_tokens(generation, engine.tokenizer());
  if (!tokens.ok()) return tokens.status().with_context("generation_config.json");
  model.tokens = std::move(*tokens);
  for (const std::vector<int32_t>* ids :
       {&model.tokens.suppressed, &model.tokens.suppressed_at_begin}) {
    for (const int32_t id : *ids) {
      if (id >= spec.vocab_size)
        return invalid_argument("generation_config.json suppresses token {}: the model has {}", id,
                                spec.vocab_size);
    }
  }
  FRESHET_ASSIGN_OR_RETURN(const json::Value config,
                           read_optional(engine.model_path(), "config.json"));
  FRESHET_RETURN_IF_ERROR(read_alignment(generation, config, spec, model));
  if (model.tokens.no_timestamps + 1 >= spec.vocab_size)
    return unsupported("the model has no timestamps");
  FRESHET_ASSIGN_OR_RETURN(model.mel, read_mel_settings(engine.model_path(), spec));
  model.window_frames = model.mel.frames();
  model.max_tokens = engine.max_model_len();
  return model;
}

}  // namespace freshet::speech
