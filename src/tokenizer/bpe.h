// Byte-pair encoding in three variants: merges listed by rank (GPT-2, Hugging Face), merges implied
// by the token ranks (tiktoken), and merges implied by the token scores (SentencePiece).
//
// Symbols are bytes or characters. Once it is known that a word which is itself a token merges into
// that token, the word is looked up instead of merged, so most words cost one look-up. This
// knowledge is cached in one atomic byte per token.
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
  bool whole_words = false;     // a word that is a token becomes that token, whatever the merges
  bool whole_newlines = false;  // the same, for words of newlines only
  bool byte_fallback = false;   // unknown characters become the tokens <0x00> to <0xFF>
  bool fuse_unknown = false;    // adjacent unknown characters become one token
  bool late_unknown = false;    // unknown characters may still merge (SentencePiece)
  int32_t unknown = -1;         // -1: unknown characters are dropped
  std::string prefix, suffix;   // prefix of symbols after the first; suffix of the last symbol
};

// Ranks of listed merges, keyed by the ids of the left and right token.
class PairRanks {
 public:
  void reserve(size_t count);
  // If a pair is added twice, the first one counts.
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
  // `keys` are the tokens in the form in which words contain them (raw bytes for byte symbols). The
  // map and its strings must outlive the model. All ids are < id_count.
  BpeModel(BpeOptions options, const TokenMap& keys, int32_t id_count);

  // Exactly one of the next two is called before use.
  void set_pairs(PairRanks pairs);
  // Two neighbours merge if their concatenation is a token; ranks[id] is the merge rank
  // (Merge::kNone: never).
  void set_token_ranks(std::vector<int32_t> ranks);

  // SentencePiece only. User-defined tokens are never merged; unused tokens are split up again.
  void set_user_defined(std::shared_ptr<const Trie> trie) { user_defined_ = std::move(trie); }
  void set_unused(std::vector<bool> unused) { unused_ = std::move(unused); }
  // Declares that no token has U+2581 after another character, so words may be cut before U+2581.
  void cut_before_spaces() { cut_ = true; }

  // The ids of the byte-fallback tokens <0x00> to <0xFF>; -1 if missing.
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
  std::array<int32_t, 256> byte_ids_;     // ids of single-byte keys
  std::array<int32_t, 256> byte_tokens_;  // ids of <0xXX>
  std::shared_ptr<const Trie> user_defined_;
  std::vector<bool> unused_;
  std::unique_ptr<std::atomic<uint8_t>[]> known_;  // indexed by id
};

}  // namespace freshet::tokenizer
