#include "server/tool_request.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

bool has_tool(const json::Value& tools, const std::string& name) {
  if (!tools.is_array()) return false;
  return std::any_of(tools.as_array().begin(), tools.as_array().end(),
                     [&](const json::Value& tool) {
                       return tool.find("function")->get_string("name", "") == name;
                     });
}

// The error in the tools; nullopt if they are valid.
std::optional<std::string> wrong_tools(const json::Array& tools) {
  std::set<std::string> names;
  for (const json::Value& tool : tools) {
    const std::string type = tool.is_object() ? tool.get_string("type", "function") : "";
    if (type != "function" && !type.empty()) {
      return fmt::format("tools of type '{}' are not supported: only those of type 'function' are",
                         type);
    }
    const json::Value* function = tool.is_object() ? tool.find("function") : nullptr;
    if (function == nullptr || !function->is_object() || function->get_string("name", "").empty())
      return "each tool needs 'type': \"function\" and a 'function' with a name";
    const std::string name = function->get_string("name", "");
    if (!names.insert(name).second)
      return fmt::format("two tools have the name '{}': a call could not tell which", name);
    const json::Value* parameters = function->find("parameters");
    if (parameters != nullptr && !parameters->is_null() && !parameters->is_object())
      return "a tool's 'parameters' must be a JSON schema, an object";
  }
  return std::nullopt;
}

// {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}: the model only sees
// the allowed tools.
void allow_tools(Fields& fields, const json::Value& choice, ChatRequest& r) {
  const json::Value* allowed = choice.find("allowed_tools");
  const json::Value* list = allowed != nullptr ? allowed->find("tools") : nullptr;
  const std::string mode = allowed != nullptr ? allowed->get_string("mode", "") : "";
  if (list == nullptr || !list->is_array() || list->as_array().empty() ||
      (mode != "auto" && mode != "required")) {
    return fields.fail("tool_choice",
                       "'tool_choice.allowed_tools' needs a mode (auto or required) and tools");
  }
  std::set<std::string> names;
  for (const json::Value& tool : list->as_array()) {
    const json::Value* function = tool.find("function");
    const std::string name = function != nullptr ? function->get_string("name", "") : "";
    if (!has_tool(r.tools, name))
      return fields.fail("tool_choice", fmt::format("'tools' has no function '{}'", name));
    names.insert(name);
  }
  json::Array kept;
  for (const json::Value& tool : r.tools.as_array()) {
    if (names.contains(tool.find("function")->get_string("name", ""))) kept.push_back(tool);
  }
  r.tools = std::move(kept);
  r.tool_choice =
      mode == "auto" ? ChatRequest::ToolChoice::kAuto : ChatRequest::ToolChoice::kRequired;
}

}  // namespace

void read_tools(Fields& fields, ChatRequest& r) {
  if (const json::Value* tools = fields.get("tools")) {
    if (!tools->is_array() || tools->as_array().size() > 1024) {
      return fields.fail("tools", "'tools' must be an array of at most 1024 tools");
    }
    if (const auto message = wrong_tools(tools->as_array())) return fields.fail("tools", *message);
    if (!tools->as_array().empty()) r.tools = *tools;
  }
  const json::Value* choice = fields.get("tool_choice");
  if (choice == nullptr) {
    if (r.tools.is_null()) r.tool_choice = ChatRequest::ToolChoice::kNone;
  } else if (choice->is_string() && choice->as_string() == "none") {
    r.tool_choice = ChatRequest::ToolChoice::kNone;
  } else if (choice->is_string() && choice->as_string() == "auto") {
    r.tool_choice = ChatRequest::ToolChoice::kAuto;
  } else if (choice->is_string() && choice->as_string() == "required") {
    r.tool_choice = ChatRequest::ToolChoice::kRequired;
  } else if (choice->is_object() && choice->get_string("type", "") == "allowed_tools") {
    return allow_tools(fields, *choice, r);
  } else if (choice->is_object() && choice->find("function") != nullptr) {
    r.tool_choice = ChatRequest::ToolChoice::kNamed;
    r.tool_name = choice->find("function")->get_string("name", "");
    if (!has_tool(r.tools, r.tool_name))
      return fields.fail("tool_choice", fmt::format("'tools' has no function '{}'", r.tool_name));
  } else {
    return fields.fail("tool_choice",
                       "'tool_choice' must be none, auto, required, a named function or "
                       "allowed_tools");
  }
  const bool needs_tools = r.tool_choice == ChatRequest::ToolChoice::kRequired ||
                           r.tool_choice == ChatRequest::ToolChoice::kNamed;
  if (needs_tools && r.tools.is_null())
    fields.fail("tool_choice", "'tool_choice' asks for a tool, but 'tools' is empty");
}

}  // namespace freshet::server
