// The server's application: routes over one Engine.
//
// App owns the shared state: the chat template, keys, names, metrics. handle() runs on the HTTP
// server's workers, concurrently. If keys are set, every route except open ones (/health and
// others) needs one. The routes are in <group>_routes.cc; each group adds its rows to the table.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/translation.h"
#include "freshet/engine.h"
#include "grammar/cache.h"
#include "grammar/late_matcher.h"
#include "server/answer.h"
#include "server/http_server.h"
#include "server/metrics.h"
#include "server/openai_format.h"
#include "server/openai_request.h"
#include "server/pair_template.h"
#include "server/picture_parts.h"
#include "server/slot_texts.h"
#include "tokenizer/chat_renderer.h"
#include "tokenizer/tokenizer.h"

namespace freshet::server {

struct AppOptions {
  std::vector<std::string> served_model_names;  // the first one is reported; all are accepted
  std::vector<std::string> api_keys;            // empty: no key needed
  std::vector<std::string> allowed_origins;     // CORS; "*" for any
  std::string chat_template;                    // template source; empty: the model's
  std::string tool_call_parser;                 // empty: detected from the template
  std::string reasoning_parser;                 // empty: reasoning stays in the text
  std::string slot_save_path;                   // folder of saved slots; empty: none are
  bool web_page = true;
  Pooling pooling = Pooling::kModel;  // of embeddings
  RequestLimits limits;
  json::Object sampling_defaults;  // sampling_defaults.h
  MediaOptions media;
  // Whether the access log has the requests of probes, too: /health, /metrics and others, if
  // answered with success.
  bool log_polls = false;
  // Receives one JSON line per request; called from any thread. Empty: no access log.
  std::function<void(const std::string& line)> access_log;
};

class SpeechService;

class App {
 public:
  ~App();
  // `post` runs a task on a thread that handlers do not block.
  static Result<std::unique_ptr<App>> create(Engine& engine, AppOptions options, Answer::Post post);

  void handle(std::shared_ptr<Exchange> exchange);
  // From now on, new work is refused with 503 and /ready returns 503.
  void drain() { draining_ = true; }
  // Ends what the app itself still does, before the engine is destroyed.
  void end_work();
  void post(std::function<void()> task) { post_(std::move(task)); }

  // For the routes.
  using Exchanges = std::shared_ptr<Exchange>;
  struct Route {
    std::string method;
    std::string path;   // "/x/" (but not "/") means all paths below it
    bool open = false;  // needs no key
    std::function<void(Exchanges, const json::Value& body)> run;
    bool body_optional = false;  // of POST: an empty one is null
    bool raw_body = false;       // the body is not JSON: run() reads the request's
  };
  Engine& engine() { return engine_; }
  Metrics& metrics() { return *metrics_; }
  SlotTexts& slots() { return slots_; }
  const AppOptions& options() const { return options_; }
  const std::string& model_name() const { return options_.served_model_names.front(); }
  bool draining() const { return draining_; }
  int64_t started_at() const { return started_at_; }
  const tokenizer::ChatRenderer& renderer() const { return *renderer_; }
  ToolDialect tool_dialect() const { return tool_dialect_; }
  FormatContext format_context(const char* id_prefix, const CommonRequest& request);

  // Renders a conversation with the chat template.
  Parsed<std::string> render_chat(const ChatRequest& request) const;
  struct PreparedChat {
    std::vector<int32_t> prompt;
    std::vector<engine::Picture> pictures;
    SamplingParams params;
    std::optional<ReasoningParser> reasoning;
  };
  // Renders and encodes a chat, and adds the grammar of a forced tool call.
  Parsed<PreparedChat> prepare(ChatRequest& request) const;
  // Token ids of a prompt, cut to the last truncate_prompt_tokens if requested. An empty prompt is
  // an error unless `may_be_empty`.
  Parsed<std::vector<int32_t>> encode(const Prompt& prompt, const CommonRequest& request,
                                      bool may_be_empty = false) const;
  // Token ids of a rendered chat and its pictures, which are fetched and made ready.
  Parsed<engine::PictureText> encode_chat(const std::string& text,
                                          const ChatRequest& request) const;
  // The same for an input of the routes that give vectors. Encoders keep the beginning of a text
  // that is cut, and the special tokens around it.
  Parsed<std::vector<int32_t>> encode_pooled(const Prompt& prompt,
                                             const CommonRequest& request) const;
  // Two texts, joined as the model was trained to read them. `instruction`: for its template.
  Parsed<Tokenizer::Pair> encode_pair(const std::string& first, const std::string& second,
                                      const std::string& instruction,
                                      const CommonRequest& request) const;
  const PooledHeads& heads() const { return engine_.heads(); }
  int embedding_size() const;
  // The transcriber, or why there is none.
  std::variant<SpeechService*, ApiError> speech() const;
  // An error if the model writes no text.
  std::optional<ApiError> refuse_text() const;
  // Sets the tenant for fair scheduling and the cache salt of an engine request.
  void set_tenant(const HttpRequest& from, const CommonRequest& common, Request& request) const;
  // The salt of requests with this key and their own salt.
  std::string salt_of(const HttpRequest& request, const std::string& client_salt) const {
    return cache_salt(request, client_salt);
  }
  // Checks the model name and starts the answer. `pictures`: of the one prompt. `encoder_ids`: as
  // in Answer::run().
  void answer(Exchanges exchange, const CommonRequest& request, SamplingParams params,
              std::vector<std::vector<int32_t>> prompts, std::unique_ptr<AnswerFormat> format,
              std::vector<engine::Picture> pictures = {},
              std::vector<std::vector<int32_t>> encoder_ids = {});
  // A text to translate between the request's languages.
  Parsed<TranslationPrompt> encode_translation(const Prompt& prompt,
                                               const CompletionRequest& request) const;
  // The grammar of the request's structured output or forced tool call; nullptr: none. The caller
  // adds the field to an error.
  Parsed<std::shared_ptr<const grammar::Grammar>> grammar_of(const json::Value& structured);
  std::optional<ApiError> check_model(const std::string& name) const;

 private:
  App(Engine& engine, AppOptions options, Answer::Post post);
  void find_thought_tokens();
  bool authorised(const HttpRequest& request) const;
  std::string cache_salt(const HttpRequest& request, const std::string& client_salt) const;
  size_t tokens_to_keep(const CommonRequest& request) const;         // 0: all
  size_t pooled_tokens_to_keep(const CommonRequest& request) const;  // 0: all
  Parsed<Tokenizer::Pair> encode_by_template(std::string_view first, std::string_view second,
                                             const std::string& instruction,
                                             const CommonRequest& request) const;
  void add_cors(const HttpRequest& request, Headers& headers) const;
  std::string request_id(const HttpRequest& request) const;  // the client's, or a generated one
  void log_when_done(const Exchanges& exchange);
  // The route, or nullptr; then `allowed` lists the methods of the path, if the path exists.
  const Route* find(const HttpRequest& request, std::string& allowed) const;

  Engine& engine_;
  AppOptions options_;
  std::unique_ptr<Metrics> metrics_;
  SlotTexts slots_;
  std::unique_ptr<tokenizer::ChatRenderer> renderer_;
  std::unique_ptr<PairTemplate> pair_template_;
  ToolDialect tool_dialect_ = ToolDialect::kHermes;
  std::optional<ReasoningTags> reasoning_tags_;
  bool tags_are_special_ = false;  // the tags are special tokens, which texts otherwise omit
  std::shared_ptr<const grammar::ThoughtTokens> thought_tokens_;  // if there are tags
  std::once_flag grammar_once_;
  std::unique_ptr<grammar::GrammarCache> grammars_;  // created by the first request that needs it
  std::vector<Route> routes_;
  size_t max_text_bytes_ = 0;  // longer texts cannot fit: refused before tokenisation
  const Answer::Post post_;
  std::atomic<bool> draining_{false};
  std::string secret_;  // random per process; salts are derived from it
  int64_t started_at_ = 0;
  std::string boot_id_;
  std::atomic<uint64_t> ids_{0};
  std::unique_ptr<SpeechService> speech_;
  Status speech_error_;  // why there is no speech_
};

// One function per group; see <group>_routes.cc.
void add_openai_routes(App& app, std::vector<App::Route>& routes);
void add_responses_routes(App& app, std::vector<App::Route>& routes);
void add_embedding_routes(App& app, std::vector<App::Route>& routes);
void add_audio_routes(App& app, std::vector<App::Route>& routes);
void add_score_routes(App& app, std::vector<App::Route>& routes);
void add_generate_routes(App& app, std::vector<App::Route>& routes);
void add_llama_routes(App& app, std::vector<App::Route>& routes);
void add_slot_routes(App& app, std::vector<App::Route>& routes);
void add_service_routes(App& app, std::vector<App::Route>& routes);
void add_web_routes(App& app, std::vector<App::Route>& routes);

void send_json(const App::Exchanges& exchange, const json::Value& value);
void send_error(const App::Exchanges& exchange, const ApiError& error);

}  // namespace freshet::server
