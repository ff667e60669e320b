// `freshet bench ceilings`: the maximum rates of the machine.
#include <memory>
#include <string>

#include "base/json.h"
#include "cli/command.h"
#include "eval/ceilings.h"

namespace freshet::cli {
namespace bench_ceilings_command {

struct Options {
  int threads = 0;
  std::string cpu_isa;
  bool json = false;
};

Status bench_ceilings(const Options& o, Context& context) {
  FRESHET_ASSIGN_OR_RETURN(const auto all, eval::measure_all_ceilings(o.threads, o.cpu_isa));
  if (o.json) {
    json::Array list;
    for (const eval::Ceiling& c : all) {
      json::Object e;
      e["name"] = c.name;
      e["unit"] = c.unit;
      e["rate"] = c.rate;
      list.emplace_back(std::move(e));
    }
    context.out.write(json::write(list) + "\n");
    return {};
  }
  for (const eval::Ceiling& c : all)
    context.out.print("{:<20} {:>9.1f} {}\n", c.name, c.rate / 1e9,
                      c.unit == "B/s" ? "GB/s" : "GOP/s");
  return {};
}

}  // namespace bench_ceilings_command

void add_bench_ceilings(CLI::App& bench, Context& context, Action& action) {
  auto o = std::make_shared<bench_ceilings_command::Options>();
  CLI::App* c = bench.add_subcommand(
      "ceilings",
      "Measure the maximum rates of the machine: memory reads and each kind of arithmetic");
  c->add_option("-t,--threads", o->threads, "Threads (default: one per physical core)")
      ->check(CLI::Range(1, 4096));
  c->add_option("--cpu-isa", o->cpu_isa, "Highest instruction set to measure");
  c->add_flag("--json", o->json, "Print a JSON list of name, unit and rate");
  add_examples(*c,
               "  freshet bench ceilings\n"
               "  freshet bench ceilings -t 1 --cpu-isa avx2\n"
               "  freshet bench ceilings --json | jq '.[] | select(.name == \"read\").rate'");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return bench_ceilings(*o, context); }; });
}

}  // namespace freshet::cli
