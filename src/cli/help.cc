#include "cli/help.h"

#include <algorithm>
#include <cctype>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/option_table.h"

namespace freshet::cli {
namespace {

constexpr size_t kHelpColumn = 34;  // where descriptions begin
constexpr size_t kHelpWidth = 100;

// By the name of an option or argument that takes a text. The longest ending that fits counts.
constexpr std::pair<std::string_view, const char*> kValueNames[] = {
    {"model", "MODEL"},
    {"words", "WORDS"},
    {"file", "FILE"},
    {"path", "FILE"},
    {"output", "FILE"},
    {"input", "FOLDER"},
    {"ids", "FILE"},
    {"inputs", "FILE"},
    {"imatrix", "FILE"},
    {"merge", "FILE"},
    {"calibration", "FILE"},
    {"evaluate", "FILE"},
    {"plot", "FILE"},
    {"mmproj", "FILE"},
    {"kv-scales", "FILE"},
    {"template", "FILE"},
    {"json", "FILE"},
    {"filename", "FILE"},
    {"dir", "FOLDER"},
    {"all", "FOLDER"},
    {"host", "HOST"},
    {"url", "URL"},
    {"endpoint", "PATH"},
    {"key", "KEY"},
    {"name", "NAME"},
    {"weights", "NAME"},
    {"scheme", "NAME"},
    {"method", "NAME"},
    {"policies", "NAME,..."},
    {"ignore", "REGEX"},
    {"command", "COMMAND"},
    {"label", "NAME"},
    {"set", "KEY=VALUE"},
    {"header", "KEY=VALUE"},
    {"metadata", "KEY=VALUE"},
    {"bias", "ID=VALUE"},
    {"language", "CODE"},  // en, de
    {"image", "FILE"},
    {"domains", "HOST,..."},
    {"memory", "SIZE"},
    {"bytes", "SIZE"},
    {"size", "SIZE"},
    {"device", "DEVICE"},
    {"type", "TYPE"},
    {"format", "FORMAT"},
    {"isa", "ISA"},
    {"dtype", "TYPE"},
    {"stop", "TEXT"},
    {"system", "TEXT"},
    {"prompt", "TEXT"},
    {"text", "TEXT"},
    {"texts", "FILE"},
    {"now", "TIME"},
    {"kernel", "OP=KERNEL"},
    {"origins", "ORIGIN"},
    {"n-prompt", "N,..."},
    {"n-gen", "N,..."},
    {"n-depth", "N,..."},
    {"batch-size", "N,..."},
    {"threads", "N,..."},
    {"sequences", "N,..."},
    {"pg", "N,N"},
    {"level", "LEVEL"},
    {"generation-config", "auto|none|FOLDER"},
    {"config", "FILE"},
    {"speculative-config", "JSON"},
    {"hf-overrides", "JSON"},
    {"body", "JSON"},
    {"percentiles", "N,..."},
    {"metrics", "NAME,..."},
    {"goodput", "NAME:MS"},
    {"tokenizer", "MODEL"},
    {"parser", "NAME"},
    {"base", "BASE"},
    {"extract", "text|number|REGEX"},
};

std::string own_name(const CLI::Option& o) {
  if (!o.get_lnames().empty()) return o.get_lnames().back();
  return o.get_positional() ? o.get_name(true, false) : "";
}

std::vector<std::string> split_words(const std::string& text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_of(" \n", at), text.size());
    if (end > at) words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

// A left column and a description that wraps.
std::string help_entry(const std::string& left, const std::string& description) {
  std::string text = "  " + left;
  if (text.size() + 2 > kHelpColumn) text += "\n" + std::string(kHelpColumn, ' ');
  size_t column = kHelpColumn;
  if (text.find('\n') == std::string::npos) text.resize(kHelpColumn, ' ');
  bool first = true;
  for (const std::string& word : split_words(description)) {
    if (!first && column + 1 + word.size() > kHelpWidth) {
      text += "\n" + std::string(kHelpColumn, ' ');
      column = kHelpColumn;
      first = true;
    }
    text += (first ? "" : " ") + word;
    column += word.size() + (first ? 0 : 1);
    first = false;
  }
  return text + "\n";
}

// Breaks long lines; line breaks of the text stay.
std::string wrapped(const std::string& text) {
  std::string out;
  size_t column = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_of(" \n", at), text.size());
    const std::string word = text.substr(at, end - at);
    if (column > 0 && column + 1 + word.size() > kHelpWidth) {
      out += '\n';
      column = 0;
    }
    if (column > 0) out += ' ';
    out += word;
    column += word.size() + (column > 0 ? 1 : 0);
    if (end < text.size() && text[end] == '\n') {
      out += '\n';
      column = 0;
    }
    at = end + 1;
  }
  return out;
}

std::string description_of(const CLI::Option& o) {
  std::string text = o.get_description();
  const std::string value = o.get_default_str();
  if (!value.empty() && value_name(o) != "" && text.find("(default") == std::string::npos)
    text += fmt::format(" (default: {})", value);
  if (o.get_required() && o.nonpositional()) text += " (required)";
  return text;
}

// "-t,--threads N"
std::string option_text(const CLI::Option& o) {
  std::string names;
  for (const std::string& n : o.get_snames()) names += (names.empty() ? "-" : ", -") + n;
  for (const std::string& n : o.get_lnames()) {
    if (names.empty()) names = "    ";  // long names line up
    names += (names.ends_with(' ') ? "--" : ", --") + n;
  }
  const std::string value = value_name(o);
  return value.empty() ? names : names + " " + value;
}

std::string argument_text(const CLI::Option& o) {
  std::string text = o.get_option_text().empty() ? value_name(o) : o.get_option_text();
  if (!o.get_option_text().empty()) return text;
  if (o.get_items_expected_max() >= CLI::detail::expected_max_vector_size) text += " ...";
  return o.get_required() ? text : "[" + text + "]";
}

bool is_shown_as_option(const CLI::Option& o) {
  return o.nonpositional() && !o.get_group().empty();
}

std::vector<const CLI::Option*> options_in(const CLI::App& app, const std::string& group) {
  return app.get_options(
      [&](const CLI::Option* o) { return is_shown_as_option(*o) && o->get_group() == group; });
}

class HelpFormatter final : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    const bool all = mode != CLI::AppFormatMode::Normal;
    std::string text = wrapped(app->get_description()) + "\n\n" + usage(*app, name);
    text += arguments(*app);
    text += commands(*app);
    for (const std::string& group : app->get_groups()) {
      if (group != kRareGroup) text += options(*app, group, all);
    }
    text += options(*app, kRareGroup, all);
    if (all) text += every_command(*app, name);
    if (!app->get_footer().empty()) text += "\n" + app->get_footer() + "\n";
    return text;
  }

 private:
  static std::string usage(const CLI::App& app, const std::string& name) {
    std::string text = "Usage: " + name + " [OPTIONS]";
    for (const CLI::Option* o : app.get_options({})) {
      if (o->get_positional() && !o->get_group().empty()) text += " " + argument_text(*o);
    }
    if (!app.get_subcommands({}).empty())
      text += app.get_require_subcommand_min() == 0 ? " [COMMAND]" : " COMMAND";
    return text + "\n";
  }

  static std::string arguments(const CLI::App& app) {
    std::string text;
    for (const CLI::Option* o : app.get_options({})) {
      if (!o->get_positional() || o->get_group().empty()) continue;
      text += help_entry(argument_text(*o), description_of(*o));
    }
    return text.empty() ? "" : "\nArguments:\n" + text;
  }

  static std::string commands(const CLI::App& app) {
    std::string text;
    for (const CLI::App* sub : app.get_subcommands({})) {
      if (!sub->get_group().empty()) text += help_entry(sub->get_name(), sub->get_description());
    }
    return text.empty() ? "" : "\nCommands:\n" + text;
  }

  static std::string options(const CLI::App& app, const std::string& group, bool all) {
    const std::vector<const CLI::Option*> list = options_in(app, group);
    if (list.empty()) return {};
    if (group == kRareGroup && !all) {
      std::string names;
      for (const CLI::Option* o : list)
        names += (names.empty() ? "" : ", ") + std::string("--") + o->get_lnames().front();
      return "\n" + help_entry("--help-all also explains", names);
    }
    std::string text = "\n" + group + ":\n";
    for (const CLI::Option* o : list) text += help_entry(option_text(*o), description_of(*o));
    return text;
  }

  // With --help-all, the commands of the program one after the other.
  std::string every_command(const CLI::App& app, const std::string& name) const {
    std::string text;
    for (const CLI::App* sub : app.get_subcommands({})) {
      text += fmt::format("\n{}\n", std::string(kHelpWidth, '-'));
      text += make_help(sub, name + " " + sub->get_name(), CLI::AppFormatMode::All);
    }
    return text;
  }
};

}  // namespace

std::string value_name(const CLI::Option& option) {
  if (option.get_items_expected_max() == 0) return {};
  const std::string type = option.get_type_name();
  if (type.starts_with("INT") || type.starts_with("UINT")) return "N";
  if (type.starts_with("FLOAT")) return "X";
  // Named where the option is declared.
  const std::string declared = type.substr(0, type.find(':'));
  if (declared == "JSON") return declared;
  const std::string name = own_name(option);
  std::string_view best;
  std::string found;
  for (const auto& [ending, what] : kValueNames) {
    if (ending.size() < best.size() || !name.ends_with(ending)) continue;
    best = ending;
    found = what;
  }
  if (found.empty()) found = fmt::format("{}", fmt::join(choices_of(type), "|"));
  return found.empty() ? "VALUE" : found;
}

std::shared_ptr<CLI::FormatterBase> help_formatter() {
  return std::make_shared<HelpFormatter>();
}

}  // namespace freshet::cli
