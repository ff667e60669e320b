// Finds tool calls in generated text, as it streams.
//
// Dialects: Hermes/Qwen (<tool_call>{"name", "arguments"}</tool_call>, any number, mixed with
// text), Llama 3 (the whole answer is {"name", "parameters"}, perhaps after <|python_tag|>, several
// joined by
// ';'), and Mistral ([TOOL_CALLS] followed by a JSON array, or by name[ARGS]{...} calls). Text that
// looks like a call but does not parse is given back as content: nothing the model wrote is lost.
// One parser serves one answer; not synchronised.
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
  Step feed_hermes();
  void flush_hermes_call(std::string_view body, Step& step);
  bool parse_calls(std::string_view text, std::string_view arguments_key, Step& step);
  bool parse_mistral(std::string_view text, Step& step);
  void add_call(std::string name, std::string arguments, Step& step);

  ToolDialect dialect_;
  std::string id_seed_;
  std::string held_;
  bool inside_ = false;   // of a call (Hermes) or of the rest of the answer (the others)
  bool decided_ = false;  // Llama 3: whether the answer is a call
  int calls_found_ = 0;
};

}  // namespace freshet::server
