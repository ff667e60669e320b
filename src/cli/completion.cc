// `freshet completion SHELL`: scripts that complete commands, options and their values.
#include <algorithm>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/option_table.h"

namespace freshet::cli {
namespace completion {

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

std::string joined(const std::vector<std::string>& words, const char* between = " ") {
  return CLI::detail::join(words, between);
}

// "/bench/serve"; "" for the program itself.
std::string path_of(const CommandEntry& command) {
  return command.path.empty() ? "" : "/" + command.name('/');
}

// "/run|/chat|/bench|/bench/serve"
std::vector<std::string> all_paths(const std::vector<CommandEntry>& table) {
  std::vector<std::string> paths;
  for (const CommandEntry& c : table) {
    if (!c.path.empty()) paths.push_back(path_of(c));
  }
  return paths;
}

std::vector<std::string> named(const CommandEntry& command) {
  std::vector<std::string> names = command.subcommands;
  for (const OptionEntry& o : command.options)
    names.insert(names.end(), o.names.begin(), o.names.end());
  return names;
}

// Single quotes, for a shell where '\'' is a quote within them.
std::string shell_quoted(const std::string& text) {
  return "'" + replaced(text, "'", "'\\''") + "'";
}

const CommandEntry& at(const std::vector<CommandEntry>& table, std::vector<std::string> path) {
  return *std::find_if(table.begin(), table.end(),
                       [&](const CommandEntry& c) { return c.path == path; });
}

std::vector<std::string> below(const CommandEntry& parent, const std::string& name) {
  std::vector<std::string> path = parent.path;
  path.push_back(name);
  return path;
}

// Bash splits --option=value into three words, hence the two cases of "=".
constexpr char kBashBegin[] =
    R"(# Completion of freshet for bash. Written by: freshet completion bash
_freshet() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
  local command="" word
  if [[ $current == "=" ]]; then
    current=""
  elif [[ $previous == "=" && $COMP_CWORD -gt 1 ]]; then
    previous=${COMP_WORDS[COMP_CWORD-2]}
  fi
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case $command/$word in
)";
// With no candidates, "-o default" completes names of files.
constexpr char kBashEnd[] = R"(  esac
  if [[ $current == -* || -z $command || $command == /bench ]]; then
    # shellcheck disable=SC2207
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  fi
}
complete -o default -F _freshet freshet
)";

std::string bash(const std::vector<CommandEntry>& table) {
  std::string out = kBashBegin;
  out += "      " + joined(all_paths(table), "|") + ") command+=/$word ;;\n    esac\n  done\n";
  out += "  case $command:$previous in\n";
  for (const CommandEntry& c : table) {
    std::vector<std::string> plain;
    for (const OptionEntry& o : c.options) {
      if (o.names.empty() || o.value.empty()) continue;
      std::vector<std::string> patterns;
      for (const std::string& name : o.names) patterns.push_back(path_of(c) + ":" + name);
      if (o.choices.empty()) {
        plain.insert(plain.end(), patterns.begin(), patterns.end());
        continue;
      }
      out += fmt::format(
          "    {})\n      # shellcheck disable=SC2207\n"
          "      COMPREPLY=($(compgen -W \"{}\" -- \"$current\"))\n      return ;;\n",
          joined(patterns, "|"), joined(o.choices));
    }
    if (!plain.empty()) out += fmt::format("    {}) return ;;\n", joined(plain, "|"));
  }
  out += "  esac\n  local words=\"\"\n  case $command in\n";
  for (const CommandEntry& c : table) {
    out += fmt::format("    {}) words=\"{}\" ;;\n", c.path.empty() ? "\"\"" : path_of(c),
                       joined(named(c)));
  }
  return out + kBashEnd;
}

std::string zsh_escaped(std::string text) {
  for (const char* special : {"\\", "[", "]", ":"})
    text = replaced(text, special, std::string("\\") + special);
  return text;
}

std::string zsh_value(const OptionEntry& o) {
  if (!o.choices.empty()) return ":value:(" + joined(o.choices) + ")";
  return fmt::format(":{}:_files", zsh_escaped(CLI::detail::to_lower(o.value)));
}

// A line of _arguments for each name of an option.
std::string zsh_option(const OptionEntry& o) {
  if (o.names.empty()) return {};
  std::string out;
  for (const std::string& name : o.names) {
    std::string spec = o.repeats ? "*" : "(" + joined(o.names) + ")";
    spec += name;
    if (!o.value.empty()) spec += name.starts_with("--") ? "=" : "+";
    spec += "[" + zsh_escaped(short_about(o.about)) + "]";
    if (!o.value.empty()) spec += zsh_value(o);
    out += "    " + shell_quoted(spec) + " \\\n";
  }
  return out;
}

std::string zsh_function(const std::vector<CommandEntry>& table, const CommandEntry& c) {
  std::string name = "_freshet";
  for (const std::string& word : c.path) name += "_" + replaced(word, "-", "_");
  std::string out = name + "() {\n  local context state state_descr line\n  typeset -A opt_args\n";
  out += "  _arguments -s -S -C \\\n";
  for (const OptionEntry& o : c.options) out += zsh_option(o);
  if (c.subcommands.empty()) return out + "    '*:file:_files'\n}\n";
  out += "    '1:command:->command' \\\n    '*::argument:->argument'\n  case $state in\n";
  out += "    command)\n      local -a commands=(\n";
  std::string cases;
  for (const std::string& s : c.subcommands) {
    out +=
        "        " + shell_quoted(s + ":" + zsh_escaped(short_about(at(table, below(c, s)).about)));
    out += "\n";
    cases += fmt::format("        {}) {}_{} ;;\n", s, name, replaced(s, "-", "_"));
  }
  out += "      )\n      _describe command commands ;;\n    argument)\n      case $line[1] in\n";
  return out + cases + "      esac ;;\n  esac\n}\n";
}

std::string zsh(const std::vector<CommandEntry>& table) {
  std::string out =
      "#compdef freshet\n# Completion of freshet for zsh. Written by: freshet completion zsh\n";
  for (const CommandEntry& c : table) out += zsh_function(table, c);
  return out +
         "if [[ $funcstack[1] == _freshet ]]; then\n  _freshet \"$@\"\nelse\n"
         "  compdef _freshet freshet\nfi\n";
}

std::string fish_quoted(std::string text) {
  text = replaced(replaced(text, "\\", "\\\\"), "'", "\\'");
  return "'" + text + "'";
}

std::string fish(const std::vector<CommandEntry>& table) {
  std::string out = "# Completion of freshet for fish. Written by: freshet completion fish\n";
  out += "function __freshet_command\n  set -l path\n  for word in (commandline -opc)[2..-1]\n";
  out += "    switch \"$path/$word\"\n      case " + joined(all_paths(table));
  out += "\n        set path \"$path/$word\"\n    end\n  end\n  echo \"at$path\"\nend\n";
  for (const CommandEntry& c : table) {
    const std::string start =
        fmt::format("complete -c freshet -n 'test (__freshet_command) = at{}'", path_of(c));
    for (const std::string& s : c.subcommands) {
      out += fmt::format("{} {}-a {} -d {}\n", start, c.path.empty() ? "-f " : "", s,
                         fish_quoted(short_about(at(table, below(c, s)).about)));
    }
    for (const OptionEntry& o : c.options) {
      if (o.names.empty()) continue;
      out += start;
      for (const std::string& name : o.names)
        out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (!o.choices.empty()) {
        out += " -x -a " + fish_quoted(joined(o.choices));
      } else if (!o.value.empty()) {
        out += " -r";
      }
      out += " -d " + fish_quoted(short_about(o.about)) + "\n";
    }
  }
  return out;
}

}  // namespace completion

void add_completion(CLI::App& program, Context& context, Action& action) {
  auto shell = std::make_shared<std::string>();
  CLI::App* c = program.add_subcommand("completion", "Print a completion script for a shell");
  c->group("");  // for packages; documented, but not a command for every day
  c->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  c->callback([shell, &program, &context, &action] {
    action = [shell, &program, &context] {
      const auto table = command_table(program);
      context.out.write(*shell == "bash"  ? completion::bash(table)
                        : *shell == "zsh" ? completion::zsh(table)
                                          : completion::fish(table));
      return Status();
    };
  });
}

}  // namespace freshet::cli
