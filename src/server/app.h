// The server's application: routes over one Engine.
//
// App owns what requests share: the chat template, keys, names, metrics. handle() runs on the HTTP
// server's workers, many at once. Every route but /health and /ready needs a key when keys are set.
// What a route does is in <group>_routes.cc; each group adds its rows to the table.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "freshet/engine.h"
#include "grammar/cache.h"
#include "grammar/late_matcher.h"
#include "server/answer.h"
#include "server/http_server.h"
#include "server/metrics.h"
#include "server/openai_format.h"
#include "server/openai_request.h"
#include "tokenizer/chat_renderer.h"
#include "tokenizer/tokenizer.h"

namespace freshet::server {

struct AppOptions {
  std::vector<std::string> served_model_names;  // the first is reported; all are accepted
  std::vector<std::string> api_keys;            // empty: open
  std::vector<std::string> allowed_origins;     // CORS; "*" for any
  std::string chat_template;                    // source; empty: the model's own
  std::string tool_call_parser;                 // empty: by the template
  std::string reasoning_parser;                 // empty: thoughts stay in the text
  bool web_page = true;
  Pooling pooling = Pooling::kLast;  // of embeddings
  RequestLimits limits;
  json::Object sampling_defaults;  // sampling_defaults.h
  // Gets one JSON line a request; may be called from any thread. Empty: no access log.
  std::function<void(const std::string& line)> access_log;
};

class App {
 public:
  // `post` runs a task on a thread that handlers do not hold up.
  static Result<std::unique_ptr<App>> create(Engine& engine, AppOptions options, Answer::Post post);

  void handle(std::shared_ptr<Exchange> exchange);
  // From now on new work is refused with 503 and /ready says so.
  void drain() { draining_ = true; }
  void post(std::function<void()> task) { post_(std::move(task)); }

  // For the routes.
  using Exchanges = std::shared_ptr<Exchange>;
  struct Route {
    std::string method;
    std::string path;   // ends with '/' (and is more): all paths below it
    bool open = false;  // needs no key
    std::function<void(Exchanges, const json::Value& body)> run;
  };
  Engine& engine() { return engine_; }
  Metrics& metrics() { return *metrics_; }
  const AppOptions& options() const { return options_; }
  const std::string& model_name() const { return options_.served_model_names.front(); }
  bool draining() const { return draining_; }
  int64_t started_at() const { return started_at_; }
  const tokenizer::ChatRenderer& renderer() const { return *renderer_; }
  ToolDialect tool_dialect() const { return tool_dialect_; }
  FormatContext format_context(const char* id_prefix, const CommonRequest& request);

  // The template's text for a conversation.
  Parsed<std::string> render_chat(const ChatRequest& request) const;
  struct PreparedChat {
    std::vector<int32_t> prompt;
    SamplingParams params;
    std::optional<ReasoningParser> reasoning;
  };
  // A chat rendered and encoded, with the structure that a forced tool call asks for.
  Parsed<PreparedChat> prepare(ChatRequest& request) const;
  // Token ids of a prompt; cuts to the last truncate_prompt_tokens when asked. No ids at all are an
  // error unless they may be.
  Parsed<std::vector<int32_t>> encode(const Prompt& prompt, const CommonRequest& request,
                                      bool may_be_empty = false) const;
  int embedding_size() const;
  // Whose share of the machine and of the cache an engine request takes.
  void set_tenant(const HttpRequest& from, const CommonRequest& common, Request& request) const;
  // Checks the model's name and starts the answer.
  void answer(Exchanges exchange, const CommonRequest& request, SamplingParams params,
              std::vector<std::vector<int32_t>> prompts, std::unique_ptr<AnswerFormat> format);
  // The grammar that the request's structured output or forced tool call asks for; nullptr: none.
  // An error does not name the field yet.
  Parsed<std::shared_ptr<const grammar::Grammar>> grammar_of(const json::Value& structured);
  std::optional<ApiError> check_model(const std::string& name) const;

 private:
  App(Engine& engine, AppOptions options, Answer::Post post);
  void find_thought_tokens();
  bool authorised(const HttpRequest& request) const;
  std::string cache_salt(const HttpRequest& request, const std::string& client_salt) const;
  size_t tokens_to_keep(const CommonRequest& request) const;  // 0: all
  void add_cors(const HttpRequest& request, Headers& headers) const;
  std::string request_id(const HttpRequest& request) const;  // the client's, or one of ours
  void log_when_done(const Exchanges& exchange);
  // The route, or nullptr: `allowed` names the methods that the path has, if it is known.
  const Route* find(const HttpRequest& request, std::string& allowed) const;

  Engine& engine_;
  AppOptions options_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<tokenizer::ChatRenderer> renderer_;
  ToolDialect tool_dialect_ = ToolDialect::kHermes;
  std::optional<ReasoningTags> reasoning_tags_;
  bool tags_are_special_ = false;  // tokens, which are left out of texts otherwise
  std::shared_ptr<const grammar::ThoughtTokens> thought_tokens_;  // with tags
  std::once_flag grammar_once_;
  std::unique_ptr<grammar::GrammarCache> grammars_;  // made for the first request that needs one
  std::vector<Route> routes_;
  size_t max_text_bytes_ = 0;  // texts that are longer cannot fit: refused before tokenisation
  const Answer::Post post_;
  std::atomic<bool> draining_{false};
  std::string secret_;  // of this process: salts are derived with it
  int64_t started_at_ = 0;
  std::string boot_id_;
  std::atomic<uint64_t> ids_{0};
};

// One function a group; see <group>_routes.cc.
void add_openai_routes(App& app, std::vector<App::Route>& routes);
void add_responses_routes(App& app, std::vector<App::Route>& routes);
void add_embedding_routes(App& app, std::vector<App::Route>& routes);
void add_generate_routes(App& app, std::vector<App::Route>& routes);
void add_llama_routes(App& app, std::vector<App::Route>& routes);
void add_service_routes(App& app, std::vector<App::Route>& routes);
void add_web_routes(App& app, std::vector<App::Route>& routes);

void send_json(const App::Exchanges& exchange, const json::Value& value);
void send_error(const App::Exchanges& exchange, const ApiError& error);

}  // namespace freshet::server
