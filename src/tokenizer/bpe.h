// Byte-pair encoding in its kinds: merges listed by rank (GPT-2, Hugging Face), merges implied by
// the ranks of the tokens (tiktoken), and merges implied by their scores (SentencePiece).
//
// Symbols are bytes or characters. A word that is itself a token is looked up instead of merged
// once it is known to merge into that token, so that most words cost one look-up; what is known is
// kept in an atomic byte a token.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tokenizer/model.h"
#include "tokenizer/trie.h"
#include "tokenizer/vocab.h"

namespace freshet::tokenizer {

struct BpeOptions {
  bool bytes = false;           // symbols are bytes, not characters
  bool whole_words = false;     // a word that is a token is that token, whatever the merges say
  bool whole_newlines = false;  // the same for words of nothing but newlines
  bool byte_fallback = false;   // unknown characters become the tokens <0x00> to <0xFF>
  bool fuse_unknown = false;    // unknown neighbours become one
  bool late_unknown = false;    // unknown characters may still merge (SentencePiece)
  int32_t unknown = -1;         // -1: unknown characters vanish
  std::string prefix, suffix;   // of symbols after the first, and of the last
};

// Ranks of listed merges, by the ids of the two sides.
class PairRanks {
 public:
  void reserve(size_t count);
  // Of equal pairs the first given counts.
  void add(int32_t left, int32_t right, Merge merge);
  Merge find(int32_t left, int32_t right) const {
    if (slots_.empty() || left < 0 || right < 0) return {};
    const uint64_t key = make_key(left, right);
    for (size_t i = slot(key);; i = (i + 1) & (slots_.size() - 1)) {
      if (slots_[i].key == key) return slots_[i].merge;
      if (slots_[i].key == kEmpty) return {};
    }
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  struct Slot {
    uint64_t key = kEmpty;
    Merge merge;
  };
  static uint64_t make_key(int32_t left, int32_t right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) |
           static_cast<uint32_t>(right);
  }
  size_t slot(uint64_t key) const {
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15) >> 20) & (slots_.size() - 1);
  }
  std::vector<Slot> slots_;
  size_t count_ = 0;
};

class BpeModel : public Model {
 public:
  // `keys` are the tokens as they are met in words (for byte symbols: raw bytes); it and the
  // strings in it outlive the model. ids < id_count.
  BpeModel(BpeOptions options, const TokenMap& keys, int32_t id_count);

  // Exactly one of these is called before use.
  void set_pairs(PairRanks pairs);
  // Two neighbours merge when together they are a token; ranks[id] is when (Merge::kNone: never).
  void set_token_ranks(std::vector<int32_t> ranks);

  // SentencePiece only. User-defined tokens are never merged; unused ones are taken apart again.
  void set_user_defined(std::shared_ptr<const Trie> trie) { user_defined_ = std::move(trie); }
  void set_unused(std::vector<bool> unused) { unused_ = std::move(unused); }
  // No token holds U+2581 after another character, so that words may be cut before it.
  void cut_before_spaces() { cut_ = true; }

  // The ids of the tokens <0x00> to <0xFF>, or -1 each.
  const std::array<int32_t, 256>& byte_tokens() const { return byte_tokens_; }
  bool has_all_byte_tokens() const;

  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const override;

 private:
  enum Known : uint8_t { kUntried, kMergesToItself, kDoesNot };

  void encode_piece(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;
  void split_bytes(std::string_view word, std::vector<Symbol>& symbols) const;
  void split_chars(std::string_view word, std::vector<Symbol>& symbols) const;
  int32_t char_id(std::string_view c, bool first, bool last) const;
  void merge(std::string_view word, Scratch& scratch) const;
  void emit(std::string_view word, const std::vector<Symbol>& symbols,
            std::vector<int32_t>& out) const;
  void emit_unknown(std::string_view text, bool after_unknown, std::vector<int32_t>& out) const;
  void emit_unused(std::string_view text, std::vector<int32_t>& out) const;

  BpeOptions options_;
  const TokenMap& keys_;
  int32_t id_count_;
  bool by_token_ = false, cut_ = false;
  PairRanks pairs_;
  std::vector<int32_t> ranks_;
  std::array<int32_t, 256> byte_ids_;     // of single-byte keys
  std::array<int32_t, 256> byte_tokens_;  // of <0xXX>
  std::shared_ptr<const Trie> user_defined_;
  std::vector<bool> unused_;
  std::unique_ptr<std::atomic<uint8_t>[]> known_;  // by id
};

}  // namespace freshet::tokenizer
