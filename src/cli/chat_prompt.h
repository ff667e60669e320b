// Renders a conversation with the model's chat template.
//
// Immutable after make(); thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "tokenizer/chat_renderer.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {

// {"role": role, "content": content}
json::Value message(std::string_view role, std::string_view content);

class ChatPrompt {
 public:
  // The tokenizer's template, or the one in `template_file` unless that is empty. The tokenizer
  // must outlive the result. An error if there is none.
  static Result<ChatPrompt> make(const tokenizer::Tokenizer& tokenizer,
                                 const std::string& template_file);
  // The same; nullopt if there is none.
  static Result<std::optional<ChatPrompt>> find(const tokenizer::Tokenizer& tokenizer,
                                                const std::string& template_file);

  // The template's text.
  const std::string& source() const { return renderer_.source(false); }

  // `extra`: additional template variables.
  Result<std::string> render(const json::Array& messages, const json::Object& extra = {}) const;
  Result<std::vector<int32_t>> encode(const json::Array& messages) const;
  // `text`: as returned by render().
  std::vector<int32_t> encode_text(const std::string& text) const;

 private:
  ChatPrompt(const tokenizer::Tokenizer& tokenizer, tokenizer::ChatRenderer renderer)
      : tokenizer_(&tokenizer), renderer_(std::move(renderer)) {}

  const tokenizer::Tokenizer* tokenizer_;
  tokenizer::ChatRenderer renderer_;
};

}  // namespace freshet::cli
