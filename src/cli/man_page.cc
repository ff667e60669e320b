// `freshet man`: the manual pages, in roff with the macros of man(7).
#include <string>
#include <vector>

#include "base/env.h"
#include "cli/command.h"
#include "cli/option_table.h"

namespace freshet::cli {
namespace man_page {

// Text in which nothing is a roff command.
std::string roff(const std::string& text) {
  std::string out;
  bool line_begins = true;
  for (const char c : text) {
    if (line_begins && (c == '.' || c == '\'')) out += "\\&";
    line_begins = c == '\n';
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

std::string page_name(const CommandEntry& command) {
  return command.path.empty() ? "freshet" : "freshet-" + command.name('-');
}

std::string bold(const std::string& text) {
  return "\\fB" + roff(text) + "\\fR";
}
std::string italic(const std::string& text) {
  return "\\fI" + roff(text) + "\\fR";
}

std::string synopsis(const CommandEntry& command) {
  std::string out = ".SH SYNOPSIS\n";
  std::string line = bold(command.path.empty() ? "freshet" : "freshet " + command.name(' '));
  if (!command.subcommands.empty()) line += " " + italic("COMMAND");
  line += " [" + italic("OPTION") + " ...]";
  for (const OptionEntry& o : command.options) {
    if (o.positional.empty()) continue;
    const std::string name = italic(o.positional) + (o.repeats ? " ..." : "");
    line += o.required ? " " + name : " [" + name + "]";
  }
  return out + line + "\n";
}

std::string option_text(const OptionEntry& o) {
  std::string out = ".TP\n";
  if (o.names.empty()) out += italic(o.positional);
  for (size_t i = 0; i < o.names.size(); ++i) out += (i > 0 ? ", " : "") + bold(o.names[i]);
  if (!o.names.empty() && !o.value.empty()) {
    out += " " + (o.choices.empty() ? italic(o.value) : CLI::detail::join(o.choices, "|"));
  }
  out += "\n" + roff(o.about);
  if (!o.default_value.empty() && o.about.find("default") == std::string::npos)
    out += " (default: " + roff(o.default_value) + ")";
  return out + "\n";
}

std::string options_text(const CommandEntry& command) {
  std::vector<std::string> groups;
  for (const OptionEntry& o : command.options) {
    const std::string& group = o.names.empty() ? "Arguments" : o.group;
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  }
  std::string out;
  for (const std::string& group : groups) {
    std::string title = CLI::detail::to_lower(group);
    for (char& c : title) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    out += ".SH \"" + roff(title) + "\"\n";
    for (const OptionEntry& o : command.options) {
      if ((o.names.empty() ? "Arguments" : o.group) == group) out += option_text(o);
    }
  }
  return out;
}

std::string commands_text(const CommandEntry& command, const std::vector<CommandEntry>& table) {
  if (command.subcommands.empty()) return {};
  std::string out = ".SH COMMANDS\nEach has a page of its own, e.g. ";
  out += bold(page_name(command) + "-" + command.subcommands.front()) + "(1).\n";
  for (const CommandEntry& c : table) {
    if (c.path.size() != command.path.size() + 1) continue;
    if (!std::equal(command.path.begin(), command.path.end(), c.path.begin())) continue;
    out += ".TP\n" + bold("freshet " + c.name(' ')) + "\n" + roff(short_about(c.about)) + "\n";
  }
  return out;
}

std::string examples_text(const CommandEntry& command) {
  constexpr std::string_view kHeading = "Examples:\n";
  if (!command.footer.starts_with(kHeading)) return {};
  return ".SH EXAMPLES\n.nf\n" + roff(command.footer.substr(kHeading.size())) + "\n.fi\n";
}

// What holds for all commands.
std::string common_text() {
  std::string out =
      ".SH \"EXIT STATUS\"\n"
      ".TP\n0\nsuccess\n.TP\n1\nruntime failure: out of memory, disk full, broken pipe\n"
      ".TP\n2\nbad input or usage\n.TP\n130\ninterrupted\n"
      ".SH ENVIRONMENT\n";
  for (const EnvEntry& e : env_table())
    out += ".TP\n" + bold(e.name) + "\n" + roff(std::string(e.meaning)) + "\n";
  return out;
}

std::string page(const CommandEntry& command, const std::vector<CommandEntry>& table) {
  const std::string name = page_name(command);
  std::string title = name;
  for (char& c : title) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  // No date: the same sources give the same page.
  std::string out = fmt::format(".TH \"{}\" 1 \"\" \"Freshet {}\" \"Freshet manual\"\n",
                                roff(title), FRESHET_VERSION);
  const std::string about = command.path.empty() ? "run large language models from their weights"
                                                 : short_about(command.about);
  out += ".SH NAME\n" + roff(name) + " \\- " + roff(about) + "\n";
  out += synopsis(command);
  out += ".SH DESCRIPTION\n" + roff(command.about) + "\n";
  out += commands_text(command, table) + options_text(command) + examples_text(command);
  if (command.path.empty()) return out + common_text();
  return out + ".SH \"SEE ALSO\"\n" + bold("freshet") + "(1)\n";
}

Status write_pages(const std::vector<CommandEntry>& table, const std::string& folder) {
  for (const CommandEntry& c : table)
    FRESHET_RETURN_IF_ERROR(write_text_file(folder + "/" + page_name(c) + ".1", page(c, table)));
  return {};
}

Status print_page(const std::vector<CommandEntry>& table, const std::vector<std::string>& path,
                  Output& out) {
  for (const CommandEntry& c : table) {
    if (c.path != path) continue;
    out.write(page(c, table));
    return {};
  }
  return invalid_argument("there is no command '{}'", CLI::detail::join(path, " "));
}

}  // namespace man_page

void add_man(CLI::App& program, Context& context, Action& action) {
  struct Options {
    std::vector<std::string> path;
    std::string folder;
  };
  auto o = std::make_shared<Options>();
  CLI::App* c = program.add_subcommand("man", "Print the manual page of the program or a command");
  c->group("");
  c->add_option("command", o->path, "The command, e.g. bench serve (default: the program)");
  c->add_option("--all", o->folder, "Write the pages of all commands to this folder instead");
  c->callback([o, &program, &context, &action] {
    action = [o, &program, &context] {
      const auto table = command_table(program);
      return o->folder.empty() ? man_page::print_page(table, o->path, context.out)
                               : man_page::write_pages(table, o->folder);
    };
  });
}

}  // namespace freshet::cli
