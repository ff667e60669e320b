// App: chats, from their messages to token ids and pictures.
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "server/app.h"

namespace freshet::server {

Parsed<std::string> App::render_chat(const ChatRequest& request) const {
  if (renderer_->empty()) {
    return bad_request(
        "messages",
        "this model has no chat template: use /v1/completions, or start with --chat-template");
  }
  const std::string marker =
      engine_.pictures() != nullptr ? engine_.pictures()->settings.marker : "";
  auto text = renderer_->render({.messages = request.messages,
                                 .tools = request.tools,
                                 .variables = request.template_kwargs,
                                 .add_generation_prompt = request.add_generation_prompt,
                                 .continue_final_message = request.continue_final_message,
                                 .picture_marker = marker});
  if (!text.ok()) {
    return bad_request("messages",
                       "the chat template refuses these messages: " + text.status().message());
  }
  return std::move(text).value();
}

Parsed<App::PreparedChat> App::prepare(ChatRequest& request) const {
  if (auto error = refuse_text()) return *error;
  const bool forced = request.tool_choice == ChatRequest::ToolChoice::kRequired ||
                      request.tool_choice == ChatRequest::ToolChoice::kNamed;
  if (forced && !request.structured.is_null()) {
    return bad_request("tool_choice", fmt::format("a forced tool call cannot be combined with {}",
                                                  request.structure_field));
  }
  if (forced) {
    request.structured = forced_call(tool_dialect_, request.tools, request.tool_name);
    request.structure_field = "tools";
  }
  auto text = render_chat(request);
  if (auto* error = std::get_if<ApiError>(&text)) return *error;
  std::optional<ReasoningParser> reasoning;
  if (reasoning_tags_) {
    std::string_view before = std::get<std::string>(text);
    // A continued message starts inside the reasoning that it begins with, or else after it.
    const std::string begun =
        request.continue_final_message
            ? tokenizer::text_of_content(request.messages.back().find("content"))
            : "";
    if (!begun.empty()) {
      const size_t open = begun.find(reasoning_tags_->open);
      const bool thinks = open != std::string::npos && begun.find_first_not_of(" \t\r\n") == open &&
                          begun.find(reasoning_tags_->close) == std::string::npos;
      before = thinks ? reasoning_tags_->open : reasoning_tags_->close;
    }
    reasoning.emplace(*reasoning_tags_, before);
  }
  auto encoded = encode_chat(std::get<std::string>(text), request);
  if (auto* error = std::get_if<ApiError>(&encoded)) return *error;
  auto& tokens = std::get<engine::PictureText>(encoded);
  PreparedChat chat{std::move(tokens.ids), std::move(tokens.pictures), request.params,
                    std::move(reasoning)};
  if (!request.max_tokens_given) {
    chat.params.max_tokens =
        std::max(1, engine_.max_model_len() - static_cast<int>(chat.prompt.size()));
  }
  // Llama's and Mistral's calls begin with special tokens, which the parser must see.
  if (!request.tools.is_null() && tool_dialect_ != ToolDialect::kHermes)
    chat.params.skip_special_tokens = false;
  if (chat.reasoning && tags_are_special_) chat.params.skip_special_tokens = false;
  if (chat.reasoning && !chat.reasoning->answers()) {
    chat.params.thought = thought_tokens_;
    chat.params.in_thought = chat.reasoning->inside();
  }
  return chat;
}

Parsed<engine::PictureText> App::encode_chat(const std::string& text,
                                             const ChatRequest& request) const {
  engine::PictureText out;
  if (request.pictures.empty()) {
    auto ids = encode(text, request);
    if (auto* error = std::get_if<ApiError>(&ids)) return *error;
    out.ids = std::get<std::vector<int32_t>>(std::move(ids));
    return out;
  }
  const PictureReading& reading = *engine_.pictures();
  if (text.size() > max_text_bytes_) {
    return bad_request(request.prompt_field,
                       fmt::format("the prompt has {} bytes: more than {} tokens can hold",
                                   text.size(), engine_.max_model_len()));
  }
  auto pictures = read_pictures(request.pictures, reading, options_.media, engine_.max_model_len(),
                                request.prompt_field);
  if (auto* error = std::get_if<ApiError>(&pictures)) return *error;
  tokenizer::EncodeOptions options;
  options.add_special = request.add_special_tokens;
  auto expanded = engine::expand_pictures(text, std::get<std::vector<engine::Picture>>(pictures),
                                          reading, engine_.tokenizer(), options);
  if (!expanded.ok()) return bad_request(request.prompt_field, expanded.status().message());
  out = *std::move(expanded);
  if (const size_t keep = tokens_to_keep(request); keep > 0 && out.ids.size() > keep) {
    return bad_request("truncate_prompt_tokens",
                       fmt::format("the prompt has {} tokens, and one with pictures is not cut to "
                                   "{}: send fewer or smaller pictures",
                                   out.ids.size(), keep));
  }
  return out;
}

}  // namespace freshet::server
