#include "cli/usage_error.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/nearest.h"

namespace freshet::cli {
namespace {

// Commands of other programs, and other words for ours.
constexpr std::pair<const char*, const char*> kOtherWords[] = {
    {"generate", "run"},    {"complete", "run"},    {"ask", "run"},
    {"server", "serve"},    {"start", "serve"},     {"api", "serve"},
    {"cli", "chat"},        {"talk", "chat"},       {"export", "convert"},
    {"info", "inspect"},    {"benchmark", "bench"}, {"perplexity", "eval perplexity"},
    {"gpus", "devices"},    {"gpu", "devices"},     {"template", "apply-template"},
    {"encode", "tokenize"}, {"tokens", "tokenize"}, {"logits", "eval logits"},
    {"ls", "list"},         {"models", "list"},     {"download", "pull"},
    {"get", "pull"},        {"remove", "rm"},       {"delete", "rm"},
};

const CLI::App& chosen_command(const CLI::App& program) {
  const CLI::App* command = &program;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return *command;
}

std::vector<std::string> names_of_commands(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::App* sub : command.get_subcommands({})) names.push_back(sub->get_name());
  return names;
}

std::string upper_case(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// The error for a word in place of a command; "" if there is no such word.
std::string unknown_command(const CLI::App& command) {
  const std::vector<std::string> words = command.remaining();
  if (command.get_require_subcommand_min() == 0 || words.empty()) return {};
  const std::vector<std::string> names = names_of_commands(command);
  std::string best;
  for (const auto& [other, ours] : kOtherWords) {
    const std::string first = std::string(ours).substr(0, std::string_view(ours).find(' '));
    const bool there = std::find(names.begin(), names.end(), first) != names.end();
    if (words.front() == other && there) best = ours;
  }
  if (best.empty()) best = nearest(words.front(), names);
  const std::string error = fmt::format("there is no command '{}'", words.front());
  return best.empty() ? error : fmt::format("{}: did you mean '{}'?", error, best);
}

// The option that a message of CLI11 begins with ("words: At Most 2 ..."); nullptr if none.
const CLI::Option* option_of(const CLI::App& command, std::string_view message) {
  const std::string name(message.substr(0, message.find(':')));
  for (const CLI::Option* o : command.get_options({})) {
    if (o->get_name() == name || o->check_name(name)) return o;
  }
  return nullptr;
}

std::string mismatch(const CLI::App& command, const std::string& message) {
  const CLI::Option* o = option_of(command, message);
  if (o == nullptr) return message;
  const size_t given = o->results().size();
  if (message.find("missing") != std::string::npos)
    return fmt::format("{} needs a value", o->get_name());
  if (!o->nonpositional())
    return fmt::format("too many words: {} of them; put a text of several words in quotes", given);
  return fmt::format("{} was given {} times: it takes one value", o->get_name(), given);
}

std::string superfluous(const CLI::App& command) {
  std::string words;
  for (const std::string& word : command.remaining()) {
    if (words.empty()) words = fmt::format("'{}'", word);
  }
  return fmt::format("unexpected argument {} of freshet {}{}", words, path_of(command),
                     command.get_name() == "run" || command.get_name() == "tokenize"
                         ? ": put a text of several words in quotes"
                         : "");
}

std::string required(const CLI::App& command, std::string message) {
  if (message.starts_with("A subcommand")) {
    std::string names;
    for (const std::string& name : names_of_commands(command))
      names += (names.empty() ? "" : ", ") + name;
    return fmt::format("freshet {}needs a command: {}",
                       path_of(command).empty() ? "" : path_of(command) + " ", names);
  }
  for (const CLI::Option* o : command.get_options({})) {
    const std::string name = o->get_name();
    if (o->get_positional() && message == name + " is required")
      return fmt::format("{} is missing: freshet {} {}", upper_case(name), path_of(command),
                         upper_case(name));
  }
  return message;
}

}  // namespace

std::string path_of(const CLI::App& command) {
  if (command.get_parent() == nullptr) return {};
  const std::string above = path_of(*command.get_parent());
  return above.empty() ? command.get_name() : above + " " + command.get_name();
}

std::string usage_error(const CLI::App& program, const CLI::ParseError& error) {
  const CLI::App& command = chosen_command(program);
  if (std::string unknown = unknown_command(command); !unknown.empty()) return unknown;
  const std::string name = error.get_name();
  std::string message = error.what();
  if (name == "ConversionError") {
    constexpr std::string_view kPrefix = "Could not convert: ";  // and then: --option = value
    if (message.starts_with(kPrefix)) message.erase(0, kPrefix.size());
    return message + ": not a number, or too large";
  }
  if (name == "ArgumentMismatch") return mismatch(command, message);
  if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr || !command.remaining().empty())
    return superfluous(command);
  if (name == "RequiredError") return required(command, std::move(message));
  return message;
}

void translate_words(std::vector<std::string>& arguments) {
  if (arguments.empty()) return;
  if (arguments.front() == "version") arguments.front() = "--version";
  if (arguments.front() != "help") return;
  arguments.erase(arguments.begin());
  arguments.emplace_back("--help");
}

}  // namespace freshet::cli
