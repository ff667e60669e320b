#include "server/tool_parser.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "base/json.h"

namespace freshet::server {
namespace {

constexpr std::string_view kOpen = "<tool_call>";
constexpr std::string_view kClose = "</tool_call>";
constexpr std::string_view kPythonTag = "<|python_tag|>";
constexpr std::string_view kMistralTag = "[TOOL_CALLS]";
constexpr std::string_view kMistralArgs = "[ARGS]";

constexpr std::string_view kBlanks = " \t\r\n";

std::string_view strip(std::string_view s) {
  const size_t first = s.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return s.substr(first, s.find_last_not_of(kBlanks) - first + 1);
}

// Length of the longest suffix of `text` that is a prefix of `tag`.
size_t partial_tag(std::string_view text, std::string_view tag) {
  for (size_t n = std::min(text.size(), tag.size() - 1); n > 0; --n) {
    if (text.ends_with(tag.substr(0, n))) return n;
  }
  return 0;
}

// The end of the JSON value at the start of text, by brackets and quotes; npos: incomplete.
size_t json_value_end(std::string_view text) {
  JsonScan scan;
  return scan.end_in(text);
}

}  // namespace

size_t JsonScan::end_in(std::string_view text) {
  for (; at_ < text.size(); ++at_) {
    const char c = text[at_];
    if (quoted_) {
      if (escaped_) {
        escaped_ = false;
      } else if (c == '\\') {
        escaped_ = true;
      } else if (c == '"') {
        quoted_ = false;
      }
    } else if (c == '"') {
      quoted_ = true;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if ((c == '}' || c == ']') && --depth_ == 0) {
      return ++at_;
    }
  }
  return std::string_view::npos;
}

std::optional<ToolDialect> tool_dialect_by_name(std::string_view name) {
  if (name == "hermes") return ToolDialect::kHermes;
  if (name == "llama3_json") return ToolDialect::kLlama3;
  if (name == "mistral") return ToolDialect::kMistral;
  return std::nullopt;
}

ToolDialect tool_dialect_of_template(std::string_view chat_template) {
  const auto has = [&](std::string_view s) {
    return chat_template.find(s) != std::string_view::npos;
  };
  if (has(kOpen)) return ToolDialect::kHermes;
  if (has(kMistralTag)) return ToolDialect::kMistral;
  if (has(kPythonTag) || has("\"parameters\": dictionary")) return ToolDialect::kLlama3;
  return ToolDialect::kHermes;
}

json::Value forced_call(ToolDialect dialect, const json::Value& tools, std::string_view only) {
  json::Array calls;
  for (const json::Value& tool : tools.as_array()) {
    const json::Value& function = *tool.find("function");
    const std::string name = function.get_string("name", "");
    if (!only.empty() && name != only) continue;
    json::Object call;
    call["name"] = name;
    if (const json::Value* parameters = function.find("parameters"))
      call["parameters"] = *parameters;
    calls.emplace_back(std::move(call));
  }
  json::Object description;
  description["calls"] = std::move(calls);
  description["arguments_key"] = dialect == ToolDialect::kLlama3 ? "parameters" : "arguments";
  if (dialect == ToolDialect::kHermes) {
    description["before"] = kOpen;
    description["after"] = kClose;
  } else if (dialect == ToolDialect::kMistral) {
    description["before"] = fmt::format("{}[", kMistralTag);
    description["after"] = "]";
  }
  return description;
}

ToolParser::ToolParser(ToolDialect dialect, std::string id_seed)
    : dialect_(dialect), id_seed_(std::move(id_seed)) {}

void ToolParser::add_call(std::string name, std::string arguments, Step& step) {
  const size_t h = std::hash<std::string>{}(fmt::format("{}/{}", id_seed_, calls_found_++));
  // Mistral's templates require ids of nine letters and digits.
  std::string id = dialect_ == ToolDialect::kMistral ? fmt::format("{:09x}", h & 0xfffffffff)
                                                     : fmt::format("call_{:016x}", h);
  step.calls.push_back({std::move(id), std::move(name), std::move(arguments)});
}

// Parses one call object or an array of them, all or nothing.
bool ToolParser::parse_calls(std::string_view text, std::string_view arguments_key, Step& step) {
  auto parsed = json::parse(strip(text));
  if (!parsed.ok()) return false;
  json::Array calls;
  if (parsed->is_array()) calls = parsed->as_array();
  if (parsed->is_object()) calls.push_back(*parsed);
  const auto arguments_of = [&](const json::Value& call) {
    const json::Value* a = call.find(arguments_key);
    return a != nullptr ? a : call.find("arguments");
  };
  for (const json::Value& call : calls) {
    const json::Value* arguments = call.is_object() ? arguments_of(call) : nullptr;
    if (arguments == nullptr || call.get_string("name", "").empty()) return false;
  }
  for (const json::Value& call : calls) {
    const json::Value& a = *arguments_of(call);
    add_call(call.get_string("name", ""), a.is_string() ? a.as_string() : json::write(a), step);
  }
  return !calls.empty();
}

// The position of the closing tag of the call at the beginning of `held_`; npos: not there yet. A
// tag within a JSON string of the call is text. Each byte is scanned once.
size_t ToolParser::find_close() {
  if (!body_) {  // JSON, or anything else up to the first tag?
    const size_t first = held_.find_first_not_of(kBlanks);
    if (first == std::string::npos) return first;
    const bool json = held_[first] == '{' || held_[first] == '[';
    body_ = json && !plain_tags_ ? Body::kJson : Body::kText;
  }
  if (*body_ == Body::kJson) {
    const size_t end = scan_.end_in(held_);
    if (end == std::string_view::npos) return end;
    body_ = Body::kText;
    searched_ = end;
  }
  const size_t at = held_.find(kClose, searched_);
  if (at == std::string::npos && held_.size() >= kClose.size())
    searched_ = std::max(searched_, held_.size() - kClose.size() + 1);
  return at;
}

void ToolParser::enter(bool inside) {
  inside_ = inside;
  body_.reset();
  scan_ = {};
  searched_ = 0;
  plain_tags_ = false;
}

ToolParser::Step ToolParser::feed_hermes() {
  Step step;
  for (;;) {
    const size_t at = inside_ ? find_close() : held_.find(kOpen);
    if (at == std::string::npos) break;
    const std::string before = held_.substr(0, at);
    held_.erase(0, at + (inside_ ? kClose : kOpen).size());
    if (inside_) {
      if (!parse_calls(before, "arguments", step))
        step.content += fmt::format("{}{}{}", kOpen, before, kClose);
    } else if (calls_found_ == 0 || !strip(before).empty()) {
      step.content += before;  // except white space between two calls
    }
    enter(!inside_);
  }
  if (inside_) return step;
  const size_t keep = partial_tag(held_, kOpen);
  if (calls_found_ > 0 && strip(std::string_view(held_).substr(0, held_.size() - keep)).empty())
    return step;
  step.content += held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return step;
}

// Models often stop right after the object, without the closing tag. If the held text does not
// parse, it may have an unterminated string: then the first closing tag ends the call.
ToolParser::Step ToolParser::finish_hermes() {
  Step step;
  while (inside_) {
    if (parse_calls(held_, "arguments", step)) {
      held_.clear();
      break;
    }
    if (held_.find(kClose) == std::string::npos) {
      held_.insert(0, kOpen);
      break;
    }
    enter(true);
    plain_tags_ = true;
    Step more = feed_hermes();
    step.content += more.content;
    std::move(more.calls.begin(), more.calls.end(), std::back_inserter(step.calls));
  }
  if (calls_found_ == 0 || !strip(held_).empty()) step.content += held_;
  held_.clear();
  return step;
}

ToolParser::Step ToolParser::feed(std::string_view text) {
  held_ += text;
  if (dialect_ == ToolDialect::kHermes) return feed_hermes();
  Step step;
  if (inside_) return step;  // the rest of the answer consists of calls: wait for its end
  if (dialect_ == ToolDialect::kMistral) {
    const size_t at = held_.find(kMistralTag);
    const size_t shown =
        at != std::string::npos ? at : held_.size() - partial_tag(held_, kMistralTag);
    step.content = held_.substr(0, shown);
    held_.erase(0, shown);
    inside_ = at != std::string::npos;
    return step;
  }
  if (!decided_) {
    const std::string_view seen = strip(held_);
    if (seen.empty() || (seen.size() < kPythonTag.size() && kPythonTag.starts_with(seen)))
      return step;
    decided_ = true;
    inside_ = seen.front() == '{' || seen.starts_with(kPythonTag);
    if (inside_) return step;
  }
  step.content = std::exchange(held_, {});
  return step;
}

bool ToolParser::parse_mistral(std::string_view text, Step& step) {
  text = strip(text);
  if (text.starts_with('[')) return parse_calls(text, "arguments", step);
  std::vector<std::pair<std::string, std::string>> calls;
  while (!text.empty()) {
    if (text.starts_with(kMistralTag)) text = strip(text.substr(kMistralTag.size()));
    const size_t open = text.find('{');
    if (open == std::string_view::npos) return false;
    std::string_view name = strip(text.substr(0, open));
    if (name.ends_with(kMistralArgs))
      name = strip(name.substr(0, name.size() - kMistralArgs.size()));
    const size_t length = json_value_end(text.substr(open));
    if (name.empty() || length == std::string_view::npos) return false;
    const std::string_view arguments = text.substr(open, length);
    if (!json::parse(arguments).ok()) return false;
    calls.emplace_back(name, arguments);
    text = strip(text.substr(open + length));
  }
  for (auto& [name, arguments] : calls) add_call(std::move(name), std::move(arguments), step);
  return !calls.empty();
}

ToolParser::Step ToolParser::finish() {
  if (dialect_ == ToolDialect::kHermes) return finish_hermes();
  Step step;
  const std::string rest = std::exchange(held_, {});
  if (!inside_) {
    step.content = rest;
    return step;
  }
  std::string_view text = strip(rest);
  if (dialect_ == ToolDialect::kMistral) {
    if (!parse_mistral(text.substr(kMistralTag.size()), step)) step = {rest, {}};
    return step;
  }
  if (text.starts_with(kPythonTag)) text.remove_prefix(kPythonTag.size());
  while (!strip(text).empty()) {
    text = strip(text);
    const size_t end = json_value_end(text);
    if (end == std::string_view::npos || !parse_calls(text.substr(0, end), "parameters", step)) {
      calls_found_ -= static_cast<int>(step.calls.size());
      return {rest, {}};
    }
    text = strip(text.substr(end));
    if (text.starts_with(';')) text.remove_prefix(1);
  }
  return step;
}

}  // namespace freshet::server
