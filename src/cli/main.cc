#include <algorithm>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/env.h"
#include "cli/command.h"
#include "cli/foreign_options.h"
#include "cli/help.h"
#include "cli/usage_error.h"
#include "cli/version.h"

namespace freshet::cli {

int exit_code(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return 0;
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
    case StatusCode::kUnsupported:
      return 2;
    case StatusCode::kResourceExhausted:
    case StatusCode::kIo:
    case StatusCode::kInternal:
      return 1;
    case StatusCode::kCancelled:
      return 130;
  }
  return 1;
}

void add_examples(CLI::App& command, const std::string& text) {
  command.footer("Examples:\n" + text);
}

namespace {

constexpr char kAbout[] =
    "freshet runs large language models from their published weights.\n"
    "MODEL is a .gguf file, a folder with config.json and safetensors, a name (freshet list\n"
    "--catalogue), hf:ORG/REPO[:QUANT] or a URL; what is not on this machine is downloaded once.\n"
    "-hf ORG/REPO works as in llama.cpp. If MODEL is optional, the default is the embedded model.";

std::string footer() {
  std::string text =
      "Exit codes: 0 success, 1 runtime failure, 2 bad input or usage, 130 interrupted.\n"
      "Environment:\n";
  for (const EnvEntry& e : env_table()) text += fmt::format("  {:24} {}\n", e.name, e.meaning);
  return text +
         "Run freshet COMMAND --help for the options of a command, freshet man COMMAND for its\n"
         "manual page, freshet completion SHELL for a completion script.";
}

// Makes an error message one printable line. Names in a damaged file may be long and contain
// terminal control characters.
std::string one_line(std::string_view text) {
  constexpr size_t kMost = 4096;
  while (text.ends_with('\n')) text.remove_suffix(1);
  std::string out;
  for (const char c : text) {
    if (out.size() >= kMost) return out + " ...";
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += ' ';
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

int run(int argc, char** argv) {
  Interrupts interrupts;
  Output out;
  Context context{out, interrupts};
  Action action;

  CLI::App program(kAbout, "freshet");
  program.formatter(help_formatter());
  program.set_help_flag("-h,--help", "Explain the usual options");
  program.set_help_all_flag("--help-all", "Explain all options");
  program.set_version_flag("--version", version_text,
                           "Print version, commit, compiler and devices");
  program.require_subcommand(1);
  program.footer(footer());
  for (const auto add :
       {add_run, add_chat, add_transcribe, add_serve, add_pull, add_list, add_show, add_rm,
        add_devices, add_bench, add_eval, add_inspect, add_convert, add_quantize, add_calibrate,
        add_tokenize, add_apply_template, add_completion, add_man})
    add(program, context, action);
  add_config_options(program);
  std::vector<std::string> arguments(argv + 1, argv + argc);
  accept_hub_option(program, arguments);
  translate_words(arguments);
  auto translated = translate_options(program, arguments);
  if (!translated.ok()) {
    say("freshet: " + one_line(translated.status().message()) + " (--help shows how)");
    return 2;
  }
  arguments = std::move(translated).value();
  std::reverse(arguments.begin(), arguments.end());
  try {
    program.parse(std::move(arguments));
  } catch (const CLI::Success& e) {  // --help, --version
    return program.exit(e);
  } catch (const CLI::ParseError& e) {
    say("freshet: " + one_line(usage_error(program, e)) + " (--help shows how)");
    return 2;
  }
  log_to_stderr(LogLevel::kWarning);
  Status status = action();
  const Status written = out.flush();
  if (status.ok()) status = written;
  // Ctrl-C needs no message.
  if (!status.ok() && status.code() != StatusCode::kCancelled)
    say("freshet: " + one_line(status.message()));
  return exit_code(status);
}

}  // namespace
}  // namespace freshet::cli

int main(int argc, char** argv) {
  try {
    return freshet::cli::run(argc, argv);
  } catch (const std::bad_alloc&) {
    freshet::cli::say("freshet: out of memory");
  } catch (const std::exception& e) {
    freshet::cli::say(std::string("freshet: ") + e.what());
  }
  return 1;
}
