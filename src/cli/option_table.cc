#include "cli/option_table.h"

#include <algorithm>

namespace freshet::cli {

std::vector<std::string> choices_of(const std::string& type) {
  const size_t open = type.find('{');
  const size_t close = type.find('}', open);
  if (open == std::string::npos || close == std::string::npos) return {};
  return CLI::detail::split(type.substr(open + 1, close - open - 1), ',');
}

namespace {

OptionEntry entry_of(const CLI::Option& o) {
  OptionEntry e;
  for (const std::string& name : o.get_snames()) e.names.push_back("-" + name);
  for (const std::string& name : o.get_lnames()) e.names.push_back("--" + name);
  if (o.get_positional()) {
    e.positional = o.get_name(true, false);
    for (char& c : e.positional) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  if (o.get_items_expected_max() > 0) {
    const std::string type = o.get_type_name();
    e.choices = choices_of(type);
    e.value = type.substr(0, type.find(':'));
    if (e.value.empty()) e.value = "VALUE";
    e.default_value = o.get_default_str();
  }
  e.repeats = o.get_items_expected_max() > 1;
  e.about = o.get_description();
  e.group = o.get_group();
  e.required = o.get_required();
  return e;
}

void append_commands(const CLI::App& app, std::vector<std::string> path,
                     std::vector<CommandEntry>& table) {
  CommandEntry command;
  command.path = std::move(path);
  command.about = app.get_description();
  command.footer = app.get_footer();
  for (const CLI::Option* o : app.get_options()) {
    if (!o->get_group().empty()) command.options.push_back(entry_of(*o));
  }
  const auto subcommands = app.get_subcommands(
      [](const CLI::App* s) { return !s->get_name().empty() && !s->get_group().empty(); });
  for (const CLI::App* s : subcommands) command.subcommands.push_back(s->get_name());
  const std::vector<std::string> here = command.path;
  table.push_back(std::move(command));
  for (const CLI::App* s : subcommands) {
    std::vector<std::string> below = here;
    below.push_back(s->get_name());
    append_commands(*s, std::move(below), table);
  }
}

}  // namespace

std::string CommandEntry::name(char separator) const {
  return CLI::detail::join(path, std::string(1, separator));
}

std::vector<CommandEntry> command_table(const CLI::App& program) {
  std::vector<CommandEntry> table;
  append_commands(program, {}, table);
  return table;
}

std::string short_about(const std::string& about) {
  std::string text = about.substr(0, about.find('\n'));
  if (const size_t dot = text.find(". "); dot != std::string::npos) text.resize(dot);
  return text;
}

}  // namespace freshet::cli
