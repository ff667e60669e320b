#include "server/app.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <utility>

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include "base/json.h"
#include "base/utc_time.h"
#include "layers/model.h"
#include "layers/pooled_head.h"
#include "server/bad_words.h"
#include "server/speech_service.h"

namespace freshet::server {
namespace {

constexpr size_t kAlwaysTokenised = size_t{1} << 20;  // some vocabularies drop white space
constexpr size_t kGrammarCacheBytes = size_t{256} << 20;

std::string sha256_hex(std::string_view data) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  FRESHET_CHECK(EVP_Digest(data.data(), data.size(), digest, &size, EVP_sha256(), nullptr) == 1);
  std::string out;
  for (unsigned i = 0; i < size; ++i) out += fmt::format("{:02x}", digest[i]);
  return out;
}

std::string random_hex(size_t bytes) {
  std::string raw(bytes, '\0');
  FRESHET_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(raw.data()), static_cast<int>(bytes)) ==
                1);
  std::string out;
  for (unsigned char c : raw) out += fmt::format("{:02x}", c);
  return out;
}

std::string_view bearer(const HttpRequest& request) {
  std::string_view value = request.header("authorization");
  // RFC 9110: the scheme in any case, then one or more spaces.
  constexpr std::string_view kScheme = "bearer ";
  const bool named = value.size() > kScheme.size() &&
                     std::equal(kScheme.begin(), kScheme.end(), value.begin(), [](char a, char b) {
                       return a == std::tolower(static_cast<unsigned char>(b));
                     });
  if (!named) return request.header("x-api-key");
  return value.substr(std::min(value.find_first_not_of(' ', kScheme.size()), value.size()));
}

// Equal in constant time for equal lengths.
bool same_secret(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

// Routes that monitoring and the chat page ask again and again.
bool is_poll(std::string_view path) {
  for (const char* poll : {"/health", "/ping", "/ready", "/metrics", "/v1/metrics"}) {
    if (path == poll) return true;
  }
  return false;
}

// For metric labels: clients must not be able to create new ones.
std::string known_method(const std::string& method) {
  for (const char* known : {"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"}) {
    if (method == known) return method;
  }
  return "other";
}

}  // namespace

void send_json(const App::Exchanges& exchange, const json::Value& value) {
  HttpResponse response;
  response.body = json::write(value);
  exchange->send(std::move(response));
}

void send_error(const App::Exchanges& exchange, const ApiError& error) {
  exchange->send(to_response(error));
}

App::App(Engine& engine, AppOptions options, Answer::Post post)
    : engine_(engine), options_(std::move(options)), post_(std::move(post)) {
  if (engine_.pictures() != nullptr)
    options_.limits.max_pictures = options_.media.policy.pictures_per_request;
  if (options_.served_model_names.empty()) options_.served_model_names.emplace_back("default");
  metrics_ = std::make_unique<Metrics>(model_name(), engine_.max_model_len(), engine_.max_drafts(),
                                       engine_.cache_info(), [this] { return engine_.stats(); });
  // Salts must stay the same while a folder keeps what was cached under them.
  secret_ = engine_.cache_secret();
  if (secret_.empty()) secret_ = random_hex(32);
  boot_id_ = random_hex(6);
  started_at_ = std::chrono::duration_cast<std::chrono::seconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count();
}

App::~App() = default;

void App::end_work() {
  if (speech_ != nullptr) speech_->end();
}

std::variant<SpeechService*, ApiError> App::speech() const {
  if (speech_ != nullptr) return speech_.get();
  return bad_request("model", speech_error_.message());
}

Result<std::unique_ptr<App>> App::create(Engine& engine, AppOptions options, Answer::Post post) {
  auto app = std::unique_ptr<App>(new App(engine, std::move(options), std::move(post)));
  auto renderer = tokenizer::ChatRenderer::make(engine.tokenizer(), app->options_.chat_template);
  if (!renderer.ok()) return renderer.status().with_context("chat template");
  app->renderer_ = std::make_unique<tokenizer::ChatRenderer>(std::move(renderer).value());
  app->pair_template_ =
      std::make_unique<PairTemplate>(engine.tokenizer(), *app->renderer_, engine.heads());
  app->tool_dialect_ = tool_dialect_of_template(app->renderer_->source(true));
  if (!app->options_.tool_call_parser.empty()) {
    const auto dialect = tool_dialect_by_name(app->options_.tool_call_parser);
    if (!dialect) {
      return invalid_argument("--tool-call-parser {}: must be hermes, llama3_json or mistral",
                              app->options_.tool_call_parser);
    }
    app->tool_dialect_ = *dialect;
  }
  if (!app->options_.reasoning_parser.empty()) {
    app->reasoning_tags_ = reasoning_tags_by_name(app->options_.reasoning_parser);
    if (!app->reasoning_tags_) {
      return invalid_argument("--reasoning-parser {}: must be one of {}",
                              app->options_.reasoning_parser, reasoning_parser_names());
    }
  }
  size_t longest = 1;
  for (int32_t id = 0; id < engine.tokenizer().vocab_size(); ++id) {
    const std::string_view bytes = engine.tokenizer().token_bytes(id);
    longest = std::max(longest, bytes.size());
    if (app->reasoning_tags_ && bytes == app->reasoning_tags_->close)
      app->tags_are_special_ = engine.tokenizer().is_special(id);
  }
  if (app->reasoning_tags_) app->find_thought_tokens();
  app->max_text_bytes_ =
      std::max(kAlwaysTokenised, longest * static_cast<size_t>(engine.max_model_len()));
  if (auto model = speech::read_speech_model(engine); model.ok()) {
    app->speech_ = std::make_unique<SpeechService>(*app, std::move(*model));
  } else {
    app->speech_error_ = model.status();
  }
  add_service_routes(*app, app->routes_);
  add_openai_routes(*app, app->routes_);
  add_responses_routes(*app, app->routes_);
  add_embedding_routes(*app, app->routes_);
  add_score_routes(*app, app->routes_);
  add_audio_routes(*app, app->routes_);
  add_generate_routes(*app, app->routes_);
  add_llama_routes(*app, app->routes_);
  add_slot_routes(*app, app->routes_);
  add_web_routes(*app, app->routes_);
  return app;
}

bool App::authorised(const HttpRequest& request) const {
  if (options_.api_keys.empty()) return true;
  const std::string_view given = bearer(request);
  bool found = false;
  for (const std::string& key : options_.api_keys) found |= same_secret(key, given);
  return found;
}

std::string App::cache_salt(const HttpRequest& request, const std::string& client_salt) const {
  if (options_.api_keys.empty() && client_salt.empty()) return {};
  return sha256_hex(fmt::format("{}\n{}\n{}", secret_,
                                options_.api_keys.empty() ? "" : bearer(request), client_salt));
}

void App::add_cors(const HttpRequest& request, Headers& headers) const {
  const std::string_view origin = request.header("origin");
  if (origin.empty()) return;
  for (const std::string& allowed : options_.allowed_origins) {
    if (allowed != "*" && allowed != origin) continue;
    headers.emplace_back("Access-Control-Allow-Origin", std::string(allowed == "*" ? "*" : origin));
    headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    // Allow all headers that the page asks for: clients add their own (X-Stainless-...).
    const std::string_view wanted = request.header("access-control-request-headers");
    if (!wanted.empty()) headers.emplace_back("Access-Control-Allow-Headers", std::string(wanted));
    headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
    headers.emplace_back("Vary", "Origin");
    return;
  }
}

std::string App::request_id(const HttpRequest& r) const {
  const std::string_view given = r.header("x-request-id");
  return given.empty() ? fmt::format("{}-{}", boot_id_, r.number)
                       : std::string(given.substr(0, 256));
}

void App::log_when_done(const Exchanges& exchange) {
  const HttpRequest& r = exchange->request();
  json::Object line;
  line["time"] = utc_now();
  line["id"] = request_id(r);
  line["remote"] = r.remote;
  line["method"] = r.method.substr(0, 32);
  line["path"] =
      r.path.substr(0, 384);  // up to six bytes each when escaped: a line stays below 4 KiB
  if (!r.header("traceparent").empty())
    line["traceparent"] = std::string(r.header("traceparent").substr(0, 64));
  line["bytes_in"] = static_cast<int64_t>(r.body.size());
  std::string allowed;
  const Route* route = find(r, allowed);
  const std::string handler = route != nullptr ? route->path : "unknown";
  exchange->on_complete([this, line = std::move(line), handler, method = known_method(r.method),
                         begin = Clock::now()](int status, size_t bytes) mutable {
    const double seconds = seconds_between(begin, Clock::now());
    metrics_->http_request(handler, method, status, seconds);
    if (!options_.access_log) return;
    if (!options_.log_polls && status < 400 && is_poll(handler)) return;
    line["status"] = status;
    line["bytes_out"] = static_cast<int64_t>(bytes);
    line["ms"] = static_cast<double>(static_cast<int64_t>(seconds * 1e6)) / 1e3;
    options_.access_log(json::write(line));
  });
}

const App::Route* App::find(const HttpRequest& request, std::string& allowed) const {
  const std::string& method = request.method == "HEAD" ? "GET" : request.method;
  for (const Route& route : routes_) {
    const bool below =
        route.path.size() > 1 && route.path.ends_with('/') && request.path.starts_with(route.path);
    if (!below && route.path != request.path) continue;
    if (route.method == method) return &route;
    allowed += (allowed.empty() ? "" : ", ") + route.method;
    if (route.method == "GET") allowed += ", HEAD";
  }
  return nullptr;
}

namespace {

// Adds the common headers to the route's response.
class DecoratedExchange final : public Exchange {
 public:
  DecoratedExchange(std::shared_ptr<Exchange> inner, Headers headers)
      : inner_(std::move(inner)), headers_(std::move(headers)) {}
  const HttpRequest& request() const override { return inner_->request(); }
  void send(HttpResponse r) override { inner_->send(decorate(std::move(r))); }
  void start(HttpResponse r) override { inner_->start(decorate(std::move(r))); }
  void write(std::string piece) override { inner_->write(std::move(piece)); }
  void finish() override { inner_->finish(); }
  void on_gone(std::function<void()> callback) override { inner_->on_gone(std::move(callback)); }
  bool gone() const override { return inner_->gone(); }
  void on_complete(std::function<void(int, size_t)> callback) override {
    inner_->on_complete(std::move(callback));
  }

 private:
  HttpResponse decorate(HttpResponse r) const {
    r.headers.insert(r.headers.end(), headers_.begin(), headers_.end());
    return r;
  }
  const std::shared_ptr<Exchange> inner_;
  const Headers headers_;
};

}  // namespace

void App::handle(std::shared_ptr<Exchange> raw) {
  const HttpRequest& request = raw->request();
  Headers headers;
  add_cors(request, headers);
  headers.emplace_back("X-Request-Id", request_id(request));
  auto exchange = std::make_shared<DecoratedExchange>(std::move(raw), std::move(headers));
  log_when_done(exchange);
  if (request.method == "OPTIONS") return exchange->send({204, {}, "", ""});
  std::string allowed;
  const Route* route = find(request, allowed);
  if ((route == nullptr || !route->open) && !authorised(request)) {
    return send_error(exchange,
                      {401, "a valid API key is needed: send 'Authorization: Bearer <key>'", ""});
  }
  if (route == nullptr) {
    if (allowed.empty())
      return send_error(exchange, {404, fmt::format("there is no {}", request.path), ""});
    HttpResponse refusal =
        to_response({405, fmt::format("{} does not answer {}", request.path, request.method), ""});
    refusal.headers.emplace_back("Allow", allowed + ", OPTIONS");
    return exchange->send(std::move(refusal));
  }
  json::Value body;
  if (route->method == "POST" && !route->raw_body &&
      !(route->body_optional && request.body.empty())) {
    json::ParseLimits limits;
    limits.depth = 64;
    auto parsed = json::parse(request.body, limits);
    if (!parsed.ok()) {
      return send_error(
          exchange, bad_request("", "the body is not valid JSON: " + parsed.status().message()));
    }
    body = std::move(parsed).value();
  }
  route->run(exchange, body);
}

FormatContext App::format_context(const char* id_prefix, const CommonRequest& request) {
  FormatContext c;
  c.id = request.request_id.empty() ? fmt::format("{}-{}{:08x}", id_prefix, boot_id_, ++ids_)
                                    : fmt::format("{}-{}", id_prefix, request.request_id);
  c.model = request.model.empty() ? model_name() : request.model;
  c.created = std::chrono::duration_cast<std::chrono::seconds>(
                  std::chrono::system_clock::now().time_since_epoch())
                  .count();
  c.token_bytes = [this](int32_t t) { return std::string(engine_.tokenizer().token_bytes(t)); };
  c.text_bytes = [this, skips = request.params.skip_special_tokens](int32_t t) {
    const Tokenizer& tokenizer = engine_.tokenizer();
    return skips && tokenizer.is_special(t) ? std::string() : std::string(tokenizer.token_bytes(t));
  };
  return c;
}

// Finds the tokens of the reasoning tags. Special tokens that are hidden in texts count as empty.
void App::find_thought_tokens() {
  const Tokenizer& tokenizer = engine_.tokenizer();
  std::vector<std::string> tokens(static_cast<size_t>(tokenizer.vocab_size()));
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (tags_are_special_ || !tokenizer.is_special(id))
      tokens[static_cast<size_t>(id)] = tokenizer.token_bytes(id);
  }
  thought_tokens_ = std::make_shared<grammar::ThoughtTokens>(
      std::string(reasoning_tags_->open), std::string(reasoning_tags_->close), std::move(tokens));
}

int App::embedding_size() const {
  return options_.pooling == Pooling::kModel ? heads().embedding.size
                                             : engine_.model().spec().hidden_size;
}

std::optional<ApiError> App::refuse_text() const {
  if (engine_.model().spec().generates) return std::nullopt;
  const bool scores = heads().classifier.has_value();
  return bad_request("model", fmt::format("this model writes no text: it gives {}",
                                          scores ? "scores (/v1/score, /v1/rerank, /classify)"
                                                 : "embeddings (/v1/embeddings, /v1/score)"));
}

void App::set_tenant(const HttpRequest& from, const CommonRequest& common, Request& request) const {
  request.tenant = cache_salt(from, {});
  request.cache_salt = cache_salt(from, common.cache_salt);
}

size_t App::tokens_to_keep(const CommonRequest& request) const {
  if (request.truncate_prompt_tokens >= 0)
    return static_cast<size_t>(request.truncate_prompt_tokens);
  const int longest = engine_.max_model_len();
  const int wanted = request.max_tokens_given ? request.params.max_tokens : 1;
  return static_cast<size_t>(longest - (wanted < longest ? wanted : 1));
}

Parsed<std::vector<int32_t>> App::encode(const Prompt& prompt, const CommonRequest& request,
                                         bool may_be_empty) const {
  std::vector<int32_t> ids;
  if (const auto* text = std::get_if<std::string>(&prompt)) {
    std::string_view kept = *text;
    if (kept.size() > max_text_bytes_ && request.truncate_prompt_tokens != 0) {
      kept.remove_prefix(kept.size() - max_text_bytes_);  // only the end is kept
    } else if (kept.size() > max_text_bytes_) {
      return bad_request(request.prompt_field,
                         fmt::format("the prompt has {} bytes: more than {} tokens can hold",
                                     kept.size(), engine_.max_model_len()));
    }
    tokenizer::EncodeOptions options;
    options.add_special = request.add_special_tokens;
    options.parse_special = request.parse_special;
    ids = engine_.tokenizer().encode(kept, options);
  } else {
    ids = std::get<std::vector<int32_t>>(prompt);
  }
  const size_t keep = tokens_to_keep(request);
  if (keep > 0 && ids.size() > keep)
    ids.erase(ids.begin(), ids.end() - static_cast<std::ptrdiff_t>(keep));
  if (ids.empty() && !may_be_empty)
    return bad_request(request.prompt_field, "the prompt has no tokens");
  return ids;
}

Parsed<TranslationPrompt> App::encode_translation(const Prompt& prompt,
                                                  const CompletionRequest& request) const {
  const char* const field = request.source_language.empty() ? "target_language" : "source_language";
  const ModelSpec& spec = engine_.model().spec();
  if (spec.encoder == nullptr || spec.encoder->stem)
    return bad_request(field,
                       fmt::format("'{}' is for models that translate: leave it out", field));
  const auto* const text = std::get_if<std::string>(&prompt);
  if (text == nullptr)
    return bad_request(field, fmt::format("'{}' needs a prompt that is a text", field));
  if (text->size() > max_text_bytes_ || request.truncate_prompt_tokens != 0)
    return bad_request(request.prompt_field, "a text to translate is not cut: send less of it");
  const auto made = [&](const std::string& source, const std::string& target) {
    return translation_prompt(engine_.tokenizer(), engine_.decoder_start(), *text, source, target);
  };
  // One after the other, so that an error names the field.
  if (auto first = made(request.source_language, ""); !first.ok())
    return bad_request("source_language", first.status().message());
  auto both = made(request.source_language, request.target_language);
  if (!both.ok()) return bad_request("target_language", both.status().message());
  return std::move(both).value();
}

size_t App::pooled_tokens_to_keep(const CommonRequest& request) const {
  if (request.truncate_prompt_tokens >= 0)
    return static_cast<size_t>(request.truncate_prompt_tokens);
  return static_cast<size_t>(engine_.max_model_len());
}

Parsed<std::vector<int32_t>> App::encode_pooled(const Prompt& prompt,
                                                const CommonRequest& request) const {
  const size_t keep = pooled_tokens_to_keep(request);
  const bool whole = reads_both_ways(engine_.model().spec());
  if (!whole || keep == 0) return encode(prompt, request);
  if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) {
    return std::vector<int32_t>(
        ids->begin(), ids->begin() + static_cast<std::ptrdiff_t>(std::min(keep, ids->size())));
  }
  std::string_view text = std::get<std::string>(prompt);
  text = text.substr(0, max_text_bytes_);
  tokenizer::EncodeOptions options;
  options.add_special = request.add_special_tokens;
  options.parse_special = request.parse_special;
  auto ids = engine_.tokenizer().encode_up_to(text, keep, options);
  if (ids.empty()) return bad_request(request.prompt_field, "the prompt has no tokens");
  return ids;
}

Parsed<std::shared_ptr<const grammar::Grammar>> App::grammar_of(const json::Value& structured) {
  if (structured.is_null()) return std::shared_ptr<const grammar::Grammar>();
  std::call_once(grammar_once_, [this] {
    const Tokenizer& tokenizer = engine_.tokenizer();
    std::vector<std::string> tokens(static_cast<size_t>(tokenizer.vocab_size()));
    for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
      if (!tokenizer.is_special(id)) tokens[static_cast<size_t>(id)] = tokenizer.token_bytes(id);
    }
    grammars_ = std::make_unique<grammar::GrammarCache>(
        std::make_shared<grammar::TokenTrie>(tokens), kGrammarCacheBytes);
  });
  auto compiled = grammars_->get(structured);
  if (!compiled.ok()) return bad_request("", compiled.status().message());
  return std::move(compiled).value();
}

std::optional<ApiError> App::check_model(const std::string& name) const {
  if (name.empty()) return std::nullopt;
  for (const std::string& served : options_.served_model_names) {
    if (served == name) return std::nullopt;
  }
  return ApiError{
      404, fmt::format("the model '{}' does not exist here; '{}' is served", name, model_name()),
      "model"};
}

void App::answer(Exchanges exchange, const CommonRequest& request, SamplingParams params,
                 std::vector<std::vector<int32_t>> prompts, std::unique_ptr<AnswerFormat> format,
                 std::vector<engine::Picture> pictures,
                 std::vector<std::vector<int32_t>> encoder_ids) {
  if (auto error = check_model(request.model)) return send_error(exchange, *error);
  if (draining_) return send_error(exchange, {503, "the server is shutting down", ""});
  if (auto error = refuse_text()) return send_error(exchange, *error);
  auto grammar = grammar_of(request.structured);
  if (auto* error = std::get_if<ApiError>(&grammar)) {
    error->param = request.structure_field;
    return send_error(exchange, *error);
  }
  params.grammar = std::get<std::shared_ptr<const grammar::Grammar>>(std::move(grammar));
  for (const std::string& word : request.bad_words) {
    const auto sequences = sequences_of(engine_.tokenizer(), word);
    if (sequences.empty())
      return send_error(exchange, bad_request("bad_words", "'bad_words' has a word of no tokens"));
    params.bad_words.insert(params.bad_words.end(), sequences.begin(), sequences.end());
  }
  Request probe;
  probe.params = params;
  probe.pictures = pictures;
  probe.kv_eviction = request.kv_eviction;
  probe.sparse_attention = request.sparse_attention;
  for (size_t i = 0; i < prompts.size(); ++i) {  // check all before submitting any
    probe.prompt.swap(prompts[i]);
    if (!encoder_ids.empty()) probe.encoder_ids = encoder_ids[i];
    const auto error = engine_.check(probe);
    probe.prompt.swap(prompts[i]);
    if (!error) continue;
    return send_error(exchange, bad_request(name_of_field(request, error->field), error->message));
  }
  Answer::Options options;
  options.stream = request.stream;
  options.n = params.n;
  options.priority = request.priority;
  options.request_id = request.request_id;
  options.tenant = cache_salt(exchange->request(), {});
  options.cache_salt = cache_salt(exchange->request(), request.cache_salt);
  options.kv_eviction = request.kv_eviction;
  options.sparse_attention = request.sparse_attention;
  options.timeout_s = request.timeout_s;
  options.max_predict_s = request.max_predict_s;
  if (!options_.slot_save_path.empty()) {
    options.ended = [this, slot = request.id_slot, salt = options.cache_salt](
                        std::vector<int32_t> tokens) { slots_.set(slot, std::move(tokens), salt); };
  }
  auto answer = std::make_shared<Answer>(std::move(exchange), engine_, *metrics_, post_,
                                         std::move(format), std::move(options));
  answer->run(std::move(prompts), params, std::move(pictures), std::move(encoder_ids));
}

}  // namespace freshet::server
