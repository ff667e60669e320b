#include "tokenizer/template/chat_template.h"

#include <ctime>

#include "base/utf8.h"
#include "tokenizer/template/interpreter.h"
#include "tokenizer/template/parser.h"

namespace freshet {
namespace {

Status status_of(const jinja::Error& e) {
  if (e.line == 0) return {e.code, fmt::format("chat template: {}", e.message)};
  return {e.code, fmt::format("chat template, line {}: {}", e.line, e.message)};
}

std::chrono::local_seconds local_now() {
  const std::time_t now = std::time(nullptr);
  std::tm tm{};
  ::localtime_r(&now, &tm);
  return std::chrono::local_seconds(std::chrono::seconds(now + tm.tm_gmtoff));
}

}  // namespace

Result<ChatTemplate> ChatTemplate::compile(std::string_view source, const TemplateLimits& limits) {
  if (source.size() > limits.source_bytes) {
    return resource_exhausted("chat template: {} bytes are over the limit of {}", source.size(),
                              limits.source_bytes);
  }
  if (find_invalid_utf8(source) != std::string_view::npos) {
    return invalid_argument("chat template: byte {} is not UTF-8", find_invalid_utf8(source));
  }
  try {
    return ChatTemplate(jinja::parse_template(source, limits));
  } catch (const jinja::Error& e) {
    return status_of(e);
  }
}

Result<std::string> ChatTemplate::render(const json::Value& context, const Options& options) const {
  try {
    return jinja::Interpreter(*program_, options.now ? *options.now : local_now()).render(context);
  } catch (const jinja::Error& e) {
    return status_of(e);
  }
}

bool ChatTemplate::mentions(std::string_view variable) const {
  return program_->ids.contains(std::string(variable));
}

}  // namespace freshet
