// A conversation as the model's chat template writes it.
//
// Immutable after make(); safe from many threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "tokenizer/template/chat_template.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {

// {"role": role, "content": content}
json::Value message(std::string_view role, std::string_view content);

class ChatPrompt {
 public:
  // The tokenizer's template, or the one in `template_file` unless that is empty. The tokenizer
  // must outlive the result.
  static Result<ChatPrompt> make(const tokenizer::Tokenizer& tokenizer,
                                 const std::string& template_file);

  // `extra`: further variables of the template.
  Result<std::string> render(const json::Array& messages, const json::Object& extra = {}) const;
  Result<std::vector<int32_t>> encode(const json::Array& messages) const;

 private:
  ChatPrompt(const tokenizer::Tokenizer& tokenizer, ChatTemplate compiled)
      : tokenizer_(&tokenizer), template_(std::move(compiled)) {}

  const tokenizer::Tokenizer* tokenizer_;
  ChatTemplate template_;
};

// The variables that every template may read: bos_token and eos_token.
void add_token_variables(const tokenizer::Tokenizer& tokenizer, json::Object& context);

}  // namespace freshet::cli
