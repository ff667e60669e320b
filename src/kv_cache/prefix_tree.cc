#include "kv_cache/prefix_tree.h"

#include <algorithm>

namespace freshet::kv_cache {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

PrefixTree::PrefixTree(int groups, uint64_t hash_seed) : groups_(groups), hash_seed_(hash_seed) {
  FRESHET_CHECK(groups > 0);
}

uint64_t PrefixTree::hash(NodeId parent, std::span<const int32_t> tokens) const {
  uint64_t h = mix(hash_seed_ + static_cast<uint64_t>(static_cast<uint32_t>(parent)));
  for (const int32_t t : tokens) {
    h = mix(h + 0x9E3779B97F4A7C15 + static_cast<uint32_t>(t));
  }
  return h;
}

NodeId PrefixTree::make_node(NodeId parent) {
  NodeId id;
  if (!free_.empty()) {
    id = free_.back();
    free_.pop_back();
    at(id) = Node{};
  } else {
    id = static_cast<NodeId>(nodes_.size());
    nodes_.emplace_back();
    blocks_.resize(blocks_.size() + static_cast<size_t>(groups_), kNoBlock);
  }
  Node& node = at(id);
  node.parent = parent;
  node.live = true;
  ++live_;
  for (int g = 0; g < groups_; ++g) set_block(id, g, kNoBlock);
  return id;
}

NodeId PrefixTree::find_root(std::string_view salt) const {
  const auto it = roots_.find(std::string(salt));
  return it == roots_.end() ? kNoNode : it->second;
}

NodeId PrefixTree::root(std::string_view salt) {
  if (const NodeId found = find_root(salt); found != kNoNode) return found;
  const NodeId id = make_node(kNoNode);
  roots_.emplace(salt, id);
  salts_.emplace(id, salt);
  return id;
}

NodeId PrefixTree::child(NodeId node, std::span<const int32_t> tokens) const {
  FRESHET_CHECK(tokens.size() == kBlockTokens);
  const auto [first, last] = index_.equal_range(hash(node, tokens));
  for (auto it = first; it != last; ++it) {
    const Node& n = at(it->second);
    if (n.parent == node && std::ranges::equal(n.tokens, tokens)) return it->second;
  }
  return kNoNode;
}

NodeId PrefixTree::add_child(NodeId node, std::span<const int32_t> tokens) {
  FRESHET_CHECK(tokens.size() == kBlockTokens);
  const NodeId id = make_node(node);
  Node& n = at(id);
  std::ranges::copy(tokens, n.tokens.begin());
  n.next = at(node).first_child;
  if (n.next != kNoNode) at(n.next).previous = id;
  at(node).first_child = id;
  index_.emplace(hash(node, tokens), id);
  return id;
}

PrefixTree::Partial PrefixTree::longest_partial(NodeId node,
                                                std::span<const int32_t> tokens) const {
  Partial best;
  int scanned = 0;
  for (NodeId c = at(node).first_child; c != kNoNode && scanned < kPartialScan; ++scanned) {
    const Node& n = at(c);
    const auto differ = std::ranges::mismatch(n.tokens, tokens);
    const auto same = static_cast<int32_t>(differ.in1 - n.tokens.begin());
    if (same > best.tokens) best = {c, same};
    c = n.next;
  }
  return best;
}

bool PrefixTree::holds_nothing(NodeId node) const {
  if (!is_leaf(node) || at(node).cursors > 0) return false;
  for (int g = 0; g < groups_; ++g) {
    if (block(node, g) != kNoBlock) return false;
  }
  return true;
}

void PrefixTree::unlink(NodeId node) {
  Node& n = at(node);
  if (n.parent == kNoNode) {
    const auto salt = salts_.find(node);
    roots_.erase(salt->second);
    salts_.erase(salt);
  } else {
    const auto [first, last] = index_.equal_range(hash(n.parent, n.tokens));
    for (auto it = first; it != last; ++it) {
      if (it->second == node) {
        index_.erase(it);
        break;
      }
    }
    if (n.previous != kNoNode) at(n.previous).next = n.next;
    if (n.next != kNoNode) at(n.next).previous = n.previous;
    if (at(n.parent).first_child == node) at(n.parent).first_child = n.next;
  }
  n.live = false;
  --live_;
  free_.push_back(node);
}

NodeId PrefixTree::prune(NodeId node) {
  while (node != kNoNode && holds_nothing(node)) {
    const NodeId up = parent(node);
    unlink(node);
    node = up;
  }
  return node;
}

}  // namespace freshet::kv_cache
