// A radix tree over blocks of tokens: finds the cached blocks of a prefix.
//
// Every edge is one full block of kBlockTokens tokens, so a node is a prefix whose length is its
// depth in blocks. A node has one block id for each cache group, or kNoBlock if the group has none.
// Each salt has its own root, and prefixes are never found across salts. A cursor keeps a node in
// the tree for a sequence that ends there. The tree only stores ids: block_cache.h does references,
// eviction and windows. Not synchronised.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kv_cache/block_pool.h"
#include "ops/attention.h"

namespace freshet::kv_cache {

using ops::kBlockTokens;
using NodeId = int32_t;
inline constexpr NodeId kNoNode = -1;

class PrefixTree {
 public:
  // `hash_seed` protects against clients that choose tokens with colliding hashes; it never changes
  // results.
  PrefixTree(int groups, uint64_t hash_seed);

  NodeId root(std::string_view salt);             // created if absent
  NodeId find_root(std::string_view salt) const;  // kNoNode if absent
  // tokens: kBlockTokens of them. kNoNode if there is no such child.
  NodeId child(NodeId node, std::span<const int32_t> tokens) const;
  NodeId add_child(NodeId node, std::span<const int32_t> tokens);  // REQUIRES: no such child
  NodeId parent(NodeId node) const { return at(node).parent; }
  bool is_leaf(NodeId node) const { return at(node).first_child == kNoNode; }
  int32_t nodes() const { return live_; }

  // The child whose block shares the longest prefix with `tokens`, and that length; 0: none.
  // Only the newest kPartialScan children are compared.
  struct Partial {
    NodeId node = kNoNode;
    int32_t tokens = 0;
  };
  Partial longest_partial(NodeId node, std::span<const int32_t> tokens) const;

  int32_t block(NodeId node, int group) const { return blocks_[slot(node, group)]; }
  void set_block(NodeId node, int group, int32_t block) { blocks_[slot(node, group)] = block; }

  void add_cursor(NodeId node) { ++at(node).cursors; }
  void drop_cursor(NodeId node) { --at(node).cursors; }
  // Removes `node` if it is empty (no blocks, children or cursors), then its parents likewise.
  // Returns the first node that stays, or kNoNode if the whole path was removed.
  NodeId prune(NodeId node);

 private:
  static constexpr int kPartialScan = 64;
  struct Node {
    NodeId parent = kNoNode;
    NodeId first_child = kNoNode;
    NodeId next = kNoNode;  // siblings, newest first
    NodeId previous = kNoNode;
    int32_t cursors = 0;
    bool live = false;
    std::array<int32_t, kBlockTokens> tokens{};
  };

  Node& at(NodeId id) { return nodes_[static_cast<size_t>(id)]; }
  const Node& at(NodeId id) const { return nodes_[static_cast<size_t>(id)]; }
  size_t slot(NodeId node, int group) const {
    return static_cast<size_t>(node) * static_cast<size_t>(groups_) + static_cast<size_t>(group);
  }
  uint64_t hash(NodeId parent, std::span<const int32_t> tokens) const;
  NodeId make_node(NodeId parent);
  bool holds_nothing(NodeId node) const;
  void unlink(NodeId node);

  int groups_;
  uint64_t hash_seed_;
  int32_t live_ = 0;
  std::vector<Node> nodes_;
  std::vector<int32_t> blocks_;  // [nodes, groups]
  std::vector<NodeId> free_;
  std::unordered_multimap<uint64_t, NodeId> index_;  // by hash of (parent, tokens)
  std::unordered_map<std::string, NodeId> roots_;
  std::unordered_map<NodeId, std::string> salts_;
};

}  // namespace freshet::kv_cache
