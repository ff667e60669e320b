// The subcommands of `freshet`: one function declares each.
//
// add_x() adds a subcommand to the program. If the user chooses it, it sets `action`, which runs
// after parsing. The Status of the action decides the exit code (exit_code()). Commands write
// results to context.out and messages to standard error. Single-threaded.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "cli/interrupt.h"
#include "cli/output.h"

namespace freshet::cli {

struct Context {
  Output& out;
  Interrupts& interrupts;
};

using Action = std::function<Status()>;

void add_run(CLI::App& program, Context& context, Action& action);
void add_chat(CLI::App& program, Context& context, Action& action);
void add_transcribe(CLI::App& program, Context& context, Action& action);
void add_tokenize(CLI::App& program, Context& context, Action& action);
void add_apply_template(CLI::App& program, Context& context, Action& action);
void add_inspect(CLI::App& program, Context& context, Action& action);
void add_convert(CLI::App& program, Context& context, Action& action);
void add_quantize(CLI::App& program, Context& context, Action& action);
void add_calibrate(CLI::App& program, Context& context, Action& action);
void add_eval(CLI::App& program, Context& context, Action& action);
void add_bench(CLI::App& program, Context& context, Action& action);
void add_serve(CLI::App& program, Context& context, Action& action);
void add_pull(CLI::App& program, Context& context, Action& action);
void add_list(CLI::App& program, Context& context, Action& action);
void add_show(CLI::App& program, Context& context, Action& action);
void add_rm(CLI::App& program, Context& context, Action& action);
void add_devices(CLI::App& program, Context& context, Action& action);
// For packages, not in --help: a completion script; the manual pages.
void add_completion(CLI::App& program, Context& context, Action& action);
void add_man(CLI::App& program, Context& context, Action& action);
// Adds --config to every command in --help. Called when all other options are declared.
void add_config_options(CLI::App& program);
// Subcommands of eval.
void add_eval_compare(CLI::App& eval, Context& context, Action& action);
void add_eval_kv(CLI::App& eval, Context& context, Action& action);
void add_eval_quant(CLI::App& eval, Context& context, Action& action);
void add_eval_tasks(CLI::App& eval, Context& context, Action& action);
void add_eval_speculation(CLI::App& eval, Context& context, Action& action);
// Subcommands of bench.
void add_bench_serve(CLI::App& bench, Context& context, Action& action);
void add_bench_ceilings(CLI::App& bench, Context& context, Action& action);
void add_bench_throughput(CLI::App& bench, Context& context, Action& action);

// Turns llama.cpp's "-hf ORG/REPO[:QUANT]" (also -hfr, --hf-repo) into this program's spelling:
// "--model=hf:ORG/REPO" if the command has that option, else the word "hf:ORG/REPO".
void accept_hub_option(const CLI::App& program, std::vector<std::string>& arguments);

// 0 success, 1 runtime failure, 2 bad input or usage, 130 interrupted.
int exit_code(const Status& status);

// Shows `text` in --help after the options, under the heading "Examples".
void add_examples(CLI::App& command, const std::string& text);

}  // namespace freshet::cli
