// Structured output for a model that thinks first.
//
// A thought stands at the beginning of an answer, between two tags; a template may already have
// written the opening tag at the end of the prompt. LateMatcher leaves the thought unconstrained
// and applies the grammar to the text after it. The tags are found in the bytes of the tokens,
// whether they are tokens themselves or spelled by several tokens, just as the server's parser of
// thoughts finds them in the text. The result depends only on the tokens of the sequence itself.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "grammar/grammar.h"

namespace freshet::grammar {

// How the tokens of a vocabulary relate to the tags around a thought. Immutable, shared by
// requests.
class ThoughtTokens {
 public:
  // tokens[id]: the bytes that a token adds to the text; may be empty.
  ThoughtTokens(std::string open, std::string close, std::vector<std::string> tokens);

  const std::string& open() const { return open_; }
  const std::string& close() const { return close_; }
  int32_t vocab_size() const { return static_cast<int32_t>(tokens_.size()); }
  std::string_view token(int32_t id) const;
  // The tokens that continue the opening tag after `spelled` bytes of it.
  const std::vector<int32_t>& openers(size_t spelled) const { return openers_[spelled]; }
  // The tokens of white space only.
  const std::vector<int32_t>& spaces() const { return spaces_; }
  // A token that may both end the thought and begin the answer.
  struct Ender {
    int32_t id;
    size_t length;       // end of the closing tag within the token
    std::string answer;  // the rest of the token, from the first byte that is not white space
  };
  const std::vector<Ender>& enders() const { return enders_; }

 private:
  void find_openers();
  void find_enders();

  const std::string open_;
  const std::string close_;
  const std::vector<std::string> tokens_;
  std::vector<std::vector<int32_t>> openers_;  // [open_.size()]
  std::vector<int32_t> spaces_;
  std::vector<Ender> enders_;
};

// A GrammarMatcher that is inactive until the thought ends. If the output does not begin with a
// thought, the grammar applies from the first token. After a thought one token of white space is
// allowed, because models are trained to write it there; it is not part of the answer. Not
// synchronised.
class LateMatcher {
 public:
  // `thought`: nullptr if the model does not think. `inside`: the prompt has opened the thought.
  LateMatcher(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const ThoughtTokens> thought,
              bool inside);

  // As in GrammarMatcher; but returns false and writes nothing if any token may come.
  bool fill_mask(std::span<uint32_t> mask);
  bool can_end() const;
  // REQUIRES: `id` was allowed and is not an end-of-text token.
  void accept(int32_t id);
  // Takes back the last accepted tokens (for speculation). REQUIRES: tokens <= kMostRollback, and
  // at least that many were accepted.
  static constexpr int kMostRollback = 64;
  void rollback(int tokens);

 private:
  enum class Place { kBefore, kThought, kAnswer };
  // The state before a token, apart from that of the grammar matcher.
  struct Saved {
    int accepted;  // tokens accepted by the grammar matcher
    Place place;
    size_t spelled;
    bool fits;
    std::string tail;
    bool space;
  };
  bool mask_enders(std::span<uint32_t> mask);
  void take_beginning(int32_t id);
  void take_thought(std::string_view bytes);

  GrammarMatcher matcher_;
  std::shared_ptr<const ThoughtTokens> thought_;
  Place place_;
  size_t spelled_ = 0;              // before the thought: number of bytes of the opening tag seen,
  bool fits_ = true;                // and whether these bytes also begin an answer
  std::string tail_;                // in the thought: bytes that may begin the closing tag
  bool space_ = false;              // white space is allowed
  std::deque<Saved> history_;       // of the last tokens, oldest first
  bool opened_ = false;             // the output opened the thought: the grammar matcher was reset
  std::vector<int32_t> beginning_;  // tokens that it had accepted before
};

}  // namespace freshet::grammar
