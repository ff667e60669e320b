// The layout of --help, from CLI11's table of options.
//
// Names of values say what an option takes (MODEL, FILE, N). Options of the group kRareGroup are
// only named by --help; --help-all explains them, too. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include <CLI/CLI.hpp>

namespace freshet::cli {

inline constexpr char kRareGroup[] = "Rarely needed";

std::shared_ptr<CLI::FormatterBase> help_formatter();

// "FILE"; "" for flags. Shell completion can tell files and folders by it.
std::string value_name(const CLI::Option& option);

}  // namespace freshet::cli
