// A conversation as the text that a model's chat template makes of it.
//
// Knows which of a model's templates is meant, what variables transformers binds, and in which of
// several shapes a template takes contents and tool calls; that is tried out once, when a renderer
// is made. A renderer is immutable: any number of threads may use it.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "tokenizer/template/chat_template.h"
#include "tokenizer/tokenizer.h"

namespace freshet::tokenizer {

// As OpenAI's API has it: a content is a string, null or a list of {"type": "text", "text": ...};
// the arguments of a call are JSON text or an object.
struct Conversation {
  json::Array messages;
  json::Value tools;       // null or an array
  json::Object variables;  // further ones; they go before the special tokens of the same name
  bool add_generation_prompt = true;
  // The last message goes on: the text ends where its content does, trimmed if the template trims.
  bool continue_final_message = false;
};

// The text of a content: of a list, that of its parts.
std::string text_of_content(const json::Value* content);

class ChatRenderer {
 public:
  // The model's templates, or the one whose source is `override_source` unless that is empty. A
  // model without any gives a renderer without any. Fails when a template cannot be compiled.
  static Result<ChatRenderer> make(const Tokenizer& tokenizer, const std::string& override_source);

  bool empty() const { return !plain_ && !tool_use_; }
  // The source of the template that a conversation gets; "" if there is none.
  const std::string& source(bool with_tools) const;
  // Whether tools have a template of their own.
  bool has_tool_use() const { return tool_use_.has_value(); }

  Result<std::string> render(const Conversation& conversation) const;

 private:
  // How a template takes the content of a role's messages.
  enum class Content { kEither, kString, kParts };
  struct Shape {
    std::array<Content, 4> contents = {Content::kString, Content::kString, Content::kString,
                                       Content::kString};  // by role, see kRoles
    // Of an assistant's message that is nothing but calls.
    bool null_content = false;    // else ""
    bool text_arguments = false;  // else an object
    bool knows_developers = false;
  };
  struct Form {
    std::string source;
    std::optional<ChatTemplate> compiled;
    Shape shape;
  };

  ChatRenderer() = default;
  Result<Form> make_form(const std::string& source) const;
  Content find_content_shape(const Form& form, size_t role) const;
  void find_call_shape(Form& form) const;
  const Form* form_for(bool with_tools) const;
  Result<std::string> render(const Form& form, Conversation conversation) const;

  json::Object special_tokens_;
  std::string names_;  // of the model's other templates, for an error
  std::optional<Form> plain_, tool_use_;
};

}  // namespace freshet::tokenizer
