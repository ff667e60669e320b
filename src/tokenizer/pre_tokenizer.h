// Pre-tokenizers: split a normalised text into the words that the model encodes.
//
// A PreTokenizer is a list of steps, like the "pre_tokenizer" of a tokenizer.json (a Sequence is
// flattened); each step splits every piece from the previous one. Immutable after building; safe
// from many threads. Texts are valid UTF-8; pieces are never empty.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "tokenizer/regex.h"
#include "tokenizer/scanner.h"

namespace freshet::tokenizer {

// How the matches of a pattern are split off.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

enum class PrependScheme { kFirst, kNever, kAlways };

struct PreTokenizerStep {
  enum class Kind {
    kScan,         // rules: words that cover the whole text
    kRegex,        // regex, behavior, invert
    kLiteral,      // text, behavior, invert
    kClass,        // characters with class `bits` (or ASCII punctuation), behavior, invert
    kMetaspace,    // text replaces spaces; scheme; split: before each one
    kPrefixSpace,  // prepends a space unless there is one
    kByteLevel,    // bytes to printable characters
    kWhitespace,   // \w+ or [^\w\s]+
    kFixedLength,  // pieces of `length` characters
  };
  Kind kind;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;
  ScanRules rules;
  std::shared_ptr<const Regex> regex;
  std::string text;
  uint32_t bits = 0;
  bool ascii_punctuation = false;
  PrependScheme scheme = PrependScheme::kAlways;
  bool split = true;
  size_t length = 0;
};

class PreTokenizer {
 public:
  void add(PreTokenizerStep step) { steps_.push_back(std::move(step)); }
  const std::vector<PreTokenizerStep>& steps() const { return steps_; }
  void remove_last() { steps_.pop_back(); }

  // Calls sink with each piece, in order. at_start: the text is at the beginning of the input.
  // Pieces are views of `text` or of memory that is valid until sink returns.
  using Sink = FunctionRef<void(std::string_view)>;
  void run(std::string_view text, bool at_start, Sink sink) const { run(0, text, at_start, sink); }

 private:
  void run(size_t step, std::string_view text, bool at_start, Sink sink) const;
  std::vector<PreTokenizerStep> steps_;
};

// The step for a pattern. Uses the hand-written scanner if it knows an equivalent.
Result<PreTokenizerStep> make_split(std::string_view pattern, RegexDialect dialect,
                                    SplitBehavior behavior = SplitBehavior::kIsolated,
                                    bool invert = false);

// Runs of one script (Han, Hiragana and Katakana count as one), each with the spaces after it.
Result<PreTokenizerStep> make_script_split();

}  // namespace freshet::tokenizer
