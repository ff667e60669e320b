#include "tokenizer/added_tokens.h"

#include <algorithm>

#include "tokenizer/unicode.h"

namespace freshet::tokenizer {
namespace {

// The character that ends just before `end`.
std::string_view last_char(std::string_view text, size_t end) {
  size_t begin = end - 1;
  while (begin > 0 && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
  return text.substr(begin, end - begin);
}

bool is_space(std::string_view c) {
  return (char_class(decode_utf8(c).code) & kSpace) != 0;
}
bool is_word(std::string_view c) {
  return is_word_char(decode_utf8(c).code);
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::vector<std::pair<std::string_view, int32_t>> keys;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (!tokens_[i].content.empty()) keys.emplace_back(tokens_[i].content, static_cast<int32_t>(i));
  }
  trie_ = Trie(std::move(keys));
}

bool AddedTokens::allowed(const AddedToken& token, std::string_view text, size_t begin, size_t end,
                          bool parse_special) const {
  if (token.special && !parse_special) return false;
  if (!token.single_word) return true;
  return (begin == 0 || !is_word(last_char(text, begin))) &&
         (end == text.size() || !is_word(text.substr(end)));
}

void AddedTokens::split(std::string_view text, bool parse_special, const PieceContext& context,
                        FunctionRef<void(int32_t)> on_token,
                        FunctionRef<void(std::string_view, const PieceContext&)> on_text) const {
  size_t done = 0;
  bool after_token = context.after_token;
  const auto flush = [&](size_t end) {
    if (done < end) {
      on_text(text.substr(done, end - done), {context.at_start && done == 0, after_token});
      after_token = false;
    }
  };
  for (size_t i = 0; !trie_.empty() && i < text.size();) {
    const auto [size, index] = trie_.may_begin(text[i]) ? trie_.longest_prefix(text.substr(i))
                                                        : std::pair<size_t, int32_t>{};
    if (size == 0) {
      ++i;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t begin = i, end = i + size;
    i = end;
    if (!allowed(token, text, begin, end, parse_special)) continue;
    while (token.lstrip && begin > done && is_space(last_char(text, begin))) {
      begin -= last_char(text, begin).size();
    }
    while (token.rstrip && end < text.size() && is_space(text.substr(end))) {
      end += utf8_size(text[end]);
    }
    flush(begin);
    on_token(token.id);
    after_token = true;
    // Stripped white space is still searched for tokens, as in the reference implementation.
    done = end;
  }
  flush(text.size());
}

}  // namespace freshet::tokenizer
