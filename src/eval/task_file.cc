// Reads the lines of task files.
#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <optional>
#include <span>

#include "base/utf8.h"
#include "eval/tasks.h"

namespace freshet::eval {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

// "$1,200." as a number.
std::optional<double> number_of(std::string_view text) {
  std::string digits;
  for (const char c : trimmed(text)) {
    if (c != ',' && c != '$') digits += c;
  }
  if (digits.ends_with('.')) digits.pop_back();
  double value = 0.0;
  const char* const end = digits.data() + digits.size();
  const auto [rest, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

Status wrong_field(std::string_view key, std::string_view expected) {
  return invalid_argument("\"{}\" must be {}", key, expected);
}

// A text, or a list of texts.
Result<std::vector<std::string>> texts_of(const json::Value& value, std::string_view key) {
  if (value.is_string()) return std::vector<std::string>{value.as_string()};
  std::vector<std::string> texts;
  const Status wrong = wrong_field(key, "a text or a list of texts");
  if (!value.is_array() || value.as_array().empty()) return wrong;
  for (const json::Value& v : value.as_array()) {
    if (!v.is_string()) return wrong;
    texts.push_back(v.as_string());
  }
  return texts;
}

Result<std::string> text_field(const json::Value& line, std::string_view key) {
  const json::Value* value = line.find(key);
  if (value == nullptr || !value->is_string()) return wrong_field(key, "a text");
  return value->as_string();
}

Status read_choices(const json::Value& line, TaskItem& item) {
  FRESHET_ASSIGN_OR_RETURN(item.choices, texts_of(*line.find("choices"), "choices"));
  const Status wrong = wrong_field(
      "answer", "the index of a choice, counted from 0, or the text of exactly one choice");
  const json::Value* answer = line.find("answer");
  if (answer == nullptr || item.choices.size() < 2) {
    return answer == nullptr ? wrong : wrong_field("choices", "a list of at least two texts");
  }
  for (size_t i = 0; i < item.choices.size(); ++i) {
    if (item.choices[i].empty()) return invalid_argument("choice {} is empty", i);
    if (!answer->is_string() || answer->as_string() != item.choices[i]) continue;
    if (item.answer >= 0) return wrong;
    item.answer = static_cast<int>(i);
  }
  if (const auto index = answer->is_number() ? answer->as_int64() : std::nullopt;
      index && *index >= 0 && *index < std::ssize(item.choices))
    item.answer = static_cast<int>(*index);
  return item.answer >= 0 ? Status() : wrong;
}

// What GSM8K's answers end with.
constexpr std::string_view kFinal = "####";

// GSM8K's own lines have a question, and an answer with its derivation.
Status read_question(const json::Value& line, TaskItem& item) {
  FRESHET_ASSIGN_OR_RETURN(const std::string question, text_field(line, "question"));
  FRESHET_ASSIGN_OR_RETURN(const std::string answer, text_field(line, "answer"));
  const size_t at = answer.rfind(kFinal);
  if (at == std::string::npos)
    return wrong_field("answer", "a text that ends with \"#### NUMBER\" beside \"question\"");
  item.prompt += fmt::format("Question: {}\nAnswer:", question);
  item.answers = {std::string(trimmed(std::string_view(answer).substr(at + kFinal.size())))};
  item.stop.insert(item.stop.end(), {"Question:", "</s>", "<|im_end|>"});
  FRESHET_ASSIGN_OR_RETURN(item.extraction, Extraction::parse("number"));
  return {};
}

Status read_answers(const json::Value& line, TaskItem& item) {
  const json::Value* answer = line.find("answer");
  if (answer == nullptr) return wrong_field("answer", "a text or a list of texts");
  FRESHET_ASSIGN_OR_RETURN(item.answers, texts_of(*answer, "answer"));
  if (const json::Value* stop = line.find("stop")) {
    FRESHET_ASSIGN_OR_RETURN(item.stop, texts_of(*stop, "stop"));
  }
  if (const json::Value* how = line.find("extract")) {
    if (!how->is_string()) return wrong_field("extract", "a text");
    FRESHET_ASSIGN_OR_RETURN(item.extraction, Extraction::parse(how->as_string()));
  }
  if (const json::Value* most = line.find("max_tokens")) {
    const auto count = most->is_number() ? most->as_int64() : std::nullopt;
    if (!count || *count < 1 || *count > INT32_MAX)
      return wrong_field("max_tokens", "an integer of at least 1");
    item.max_tokens = static_cast<int>(*count);
  }
  return {};
}

Status check_fields(const json::Value& line) {
  constexpr std::array<std::string_view, 4> kChoiceFields = {"id", "prompt", "choices", "answer"};
  constexpr std::array<std::string_view, 6> kAnswerFields = {"id",   "prompt",  "answer",
                                                             "stop", "extract", "max_tokens"};
  constexpr std::array<std::string_view, 3> kQuestionFields = {"id", "question", "answer"};
  const std::span<const std::string_view> known =
      line.find("choices") != nullptr    ? std::span<const std::string_view>(kChoiceFields)
      : line.find("question") != nullptr ? std::span<const std::string_view>(kQuestionFields)
                                         : std::span<const std::string_view>(kAnswerFields);
  for (const auto& [key, value] : line.as_object()) {
    if (key == "metadata" || std::ranges::find(known, key) != known.end()) continue;
    std::string names;
    for (const std::string_view name : known) names += fmt::format("{}, ", name);
    return invalid_argument("unknown field \"{}\"; known: {}and metadata for notes", key, names);
  }
  return {};
}

Result<TaskItem> read_item(const json::Value& line, const TaskDefaults& defaults,
                           const Extraction& extraction) {
  if (!line.is_object()) return invalid_argument("expected a JSON object");
  FRESHET_RETURN_IF_ERROR(check_fields(line));
  TaskItem item;
  item.prompt = defaults.preamble;
  item.stop = defaults.stop;
  item.max_tokens = defaults.max_tokens;
  item.extraction = extraction;
  if (const json::Value* id = line.find("id"))
    item.id = id->is_string() ? id->as_string() : json::write(*id);
  if (line.find("question") != nullptr && line.find("choices") == nullptr) {
    FRESHET_RETURN_IF_ERROR(read_question(line, item));
    return item;
  }
  FRESHET_ASSIGN_OR_RETURN(const std::string prompt, text_field(line, "prompt"));
  item.prompt += prompt;
  FRESHET_RETURN_IF_ERROR(line.find("choices") != nullptr ? read_choices(line, item)
                                                          : read_answers(line, item));
  return item;
}

}  // namespace

Result<Extraction> Extraction::parse(const std::string& how) {
  Extraction e;
  if (how == "text") return e;
  e.kind = how == "number" ? Kind::kNumber : Kind::kRegex;
  const char* const number = R"(-?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+))";
  FRESHET_ASSIGN_OR_RETURN(
      e.regex, tokenizer::Regex::compile(e.kind == Kind::kNumber ? std::string(number) : how,
                                         tokenizer::RegexDialect::kOniguruma));
  return e;
}

std::string Extraction::extract(std::string_view text) const {
  if (kind == Kind::kText) return std::string(trimmed(text));
  const auto last_match = [&](std::string_view part, bool first) {
    std::string found;
    bool any = false;
    regex->for_each_match(part, [&](size_t begin, size_t end) {
      if (!first || !any) found = trimmed(part.substr(begin, end - begin));
      any = true;
    });
    return found;
  };
  if (kind == Kind::kNumber) {
    if (const size_t at = text.rfind(kFinal); at != std::string_view::npos) {
      const std::string found = last_match(text.substr(at + kFinal.size()), true);
      if (!found.empty()) return found;
    }
  }
  return last_match(text, false);
}

bool Extraction::equal(const std::string& extracted, const std::string& answer) const {
  if (kind != Kind::kNumber) return !extracted.empty() && extracted == trimmed(answer);
  const auto got = number_of(extracted), want = number_of(answer);
  return got && want && *got == *want;
}

Result<TaskFile> read_task_file(const std::string& path, const TaskDefaults& defaults) {
  std::ifstream in(path);
  if (!in) return not_found("cannot open {}", path);
  FRESHET_ASSIGN_OR_RETURN(const Extraction extraction, Extraction::parse(defaults.extract));
  TaskFile file;
  file.name = path;
  std::string text;
  for (int64_t number = 1; std::getline(in, text); ++number) {
    if (trimmed(text).empty()) continue;
    if (defaults.limit > 0 && std::ssize(file.items) >= defaults.limit) break;
    const auto place = fmt::format("{}, line {}", path, number);
    const auto line = json::parse(text);
    if (!line.ok()) return line.status().with_context(place);
    auto item = read_item(*line, defaults, extraction);
    if (!item.ok()) return item.status().with_context(place);
    if (item->id.empty()) item->id = std::to_string(number);
    const bool choices = !item->choices.empty();
    if (!file.items.empty() && choices != file.choices)
      return invalid_argument("{}: items with and without \"choices\" in one file", place);
    file.choices = choices;
    file.items.push_back(std::move(item).value());
  }
  if (in.bad()) return io_error("cannot read {}", path);
  if (file.items.empty()) return invalid_argument("{} has no items", path);
  return file;
}

}  // namespace freshet::eval
