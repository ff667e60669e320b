#include "cli/chat_session.h"

#include <algorithm>
#include <utility>

#include "cli/text_width.h"

namespace freshet::cli {
namespace {

std::string role_of(const json::Value& message) {
  return message.get_string("role", "");
}

std::string count_of(size_t n, const char* what) {
  return fmt::format("{} {}{}", n, what, n == 1 ? "" : "s");
}

// The messages in a file that /save wrote, or any list of messages with a role and a text.
Result<json::Array> read_messages(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value root, json::parse_file(path));
  const json::Value* list = root.is_object() ? root.find("messages") : &root;
  if (list == nullptr || !list->is_array())
    return invalid_argument("{}: expected a JSON list of messages", path);
  for (const json::Value& m : list->as_array()) {
    const json::Value* content = m.is_object() ? m.find("content") : nullptr;
    const std::string role = content != nullptr ? role_of(m) : "";
    if (content == nullptr || (!content->is_string() && !content->is_array()) ||
        (role != "system" && role != "user" && role != "assistant")) {
      return invalid_argument(
          "{}: a message needs a role (system, user or assistant) and a text as content", path);
    }
  }
  return list->as_array();
}

}  // namespace

struct ChatSession::Command {
  std::string_view name;
  std::string_view other;  // another name, or ""
  std::string_view argument;
  std::string_view about;
  Status (ChatSession::*run)(const std::string& rest);
};

const ChatSession::Command ChatSession::kCommands[] = {
    {"/reset", "/clear", "", "forget the conversation", &ChatSession::reset},
    {"/system", "", "[TEXT]",
     "show the system message, or set it and forget the conversation (\"\": none)",
     &ChatSession::system},
    {"/image", "", "FILE", "send a picture with the next message", &ChatSession::image},
    {"/retry", "", "", "answer the last message again", &ChatSession::retry},
    {"/undo", "", "", "take back the last message and its answer", &ChatSession::undo},
    {"/trim", "", "", "drop the oldest turns, to make room in the context", &ChatSession::trim},
    {"/history", "", "", "show the conversation", &ChatSession::history},
    {"/save", "", "FILE", "write the conversation as JSON messages", &ChatSession::save},
    {"/load", "", "FILE", "go on with a conversation that /save wrote", &ChatSession::load},
    {"/temp", "", "[VALUE]", "show or set the temperature", &ChatSession::temperature},
    {"/stats", "", "", "show the speed after each answer, or stop showing it", &ChatSession::stats},
    {"/thoughts", "", "", "show what the model thinks, or fold it again; shows the last thought",
     &ChatSession::thoughts},
    {"/help", "/?", "", "show this list", &ChatSession::help},
};

ChatSession::ChatSession(Options options, Context& context, Engine& engine,
                         const ChatPrompt& prompt)
    : o_(std::move(options)),
      context_(context),
      engine_(engine),
      prompt_(prompt),
      thinking_(find_thinking(prompt.source(), engine.tokenizer())) {
  if (thinking_ && thinking_->special) o_.params.skip_special_tokens = false;
  forget();
}

void ChatSession::forget() {
  messages_.clear();
  attached_.clear();
  pictures_.clear();
  if (!o_.system.empty()) messages_.push_back(message("system", o_.system));
}

bool ChatSession::stop() {
  const std::lock_guard lock(mutex_);
  if (current_ == nullptr) return false;
  current_->cancel();
  return true;
}

Result<int> ChatSession::tokens() {
  FRESHET_ASSIGN_OR_RETURN(const std::string text, prompt_.render(messages_));
  FRESHET_ASSIGN_OR_RETURN(const auto shown, pictures());
  FRESHET_ASSIGN_OR_RETURN(const engine::PictureText prompt, prompt_.encode_text(text, shown));
  return static_cast<int>(prompt.ids.size());
}

// The pictures of the conversation, in order.
Result<std::vector<engine::Picture>> ChatSession::pictures() {
  std::vector<engine::Picture> shown;
  for (const std::string& file : picture_files(messages_)) {
    engine::Picture& picture = pictures_[file];
    if (picture == nullptr) {
      FRESHET_ASSIGN_OR_RETURN(picture, read_picture_file(file, engine_));
    }
    shown.push_back(picture);
  }
  return shown;
}

void ChatSession::read(Generation& generation, AnswerPrinter& printer, PromptProgress& progress) {
  {
    const std::lock_guard lock(mutex_);
    current_ = &generation;
  }
  // Ctrl-C may have come before current_ was set.
  if (context_.interrupts.requested()) generation.cancel();
  bool begun = false;
  while (auto delta = generation.next([&progress] { progress.update(); })) {
    finish_ = delta->finish;
    // A step cannot be stopped half-way: its token comes after Ctrl-C, and does not count.
    if (!begun && context_.interrupts.requested()) continue;
    begun = begun || !delta->text.empty();
    progress.done();
    printer.feed(delta->text);
    if (!context_.out.flush().ok()) generation.cancel();
  }
  progress.done();
  const std::lock_guard lock(mutex_);
  current_ = nullptr;
}

void ChatSession::remark_on(const Generation& generation, bool stopped) {
  const std::string cut = why_cut(finish_, generation.usage(), engine_.max_model_len());
  if (stopped) {
    say_dimmed("(stopped)");
  } else if (!cut.empty()) {
    const bool full = cut.find("full") != std::string::npos;
    say_dimmed(fmt::format(
        "({}{})", cut, full ? "; /trim drops the oldest turns, /reset forgets all of them" : ""));
  }
  if (o_.stats) say_dimmed(speed_line(generation));
}

Status ChatSession::answer() {
  FRESHET_ASSIGN_OR_RETURN(const std::string text, prompt_.render(messages_));
  FRESHET_ASSIGN_OR_RETURN(const auto shown, pictures());
  FRESHET_ASSIGN_OR_RETURN(engine::PictureText prompt, prompt_.encode_text(text, shown));
  Request request;
  request.prompt = std::move(prompt.ids);
  request.pictures = std::move(prompt.pictures);
  request.params = o_.params;
  const size_t size = request.prompt.size();
  if (size >= static_cast<size_t>(engine_.max_model_len())) {
    return resource_exhausted(
        "the conversation has {} tokens and the model holds {}: /trim drops the oldest turns, "
        "/undo takes back the last one, /reset forgets all",
        size, engine_.max_model_len());
  }
  PromptProgress progress(engine_, size);
  FRESHET_ASSIGN_OR_RETURN(const auto generation, Generation::start(engine_, std::move(request)));
  AnswerPrinter printer(context_.out, o_.look,
                        {.show_thoughts = o_.show_thoughts, .thinking = thinking_, .prompt = text});
  finish_ = FinishReason::kNone;
  read(*generation, printer, progress);
  const bool stopped = context_.interrupts.requested();
  printer.finish();
  FRESHET_RETURN_IF_ERROR(generation->status());
  if (stopped && printer.answer().empty()) return cancelled("stopped before the answer");
  json::Value reply = message("assistant", printer.answer());
  if (!printer.thought().empty()) reply.as_object()["reasoning_content"] = printer.thought();
  messages_.push_back(std::move(reply));
  FRESHET_RETURN_IF_ERROR(context_.out.flush());
  remark_on(*generation, stopped);
  return {};
}

Status ChatSession::say_to_model(const std::string& text) {
  messages_.push_back(attached_.empty() ? message("user", text)
                                        : message_with_pictures(attached_, text));
  refused_.clear();
  Status status = answer();
  if (status.ok()) {
    attached_.clear();
    return status;
  }
  messages_.pop_back();
  if (status.code() == StatusCode::kResourceExhausted) refused_ = text;
  if (status.code() == StatusCode::kCancelled) {
    FRESHET_RETURN_IF_ERROR(context_.out.flush());
    say_dimmed("(taken back before the answer began; the arrow up brings the message back)");
  }
  return status;
}

Status ChatSession::help(const std::string&) {
  const auto line = [&](std::string_view name, std::string_view argument, std::string_view about) {
    context_.out.print("{:18} {}\n", fmt::format("{} {}", name, argument), about);
  };
  for (const Command& c : kCommands) line(c.name, c.argument, c.about);
  line("/exit", "", "leave (also /quit, /bye, Ctrl-D, or Ctrl-C twice)");
  context_.out.write(
      "A message of several lines: end a line with a backslash or Alt-Enter, put the message "
      "between\n\"\"\" and \"\"\", or paste it. A space before a slash sends the line as a "
      "message.\nCtrl-C clears the line, or stops the answer; before the answer begins it takes "
      "the message back.\n");
  return {};
}

Status ChatSession::reset(const std::string&) {
  forget();
  say_dimmed("(the conversation is forgotten)");
  return {};
}

Status ChatSession::system(const std::string& rest) {
  if (rest.empty()) {
    context_.out.print("{}\n", o_.system.empty() ? "(there is no system message)" : o_.system);
    return {};
  }
  o_.system = rest == "\"\"" ? "" : rest;
  forget();
  say_dimmed(o_.system.empty() ? "(no system message; the conversation is forgotten)"
                               : "(system message set; the conversation is forgotten)");
  return {};
}

// Read at once, so that a wrong file is told now; kept by its name, which the conversation has.
Status ChatSession::image(const std::string& file) {
  if (file.empty()) return invalid_argument("/image needs a file");
  FRESHET_ASSIGN_OR_RETURN(pictures_[file], read_picture_file(file, engine_));
  attached_.push_back(file);
  say_dimmed(fmt::format("({} with the next message)", count_of(attached_.size(), "picture")));
  return {};
}

Status ChatSession::retry(const std::string&) {
  if (messages_.empty() || role_of(messages_.back()) == "system")
    return invalid_argument("there is no message to answer again");
  const json::Array before = messages_;
  if (role_of(messages_.back()) == "assistant") messages_.pop_back();
  Status status = answer();
  if (!status.ok()) messages_ = before;
  return status;
}

Status ChatSession::undo(const std::string&) {
  while (!messages_.empty()) {
    const std::string role = role_of(messages_.back());
    if (role == "system") break;
    messages_.pop_back();
    if (role != "user") continue;
    say_dimmed("(the last message is taken back)");
    return {};
  }
  return invalid_argument("there is nothing to take back");
}

bool ChatSession::drop_oldest_turn() {
  const auto is_user = [](const json::Value& m) { return role_of(m) == "user"; };
  const auto first = std::find_if(messages_.begin(), messages_.end(), is_user);
  if (first == messages_.end()) return false;
  const auto next = std::find_if(first + 1, messages_.end(), is_user);
  messages_.erase(first, next);
  return true;
}

// Leaves a quarter of the context free, also with the message that was refused.
Status ChatSession::trim(const std::string&) {
  const int most = engine_.max_model_len() / 4 * 3;
  const int waiting =
      refused_.empty() ? 0 : static_cast<int>(engine_.tokenizer().encode(refused_).size());
  size_t dropped = 0;
  FRESHET_ASSIGN_OR_RETURN(int used, tokens());
  while (used + waiting > most && drop_oldest_turn()) {
    ++dropped;
    FRESHET_ASSIGN_OR_RETURN(used, tokens());
  }
  say_dimmed(fmt::format("({} dropped; {} of {} tokens are used{})", count_of(dropped, "turn"),
                         used, engine_.max_model_len(),
                         waiting > 0 ? "; the arrow up brings your message back" : ""));
  return {};
}

Status ChatSession::history(const std::string&) {
  for (const json::Value& m : messages_) {
    const std::string content = shown_content(m);
    context_.out.print("{}: {}\n", role_of(m),
                       o_.look.terminal ? without_controls(content) : content);
  }
  if (messages_.empty()) say_dimmed("(nothing was said yet)");
  return {};
}

Status ChatSession::save(const std::string& path) {
  if (path.empty()) return invalid_argument("/save needs a file");
  FRESHET_RETURN_IF_ERROR(
      write_text_file(path, json::write(json::Value(messages_), {.indent = 2}) + "\n"));
  say_dimmed(fmt::format("(saved {} to {})", count_of(messages_.size(), "message"), path));
  return {};
}

Status ChatSession::load(const std::string& path) {
  if (path.empty()) return invalid_argument("/load needs a file");
  FRESHET_ASSIGN_OR_RETURN(messages_, read_messages(path));
  o_.system.clear();
  if (!messages_.empty() && role_of(messages_.front()) == "system")
    o_.system = messages_.front().get_string("content", "");
  say_dimmed(fmt::format("(loaded {} from {})", count_of(messages_.size(), "message"), path));
  return {};
}

Status ChatSession::temperature(const std::string& rest) {
  if (!rest.empty()) {
    const auto value = json::parse(rest);
    if (!value.ok() || !value->is_number() || !(value->as_double() >= 0.0))
      return invalid_argument("/temp needs a number of at least 0, not {}", rest);
    o_.params.temperature = static_cast<float>(value->as_double());
  }
  say_dimmed(fmt::format("(temperature {})", o_.params.temperature));
  return {};
}

Status ChatSession::stats(const std::string&) {
  o_.stats = !o_.stats;
  say_dimmed(o_.stats ? "(speed is shown after each answer)" : "(speed is not shown)");
  return {};
}

Status ChatSession::thoughts(const std::string&) {
  o_.show_thoughts = !o_.show_thoughts;
  if (o_.show_thoughts && !messages_.empty()) {
    const std::string last = messages_.back().get_string("reasoning_content", "");
    if (!last.empty()) {
      context_.out.print("{}{}{}\n", o_.look.dim(),
                         o_.look.terminal ? without_controls(last) : last, o_.look.plain());
    }
  }
  FRESHET_RETURN_IF_ERROR(context_.out.flush());
  say_dimmed(o_.show_thoughts ? "(thoughts are shown)" : "(thoughts are folded)");
  return {};
}

Result<bool> ChatSession::command(const std::string& line) {
  const size_t space = std::min(line.find_first_of(" \t\n"), line.size());
  const std::string name = line.substr(0, space);
  const size_t begin = line.find_first_not_of(" \t\n", space);
  std::string rest = begin == std::string::npos ? "" : line.substr(begin);
  rest.erase(rest.find_last_not_of(" \t\n") + 1);
  const auto unwanted = [&] {
    return invalid_argument("{} takes no text (a space before it sends the line as a message)",
                            name);
  };
  if (name == "/exit" || name == "/quit" || name == "/bye") {
    if (!rest.empty()) return unwanted();
    return false;
  }
  for (const Command& c : kCommands) {
    if (name != c.name && name != c.other) continue;
    if (c.argument.empty() && !rest.empty()) return unwanted();
    FRESHET_RETURN_IF_ERROR((this->*c.run)(rest));
    FRESHET_RETURN_IF_ERROR(context_.out.flush());
    return true;
  }
  return invalid_argument(
      "no command {} (/help lists them; a space before it sends the line as a message)", name);
}

}  // namespace freshet::cli
