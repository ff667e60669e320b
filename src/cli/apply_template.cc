#include <chrono>
#include <ctime>
#include <iomanip>
#include <memory>
#include <sstream>
#include <string>

#include "base/json.h"
#include "base/mapped_file.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/prompts.h"
#include "tokenizer/template/chat_template.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::cli {
namespace apply_template_command {

struct Options {
  std::string source;  // a Jinja file or a model
  std::string name;
  std::string now;
};

// "2024-07-26T12:30:00", for templates that print the date.
Result<std::chrono::local_seconds> parse_time(const std::string& text) {
  std::tm tm{};
  std::istringstream in(text);
  in >> std::get_time(&tm, "%Y-%m-%dT%H:%M:%S");
  if (in.fail()) return invalid_argument("--now {}: write 2024-07-26T12:30:00", text);
  using namespace std::chrono;
  const year_month_day day(year(tm.tm_year + 1900), month(static_cast<unsigned>(tm.tm_mon) + 1),
                           std::chrono::day(static_cast<unsigned>(tm.tm_mday)));
  return local_seconds(local_days(day)) + hours(tm.tm_hour) + minutes(tm.tm_min) +
         seconds(tm.tm_sec);
}

bool is_template_file(const std::string& path) {
  return path.ends_with(".jinja") || path.ends_with(".jinja2") || path.ends_with(".j2");
}

// Returns the template's source; adds the model's special tokens to the variables.
Result<std::string> load_source(const Options& o, json::Object& context) {
  if (is_template_file(o.source)) {
    FRESHET_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(o.source));
    return std::string(file.bytes().begin(), file.bytes().end());
  }
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.source));
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::load(path));
  for (const auto& [name, token] : tokenizer.special_tokens()) {
    if (context.find(name) == nullptr) context[name] = token;
  }
  const json::Value* tools = context.find("tools");
  const bool with_tools = tools != nullptr && !tools->is_null();
  const std::string* source = o.name.empty() ? tokenizer.chat_template_for(with_tools)
                              : o.name == "default" && tokenizer.chat_template()
                                  ? &*tokenizer.chat_template()
                                  : tokenizer.chat_template(o.name);
  if (source != nullptr) return *source;
  std::string names;
  for (const auto& [name, text] : tokenizer.parts().named_templates)
    names += (names.empty() ? "" : ", ") + name;
  if (!o.name.empty()) return not_found("{} has no chat template named {}", o.source, o.name);
  if (names.empty()) return invalid_argument("{} has no chat template", o.source);
  return invalid_argument("{} has no default chat template; --name takes {}", o.source, names);
}

Status apply(const Options& o, Output& out) {
  FRESHET_ASSIGN_OR_RETURN(const std::string text, read_stdin());
  auto input = json::parse(text);
  if (!input.ok()) return input.status().with_context("standard input");
  json::Object context;
  if (input->is_array()) {  // the messages alone
    context["messages"] = *input;
  } else if (input->is_object()) {
    context = input->as_object();
  } else {
    return invalid_argument(
        "standard input must be a JSON object with messages (and tools and other variables), or "
        "the list of messages");
  }
  if (context.find("add_generation_prompt") == nullptr) context["add_generation_prompt"] = true;
  ChatTemplate::Options options;
  if (!o.now.empty()) {
    FRESHET_ASSIGN_OR_RETURN(options.now, parse_time(o.now));
  }
  FRESHET_ASSIGN_OR_RETURN(const std::string source, load_source(o, context));
  auto compiled = ChatTemplate::compile(source);
  if (!compiled.ok()) return compiled.status().with_context(o.source);
  auto rendered = compiled->render(std::move(context), options);
  if (!rendered.ok()) return rendered.status().with_context(o.source);
  out.write(*rendered);
  return {};
}

}  // namespace apply_template_command

void add_apply_template(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<apply_template_command::Options>();
  CLI::App* c = program.add_subcommand("apply-template",
                                       "Render a chat template: messages as JSON in, text out");
  c->add_option("template", o->source,
                "A .jinja file, or a model with a chat template. Standard input is a JSON object "
                "with the template's variables: messages, tools, add_generation_prompt (default: "
                "true), bos_token ... or just the list of messages. The output has no trailing "
                "line break.")
      ->required();
  c->add_option("--name", o->name, "One of the model's named templates, e.g. tool_use");
  c->add_option("--now", o->now, "The time that the template sees, e.g. 2024-07-26T12:30:00");
  add_examples(*c,
               "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}],\n"
               "         \"add_generation_prompt\": true}' | freshet apply-template smollm2");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return apply(*o, context.out); }; });
}

}  // namespace freshet::cli
