// /v1/audio/transcriptions and /v1/audio/translations: multipart/form-data as OpenAI's API has it.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "server/app.h"
#include "server/multipart.h"
#include "server/speech_service.h"
#include "speech/languages.h"
#include "tokenizer/tokenizer.h"

namespace freshet::server {
namespace {

constexpr size_t kMaxPromptBytes = 64 << 10;

// The text parts by name. Each field may be given once.
class FormFields {
 public:
  explicit FormFields(const std::vector<FormPart>& parts) : parts_(parts) {}

  const FormPart* find(std::string_view name) {
    const FormPart* found = nullptr;
    for (const FormPart& part : parts_) {
      if (part.name != name) continue;
      if (found != nullptr) fail(name, fmt::format("'{}' is given more than once", name));
      found = &part;
    }
    return found;
  }
  // The values of a list: "name[]" or "name", any number of times.
  std::vector<std::string> all(std::string_view name) const {
    std::vector<std::string> values;
    for (const FormPart& part : parts_) {
      const std::string_view given = part.name;
      if (given == name || (given.ends_with("[]") && given.substr(0, given.size() - 2) == name))
        values.emplace_back(part.content);
    }
    return values;
  }
  void read(std::string_view name, std::string& out, size_t most) {
    const FormPart* part = find(name);
    if (part == nullptr) return;
    if (part->content.size() > most)
      return fail(name, fmt::format("'{}' is longer than {} bytes", name, most));
    out = part->content;
  }
  void read(std::string_view name, bool& out) {
    const FormPart* part = find(name);
    if (part == nullptr) return;
    const std::string_view text = part->content;
    if (text != "true" && text != "false" && text != "True" && text != "False" && text != "1" &&
        text != "0")
      return fail(name, fmt::format("'{}' must be true or false", name));
    out = text == "true" || text == "True" || text == "1";
  }
  // Whether the field is there.
  bool read(std::string_view name, float& out, double least, double most) {
    const FormPart* part = find(name);
    if (part == nullptr) return false;
    const std::string_view text = part->content;
    double value = NAN;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() ||
        !(value >= least && value <= most))
      fail(name, fmt::format("'{}' must be a number from {} to {}", name, least, most));
    out = static_cast<float>(value);
    return true;
  }
  void read_seed(std::optional<uint64_t>& out) {
    const FormPart* part = find("seed");
    if (part == nullptr) return;
    const std::string_view text = part->content;
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size())
      return fail("seed", "'seed' must be an integer");
    out = static_cast<uint64_t>(value);
  }
  void fail(std::string_view name, std::string message) {
    if (!error_) error_ = bad_request(std::string(name), std::move(message));
  }
  const std::optional<ApiError>& error() const { return error_; }

 private:
  const std::vector<FormPart>& parts_;
  std::optional<ApiError> error_;
};

void read_format(FormFields& fields, SpeechRequest& request) {
  std::string format = "json";
  fields.read("response_format", format, 64);
  if (format == "json")
    request.format = SpeechFormat::kJson;
  else if (format == "text")
    request.format = SpeechFormat::kText;
  else if (format == "verbose_json")
    request.format = SpeechFormat::kVerbose;
  else if (format == "srt")
    request.format = SpeechFormat::kSrt;
  else if (format == "vtt")
    request.format = SpeechFormat::kVtt;
  else
    fields.fail("response_format",
                "'response_format' must be json, text, verbose_json, srt or vtt");
  const bool plain = request.format == SpeechFormat::kJson || request.format == SpeechFormat::kText;
  request.options.timestamps = !plain;
  fields.read("stream", request.stream);
  if (request.stream && !plain)
    fields.fail("stream", "'stream' goes with the response formats json and text only");
}

void read_granularities(FormFields& fields, const speech::SpeechModel& model,
                        SpeechRequest& request) {
  constexpr const char* kField = "timestamp_granularities";
  const std::vector<std::string> asked = fields.all(kField);
  for (const std::string& one : asked) {
    request.options.words = request.options.words || one == "word";
    if (one != "word" && one != "segment")
      fields.fail(kField, "'timestamp_granularities' must be word or segment");
  }
  if (!asked.empty() && request.format != SpeechFormat::kVerbose) {
    fields.fail(kField, "'timestamp_granularities' needs the response_format verbose_json");
  }
  if (request.options.words && model.alignment_heads.empty()) {
    fields.fail(kField,
                "'timestamp_granularities': the model's generation_config.json has no "
                "alignment_heads, which times of words need");
  }
  request.segments = asked.empty() || std::ranges::find(asked, "segment") != asked.end();
}

void read_language(FormFields& fields, const speech::SpeechModel& model, SpeechRequest& request) {
  std::string language;
  fields.read("language", language, 64);
  const speech::SpeechTokens& t = model.tokens;
  if (language.empty()) return;
  const std::string code(speech::language_code(language));
  const bool known = t.languages.empty() ? code == "en" : t.language(code) >= 0;
  if (code.empty() || !known) {
    return fields.fail(
        "language",
        fmt::format(
            "'language': this model does not know '{}'{}", language.substr(0, 32),
            t.languages.empty() ? ": it is for English alone" : ": give a code such as en or de"));
  }
  request.options.language = code;
}

// At temperature 0 windows are made again by default, as in OpenAI's API; not where their words are
// sent as they are written.
void read_retries(FormFields& fields, SpeechRequest& request) {
  speech::TranscribeOptions& options = request.options;
  speech::RetryOptions retries;
  fields.read("temperature", options.temperature, 0, 1);
  bool asked =
      fields.read("temperature_increment_on_fallback", retries.temperature_increment, 0, 1);
  if (retries.temperature_increment != 0.0f &&
      retries.temperature_increment < speech::kLeastIncrement)
    fields.fail("temperature_increment_on_fallback",
                "'temperature_increment_on_fallback' must be 0 or from 0.05 to 1");
  asked |= fields.read("compression_ratio_threshold", retries.compression_ratio, 0, 1000);
  asked |= fields.read("logprob_threshold", retries.logprob, -1000, 0);
  asked |= fields.read("no_speech_threshold", retries.no_speech, 0, 1);
  fields.read("condition_on_previous_text", options.condition_on_previous_text);
  if (request.stream && asked) {
    fields.fail("stream",
                "'stream' sends words as they are written, so windows are not made again: leave "
                "out the thresholds");
  }
  if (asked || (options.temperature == 0.0f && !request.stream)) options.retries = retries;
}

// Fields that are known, and would change the answer.
void refuse_others(FormFields& fields) {
  for (const char* name :
       {"include", "known_speaker_names", "known_speaker_references", "hotwords", "to_language"}) {
    if (!fields.all(name).empty()) fields.fail(name, fmt::format("'{}' is not supported", name));
  }
  std::string chunking;
  fields.read("chunking_strategy", chunking, 4096);
  if (!chunking.empty() && chunking != "auto")
    fields.fail("chunking_strategy", "'chunking_strategy' must be auto or left out");
}

void transcribe(App& app, App::Exchanges exchange, bool translate) {
  const auto service = app.speech();
  if (auto* error = std::get_if<ApiError>(&service)) return send_error(exchange, *error);
  SpeechService& speech = *std::get<SpeechService*>(service);
  const HttpRequest& http = exchange->request();
  auto form = parse_form(http.header("content-type"), http.body);
  if (auto* error = std::get_if<ApiError>(&form)) return send_error(exchange, *error);
  FormFields fields(std::get<std::vector<FormPart>>(form));
  SpeechRequest request;
  request.options.translate = translate;
  fields.read("model", request.model, 1024);
  read_format(fields, request);
  read_granularities(fields, speech.model(), request);
  read_language(fields, speech.model(), request);
  read_retries(fields, request);
  fields.read_seed(request.options.seed);
  std::string prompt;
  fields.read("prompt", prompt, kMaxPromptBytes);
  refuse_others(fields);
  const FormPart* file = fields.find("file");
  if (file == nullptr || file->content.empty())
    fields.fail("file", "'file' is missing: send a WAV or FLAC file as a part of this name");
  if (file != nullptr && file->content.size() > kMaxSoundBytes)
    fields.fail("file", fmt::format("'file' is larger than {} MiB", kMaxSoundBytes >> 20));
  if (translate && speech.model().tokens.translate < 0)
    fields.fail("model", "this model does not translate: it is for English alone");
  if (fields.error()) return send_error(exchange, *fields.error());
  if (auto error = app.check_model(request.model)) return send_error(exchange, *error);
  if (app.draining()) return send_error(exchange, {503, "the server is shutting down", ""});
  request.options.cache_salt = app.salt_of(http, "");
  request.options.prompt = prompt_tokens(speech.model(), app.engine().tokenizer(), prompt);
  const std::string_view sound = file->content;
  speech.start(std::move(exchange), std::move(request), sound);
}

}  // namespace

void add_audio_routes(App& app, std::vector<App::Route>& routes) {
  for (const bool translate : {false, true}) {
    App::Route route;
    route.method = "POST";
    route.path = translate ? "/v1/audio/translations" : "/v1/audio/transcriptions";
    route.raw_body = true;
    route.run = [&app, translate](App::Exchanges x, const json::Value&) {
      transcribe(app, std::move(x), translate);
    };
    routes.push_back(std::move(route));
  }
}

}  // namespace freshet::server
