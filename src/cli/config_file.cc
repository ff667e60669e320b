// --config FILE: options from a TOML file.
//
// CLI11 calls an option's callback when the command line has been read. The callback of --config
// adds the values of all options that are not on the command line, so that they count as given and
// pass the same checks.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "base/nearest.h"
#include "cli/command.h"

namespace freshet::cli {
namespace config_file {

// Reported by main() as every other wrong option.
[[noreturn]] void fail(const std::string& message) {
  throw CLI::ConfigError(message);
}

std::string place(const std::string& file, const toml::source_region& source) {
  return fmt::format("{}:{}: ", file, source.begin.line);
}

// "; did you mean 'port'?", or "" if no word is near.
std::string suggestion(const std::string& word, const std::vector<std::string>& known) {
  const std::string best = nearest(word, known);
  return best.empty() ? "" : fmt::format("; did you mean '{}'?", best);
}

std::string full_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name() : full_name(*parent) + " " + command.get_name();
}

// The names that a file may use for an option: its long names, or the name of the argument.
std::vector<std::string> keys_of(const CLI::App& command, const CLI::Option& option) {
  std::vector<std::string> keys = option.get_lnames();
  if (keys.empty() && option.get_positional()) keys.push_back(option.get_name(true, false));
  for (std::string& k : keys) k = CLI::detail::to_lower(k);
  const bool meta = &option == command.get_help_ptr() || option.check_lname("help-all") ||
                    option.check_lname("config") || option.check_lname("version");
  return meta ? std::vector<std::string>() : keys;
}

// A file may write max_model_len for max-model-len.
std::string key_name(const toml::key& key) {
  std::string name(key.str());
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

CLI::Option* find_option(CLI::App& command, const std::string& key) {
  for (CLI::Option* o : command.get_options([](CLI::Option*) { return true; })) {
    const std::vector<std::string> keys = keys_of(command, *o);
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) return o;
  }
  return nullptr;
}

CLI::App* find_command(CLI::App& parent, const std::string& name) {
  const auto found =
      parent.get_subcommands([&](CLI::App* s) { return !name.empty() && s->get_name() == name; });
  return found.empty() ? nullptr : found.front();
}

class File {
 public:
  explicit File(std::string path) : path_(std::move(path)) {
    std::error_code error;
    std::ifstream in(path_);
    if (!in || std::filesystem::is_directory(path_, error))
      fail(fmt::format("--config {}: cannot be read", path_));
    toml::parse_result result = toml::parse(in);
    if (!result) {
      const toml::parse_error& e = result.error();
      fail(place(path_, e.source()) + std::string(e.description()));
    }
    root_ = std::move(result).table();
  }

  // Every key must be known, also those of other commands. Keys outside a table belong to `chosen`.
  void check(CLI::App& program, CLI::App& chosen) const { check_keys(root_, chosen, &program); }
  void apply(CLI::App& chosen) {
    std::vector<std::string> path;
    for (const CLI::App* a = &chosen; a->get_parent() != nullptr; a = a->get_parent())
      path.insert(path.begin(), a->get_name());
    const toml::table* table = &root_;
    for (const std::string& name : path)
      table = table == nullptr ? nullptr : (*table)[name].as_table();
    if (table != nullptr) apply_keys(*table, chosen);
    apply_keys(root_, chosen);
  }

 private:
  // `parent`: the command whose subcommands the tables in `table` are named after.
  void check_keys(const toml::table& table, CLI::App& command, CLI::App* parent) const {
    std::set<const CLI::Option*> seen;
    for (const auto& [key, value] : table) {
      if (const toml::table* below = value.as_table()) {
        CLI::App* const named = find_command(*parent, std::string(key.str()));
        if (named == nullptr) fail(unknown_table(key, *parent));
        check_keys(*below, *named, named);
        continue;
      }
      const CLI::Option* const option = find_option(command, key_name(key));
      if (option == nullptr) fail(unknown_key(key, command));
      if (!seen.insert(option).second) {
        fail(fmt::format("{}'{}' names an option that was set before", place(path_, key.source()),
                         key.str()));
      }
    }
  }

  std::string unknown_key(const toml::key& key, const CLI::App& command) const {
    std::vector<std::string> known;
    for (const CLI::Option* o : command.get_options()) {
      for (std::string& k : keys_of(command, *o)) known.push_back(std::move(k));
    }
    return fmt::format("{}unknown key '{}': {} has no such option{}", place(path_, key.source()),
                       key.str(), full_name(command), suggestion(key_name(key), known));
  }
  std::string unknown_table(const toml::key& key, const CLI::App& parent) const {
    std::vector<std::string> known;
    for (const CLI::App* s : parent.get_subcommands([](const CLI::App*) { return true; }))
      known.push_back(s->get_name());
    return fmt::format("{}unknown table '{}': {} has no such command{}", place(path_, key.source()),
                       key.str(), full_name(parent), suggestion(std::string(key.str()), known));
  }

  void apply_keys(const toml::table& table, CLI::App& command) const {
    for (const auto& [key, value] : table) {
      if (value.is_table()) continue;
      CLI::Option* const option = find_option(command, key_name(key));
      if (option != nullptr && option->empty()) set(*option, key, value);
    }
  }

  void set(CLI::Option& option, const toml::key& key, const toml::node& value) const {
    const bool flag = option.get_items_expected_max() == 0;
    std::vector<std::string> texts;
    if (const toml::array* array = value.as_array()) {
      if (option.get_items_expected_max() <= 1)
        fail(fmt::format("{}'{}' takes one value, not a list", place(path_, value.source()),
                         key.str()));
      for (const toml::node& item : *array) texts.push_back(text_of(key, item, flag));
      if (texts.empty()) return;
    } else {
      texts.push_back(text_of(key, value, flag));
    }
    if (flag) texts[0] = option.get_flag_value(key_name(key), texts[0]);
    try {
      option.add_result(texts);
      option.run_callback();
    } catch (const CLI::ParseError& e) {
      fail(place(path_, value.source()) + e.what());
    }
  }

  std::string text_of(const toml::key& key, const toml::node& value, bool flag) const {
    if (flag != value.is_boolean()) {
      fail(fmt::format("{}'{}' {}", place(path_, value.source()), key.str(),
                       flag ? "is true or false" : "takes a value, not true or false"));
    }
    if (flag) return *value.value<bool>() ? "true" : "false";
    if (value.is_string()) return *value.value<std::string>();
    if (value.is_integer()) return std::to_string(*value.value<int64_t>());
    if (value.is_floating_point()) return fmt::format("{}", *value.value<double>());
    fail(fmt::format("{}'{}' must be a string, a number or a list of them",
                     place(path_, value.source()), key.str()));
  }

  std::string path_;
  toml::table root_;
};

void add_to(CLI::App& program, CLI::App& command) {
  command
      .add_option_function<std::string>(
          "--config",
          [&program, &command](const std::string& path) {
            File file(path);
            file.check(program, command);
            file.apply(command);
          },
          "A TOML file with options; the command line takes precedence")
      ->type_name("FILE");
  for (CLI::App* s : command.get_subcommands([](CLI::App*) { return true; })) add_to(program, *s);
}

}  // namespace config_file

void add_config_options(CLI::App& program) {
  for (CLI::App* c : program.get_subcommands([](CLI::App*) { return true; })) {
    if (!c->get_group().empty()) config_file::add_to(program, *c);
  }
}

}  // namespace freshet::cli
