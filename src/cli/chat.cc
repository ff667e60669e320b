#include <memory>
#include <string>

#include "base/env.h"
#include "cli/chat_prompt.h"
#include "cli/chat_session.h"
#include "cli/command.h"
#include "cli/line_editor.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "cli/terminal_mode.h"

namespace freshet::cli {
namespace chat_command {

struct Options {
  std::string model;
  std::string chat_template;
  std::string first;
  bool plain = false;
  ChatSession::Options session;
  RunOptions run;
  SamplingOptions sampling;
};

constexpr char kWelcome[] =
    "/help: commands; Alt-Enter: new line; Ctrl-C: stop the answer; Ctrl-D: leave";

struct Turn {
  std::string text;
  bool may_be_command = false;
};

// Answers a message or runs a command. Returns false when the conversation is over.
Result<bool> take_turn(ChatSession& chat, LineEditor& editor, Context& context, const Turn& turn) {
  Status status;
  bool more = true;
  if (turn.may_be_command && turn.text.starts_with('/')) {
    const auto result = chat.command(turn.text);
    status = result.status();
    more = !result.ok() || *result;
  } else {
    status = chat.say_to_model(turn.text.starts_with(" /") ? turn.text.substr(1) : turn.text);
  }
  FRESHET_RETURN_IF_ERROR(context.out.status());
  if (context.interrupts.terminated()) return cancelled("terminated");
  if (!editor.is_terminal()) {
    FRESHET_RETURN_IF_ERROR(status);
    if (context.interrupts.requested()) return cancelled("interrupted");
  }
  if (!status.ok() && status.code() != StatusCode::kCancelled) say(status.message());
  editor.forget_cancel();
  context.interrupts.clear();
  return more;
}

Status converse(ChatSession& chat, LineEditor& editor, Context& context, const std::string& first) {
  Turn turn{first, false};
  for (bool more = true; more;) {
    if (!turn.text.empty()) {
      FRESHET_ASSIGN_OR_RETURN(more, take_turn(chat, editor, context, turn));
      if (!more) break;
    }
    const LineEditor::Event event = editor.read(turn.text);
    if (context.interrupts.terminated()) return cancelled("terminated");
    if (event == LineEditor::Event::kEnd) break;
    turn.may_be_command = editor.typed();
    if (event == LineEditor::Event::kCancelled) {
      context.interrupts.clear();
      turn.text.clear();
    }
  }
  return {};
}

Status run_chat(const Options& o, Context& context) {
  if (o.sampling.params.max_tokens == 0)
    return invalid_argument("-n 0 leaves no answer: chat needs at least 1, or -1 for no limit");
  FRESHET_RETURN_IF_ERROR(check_sampling(o.sampling));
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  ChatSession::Options session = o.session;
  FRESHET_ASSIGN_OR_RETURN(session.params, sampling_params(o.sampling, path));
  FRESHET_ASSIGN_OR_RETURN(const auto engine, load_engine(o.run, o.model));
  FRESHET_ASSIGN_OR_RETURN(ChatPrompt prompt,
                           ChatPrompt::make(engine->tokenizer(), o.chat_template));
  prompt.read_with(engine->pictures());
  session.look = look_of(context.out.is_terminal() && !o.plain);
  ChatSession chat(std::move(session), context, *engine, prompt);
  const auto cache = cache_dir();
  LineEditor editor("> ", cache.ok() ? *cache + "/chat_history.jsonl" : "");
  context.interrupts.set_exit_hook(terminal_mode::restore);
  const Interrupts::Handler on_interrupt(context.interrupts, [&] {
    if (!chat.stop()) editor.cancel();
  });
  if (editor.is_terminal()) say_dimmed(kWelcome);
  return converse(chat, editor, context, o.first);
}

}  // namespace chat_command

void add_chat(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<chat_command::Options>();
  CLI::App* c = program.add_subcommand("chat", "Chat with an instruction-tuned model");
  c->add_option("model", o->model, "Model folder, .gguf file or name")->required();
  c->add_option("-p,--prompt", o->first, "The first message");
  c->add_option("--system", o->session.system, "The system message");
  c->add_option("--chat-template", o->chat_template,
                "A Jinja file to use instead of the model's template");
  c->add_flag("--show-thoughts", o->session.show_thoughts,
              "Show the thoughts of models that think (default: folded; /thoughts changes it)");
  c->add_flag("--plain", o->plain, "Show answers as they are: no wrapped lines, no Markdown");
  c->add_flag("--stats", o->session.stats, "Print the speed of each answer to standard error");
  add_sampling_options(*c, o->sampling, 1024);
  add_mmproj_option(*c, o->run);
  add_engine_options(*c, o->run);
  add_examples(*c,
               "  freshet chat smollm2\n"
               "  freshet chat smollm2 --system \"Answer in one sentence.\" --temp 0\n"
               "  echo \"Name three rivers.\" | freshet chat smollm2");
  c->callback([o, &context, &action] { action = [o, &context] { return run_chat(*o, context); }; });
}

}  // namespace freshet::cli
