#include "tokenizer/wordpiece.h"

#include <algorithm>

namespace freshet::tokenizer {

void WordPieceModel::encode(std::string_view word, Scratch&, std::vector<int32_t>& out) const {
  const auto chars = static_cast<size_t>(std::count_if(
      word.begin(), word.end(), [](char b) { return (static_cast<uint8_t>(b) & 0xC0) != 0x80; }));
  const size_t before = out.size();
  if (chars <= max_chars_ && cut(word, out)) return;
  out.resize(before);
  if (unknown_ >= 0) out.push_back(unknown_);
}

bool WordPieceModel::cut(std::string_view word, std::vector<int32_t>& out) const {
  for (size_t begin = 0; begin < word.size();) {
    const TokenMap& map = begin == 0 ? starts_ : rest_;
    size_t size = std::min(word.size() - begin, map.longest());
    int32_t id = -1;
    for (; size > 0; --size) {
      const size_t end = begin + size;
      if (end < word.size() && (static_cast<uint8_t>(word[end]) & 0xC0) == 0x80) continue;
      id = map.find(word.substr(begin, size));
      if (id >= 0) break;
    }
    if (id < 0) return false;
    out.push_back(id);
    begin += size;
  }
  return true;
}

}  // namespace freshet::tokenizer
