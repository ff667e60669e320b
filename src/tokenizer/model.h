// What every tokenisation model does: words in, ids out.
//
// A Model is immutable but for caches that are safe to share; encode() may be called from many
// threads, each with its own Scratch. Words are not empty, and valid UTF-8 unless the model takes
// bytes.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace freshet::tokenizer {

// A piece of a word on its way to becoming a token.
struct Symbol {
  uint32_t begin = 0, size = 0;  // bytes of the word
  int32_t id = -1;               // -1: not in the vocabulary
  int32_t previous = -1, next = -1;
  bool frozen = false;  // takes no part in merges
};

// What merging two neighbours gives.
struct Merge {
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  int32_t rank = kNone;  // the lowest goes first
  int32_t id = -1;
};

// Memory that is reused from word to word.
struct Scratch {
  struct Candidate {
    uint64_t key;   // rank, then the left symbol's index
    uint32_t size;  // of both symbols: tells whether they are still what they were
    int32_t id;
  };
  std::vector<Symbol> symbols;
  std::vector<Merge> merges;
  std::vector<Candidate> heap;
  std::vector<int32_t> ids;
};

class Model {
 public:
  Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  virtual ~Model() = default;

  // Appends the word's ids. REQUIRES: word.size() < 2^31.
  virtual void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const = 0;
};

}  // namespace freshet::tokenizer
