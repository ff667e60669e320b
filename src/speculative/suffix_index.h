// Texts in which the longest earlier occurrences of a text's end are found, and what followed them.
//
// Every pair of tokens links to its last occurrence before, so a token costs a link and a hash
// entry, and a query follows one chain. What followed the occurrences of the longest context is a
// tree of counted continuations; guess() walks it by filtering the occurrences (suffix decoding,
// arXiv:2411.04975). Texts are forgotten oldest first. Not synchronised.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

namespace freshet::speculative {

class SuffixIndex {
 public:
  struct Guess {
    std::vector<int32_t> tokens;
    double score = 0.0;  // the expected number of right tokens, by the counts
  };
  struct Limits {
    int depth = 24;          // longest context
    double factor = 1.0;     // most tokens, as a multiple of the context's length
    double min_share = 0.1;  // of a guess among all continuations
    int most = 0;            // tokens
  };

  // Tokens behind those of the current text.
  void append(std::span<const int32_t> tokens);
  // The current text is over; what follows is another.
  void end_text();
  size_t texts() const { return texts_.size(); }
  void forget_oldest_text();

  // What may follow a text that ends with `tail`.
  Guess guess(std::span<const int32_t> tail, const Limits& limits) const;

 private:
  int64_t size() const { return first_ + static_cast<int64_t>(tokens_.size()); }
  int32_t token(int64_t at) const { return tokens_[static_cast<size_t>(at - first_)]; }
  void compact();

  int64_t first_ = 0;              // positions below are forgotten and no longer stored
  int64_t valid_ = 0;              // positions below are forgotten
  std::vector<int32_t> tokens_;    // [size() - first_]; -1 between texts
  std::vector<int64_t> previous_;  // the position before at which the same pair ends; -1: none
  std::unordered_map<uint64_t, int64_t> last_;  // of each pair, the last position at which it ends
  std::deque<int64_t> texts_;                   // ends of the texts that are over
};

}  // namespace freshet::speculative
