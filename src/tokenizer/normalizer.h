// Normalisers: applied to a text before it is split into words.
//
// A Normalizer is a list of steps from text to text, like the "normalizer" of a tokenizer.json (a
// Sequence is flattened) or of a SentencePiece model. Immutable after building; safe from many
// threads. Texts are valid UTF-8, except that kSentencePiece takes any bytes. A step stops before
// it makes the text more than 64 times as long as its input, so hostile replacements cannot exhaust
// memory.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/charsmap.h"
#include "tokenizer/regex.h"
#include "tokenizer/trie.h"
#include "tokenizer/unicode.h"

namespace freshet::tokenizer {

// The position of a piece of text in the input.
struct PieceContext {
  bool at_start = true;     // its first byte is the first byte of the input
  bool after_token = true;  // nothing precedes it, or an added token does
};

// SentencePiece's normaliser (sentencepiece_model.proto, NormalizerSpec).
struct SentencePieceRules {
  std::shared_ptr<const Charsmap> charsmap;  // may be null
  std::shared_ptr<const Trie> user_defined;  // never normalised; may be null
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
  bool whitespace_as_suffix = false;
};
std::string sentencepiece_normalize(const SentencePieceRules& rules, std::string_view text);

struct NormalizerStep {
  enum class Kind {
    kForm,  // form
    kLowercase,
    kStrip,  // left, right
    kStripAccents,
    kReplace,        // text or regex -> content
    kPrepend,        // prepends content, unless the text is empty
    kSpacePrefix,    // prepends content if the piece is first or follows an added token
    kPrecompiled,    // charsmap, applied per grapheme as in Hugging Face
    kSentencePiece,  // sentencepiece
    kBert,           // clean, cjk, strip_accents, lowercase
    kNmt,
    kByteLevel,
  };
  Kind kind;
  NormalForm form = NormalForm::kNfc;
  bool left = true, right = true;
  bool clean = true, cjk = true, strip_accents = true, lowercase = true;
  std::string text, content;
  std::shared_ptr<const Regex> regex;  // used instead of text if set
  std::shared_ptr<const Charsmap> charsmap;
  SentencePieceRules sentencepiece;
};

class Normalizer {
 public:
  void add(NormalizerStep step) { steps_.push_back(std::move(step)); }
  bool empty() const { return steps_.empty(); }
  size_t size() const { return steps_.size(); }
  std::string run(std::string_view text, const PieceContext& context = {}) const;

 private:
  std::vector<NormalizerStep> steps_;
};

}  // namespace freshet::tokenizer
