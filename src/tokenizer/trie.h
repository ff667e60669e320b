// A byte trie over token strings: finds all prefixes of a text that are tokens, in one walk.
//
// Built once from its keys; afterwards const and safe to read from many threads. Nodes are stored
// breadth first with their children side by side, so a step searches one short run of labels.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace freshet::tokenizer {

class Trie {
 public:
  Trie() { root_.fill(-1); }
  // Keys must not be empty; for equal keys the lowest id wins.
  explicit Trie(std::vector<std::pair<std::string_view, int32_t>> keys);

  bool empty() const { return nodes_.empty(); }

  // Calls f(length, id) for each token that is a prefix of `text`, shortest first.
  template <class F>
  void for_each_prefix(std::string_view text, F&& f) const {
    if (text.empty()) return;
    int32_t node = root_[static_cast<uint8_t>(text[0])];
    for (size_t i = 1; node >= 0; ++i) {
      if (nodes_[static_cast<size_t>(node)].id >= 0) f(i, nodes_[static_cast<size_t>(node)].id);
      if (i >= text.size()) break;
      node = child(node, static_cast<uint8_t>(text[i]));
    }
  }

  // The longest token that is a prefix of `text`: its length (0: none) and id.
  std::pair<size_t, int32_t> longest_prefix(std::string_view text) const {
    std::pair<size_t, int32_t> best{0, -1};
    for_each_prefix(text, [&](size_t length, int32_t id) { best = {length, id}; });
    return best;
  }

  bool may_begin(char first) const { return root_[static_cast<uint8_t>(first)] >= 0; }

 private:
  struct Node {
    int32_t id = -1;
    int32_t children = 0;  // index of the first child
    uint16_t count = 0;
  };
  int32_t child(int32_t node, uint8_t label) const {
    const Node& n = nodes_[static_cast<size_t>(node)];
    size_t low = static_cast<size_t>(n.children), high = low + n.count;
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (labels_[middle] < label) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const bool found = low < static_cast<size_t>(n.children) + n.count && labels_[low] == label;
    return found ? static_cast<int32_t>(low) : -1;
  }

  std::array<int32_t, 256> root_;
  std::vector<Node> nodes_;
  std::vector<uint8_t> labels_;  // the byte that leads to each node
};

}  // namespace freshet::tokenizer
