#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/utf8.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/prompts.h"
#include "tokenizer/tokenizer.h"

namespace freshet::cli {
namespace tokenize_command {

using tokenizer::Tokenizer;

struct Options {
  std::string model;
  std::string text;
  bool text_given = false;  // else it is read from standard input
  bool jsonl = false;
  bool decode = false;
  bool no_special = false;
  bool skip_special = false;
  bool json = false;
};

Result<std::string> decode(const Tokenizer& tokenizer, const Options& o, const json::Value& list) {
  FRESHET_ASSIGN_OR_RETURN(const auto ids, ids_from_json(list));
  for (const int32_t id : ids) {
    if (id >= tokenizer.vocab_size()) {
      return invalid_argument("token id {} is outside the vocabulary of {}", id,
                              tokenizer.vocab_size());
    }
  }
  return tokenizer.decode(ids, {.skip_special = o.skip_special});
}

// One line in, one line out.
Result<std::string> convert(const Tokenizer& tokenizer, const Options& o, std::string_view line) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value value, json::parse(line));
  if (o.decode) {
    FRESHET_ASSIGN_OR_RETURN(const std::string text, decode(tokenizer, o, value));
    return json::write(json::Value(text));
  }
  if (!value.is_string()) return invalid_argument("expected a JSON string");
  return json::write(json::Value(
      ids_to_json(tokenizer.encode(value.as_string(), {.add_special = !o.no_special}))));
}

Status convert_lines(const Tokenizer& tokenizer, const Options& o, Output& out) {
  std::string line;
  for (int64_t number = 1; std::getline(std::cin, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto converted = convert(tokenizer, o, line);
    if (!converted.ok())
      return converted.status().with_context(fmt::format("standard input, line {}", number));
    out.write(*converted + "\n");
    // Flush each answer if no input waits: other programs may talk to this one over pipes.
    if (std::cin.rdbuf()->in_avail() <= 0) FRESHET_RETURN_IF_ERROR(out.flush());
  }
  return out.flush();
}

// A token's bytes as text: a JSON string, in which bytes that are no character stand as <E4>.
std::string readable(std::string_view bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size();) {
    const Utf8Char character = decode_utf8(bytes.substr(at));
    const std::string_view piece = bytes.substr(at, character.size);
    if (character.valid) {
      const std::string quoted = json::write(json::Value(piece));
      text += quoted.substr(1, quoted.size() - 2);
    } else {
      for (const char c : piece) text += fmt::format("<{:02X}>", static_cast<unsigned char>(c));
    }
    at += character.size;
  }
  return "\"" + text + "\"";
}

// Readable output: the id and text of each token.
Status show(const Tokenizer& tokenizer, const Options& o, Output& out) {
  const auto ids = tokenizer.encode(o.text, {.add_special = !o.no_special});
  if (o.json) {
    out.write(json::write(json::Value(ids_to_json(ids))) + "\n");
    return {};
  }
  for (const int32_t id : ids) out.print("{:>8}  {}\n", id, readable(tokenizer.token_bytes(id)));
  out.print("{} token{}\n", ids.size(), ids.size() == 1 ? "" : "s");
  return {};
}

Status tokenize(Options o, Output& out) {
  if (!o.jsonl && !o.text_given) {
    if (stdin_is_terminal())
      return invalid_argument("no text: write it after MODEL, or pipe it into standard input");
    o.text.assign(std::istreambuf_iterator<char>(std::cin), {});
  }
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::load(path));
  if (o.jsonl) return convert_lines(tokenizer, o, out);
  if (!o.decode) return show(tokenizer, o, out);
  FRESHET_ASSIGN_OR_RETURN(const json::Value value, json::parse(o.text));
  FRESHET_ASSIGN_OR_RETURN(const std::string text, decode(tokenizer, o, value));
  out.write(text + "\n");
  return {};
}

}  // namespace tokenize_command

void add_tokenize(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<tokenize_command::Options>();
  CLI::App* c = program.add_subcommand("tokenize", "Convert text to token ids and back");
  c->add_option("model", o->model, "Model folder, .gguf file, name, or tokenizer file")->required();
  auto* text = c->add_option(
      "text", o->text, "The text (with --decode: a JSON array of ids; default: standard input)");
  auto* jsonl = c->add_flag(
      "--jsonl", o->jsonl,
      "Read one JSON string per line from standard input; print one JSON array of ids per line");
  c->add_flag("--decode", o->decode, "Convert ids to text");
  c->add_flag("--no-special", o->no_special, "Add no special tokens");
  c->add_flag("--skip-special", o->skip_special, "With --decode: leave out special tokens");
  c->add_flag("--json", o->json, "Print the ids as one JSON array");
  text->excludes(jsonl);
  add_examples(*c,
               "  freshet tokenize smollm2 \"Hello, world\"\n"
               "  freshet tokenize smollm2 --json < book.txt\n"
               "  echo '\"Hello\"' | freshet tokenize smollm2 --jsonl --no-special\n"
               "  echo '[9906, 11]' | freshet tokenize tokenizer.json --jsonl --decode");
  c->callback([o, text, &context, &action] {
    o->text_given = text->count() > 0;
    action = [o, &context] { return tokenize(*o, context.out); };
  });
}

}  // namespace freshet::cli
