// Draft trees: what a tree may look like, and how it grows.
//
// A node is a draft, its parent the draft before it; the root is the sequence's last token and no
// node. A static tree says by ranks which children each node gets: rank 0 is the most probable one.
// A dynamic tree (EAGLE-2, arXiv:2406.16858) keeps the nodes that the drafter believes in most: the
// value of a node is the product of the drafter's probabilities along its path. A parent is never
// worth less than its child, so the best nodes are always a tree; ties go to the node that came
// first. Plain data and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "sampling/logits.h"
#include "speculative/drafter.h"

namespace freshet::speculative {

constexpr int kMostTreeNodes = 64;
constexpr int kMostTreeRanks = 16;

// A static tree. Parents come before their children.
struct TreeShape {
  struct Node {
    int32_t parent = -1;  // index of a node; -1: the root
    int32_t rank = 0;
    int32_t depth = 1;
    bool operator==(const Node&) const = default;
  };
  std::vector<Node> nodes;

  bool empty() const { return nodes.empty(); }
  int depth() const;
  int width() const;  // most nodes with children at one depth, and at least 1
  bool operator==(const TreeShape&) const = default;
};

// vLLM's spelling: a list of tuples, each the ranks along a node's path, as in
// "[(0,), (1,), (0, 0), (0, 1)]". The nodes may come in any order.
Result<TreeShape> parse_tree(std::string_view text);

// The tree of at most `nodes` nodes and `depth` levels that gives the most tokens per step if the
// child of rank i is the accepted one with probability rates[i], whatever its parent (Sequoia,
// arXiv:2402.12374).
TreeShape tree_from_rates(std::span<const double> rates, int nodes, int depth);
// How many of its drafts are accepted on average under that assumption.
double accepted_drafts(const TreeShape& shape, std::span<const double> rates);

struct TreeOptions {
  TreeShape shape;  // of static trees
  int nodes = 0;    // of dynamic trees: the most; 0: no dynamic trees
  int top_k = 4;  // of dynamic trees: most children of a node, and most nodes that grow at a depth
  int max_batch = 4;  // trees are drafted while at most this many sequences draft

  bool wanted() const { return nodes > 0 || !shape.empty(); }
  int width() const { return shape.empty() ? top_k : shape.width(); }
};

struct DraftChoice {
  int32_t token = 0;
  float log_probability = 0.0f;
};
// The `count` tokens of a row that are most likely the sequence's own at `position`, best first.
// Where it draws, these are the first ones of its race (sampling/race.h) over the drafter's own
// probabilities and filters, and their probabilities are in proportion to 1 / time: the target's
// race is another one only as far as the two models differ. Otherwise, and if `greedy`: the most
// probable tokens. `ids`: the target's ids of the columns; empty: they are the columns.
std::vector<DraftChoice> best_choices(std::span<const float> logits, std::span<const int32_t> ids,
                                      const DraftRequest& request, int64_t position, bool greedy,
                                      int count, LogitScratch& scratch);

// A tree that grows depth by depth. Not synchronised.
class DraftTree {
 public:
  static constexpr int32_t kRoot = -1;

  // `options` must outlive the tree. `depth`: the most levels.
  DraftTree(const TreeOptions& options, int32_t depth) : options_(&options), depth_(depth) {}

  // How many choices are wanted for the children of a node that grows.
  int choices(int32_t node) const;
  void grow(int32_t node, std::span<const DraftChoice> choices);
  // The nodes of the last level that have to grow; empty: the tree is complete.
  std::vector<int32_t> growing() const;

  int32_t token(int32_t node) const { return at(node).token; }
  int32_t parent(int32_t node) const { return at(node).parent; }
  int32_t depth_of(int32_t node) const { return node == kRoot ? 0 : at(node).depth; }
  // Writes the tree's paths: the one that follows the best child of each node comes first.
  void write(DraftRequest& request) const;

 private:
  struct Node {
    int32_t token = 0;
    int32_t parent = kRoot;
    int32_t depth = 1;
    int32_t place = -1;  // in the shape
    float value = 0.0f;  // logarithm
  };
  const Node& at(int32_t node) const { return nodes_[static_cast<size_t>(node)]; }
  std::vector<int32_t> kept() const;

  const TreeOptions* options_;
  int32_t depth_;
  std::vector<Node> nodes_;  // parents first
};

}  // namespace freshet::speculative
