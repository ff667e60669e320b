// The vocabulary as a trie over bytes, in preorder.
//
// The children of node i follow it; `end` is the first node outside its subtree, so a walk that
// rejects a byte skips the whole subtree in one step. Built once per tokenizer; immutable;
// thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace freshet::grammar {

struct TrieNode {
  uint8_t byte = 0;
  uint8_t depth = 0;  // capped at 255; for statistics only
  int32_t end = 0;    // first node after this subtree
  // [tokens_first, tokens_last) of token_ids: tokens that end at this node
  int32_t tokens_first = 0;
  int32_t tokens_last = 0;
};

class TokenTrie {
 public:
  struct Part {
    std::vector<TrieNode> nodes;     // siblings at the top level follow each other through `end`
    std::vector<int32_t> token_ids;  // in the order of their bytes
  };
  // A token is plain if it consists of at most this many whole characters that a JSON string holds
  // unescaped: no quotes, backslashes or control characters.
  static constexpr int kPlainCharacters = 16;

  // tokens[id]: the bytes of a token; tokens without bytes (special, unused) are never allowed by a
  // grammar.
  explicit TokenTrie(const std::vector<std::string>& tokens);

  int32_t vocab_size() const { return vocab_size_; }
  const Part& all() const { return all_; }
  const Part& not_plain() const { return not_plain_; }
  const std::vector<uint32_t>& plain_mask() const { return plain_mask_; }  // one bit per token
  const std::string& token(int32_t id) const { return tokens_[static_cast<size_t>(id)]; }

 private:
  Part build(std::vector<int32_t> ids) const;

  int32_t vocab_size_;
  std::vector<std::string> tokens_;
  Part all_, not_plain_;
  std::vector<uint32_t> plain_mask_;
};

}  // namespace freshet::grammar
