// Structured output of a model that thinks first.
//
// A thought stands at the beginning of an answer, between two tags; templates may have written the
// first of them at the end of the prompt. LateMatcher lets a sequence think as it likes and holds
// what follows to its grammar. The tags are found in the bytes of the tokens, whether they are
// tokens themselves or spelled by several, as the server's parser of thoughts finds them in the
// text. All of it depends on the sequence's own tokens alone.
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

// What the tokens of a vocabulary are to the tags around a thought. Immutable, shared by requests.
class ThoughtTokens {
 public:
  // tokens[id]: the bytes that a token adds to the text; may be none.
  ThoughtTokens(std::string open, std::string close, std::vector<std::string> tokens);

  const std::string& open() const { return open_; }
  const std::string& close() const { return close_; }
  int32_t vocab_size() const { return static_cast<int32_t>(tokens_.size()); }
  std::string_view token(int32_t id) const;
  // Those that go on with the opening tag where `spelled` bytes of it are there.
  const std::vector<int32_t>& openers(size_t spelled) const { return openers_[spelled]; }
  // Those of white space alone.
  const std::vector<int32_t>& spaces() const { return spaces_; }
  // A token that may end the thought and begin the answer at once.
  struct Ender {
    int32_t id;
    size_t length;       // of the closing tag's part in it, its end
    std::string answer;  // what follows, from the first byte that is no white space
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

// A GrammarMatcher that is idle until the thought ends. If the output does not begin with a
// thought, the grammar holds from its first token on. After a thought one token of white space may
// come, because models are used to write it there; it is not a part of the answer. Not
// synchronised.
class LateMatcher {
 public:
  // `thought`: nullptr where nothing is thought. `inside`: the prompt has opened the thought.
  LateMatcher(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const ThoughtTokens> thought,
              bool inside);

  // As GrammarMatcher's; false, and nothing is written, where any token may come.
  bool fill_mask(std::span<uint32_t> mask);
  bool can_end() const;
  // REQUIRES: `id` was allowed, and ends no text.
  void accept(int32_t id);
  // Takes back the last accepted tokens (for speculation).
  // REQUIRES: tokens <= kMostRollback, and so many were accepted.
  static constexpr int kMostRollback = 64;
  void rollback(int tokens);

 private:
  enum class Place { kBefore, kThought, kAnswer };
  // The state before a token, beside the grammar matcher's.
  struct Saved {
    int accepted;  // by the grammar matcher
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
  size_t spelled_ = 0;              // before: bytes of the opening tag that are there;
  bool fits_ = true;                // and whether they begin an answer too
  std::string tail_;                // of the thought: what may be the beginning of the closing tag
  bool space_ = false;              // white space may come
  std::deque<Saved> history_;       // of the last tokens, oldest first
  bool opened_ = false;             // by the output: the grammar matcher started anew
  std::vector<int32_t> beginning_;  // that it accepted before
};

}  // namespace freshet::grammar
