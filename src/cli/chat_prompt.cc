#include "cli/chat_prompt.h"

#include <utility>

#include "base/mapped_file.h"

namespace freshet::cli {
namespace {

constexpr size_t kMaxTemplate = size_t{1} << 20;

Result<std::string> read_template(const std::string& file) {
  if (file.empty()) return std::string();
  FRESHET_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::open(file));
  if (mapped.bytes().size() > kMaxTemplate)
    return invalid_argument("{}: too large for a chat template", file);
  return std::string(mapped.bytes().begin(), mapped.bytes().end());
}

}  // namespace

json::Value message(std::string_view role, std::string_view content) {
  json::Object m;
  m["role"] = role;
  m["content"] = content;
  return m;
}

Result<std::optional<ChatPrompt>> ChatPrompt::find(const tokenizer::Tokenizer& tokenizer,
                                                   const std::string& template_file) {
  FRESHET_ASSIGN_OR_RETURN(const std::string source, read_template(template_file));
  auto renderer = tokenizer::ChatRenderer::make(tokenizer, source);
  if (!renderer.ok()) return renderer.status().with_context("chat template");
  std::optional<ChatPrompt> prompt;
  if (!renderer->empty()) prompt = ChatPrompt(tokenizer, std::move(renderer).value());
  return prompt;
}

Result<ChatPrompt> ChatPrompt::make(const tokenizer::Tokenizer& tokenizer,
                                    const std::string& template_file) {
  FRESHET_ASSIGN_OR_RETURN(std::optional<ChatPrompt> prompt, find(tokenizer, template_file));
  if (!prompt) {
    return invalid_argument(
        "this model has no chat template: it continues text (freshet run), or give "
        "--chat-template FILE");
  }
  return *std::move(prompt);
}

Result<std::string> ChatPrompt::render(const json::Array& messages,
                                       const json::Object& extra) const {
  auto text = renderer_.render({.messages = messages, .variables = extra});
  if (!text.ok()) return text.status().with_context("chat template");
  return text;
}

Result<std::vector<int32_t>> ChatPrompt::encode(const json::Array& messages) const {
  FRESHET_ASSIGN_OR_RETURN(const std::string text, render(messages));
  return encode_text(text);
}

std::vector<int32_t> ChatPrompt::encode_text(const std::string& text) const {
  // The template itself writes the special tokens.
  return tokenizer_->encode(text, {.add_special = false});
}

}  // namespace freshet::cli
