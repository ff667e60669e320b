// Finds tool calls in streamed text.
//
// Dialects: Hermes/Qwen (<tool_call>{"name", "arguments"}</tool_call>, any number, mixed with
// text), Llama 3 (the whole answer is {"name", "parameters"}, perhaps after <|python_tag|>, several
// joined by ';'), and Mistral ([TOOL_CALLS] followed by a JSON array, or by name[ARGS]{...} calls).
// Markup within a JSON string of a call is text. Text that looks like a call but does not parse is
// returned as content, so no output is lost. Each byte is scanned once, however the text is split.
// One parser per answer; not synchronised.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace freshet::server {

enum class ToolDialect { kHermes, kLlama3, kMistral };

std::optional<ToolDialect> tool_dialect_by_name(
    std::string_view name);  // hermes, llama3_json, mistral
// The dialect that a chat template tells the model to use.
ToolDialect tool_dialect_of_template(std::string_view chat_template);

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // JSON text
};

// The description, for grammar::Grammar::from_description, of an answer that only calls one of
// `tools` (OpenAI's array). `only`: the tool to call, or empty for any.
json::Value forced_call(ToolDialect dialect, const json::Value& tools, std::string_view only);

// Finds the end of a JSON object or array in a growing text, by brackets and quotes.
class JsonScan {
 public:
  // The end of the value at the beginning of `text`; npos: not there yet. `text` must be the text
  // of the last call, possibly extended.
  size_t end_in(std::string_view text);

 private:
  size_t at_ = 0;
  int depth_ = 0;
  bool quoted_ = false;
  bool escaped_ = false;
};

class ToolParser {
 public:
  // Call ids are derived from `id_seed`: the same request gives the same ids.
  ToolParser(ToolDialect dialect, std::string id_seed);

  struct Step {
    std::string content;
    std::vector<ToolCall> calls;
  };
  Step feed(std::string_view text);
  Step finish();  // at the end: returns the text that was held back, as a call or as content
  int calls_found() const { return calls_found_; }

 private:
  enum class Body { kJson, kText };

  Step feed_hermes();
  Step finish_hermes();
  size_t find_close();
  void enter(bool inside);
  bool parse_calls(std::string_view text, std::string_view arguments_key, Step& step);
  bool parse_mistral(std::string_view text, Step& step);
  void add_call(std::string name, std::string arguments, Step& step);

  ToolDialect dialect_;
  std::string id_seed_;
  std::string held_;
  bool inside_ = false;   // in a call (Hermes) or in the rest of the answer (others)
  bool decided_ = false;  // Llama 3: whether the answer is a call
  // While in a Hermes call: the kind of its body, and how far it has been scanned.
  std::optional<Body> body_;
  JsonScan scan_;
  size_t searched_ = 0;
  bool plain_tags_ = false;  // the first closing tag ends the call
  int calls_found_ = 0;
};

}  // namespace freshet::server
