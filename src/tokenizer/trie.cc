#include "tokenizer/trie.h"

#include <algorithm>

#include "base/status.h"

namespace freshet::tokenizer {

Trie::Trie(std::vector<std::pair<std::string_view, int32_t>> keys) {
  root_.fill(-1);
  std::sort(keys.begin(), keys.end());
  // A node is a range of sorted keys that share their first `depth` bytes.
  struct Range {
    size_t begin, end, depth;
  };
  std::vector<Range> ranges;  // parallel to nodes_
  const auto expand = [&](Range range, auto&& add) {
    for (size_t i = range.begin; i < range.end;) {
      if (keys[i].first.size() == range.depth) {  // ends here: it belongs to the parent itself
        ++i;
        continue;
      }
      const char label = keys[i].first[range.depth];
      size_t end = i;
      while (end < range.end && keys[end].first[range.depth] == label) ++end;
      add(static_cast<uint8_t>(label));
      Node node;
      if (keys[i].first.size() == range.depth + 1) node.id = keys[i].second;
      nodes_.push_back(node);
      labels_.push_back(static_cast<uint8_t>(label));
      ranges.push_back({i, end, range.depth + 1});
      i = end;
    }
  };
  size_t first = 0;
  while (first < keys.size() && keys[first].first.empty()) ++first;
  expand({first, keys.size(), 0},
         [&](uint8_t label) { root_[label] = static_cast<int32_t>(nodes_.size()); });
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const auto children = static_cast<int32_t>(nodes_.size());
    uint16_t count = 0;
    expand(ranges[n], [&](uint8_t) { ++count; });
    nodes_[n].children = children;
    nodes_[n].count = count;
  }
}

}  // namespace freshet::tokenizer
