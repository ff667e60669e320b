#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "cli/chat_prompt.h"
#include "cli/command.h"
#include "cli/generation.h"
#include "cli/line_editor.h"
#include "cli/model_path.h"
#include "cli/options.h"

namespace freshet::cli {
namespace chat_command {

struct Options {
  std::string model;
  std::string system;
  std::string chat_template;
  std::string first;
  bool stats = false;
  RunOptions run;
  SamplingOptions sampling;
};

constexpr char kHelp[] =
    "/reset           forget the conversation\n"
    "/system TEXT     set the system message and forget the conversation\n"
    "/retry           answer the last message again\n"
    "/undo            take back the last message and its answer\n"
    "/history         show the conversation\n"
    "/save FILE       write the conversation as JSON messages\n"
    "/temp VALUE      set the temperature\n"
    "/stats           show the speed after each answer, or stop showing it\n"
    "/exit            leave (also Ctrl-D)\n"
    "A line that ends in a backslash continues on the next. Ctrl-C stops an answer.\n";

class Chat {
 public:
  Chat(const Options& options, Context& context, Engine& engine, const ChatPrompt& prompt,
       SamplingParams params)
      : context_(context),
        engine_(engine),
        prompt_(prompt),
        params_(std::move(params)),
        max_tokens_given_(options.sampling.max_tokens_given),
        stats_(options.stats),
        system_(options.system) {
    reset();
  }

  void reset() {
    messages_.clear();
    if (!system_.empty()) messages_.push_back(message("system", system_));
  }
  // Answers `text` and appends both to the conversation. A stopped answer is kept up to that point.
  Status say_to_model(const std::string& text);
  // Runs a command. Returns false when the conversation is over.
  Result<bool> command(const std::string& line);
  // Called by Ctrl-C. Returns false if no answer was in progress.
  bool stop();

 private:
  Result<std::unique_ptr<Generation>> start();
  Status answer();
  Status undo();
  Status save(const std::string& path);

  Context& context_;
  Engine& engine_;
  const ChatPrompt& prompt_;
  SamplingParams params_;
  bool max_tokens_given_;
  bool stats_;
  std::string system_;
  json::Array messages_;
  std::mutex mutex_;
  Generation* current_ = nullptr;
};

bool Chat::stop() {
  const std::lock_guard lock(mutex_);
  if (current_ == nullptr) return false;
  current_->cancel();
  return true;
}

Result<std::unique_ptr<Generation>> Chat::start() {
  Request request;
  FRESHET_ASSIGN_OR_RETURN(request.prompt, prompt_.encode(messages_));
  request.params = params_;
  const int room = engine_.max_model_len() - static_cast<int>(request.prompt.size());
  if (room <= 0) {
    return resource_exhausted(
        "the conversation has {} tokens and the model holds {}: /undo or /reset",
        request.prompt.size(), engine_.max_model_len());
  }
  if (!max_tokens_given_) request.params.max_tokens = std::min(params_.max_tokens, room);
  return Generation::start(engine_, std::move(request));
}

Status Chat::answer() {
  FRESHET_ASSIGN_OR_RETURN(const auto generation, start());
  {
    const std::lock_guard lock(mutex_);
    current_ = generation.get();
  }
  // Ctrl-C may have come before current_ was set.
  if (context_.interrupts.requested()) generation->cancel();
  std::string text;
  while (auto delta = generation->next()) {
    text += delta->text;
    context_.out.write(delta->text);
    if (!context_.out.flush().ok()) generation->cancel();
  }
  {
    const std::lock_guard lock(mutex_);
    current_ = nullptr;
  }
  context_.out.write("\n");
  messages_.push_back(message("assistant", text));
  FRESHET_RETURN_IF_ERROR(generation->status());
  if (stats_) say(speed_line(*generation));
  return context_.out.flush();
}

Status Chat::say_to_model(const std::string& text) {
  messages_.push_back(message("user", text));
  Status status = answer();
  if (!status.ok() && messages_.back().get_string("role", "") == "user") messages_.pop_back();
  return status;
}

Status Chat::undo() {
  while (!messages_.empty()) {
    const std::string role = messages_.back().get_string("role", "");
    if (role == "system") break;
    messages_.pop_back();
    if (role == "user") return {};
  }
  return invalid_argument("there is nothing to take back");
}

Status Chat::save(const std::string& path) {
  if (path.empty()) return invalid_argument("/save needs a file");
  return write_text_file(path, json::write(json::Value(messages_), {.indent = 2}) + "\n");
}

Result<bool> Chat::command(const std::string& line) {
  const size_t space = line.find(' ');
  const std::string name = line.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : line.substr(space + 1);
  if (name == "/exit" || name == "/quit") return false;
  if (name == "/help" || name == "/?") {
    context_.out.write(kHelp);
  } else if (name == "/reset" || name == "/clear") {
    reset();
  } else if (name == "/system") {
    system_ = rest;
    reset();
  } else if (name == "/retry") {
    if (messages_.empty() || messages_.back().get_string("role", "") != "assistant")
      return invalid_argument("there is no answer to retry");
    messages_.pop_back();
    FRESHET_RETURN_IF_ERROR(answer());
  } else if (name == "/undo") {
    FRESHET_RETURN_IF_ERROR(undo());
  } else if (name == "/history") {
    for (const json::Value& m : messages_)
      context_.out.print("{}: {}\n", m.get_string("role", ""), m.get_string("content", ""));
  } else if (name == "/save") {
    FRESHET_RETURN_IF_ERROR(save(rest));
  } else if (name == "/temp") {
    const auto value = json::parse(rest);
    if (!value.ok() || !value->is_number()) return invalid_argument("/temp needs a number");
    params_.temperature = static_cast<float>(value->as_double());
  } else if (name == "/stats") {
    stats_ = !stats_;
  } else {
    return invalid_argument("no command {} (/help lists them)", name);
  }
  FRESHET_RETURN_IF_ERROR(context_.out.flush());
  return true;
}

// Handles one line; Ctrl-C stops the answer. Returns false when the conversation is over.
Result<bool> take_turn(Chat& chat, LineEditor& editor, Context& context, const std::string& line) {
  Status status;
  bool more = true;
  if (line.front() == '/') {
    const auto result = chat.command(line);
    status = result.status();
    more = !result.ok() || *result;
  } else {
    status = chat.say_to_model(line);
  }
  FRESHET_RETURN_IF_ERROR(context.out.status());
  if (!editor.is_terminal()) {
    FRESHET_RETURN_IF_ERROR(status);
    if (context.interrupts.requested()) return cancelled("interrupted");
  }
  if (!status.ok()) say(status.message());
  editor.forget_cancel();
  context.interrupts.clear();
  return more;
}

Status converse(Chat& chat, LineEditor& editor, Context& context, const std::string& first) {
  std::string line = first;
  for (bool more = true; more;) {
    if (!line.empty()) {
      FRESHET_ASSIGN_OR_RETURN(more, take_turn(chat, editor, context, line));
      if (!more) break;
    }
    const LineEditor::Event event = editor.read(line);
    if (event == LineEditor::Event::kEnd) break;
    if (event == LineEditor::Event::kCancelled) {
      context.interrupts.clear();
      line.clear();
    }
  }
  if (editor.is_terminal()) context.out.write("\n");
  return {};
}

Status run_chat(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(const SamplingParams params, sampling_params(o.sampling, path));
  FRESHET_ASSIGN_OR_RETURN(const auto engine, load_engine(o.run, o.model));
  FRESHET_ASSIGN_OR_RETURN(const ChatPrompt prompt,
                           ChatPrompt::make(engine->tokenizer(), o.chat_template));
  Chat chat(o, context, *engine, prompt, params);
  const auto cache = cache_dir();
  LineEditor editor("> ", cache.ok() ? *cache + "/chat_history" : "");
  const Interrupts::Handler on_interrupt(context.interrupts, [&] {
    if (!chat.stop()) editor.cancel();
  });
  if (editor.is_terminal()) say("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.");
  return converse(chat, editor, context, o.first);
}

}  // namespace chat_command

void add_chat(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<chat_command::Options>();
  CLI::App* c = program.add_subcommand("chat", "Chat with an instruction-tuned model");
  c->add_option("model", o->model, "Model folder, .gguf file or name")->required();
  c->add_option("-p,--prompt", o->first, "The first message");
  c->add_option("--system", o->system, "The system message");
  c->add_option("--chat-template", o->chat_template,
                "A Jinja file to use instead of the model's template");
  c->add_flag("--stats", o->stats, "Print the speed of each answer to standard error");
  add_sampling_options(*c, o->sampling, 1024);
  add_engine_options(*c, o->run);
  add_examples(*c,
               "  freshet chat smollm2\n"
               "  freshet chat smollm2 --system \"Answer in one sentence.\" --temp 0\n"
               "  echo \"Name three rivers.\" | freshet chat smollm2");
  c->callback([o, &context, &action] { action = [o, &context] { return run_chat(*o, context); }; });
}

}  // namespace freshet::cli
