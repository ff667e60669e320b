// The interface of a tokenisation model: words in, ids out.
//
// A Model is immutable except for caches that are safe to share; encode() may be called from many
// threads, each with its own Scratch. Words are not empty, and they are valid UTF-8 unless the
// model takes bytes.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

namespace freshet::tokenizer {

// Part of a word that has not become a token yet.
struct Symbol {
  uint32_t begin = 0, size = 0;  // length in bytes
  int32_t id = -1;               // -1: not in the vocabulary
  int32_t previous = -1, next = -1;
  bool frozen = false;  // never merges
};

// The result of merging two neighbours.
struct Merge {
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  int32_t rank = kNone;  // lowest first
  int32_t id = -1;
};

// Memory that is reused between words.
struct Scratch {
  struct Candidate {
    uint64_t key;   // rank, then the index of the left symbol
    uint32_t size;  // total size of both symbols: shows whether they have changed
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

  // Appends the ids of the word. REQUIRES: word.size() < 2^31.
  virtual void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const = 0;
};

}  // namespace freshet::tokenizer
