#include "grammar/token_trie.h"

#include <algorithm>

#include "grammar/text_cursor.h"

namespace freshet::grammar {
namespace {

bool is_plain(std::string_view token) {
  TextCursor in(token);
  for (int n = 0; !in.at_end(); ++n) {
    const auto code = in.code_point();
    if (n >= TokenTrie::kPlainCharacters || !code || *code < 0x20 || *code == '"' || *code == '\\')
      return false;
  }
  return true;
}

}  // namespace

TokenTrie::TokenTrie(const std::vector<std::string>& tokens)
    : vocab_size_(static_cast<int32_t>(tokens.size())),
      tokens_(tokens),
      plain_mask_((tokens.size() + 31) / 32, 0) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; id < vocab_size_; ++id) {
    if (!token(id).empty()) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    const int c = token(a).compare(token(b));
    return c != 0 ? c < 0 : a < b;
  });
  std::vector<int32_t> others;
  for (const int32_t id : ids) {
    if (is_plain(token(id))) {
      plain_mask_[static_cast<size_t>(id) / 32] |= 1U << (id % 32);
    } else {
      others.push_back(id);
    }
  }
  not_plain_ = build(std::move(others));
  all_ = build(std::move(ids));
}

// `ids` in the order of their bytes.
TokenTrie::Part TokenTrie::build(std::vector<int32_t> ids) const {
  Part part;
  part.token_ids = std::move(ids);
  std::vector<int32_t> path;  // open nodes, one per byte of the current token
  const auto close_to = [&](size_t depth) {
    while (path.size() > depth) {
      part.nodes[static_cast<size_t>(path.back())].end = static_cast<int32_t>(part.nodes.size());
      path.pop_back();
    }
  };
  for (size_t i = 0; i < part.token_ids.size(); ++i) {
    const std::string& t = token(part.token_ids[i]);
    size_t common = 0;
    while (common < path.size() && common < t.size() &&
           part.nodes[static_cast<size_t>(path[common])].byte == static_cast<uint8_t>(t[common])) {
      ++common;
    }
    close_to(common);
    for (size_t d = common; d < t.size(); ++d) {
      path.push_back(static_cast<int32_t>(part.nodes.size()));
      const int32_t at = static_cast<int32_t>(i);
      part.nodes.push_back(
          {static_cast<uint8_t>(t[d]), static_cast<uint8_t>(std::min<size_t>(d, 255)), 0, at, at});
    }
    TrieNode& node = part.nodes[static_cast<size_t>(path.back())];
    if (node.tokens_last <= node.tokens_first) node.tokens_first = static_cast<int32_t>(i);
    node.tokens_last = static_cast<int32_t>(i) + 1;
  }
  close_to(0);
  return part;
}

}  // namespace freshet::grammar
