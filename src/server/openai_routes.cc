// /v1/completions, /v1/chat/completions, /v1/models, /v1/models/NAME, /tokenize, /detokenize.
#include <utility>

#include <fmt/format.h>

#include "base/utf8.h"
#include "server/app.h"
#include "server/fields.h"

namespace freshet::server {
namespace {

void completions(App& app, App::Exchanges exchange, const json::Value& body) {
  auto parsed = parse_completion(body, app.options().limits, &app.options().sampling_defaults);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto& request = std::get<CompletionRequest>(parsed);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::vector<int32_t>> encoder_ids;
  std::vector<std::string> texts;
  for (const Prompt& prompt : request.prompts) {
    if (request.translates()) {
      auto made = app.encode_translation(prompt, request);
      if (auto* error = std::get_if<ApiError>(&made)) return send_error(exchange, *error);
      auto& translation = std::get<TranslationPrompt>(made);
      prompts.push_back(std::move(translation.prompt));
      encoder_ids.push_back(std::move(translation.encoder_ids));
    } else {
      auto ids = app.encode(prompt, request);
      if (auto* error = std::get_if<ApiError>(&ids)) return send_error(exchange, *error);
      prompts.push_back(std::get<std::vector<int32_t>>(std::move(ids)));
    }
    const auto* text = std::get_if<std::string>(&prompt);
    if (request.echo)
      texts.push_back(text != nullptr ? *text : app.engine().tokenizer().decode(prompts.back()));
  }
  auto format =
      make_completion_format(app.format_context("cmpl", request), request, std::move(texts));
  app.answer(std::move(exchange), request, request.params, std::move(prompts), std::move(format),
             {}, std::move(encoder_ids));
}

void chat_completions(App& app, App::Exchanges exchange, const json::Value& body) {
  auto parsed = parse_chat(body, app.options().limits, &app.options().sampling_defaults);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto& request = std::get<ChatRequest>(parsed);
  auto prepared = app.prepare(request);
  if (auto* error = std::get_if<ApiError>(&prepared)) return send_error(exchange, *error);
  auto& chat = std::get<App::PreparedChat>(prepared);
  FormatContext context = app.format_context("chatcmpl", request);
  context.reasoning = std::move(chat.reasoning);
  auto format = make_chat_format(std::move(context), request, app.tool_dialect());
  app.answer(std::move(exchange), request, std::move(chat.params), {std::move(chat.prompt)},
             std::move(format), std::move(chat.pictures));
}

json::Object model_json(App& app, const std::string& name) {
  json::Object m;
  m["id"] = name;
  m["object"] = "model";
  m["created"] = app.started_at();
  m["owned_by"] = "freshet";
  m["root"] = app.model_name();
  m["parent"] = nullptr;
  m["max_model_len"] = app.engine().max_model_len();
  json::Object meta;  // where llama-server has it
  meta["n_vocab"] = app.engine().tokenizer().vocab_size();
  m["meta"] = std::move(meta);
  return m;
}

void models(App& app, const App::Exchanges& exchange) {
  json::Array data;
  for (const std::string& name : app.options().served_model_names)
    data.emplace_back(model_json(app, name));
  json::Object o;
  o["object"] = "list";
  o["data"] = std::move(data);
  send_json(exchange, o);
}

constexpr std::string_view kModelsPath = "/v1/models/";

void model(App& app, const App::Exchanges& exchange) {
  const std::string name = exchange->request().path.substr(kModelsPath.size());
  if (name.empty()) return models(app, exchange);
  if (auto error = app.check_model(name)) return send_error(exchange, *error);
  send_json(exchange, model_json(app, name));
}

// The input of /tokenize: vLLM's prompt or messages, or llama-server's content.
Parsed<Prompt> text_to_tokenize(App& app, const json::Value& body, CommonRequest& common) {
  std::string text;
  Fields fields(body);
  // llama-server adds special tokens only on request; vLLM adds them by default.
  const bool llama = fields.get("content") != nullptr && fields.get("prompt") == nullptr;
  common.add_special_tokens = !llama;
  common.prompt_field = llama ? "content" : "prompt";
  fields.read("prompt", text, 64 << 20);
  if (llama) fields.read("content", text, 64 << 20);
  fields.read("add_special_tokens", common.add_special_tokens);
  fields.read("add_special", common.add_special_tokens);
  fields.read("parse_special", common.parse_special);
  if (fields.error()) return *fields.error();
  if (fields.get("messages") != nullptr) {
    auto parsed = parse_chat(body, app.options().limits);
    if (auto* error = std::get_if<ApiError>(&parsed)) return *error;
    const auto& chat = std::get<ChatRequest>(parsed);
    common.add_special_tokens = chat.add_special_tokens;
    common.prompt_field = chat.prompt_field;
    auto rendered = app.render_chat(chat);
    if (auto* error = std::get_if<ApiError>(&rendered)) return *error;
    if (chat.pictures.empty()) return Prompt(std::get<std::string>(std::move(rendered)));
    auto encoded = app.encode_chat(std::get<std::string>(rendered), chat);
    if (auto* error = std::get_if<ApiError>(&encoded)) return *error;
    return Prompt(std::get<engine::PictureText>(std::move(encoded)).ids);
  }
  if (fields.get("prompt") == nullptr && !llama)
    return bad_request("prompt", "give 'prompt' or 'messages'");
  return Prompt(std::move(text));
}

// A token's text, or its bytes if they are not valid UTF-8.
json::Value piece_json(std::string_view bytes) {
  if (find_invalid_utf8(bytes) == std::string_view::npos) return std::string(bytes);
  json::Array numbers;
  for (const char c : bytes) numbers.emplace_back(static_cast<int64_t>(static_cast<uint8_t>(c)));
  return numbers;
}

void tokenize(App& app, const App::Exchanges& exchange, const json::Value& body) {
  if (!body.is_object())
    return send_error(exchange, bad_request("", "the body must be a JSON object"));
  CommonRequest common;
  bool strings_wanted = false;
  bool pieces_wanted = false;
  Fields fields(body);
  fields.read("return_token_strs", strings_wanted);
  fields.read("with_pieces", pieces_wanted);
  if (fields.error()) return send_error(exchange, *fields.error());
  auto text = text_to_tokenize(app, body, common);
  if (auto* error = std::get_if<ApiError>(&text)) return send_error(exchange, *error);
  std::vector<int32_t> ids;
  const auto& prompt = std::get<Prompt>(text);
  if (prompt != Prompt(std::string())) {
    auto encoded = app.encode(prompt, common, /*may_be_empty=*/true);
    if (auto* error = std::get_if<ApiError>(&encoded)) return send_error(exchange, *error);
    ids = std::get<std::vector<int32_t>>(std::move(encoded));
  }
  json::Array tokens;
  json::Array strings;
  for (int32_t id : ids) {
    const std::string_view bytes = app.engine().tokenizer().token_bytes(id);
    if (pieces_wanted) {
      json::Object token;
      token["id"] = static_cast<int64_t>(id);
      token["piece"] = piece_json(bytes);
      tokens.emplace_back(std::move(token));
    } else {
      tokens.emplace_back(static_cast<int64_t>(id));
    }
    if (strings_wanted) strings.emplace_back(bytes);
  }
  json::Object o;
  o["count"] = static_cast<int64_t>(ids.size());
  o["max_model_len"] = app.engine().max_model_len();
  o["tokens"] = std::move(tokens);
  if (strings_wanted) o["token_strs"] = std::move(strings);
  send_json(exchange, o);
}

void detokenize(App& app, const App::Exchanges& exchange, const json::Value& body) {
  std::vector<int32_t> ids;
  Fields fields(body);
  if (fields.get("tokens") == nullptr)
    return send_error(exchange, bad_request("tokens", "'tokens' is missing"));
  fields.read("tokens", ids, size_t{1} << 22);
  if (fields.error()) return send_error(exchange, *fields.error());
  for (int32_t id : ids) {
    if (id >= app.engine().tokenizer().vocab_size()) {
      return send_error(
          exchange,
          bad_request("tokens", fmt::format("token id {} is outside the vocabulary", id)));
    }
  }
  const std::string text = app.engine().tokenizer().decode(ids);
  json::Object o;
  o["prompt"] = text;
  o["content"] = text;
  send_json(exchange, o);
}

}  // namespace

void add_openai_routes(App& app, std::vector<App::Route>& routes) {
  using X = App::Exchanges;
  routes.push_back({"POST", "/v1/completions", false,
                    [&app](X x, const json::Value& b) { completions(app, std::move(x), b); }});
  for (const char* path : {"/v1/chat/completions", "/chat/completions"}) {
    routes.push_back({"POST", path, false, [&app](X x, const json::Value& b) {
                        chat_completions(app, std::move(x), b);
                      }});
  }
  for (const char* path : {"/v1/models", "/models"}) {  // without /v1 as in llama-server
    routes.push_back(
        {"GET", path, false, [&app](const X& x, const json::Value&) { models(app, x); }});
  }
  routes.push_back({"GET", std::string(kModelsPath), false,
                    [&app](const X& x, const json::Value&) { model(app, x); }});
  routes.push_back({"POST", "/tokenize", false,
                    [&app](const X& x, const json::Value& b) { tokenize(app, x, b); }});
  routes.push_back({"POST", "/detokenize", false,
                    [&app](const X& x, const json::Value& b) { detokenize(app, x, b); }});
}

}  // namespace freshet::server
