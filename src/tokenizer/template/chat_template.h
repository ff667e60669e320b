// Chat templates: the Jinja2 language as configured by transformers, without Python.
//
// A template is compiled once and rendered many times; a compiled template is immutable, and any
// number of threads may render it at once. The environment is that of transformers: trim_blocks,
// lstrip_blocks, break and continue, {% generation %}, tojson as json.dumps without HTML escapes,
// raise_exception, strftime_now, and values that templates cannot change (an append is an error).
// Strings count code points; numbers and their text follow Python; integers of more than 4,300
// digits are an error. include, import and extends are errors.
//
// Templates come with models and are not trusted: steps, depth, memory and output are limited, and
// every failure is a Status that names the line in the template.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"

namespace freshet {

namespace jinja {
struct Program;
}

struct TemplateLimits {
  size_t source_bytes = size_t{1} << 20;
  size_t output_bytes = size_t{16} << 20;
  size_t memory_bytes = size_t{256} << 20;  // of live values at a time
  int64_t steps = 20'000'000;               // about one or two seconds
  int depth = 700;                          // of nested expressions, statements and macro calls
};

class ChatTemplate {
 public:
  struct Options {
    // The time for strftime_now; default: the local time.
    std::optional<std::chrono::local_seconds> now;
  };

  static Result<ChatTemplate> compile(std::string_view source, const TemplateLimits& limits = {});

  // `context` is an object: messages, tools, add_generation_prompt, bos_token and anything else
  // that the template reads.
  Result<std::string> render(const json::Value& context, const Options& options = {}) const;

  // Whether the template mentions a variable, e.g. "tools" or "enable_thinking".
  bool mentions(std::string_view variable) const;

 private:
  explicit ChatTemplate(std::shared_ptr<const jinja::Program> program)
      : program_(std::move(program)) {}
  std::shared_ptr<const jinja::Program> program_;
};

}  // namespace freshet
