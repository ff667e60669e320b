// Pre-tokenisers: how a normalised text is cut into the words that the model sees.
//
// A PreTokenizer is a list of steps, each applied to every piece that the one before it made, as in
// a tokenizer.json's "pre_tokenizer" (a Sequence is flattened). Immutable after building; safe from
// many threads. Texts are valid UTF-8; pieces are never empty.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "tokenizer/regex.h"
#include "tokenizer/scanner.h"

namespace freshet::tokenizer {

// What becomes of the pieces that a pattern matches.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

enum class PrependScheme { kFirst, kNever, kAlways };

struct PreTokenizerStep {
  enum class Kind {
    kScan,         // rules: words that cover the text
    kRegex,        // regex, behavior, invert
    kLiteral,      // text, behavior, invert
    kClass,        // any character of char_class bits (or ASCII punctuation), behavior, invert
    kMetaspace,    // text replaces spaces; scheme; split before each
    kPrefixSpace,  // a space, unless there is one
    kByteLevel,    // bytes to printable characters
    kWhitespace,   // \w+ or [^\w\s]+
    kFixedLength,  // length characters at a time
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

  // Calls sink with each piece, in order. at_start: the text is the beginning of the input. The
  // pieces are views of `text` or of memory that lasts until sink returns.
  using Sink = FunctionRef<void(std::string_view)>;
  void run(std::string_view text, bool at_start, Sink sink) const { run(0, text, at_start, sink); }

 private:
  void run(size_t step, std::string_view text, bool at_start, Sink sink) const;
  std::vector<PreTokenizerStep> steps_;
};

// A pattern as a step: scanned by hand where an equal of it is known.
Result<PreTokenizerStep> make_split(std::string_view pattern, RegexDialect dialect,
                                    SplitBehavior behavior = SplitBehavior::kIsolated,
                                    bool invert = false);

// Runs of one script (Han, Hiragana and Katakana count as one), each with the spaces that follow.
Result<PreTokenizerStep> make_script_split();

}  // namespace freshet::tokenizer
