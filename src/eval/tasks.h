// Tasks: items with a known answer, from JSONL files, and how many of them a model gets right.
//
// A file holds items of one kind. Multiple choice: the choice with the largest log-likelihood after
// the prompt counts as the model's. Exact match: the model continues the prompt greedily, and what
// is extracted from its text must equal an answer. Results are functions of the model and the file:
// neither batches nor threads change them. docs/cli.md has the fields of a line. Blocks the calling
// thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "eval/session.h"
#include "freshet/engine.h"
#include "tokenizer/chat_renderer.h"
#include "tokenizer/regex.h"

namespace freshet::eval {

// What counts as the answer in a text.
struct Extraction {
  enum class Kind {
    kText,    // all of it, without white space around it
    kNumber,  // the number behind the last "####", else the last number; 1,000 equals 1000.0
    kRegex,   // the last match of a pattern, without white space around it
  };
  Kind kind = Kind::kText;
  std::shared_ptr<const tokenizer::Regex> regex;

  // "text", "number" or a regular expression.
  static Result<Extraction> parse(const std::string& how);
  std::string extract(std::string_view text) const;  // "" if there is nothing to extract
  bool equal(const std::string& extracted, const std::string& answer) const;
};

struct TaskItem {
  std::string id;  // "id" of the line, or its number
  std::string prompt;
  // Multiple choice:
  std::vector<std::string> choices;
  int answer = -1;  // index
  // Exact match:
  std::vector<std::string> answers;  // any of them is right
  std::vector<std::string> stop;
  int max_tokens = 256;
  Extraction extraction;
};

struct TaskFile {
  std::string name;
  bool choices = false;  // multiple choice, otherwise exact match
  std::vector<TaskItem> items;
};

// For lines that do not say.
struct TaskDefaults {
  std::string preamble;  // put before each prompt, such as worked examples
  std::vector<std::string> stop;
  int max_tokens = 256;
  std::string extract = "text";
  int64_t limit = 0;  // only the first items; 0: all
};
// Errors name the file and the line.
Result<TaskFile> read_task_file(const std::string& path, const TaskDefaults& defaults);

struct ItemResult {
  bool correct = false;
  bool correct_normalised = false;      // multiple choice: by log-likelihood per character
  std::vector<double> log_likelihoods;  // [choices]
  std::string output, extracted;        // exact match
};

// How prompts become token ids.
struct TaskPrompts {
  const Tokenizer& tokenizer;
  const tokenizer::ChatRenderer* chat = nullptr;  // renders each prompt as a user's message
  Result<std::string> text(const TaskItem& item) const;
  std::vector<int32_t> encode(const std::string& text) const;
};

// `fraction` done; returns whether to go on.
using TaskProgress = std::function<bool(double fraction)>;

// The longest sequence of the items, for SessionOptions::context.
Result<int64_t> longest_choice(const TaskFile& file, const TaskPrompts& prompts);
// REQUIRES: a context of longest_choice().
Result<std::vector<ItemResult>> score_choices(Session& session, const TaskFile& file,
                                              const TaskPrompts& prompts,
                                              const TaskProgress& progress);
Result<std::vector<ItemResult>> generate_answers(Engine& engine, const TaskFile& file,
                                                 const TaskPrompts& prompts,
                                                 const TaskProgress& progress);

// What `eval tasks` says about a file: accuracies with 95 % Wilson intervals; with the results of a
// base on the same items the paired difference, McNemar's exact test and the minimum detectable
// difference. `base` may be empty.
json::Object task_json(const TaskFile& file, const std::vector<ItemResult>& results,
                       const std::vector<ItemResult>& base);
std::string task_text(const json::Object& task);
// One line of --items.
json::Object item_json(const TaskFile& file, size_t item, const ItemResult& result);

}  // namespace freshet::eval
