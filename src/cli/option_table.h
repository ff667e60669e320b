// The commands and options of the program as plain data, for completion scripts and manual pages.
//
// Read from the tree of CLI::App objects that also parses the command line, so that they cannot
// disagree. Hidden commands and options (without a group) are left out. Single-threaded.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace freshet::cli {

struct OptionEntry {
  std::vector<std::string> names;    // "-t", "--threads"; empty for a positional argument
  std::string positional;            // "MODEL"; empty if it is only named
  std::string value;                 // name of the value, "FILE"; empty for a flag
  std::vector<std::string> choices;  // all possible values, if there is such a list
  std::string default_value;
  std::string about;
  std::string group;
  bool required = false;
  bool repeats = false;
};

struct CommandEntry {
  std::vector<std::string> path;  // {} for the program, {"bench", "serve"}
  std::string about;
  std::string footer;  // "Examples:\n..." or empty
  std::vector<OptionEntry> options;
  std::vector<std::string> subcommands;
  std::string name(char separator) const;  // "bench serve"
};

// The program, then its commands in the order of --help, each followed by its subcommands.
std::vector<CommandEntry> command_table(const CLI::App& program);

// The values that an option takes, from its type name: "TEXT:{last,mean}" -> {"last", "mean"}.
std::vector<std::string> choices_of(const std::string& type);

// The first line of a description, without what follows the first sentence.
std::string short_about(const std::string& about);

}  // namespace freshet::cli
