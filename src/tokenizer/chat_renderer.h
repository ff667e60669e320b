// Renders a conversation to text with the model's chat template.
//
// Knows which of a model's templates applies, which variables transformers binds, and in which of
// several shapes a template takes contents and tool calls. The shapes are probed once, when a
// renderer is made. A renderer is immutable: any number of threads may use it.
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

// Follows OpenAI's API: a content is a string, null or a list of {"type": "text", "text": ...} and
// {"type": "image"}; the arguments of a call are JSON text or an object.
struct Conversation {
  json::Array messages;
  json::Value tools;       // null or an array
  json::Object variables;  // extra variables; they override special tokens of the same name
  bool add_generation_prompt = true;
  // Continue the last message: the text ends with its content, trimmed if the template trims it.
  bool continue_final_message = false;
  // What stands for a picture in a text: for templates that know no pictures.
  std::string picture_marker;
};

// The text of a content; for a list, the concatenated text of its parts.
std::string text_of_content(const json::Value* content);

class ChatRenderer {
 public:
  // Uses the model's templates, or only `override_source` if it is not empty. If the model has no
  // template, the renderer is empty. Fails if a template does not compile.
  static Result<ChatRenderer> make(const Tokenizer& tokenizer, const std::string& override_source);

  bool empty() const { return !plain_ && !tool_use_; }
  // The source of the template used for a conversation; "" if there is none.
  const std::string& source(bool with_tools) const;
  // Whether there is a separate template for tools.
  bool has_tool_use() const { return tool_use_.has_value(); }

  Result<std::string> render(const Conversation& conversation) const;

 private:
  // How a template takes the content of messages of one role.
  enum class Content { kEither, kString, kParts };
  struct Shape {
    std::array<Content, 4> contents = {Content::kString, Content::kString, Content::kString,
                                       Content::kString};  // per role, see kRoles
    // Whether the template itself writes something for {"type": "image"}, per role.
    std::array<bool, 4> shows_pictures{};
    // For an assistant message that has only tool calls.
    bool null_content = false;    // false: ""
    bool text_arguments = false;  // false: an object
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
  bool shows_pictures(const Form& form, size_t role) const;
  void find_call_shape(Form& form) const;
  const Form* form_for(bool with_tools) const;
  Result<std::string> render(const Form& form, Conversation conversation) const;

  json::Object special_tokens_;
  std::string names_;  // names of the model's other templates, for error messages
  std::optional<Form> plain_, tool_use_;
};

}  // namespace freshet::tokenizer
