// What the subcommands of `freshet` share: one function each, which declares it.
//
// add_x() adds a subcommand to the program and, when it is chosen, sets `action` to what it does.
// The action runs after parsing; its Status decides the exit code (exit_code()). Commands write
// results to context.out and remarks to standard error. One thread.
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
void add_tokenize(CLI::App& program, Context& context, Action& action);
void add_apply_template(CLI::App& program, Context& context, Action& action);
void add_inspect(CLI::App& program, Context& context, Action& action);
void add_convert(CLI::App& program, Context& context, Action& action);
void add_eval(CLI::App& program, Context& context, Action& action);
void add_bench(CLI::App& program, Context& context, Action& action);
void add_serve(CLI::App& program, Context& context, Action& action);
// Subcommands of bench.
void add_bench_serve(CLI::App& bench, Context& context, Action& action);
void add_bench_ceilings(CLI::App& bench, Context& context, Action& action);
void add_bench_throughput(CLI::App& bench, Context& context, Action& action);

// 0 done, 1 failed, 2 bad input or usage, 130 interrupted.
int exit_code(const Status& status);

// Shows `text` after the options of --help, under the heading "Examples".
void add_examples(CLI::App& command, const std::string& text);

}  // namespace freshet::cli
