#include "speculative/draft_tree.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "base/philox.h"
#include "sampling/sampler.h"

namespace freshet::speculative {
namespace {

using Paths = std::vector<std::vector<int32_t>>;

Paths paths_of(const DraftTree& tree) {
  DraftRequest r;
  tree.write(r);
  Paths paths{r.draft};
  paths.insert(paths.end(), r.branches.begin(), r.branches.end());
  return paths;
}

TEST(TreeShape, ReadsTuplesInAnyOrder) {
  const auto shape = parse_tree(" [(0, 0), (1,) ,(0,),(0,3), (0, 0, 2),]");
  ASSERT_TRUE(shape.ok()) << shape.status().message();
  const std::vector<TreeShape::Node> want = {
      {-1, 0, 1}, {-1, 1, 1}, {0, 0, 2}, {0, 3, 2}, {2, 2, 3}};
  EXPECT_EQ(shape->nodes, want);
  EXPECT_EQ(shape->depth(), 3);
  EXPECT_EQ(shape->width(), 1);
  for (const char* wrong :
       {"", "[", "[]", "[()]", "[(0,)", "[(0,)(1,)]", "[(0,), (0,)]", "[(1, 0)]", "[(-1,)]",
        "[(16,)]", "[(0.5,)]", "[(0,), x]", "[(99999999999,)]"}) {
    EXPECT_FALSE(parse_tree(wrong).ok()) << wrong;
  }
}

// All trees of n nodes whose children have ranks 0, 1, 2 ... without a gap.
void all_trees(int nodes, int depth, size_t ranks,
               const std::function<void(const TreeShape&)>& visit) {
  TreeShape shape;
  std::vector<size_t> children;
  const std::function<void(size_t)> extend = [&](size_t from) {
    visit(shape);
    if (std::ssize(shape.nodes) == nodes) return;
    // The next node belongs to the parent of the last one, or to a later node (-1 is the root).
    for (size_t p = from; p <= shape.nodes.size(); ++p) {
      const auto parent = static_cast<int32_t>(p) - 1;
      const int32_t level = parent < 0 ? 1 : shape.nodes[p - 1].depth + 1;
      const auto rank = std::ranges::count(shape.nodes, parent, &TreeShape::Node::parent);
      if (level > depth || static_cast<size_t>(rank) >= ranks) continue;
      shape.nodes.push_back({parent, static_cast<int32_t>(rank), level});
      extend(p);
      shape.nodes.pop_back();
    }
  };
  extend(0);
}

TEST(TreeShape, IsTheBestOfAll) {
  uint32_t calls = 0;
  for (int round = 0; round < 40; ++round) {
    std::vector<double> rates;
    double left = 1.0;
    for (int i = 0; i < 1 + round % 3; ++i) {
      rates.push_back(left * philox_uniform(3, 4, ++calls));
      left -= rates.back();
    }
    std::ranges::sort(rates, std::greater());
    const int nodes = 1 + round % 7, depth = 1 + round % 4;
    double best = 0.0;
    all_trees(nodes, depth, rates.size(),
              [&](const TreeShape& s) { best = std::max(best, accepted_drafts(s, rates)); });
    const TreeShape found = tree_from_rates(rates, nodes, depth);
    EXPECT_LE(std::ssize(found.nodes), nodes);
    EXPECT_LE(found.depth(), depth);
    EXPECT_NEAR(accepted_drafts(found, rates), best, 1e-12) << "round " << round;
  }
}

// With one child a node the best tree is a chain, whose length is known.
TEST(TreeShape, OfOneRateIsAChain) {
  const double rate = 0.7;
  const TreeShape chain = tree_from_rates({&rate, 1}, 5, 9);
  EXPECT_EQ(chain.depth(), 5);
  EXPECT_NEAR(accepted_drafts(chain, {&rate, 1}), 0.7 * (1 - std::pow(0.7, 5)) / 0.3, 1e-12);
}

TEST(DraftTree, FollowsItsShape) {
  TreeOptions options;
  options.shape = *parse_tree("[(0,), (2,), (0, 1), (2, 0), (2, 0, 0)]");
  DraftTree tree(options, 2);  // shallower than the shape
  EXPECT_EQ(tree.choices(DraftTree::kRoot), 3);
  tree.grow(DraftTree::kRoot, std::vector<DraftChoice>{{10, -0.5f}, {11, -1.0f}, {12, -2.0f}});
  const std::vector<int32_t> first = tree.growing();
  ASSERT_EQ(first.size(), 2u);
  EXPECT_EQ(tree.token(first[1]), 12);
  EXPECT_EQ(tree.choices(first[0]), 2);
  EXPECT_EQ(tree.choices(first[1]), 1);
  tree.grow(first[0], std::vector<DraftChoice>{{20, -0.1f}, {21, -3.0f}});
  tree.grow(first[1], std::vector<DraftChoice>{{30, -0.1f}});
  EXPECT_TRUE(tree.growing().empty());
  EXPECT_EQ(paths_of(tree), (Paths{{10, 21}, {12, 30}}));
}

// A dynamic tree has the N best nodes of the whole tree that would grow without a limit.
TEST(DraftTree, KeepsTheBestNodes) {
  constexpr int kTokens = 3, kDepth = 4;
  const auto log_probability = [](const std::vector<int32_t>& path) {
    uint64_t key = 1;
    for (const int32_t t : path) key = key * 7 + static_cast<uint64_t>(t) + 1;
    return static_cast<float>(std::log(0.05 + 0.9 * philox_uniform(5, key, 0)));
  };
  for (const int nodes : {2, 5, 9, 20}) {
    // By brute force: values of all nodes, best first.
    std::vector<std::pair<float, std::vector<int32_t>>> all;
    const std::function<void(std::vector<int32_t>, float)> visit = [&](std::vector<int32_t> path,
                                                                       float value) {
      if (std::ssize(path) == kDepth) return;
      for (int32_t t = 0; t < kTokens; ++t) {
        path.push_back(t);
        const float worth = value + log_probability(path);
        all.emplace_back(worth, path);
        visit(path, worth);
        path.pop_back();
      }
    };
    visit({}, 0.0f);
    std::ranges::sort(all, std::greater());
    std::set<std::vector<int32_t>> want;
    for (int i = 0; i < nodes; ++i) want.insert(all[static_cast<size_t>(i)].second);

    TreeOptions options{.nodes = nodes, .top_k = 32};
    DraftTree tree(options, kDepth);
    const auto path_to = [&](int32_t node) {
      std::vector<int32_t> path;
      for (; node != DraftTree::kRoot; node = tree.parent(node))
        path.insert(path.begin(), tree.token(node));
      return path;
    };
    const auto grow = [&](int32_t node) {
      std::vector<DraftChoice> choices;
      for (int32_t t = 0; t < kTokens; ++t) {
        std::vector<int32_t> path = path_to(node);
        path.push_back(t);
        choices.push_back({t, log_probability(path)});
      }
      tree.grow(node, choices);
    };
    grow(DraftTree::kRoot);
    for (auto level = tree.growing(); !level.empty(); level = tree.growing()) {
      for (const int32_t node : level) grow(node);
    }
    std::set<std::vector<int32_t>> got;
    for (const std::vector<int32_t>& path : paths_of(tree)) {
      for (size_t n = 1; n <= path.size(); ++n)
        got.emplace(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(n));
    }
    EXPECT_EQ(got, want);
  }
}

TEST(DraftTree, ChoicesAreTheMostProbableTokens) {
  LogitScratch scratch(6);
  const std::vector<float> logits = {1.0f, 3.0f, -2.0f, 3.0f, 2.0f, -INFINITY};
  const std::vector<int32_t> ids = {60, 61, 62, 63, 64, 65};
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(x);
  SamplingParams params;
  params.temperature = 0.0f;
  const DraftRequest r{.params = &params};
  const auto choices = best_choices(logits, ids, r, 7, false, 3, scratch);
  ASSERT_EQ(choices.size(), 3u);
  EXPECT_EQ(choices[0].token, 61);  // ties go to the lowest id
  EXPECT_EQ(choices[1].token, 63);
  EXPECT_EQ(choices[2].token, 64);
  EXPECT_NEAR(choices[2].log_probability, 2.0 - std::log(sum), 1e-5);
  EXPECT_EQ(best_choices(logits, {}, r, 7, false, 9, scratch).size(), 5u);
}

// Where the sequence draws, the first choice is what its own sampler would draw from this row.
TEST(DraftTree, ChoicesFollowTheRace) {
  constexpr int64_t kVocab = 100;
  LogitScratch scratch(kVocab);
  SamplerScratch drawing(kVocab);
  std::vector<float> logits(kVocab);
  for (uint32_t i = 0; i < kVocab; ++i)
    logits[i] = static_cast<float>(4.0 * philox_uniform(8, 9, i));
  for (int which = 0; which < 3; ++which) {
    SamplingParams params;
    params.temperature = 1.0f;
    if (which == 1) params.top_k = 5;
    if (which == 2) params.top_p = 0.5f, params.min_p = 0.2f, params.temperature = 0.7f;
    const DraftRequest r{.params = &params, .seed = 12, .sample = 3};
    Sampler sampler(params, kVocab, r.seed, r.sample, {}, 1, {});
    std::set<int32_t> seen;
    for (int64_t position = 0; position < 200; ++position) {
      std::vector<float> row = logits;
      const int32_t token = sampler.sample(row, position, drawing);
      const auto choices = best_choices(logits, {}, r, position, false, 4, scratch);
      ASSERT_EQ(choices.size(), 4u);
      EXPECT_EQ(choices[0].token, token) << which << " " << position;
      EXPECT_GE(choices[0].log_probability, choices[1].log_probability);
      EXPECT_LE(choices[0].log_probability, 0.0f);
      seen.insert(token);
    }
    EXPECT_GT(seen.size(), 3u);
    const auto greedy = best_choices(logits, {}, r, 5, true, 1, scratch);
    EXPECT_EQ(greedy[0].token, std::ranges::max_element(logits) - logits.begin());
  }
}

}  // namespace
}  // namespace freshet::speculative
