#include "tokenizer/chat_renderer.h"

#include <utility>

#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {
namespace {

constexpr std::array<std::string_view, 4> kRoles = {"user", "system", "assistant", "tool"};

// Ends in a space: a template that trims a message also trims this space.
constexpr std::string_view kMarker = "FRESHET_CONTINUES_HERE ";

json::Value text_part(std::string text) {
  json::Object part;
  part["type"] = "text";
  part["text"] = std::move(text);
  return part;
}

json::Value message(std::string_view role, json::Value content) {
  json::Object m;
  m["role"] = role;
  m["content"] = std::move(content);
  return m;
}

json::Value probe_call(json::Value arguments) {
  json::Object function, call;
  function["name"] = "probed_name";
  function["arguments"] = std::move(arguments);
  call["id"] = "abcdefghi";
  call["type"] = "function";
  call["function"] = std::move(function);
  json::Object m;
  m["role"] = "assistant";
  m["content"] = nullptr;
  m["tool_calls"] = json::Array{std::move(call)};
  return m;
}

json::Value probe_result(json::Value content) {
  json::Value m = message("tool", std::move(content));
  m.as_object()["tool_call_id"] = "abcdefghi";
  m.as_object()["name"] = "probed_name";
  return m;
}

// Templates that exist only for tools may fail without any.
json::Value probe_tools() {
  json::Object function, parameters, tool;
  parameters["type"] = "object";
  parameters["properties"] = json::Object();
  function["name"] = "probed_tool";
  function["description"] = "A tool";
  function["parameters"] = std::move(parameters);
  tool["type"] = "function";
  tool["function"] = std::move(function);
  return json::Array{std::move(tool)};
}

// A conversation in which a message of the role has this content.
Conversation content_probe(size_t role, json::Value content) {
  Conversation c;
  json::Value probe =
      role == 3 ? probe_result(std::move(content)) : message(kRoles[role], std::move(content));
  if (role >= 2) c.messages.push_back(message("user", "Hello"));
  if (role == 3) c.messages.push_back(probe_call(json::Object()));
  c.messages.push_back(std::move(probe));
  if (role == 1 || role == 2) c.messages.push_back(message("user", "Hello"));
  return c;
}

json::Value picture_part() {
  json::Object part;
  part["type"] = "image";
  return part;
}

bool is_picture(const json::Value& part) {
  return part.get_string("type", "") == "image";
}

// Pictures become their markers, each on a line of its own.
void write_pictures_as_text(json::Array& parts, const std::string& marker) {
  for (size_t i = 0; i < parts.size(); ++i) {
    if (is_picture(parts[i])) parts[i] = text_part(marker + (i + 1 < parts.size() ? "\n" : ""));
  }
}

bool has(const Result<std::string>& text, std::string_view what) {
  return text.ok() && text->find(what) != std::string::npos;
}

// transformers sets the names under which templates read a thought. Templates that know "thinking"
// may refuse it next to content and calls.
void share_reasoning(json::Object& m) {
  static constexpr const char* kNames[] = {"reasoning_content", "thinking", "reasoning"};
  const json::Value* found = nullptr;
  for (const char* name : kNames) {
    const json::Value* value = found == nullptr ? m.find(name) : nullptr;
    if (value != nullptr && value->is_string()) found = value;
  }
  if (found == nullptr) return;
  const json::Value thought = *found;
  const bool calls_and_text =
      m.find("tool_calls") != nullptr && !text_of_content(m.find("content")).empty();
  for (const char* name : kNames) {
    if (m.find(name) == nullptr && !(calls_and_text && name == std::string_view("thinking")))
      m[name] = thought;
  }
}

// Converts the arguments of calls to the shape that the template takes; text stays unchanged.
void shape_arguments(json::Value& calls, bool as_text) {
  for (json::Value& call : calls.as_array()) {
    json::Value* function = call.is_object() ? call.as_object().find("function") : nullptr;
    json::Value* arguments = function != nullptr && function->is_object()
                                 ? function->as_object().find("arguments")
                                 : nullptr;
    if (arguments == nullptr) continue;
    if (arguments->is_string() && arguments->as_string().empty()) *arguments = "{}";
    if (as_text && !arguments->is_string()) {
      *arguments = json::write(*arguments, {.spaces = true});
    } else if (!as_text && arguments->is_string()) {
      auto parsed = json::parse(arguments->as_string());
      if (parsed.ok() && parsed->is_object()) *arguments = std::move(parsed).value();
    }
  }
}

// Appends the marker to the text of the last message.
void mark_end(json::Object& last) {
  const std::string marker(kMarker);
  json::Value& content = last["content"];
  if (!content.is_array()) {
    content = (content.is_string() ? content.as_string() : "") + marker;
    return;
  }
  json::Array& parts = content.as_array();
  for (size_t i = parts.size(); i-- > 0;) {
    json::Value* text = parts[i].is_object() ? parts[i].as_object().find("text") : nullptr;
    if (text == nullptr || !text->is_string()) continue;
    *text = text->as_string() + marker;
    return;
  }
  parts.push_back(text_part(marker));
}

// Cuts the text at the marker: the template's output after it closes the turn.
Status cut_at_marker(std::string& text) {
  const std::string_view bare = kMarker.substr(0, kMarker.size() - 1);
  const size_t at = text.rfind(bare);
  if (at == std::string::npos) {
    return invalid_argument(
        "the template omits the last message's content, so it cannot be continued");
  }
  const bool trims = text.compare(at, kMarker.size(), kMarker) != 0;
  text.resize(at);
  if (trims) {
    const size_t end = text.find_last_not_of(" \t\n\r\f\v");
    text.resize(end == std::string::npos ? 0 : end + 1);
  }
  return {};
}

}  // namespace

std::string text_of_content(const json::Value* content) {
  if (content == nullptr) return {};
  if (content->is_string()) return content->as_string();
  std::string text;
  if (content->is_array()) {
    for (const json::Value& part : content->as_array()) text += part.get_string("text", "");
  }
  return text;
}

Result<ChatRenderer> ChatRenderer::make(const Tokenizer& tokenizer,
                                        const std::string& override_source) {
  ChatRenderer renderer;
  renderer.special_tokens_ = tokenizer.special_tokens();
  for (const auto& [name, source] : tokenizer.parts().named_templates)
    renderer.names_ += (renderer.names_.empty() ? "" : ", ") + name;
  if (!override_source.empty()) {
    FRESHET_ASSIGN_OR_RETURN(renderer.plain_, renderer.make_form(override_source));
    return renderer;
  }
  if (tokenizer.chat_template() && !tokenizer.chat_template()->empty()) {
    FRESHET_ASSIGN_OR_RETURN(renderer.plain_, renderer.make_form(*tokenizer.chat_template()));
  }
  if (const std::string* source = tokenizer.chat_template("tool_use")) {
    auto form = renderer.make_form(*source);
    if (!form.ok()) return form.status().with_context("tool_use");
    renderer.tool_use_ = std::move(form).value();
  }
  return renderer;
}

Result<ChatRenderer::Form> ChatRenderer::make_form(const std::string& source) const {
  Form form;
  form.source = source;
  FRESHET_ASSIGN_OR_RETURN(form.compiled, ChatTemplate::compile(source));
  form.shape.knows_developers = source.find("developer") != std::string::npos;
  find_call_shape(form);
  for (size_t role = 0; role < kRoles.size(); ++role) {
    form.shape.contents[role] = find_content_shape(form, role);
    form.shape.shows_pictures[role] = shows_pictures(form, role);
  }
  return form;
}

// Templates take a content as a string, as a list of parts, or as either. A template that is given
// the wrong kind fails, omits the text, or prints the list.
ChatRenderer::Content ChatRenderer::find_content_shape(const Form& form, size_t role) const {
  Form probing = form;
  probing.shape.contents.fill(Content::kEither);
  const std::string_view word = "probed text";
  const auto with = [&](const json::Value& content) {
    auto text = render(probing, content_probe(role, content));
    if (has(text, word)) return text;
    Conversation tooled = content_probe(role, content);
    tooled.tools = probe_tools();
    return render(probing, std::move(tooled));
  };
  const auto as_string = with(json::Value(word));
  const auto as_parts = with(json::Array{text_part(std::string(word))});
  const bool prints_list =
      as_parts.ok() && (has(as_parts, "'type'") || has(as_parts, "\"type\": \"text\""));
  const bool parts = has(as_parts, word) && !prints_list;
  if (!parts) return Content::kString;
  return has(as_string, word) ? Content::kEither : Content::kParts;
}

// A template that knows pictures writes a marker where one stands among the parts.
bool ChatRenderer::shows_pictures(const Form& form, size_t role) const {
  if (form.shape.contents[role] == Content::kString) return false;
  Form probing = form;
  probing.shape.shows_pictures.fill(true);
  const json::Value text = text_part("probed text");
  const auto without = render(probing, content_probe(role, json::Array{text}));
  const auto with = render(probing, content_probe(role, json::Array{picture_part(), text}));
  return has(with, "probed text") && without.ok() && *with != *without;
}

// Templates differ in the call shapes that they refuse or omit: the first shape with which the call
// appears in the text is used. Text that is printed unchanged is preferred to objects, which the
// template would serialise again.
void ChatRenderer::find_call_shape(Form& form) const {
  const std::string spelled = R"({"probed_key":  "probed_value"})";
  for (const auto& [null_content, text] :
       {std::pair(false, true), {false, false}, {true, true}, {true, false}}) {
    form.shape.null_content = null_content;
    form.shape.text_arguments = text;
    Conversation c;
    c.messages = {message("user", "Hello"), probe_call(spelled), probe_result("Done")};
    auto rendered = render(form, c);
    if (!has(rendered, "probed_name")) {
      c.tools = probe_tools();
      rendered = render(form, std::move(c));
    }
    if (!has(rendered, "probed_name")) continue;
    if (text ? has(rendered, spelled)
             : has(rendered, "probed_key") && has(rendered, "probed_value"))
      return;
  }
  form.shape.null_content = form.shape.text_arguments = false;  // a template without calls
}

const ChatRenderer::Form* ChatRenderer::form_for(bool with_tools) const {
  if (with_tools && tool_use_) return &*tool_use_;
  return plain_ ? &*plain_ : nullptr;
}

const std::string& ChatRenderer::source(bool with_tools) const {
  static const std::string kNone;
  const Form* form = form_for(with_tools);
  return form != nullptr ? form->source : kNone;
}

Result<std::string> ChatRenderer::render(const Conversation& conversation) const {
  const Form* form = form_for(!conversation.tools.is_null());
  if (form != nullptr) return render(*form, conversation);
  if (names_.empty()) return invalid_argument("this model has no chat template");
  return invalid_argument("this model has no default chat template, only {}", names_);
}

Result<std::string> ChatRenderer::render(const Form& form, Conversation c) const {
  const Shape& shape = form.shape;
  for (json::Value& value : c.messages) {
    json::Object& m = value.as_object();
    // OpenAI's newer name for this role, which few models know.
    if (!shape.knows_developers && m["role"] == json::Value("developer")) m["role"] = "system";
    json::Value& content = m["content"];
    if (content.is_null()) content = "";
    size_t role = 0;
    for (size_t i = 0; i < kRoles.size(); ++i) {
      if (m["role"] == json::Value(kRoles[i])) role = i;
    }
    if (content.is_array() && !shape.shows_pictures[role])
      write_pictures_as_text(content.as_array(), c.picture_marker);
    if (content.is_array() && shape.contents[role] == Content::kString)
      content = text_of_content(&content);
    if (content.is_string() && shape.contents[role] == Content::kParts) {
      std::string text = content.as_string();
      content = text.empty() ? json::Array{} : json::Array{text_part(std::move(text))};
    }
    share_reasoning(m);
    json::Value* calls = m.find("tool_calls");
    if (calls == nullptr || !calls->is_array() || calls->as_array().empty()) continue;
    if (shape.null_content && text_of_content(&m["content"]).empty()) m["content"] = nullptr;
    shape_arguments(*calls, shape.text_arguments);
  }
  if (c.continue_final_message) mark_end(c.messages.back().as_object());
  json::Object context = std::move(c.variables);
  for (const auto& [name, token] : special_tokens_) {
    if (context.find(name) == nullptr) context[name] = token;
  }
  if (context.find("documents") == nullptr) context["documents"] = nullptr;
  context["messages"] = std::move(c.messages);
  context["tools"] = std::move(c.tools);
  context["add_generation_prompt"] = c.add_generation_prompt;
  FRESHET_ASSIGN_OR_RETURN(std::string text,
                           form.compiled->render(json::Value(std::move(context))));
  if (c.continue_final_message) FRESHET_RETURN_IF_ERROR(cut_at_marker(text));
  return text;
}

}  // namespace freshet::tokenizer
