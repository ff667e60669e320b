#include "cli/chat_prompt.h"

#include <utility>

#include "base/mapped_file.h"

namespace freshet::cli {
namespace {

constexpr size_t kMaxTemplate = size_t{1} << 20;

Result<std::string> template_source(const tokenizer::Tokenizer& tokenizer,
                                    const std::string& file) {
  if (!file.empty()) {
    FRESHET_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::open(file));
    if (mapped.bytes().size() > kMaxTemplate)
      return invalid_argument("{}: too large for a chat template", file);
    return std::string(mapped.bytes().begin(), mapped.bytes().end());
  }
  if (!tokenizer.chat_template())
    return invalid_argument(
        "this model has no chat template: it continues text (freshet run), or give "
        "--chat-template FILE");
  return *tokenizer.chat_template();
}

}  // namespace

json::Value message(std::string_view role, std::string_view content) {
  json::Object m;
  m["role"] = role;
  m["content"] = content;
  return m;
}

void add_token_variables(const tokenizer::Tokenizer& tokenizer, json::Object& context) {
  const auto add = [&](const char* name, std::optional<int32_t> id) {
    if (context.find(name) == nullptr) context[name] = id ? tokenizer.token_bytes(*id) : "";
  };
  add("bos_token", tokenizer.bos());
  add("eos_token", tokenizer.eos());
}

Result<ChatPrompt> ChatPrompt::make(const tokenizer::Tokenizer& tokenizer,
                                    const std::string& template_file) {
  FRESHET_ASSIGN_OR_RETURN(const std::string source, template_source(tokenizer, template_file));
  auto compiled = ChatTemplate::compile(source);
  if (!compiled.ok()) return compiled.status().with_context("chat template");
  return ChatPrompt(tokenizer, std::move(compiled).value());
}

Result<std::string> ChatPrompt::render(const json::Array& messages,
                                       const json::Object& extra) const {
  json::Object context = extra;
  context["messages"] = messages;
  context["add_generation_prompt"] = true;
  add_token_variables(*tokenizer_, context);
  auto text = template_.render(std::move(context));
  if (!text.ok()) return text.status().with_context("chat template");
  return text;
}

Result<std::vector<int32_t>> ChatPrompt::encode(const json::Array& messages) const {
  FRESHET_ASSIGN_OR_RETURN(const std::string text, render(messages));
  // The template writes the special tokens itself.
  return tokenizer_->encode(text, {.add_special = false});
}

}  // namespace freshet::cli
