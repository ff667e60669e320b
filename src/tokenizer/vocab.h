// The strings of a vocabulary: an arena, a hash map from bytes to ids, and Vocab, which maps both
// ways.
//
// Built by one thread; afterwards const and safe to read from many. Ids are non-negative and dense
// enough for a vector indexed by them; the loaders refuse others.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace freshet::tokenizer {

inline uint64_t hash_text(std::string_view s);

// Keeps strings alive at fixed addresses.
class StringArena {
 public:
  std::string_view add(std::string_view s);

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
  size_t used_ = 0, capacity_ = 0;
};

// Open addressing; keys are views that must outlive the map.
class TokenMap {
 public:
  void reserve(size_t count);
  // Returns false and changes nothing if the key exists.
  bool insert(std::string_view key, int32_t id);
  int32_t find(std::string_view key) const;  // -1: absent
  size_t size() const { return size_; }
  size_t longest() const { return longest_; }  // length in bytes of the longest key

 private:
  struct Slot {
    std::string_view key;
    uint32_t hash = 0;
    int32_t id = -1;
  };
  void grow(size_t slots);

  std::vector<Slot> slots_;
  size_t size_ = 0, longest_ = 0;
};

class Vocab {
 public:
  void reserve(size_t count);
  // Sets or replaces the text of an id; the replaced text still maps to the id. If several ids
  // share a text, look-ups return the first.
  void set(int32_t id, std::string_view text);
  int32_t find(std::string_view text) const { return map_.find(text); }
  bool has(int32_t id) const {
    return id >= 0 && id < size() && texts_[static_cast<size_t>(id)].data() != nullptr;
  }
  std::string_view text(int32_t id) const {  // empty if absent
    return has(id) ? texts_[static_cast<size_t>(id)] : std::string_view();
  }
  int32_t size() const { return static_cast<int32_t>(texts_.size()); }  // the highest id + 1
  size_t count() const { return count_; }
  StringArena& arena() { return arena_; }

 private:
  StringArena arena_;
  TokenMap map_;
  std::vector<std::string_view> texts_;
  size_t count_ = 0;
};

inline uint64_t hash_text(std::string_view s) {
  constexpr uint64_t kMul = 0x9E3779B97F4A7C15;
  uint64_t h = s.size() * kMul;
  const char* p = s.data();
  size_t n = s.size();
  const auto mix = [&](uint64_t word) {
    h = (h ^ word) * kMul;
    h ^= h >> 32;
  };
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    __builtin_memcpy(&word, p, 8);
    mix(word);
  }
  if (n > 0) {
    uint64_t word = 0;
    for (size_t i = 0; i < n; ++i) word |= uint64_t{static_cast<uint8_t>(p[i])} << (8 * i);
    mix(word);
  }
  return h;
}

}  // namespace freshet::tokenizer
