// What a wrong command line is told: one line that names the word and the fix.
//
// Single-threaded.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace freshet::cli {

// `program`: after the parse that threw `error`.
std::string usage_error(const CLI::App& program, const CLI::ParseError& error);

// "run", "bench serve"; "" for the program.
std::string path_of(const CLI::App& command);

// "help", "version" and "help COMMAND" in place of a command become the options of that name.
void translate_words(std::vector<std::string>& arguments);

}  // namespace freshet::cli
