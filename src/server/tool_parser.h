// Finds tool calls in generated text, as it streams.
//
// Dialects: Hermes/Qwen (<tool_call>{"name", "arguments"}</tool_call>, any number, mixed with
// text), Llama 3 (the whole answer is {"name", "parameters"}, perhaps after <|python_tag|>, several
// joined by ';'), and Mistral ([TOOL_CALLS] followed by a JSON array, or by name[ARGS]{...} calls).
// Markup within a string of a call's JSON is text. Text that looks like a call but does not parse
// is given back as content: nothing the model wrote is lost. Each byte is looked at once, however
// the text is cut. One parser serves one answer; not synchronised.
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
// The dialect that a chat template asks the model to speak.
ToolDialect tool_dialect_of_template(std::string_view chat_template);

struct ToolCall {
  std::string id;
  std::string name;
  std::string arguments;  // JSON text
};

// What an answer must look like that calls one of `tools` (OpenAI's array) and nothing else, as a
// description for grammar::Grammar::from_description. `only`: the one tool to call, or empty.
json::Value forced_call(ToolDialect dialect, const json::Value& tools, std::string_view only);

// Finds the end of a JSON object or array, by brackets and quotes, in a text that grows.
class JsonScan {
 public:
  // The end of the value that begins `text`; npos: not there yet. `text` is the one of the last
  // call, perhaps with more behind it.
  size_t end_in(std::string_view text);

 private:
  size_t at_ = 0;
  int depth_ = 0;
  bool quoted_ = false;
  bool escaped_ = false;
};

class ToolParser {
 public:
  // `id_seed` makes the calls' ids: the same request gives the same ids.
  ToolParser(ToolDialect dialect, std::string id_seed);

  struct Step {
    std::string content;
    std::vector<ToolCall> calls;
  };
  Step feed(std::string_view text);
  Step finish();  // the answer is complete: what was held back comes out as a call or as content
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
  bool inside_ = false;   // of a call (Hermes) or of the rest of the answer (the others)
  bool decided_ = false;  // Llama 3: whether the answer is a call
  // Of a Hermes call, while it is inside: what its body is, and how far it has been looked through.
  std::optional<Body> body_;
  JsonScan scan_;
  size_t searched_ = 0;
  bool plain_tags_ = false;  // the first closing tag ends it
  int calls_found_ = 0;
};

}  // namespace freshet::server
