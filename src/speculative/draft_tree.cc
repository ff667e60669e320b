#include "speculative/draft_tree.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include <fmt/ranges.h>

#include "sampling/race.h"

namespace freshet::speculative {

// ---- static trees ----------------------------------------------------------------------------

int TreeShape::depth() const {
  int deepest = 0;
  for (const Node& n : nodes) deepest = std::max(deepest, n.depth);
  return deepest;
}

int TreeShape::width() const {
  std::vector<bool> grows(nodes.size(), false);
  for (const Node& n : nodes) {
    if (n.parent >= 0) grows[static_cast<size_t>(n.parent)] = true;
  }
  std::map<int32_t, int> at_depth;
  int most = 1;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (grows[i]) most = std::max(most, ++at_depth[nodes[i].depth]);
  }
  return most;
}

namespace {

using RankPath = std::vector<int32_t>;

// Reads "(0, 1)" or "(0,)" at the beginning of `text`, and removes it. Empty: it is not there.
RankPath read_ranks(std::string_view& text) {
  const auto skip = [&](char c) {
    const size_t at = text.find_first_not_of(" \t\n");
    if (at == std::string_view::npos || text[at] != c) return false;
    text.remove_prefix(at + 1);
    return true;
  };
  RankPath ranks;
  if (!skip('(')) return {};
  while (!skip(')')) {
    text.remove_prefix(std::min(text.find_first_not_of(" \t\n"), text.size()));
    int32_t rank = 0;
    size_t digits = 0;
    while (digits < text.size() && digits < 3 && text[digits] >= '0' && text[digits] <= '9')
      rank = rank * 10 + (text[digits++] - '0');
    text.remove_prefix(digits);
    if (digits == 0 || rank >= kMostTreeRanks) return {};
    ranks.push_back(rank);
    if (skip(',')) continue;
    if (!skip(')')) return {};
    break;
  }
  return ranks;
}

}  // namespace

Result<TreeShape> parse_tree(std::string_view text) {
  const auto wrong = [&](std::string_view what) {
    return invalid_argument(
        "speculative_token_tree: {}; write a list of 1 to {} tuples of ranks from 0 to {}, such as "
        "[(0,), (1,), (0, 0)]",
        what, kMostTreeNodes, kMostTreeRanks - 1);
  };
  const size_t open = text.find_first_not_of(" \t\n"), close = text.find_last_not_of(" \t\n");
  if (open == std::string_view::npos || text[open] != '[' || text[close] != ']')
    return wrong("it is not a list");
  std::string_view rest = text.substr(open + 1, close - open - 1);
  std::vector<RankPath> paths;
  while (rest.find_first_not_of(" \t\n") != std::string_view::npos) {
    if (!paths.empty()) {
      const size_t comma = rest.find_first_not_of(" \t\n");
      if (rest[comma] != ',') return wrong("a comma is missing");
      rest.remove_prefix(comma + 1);
      if (rest.find_first_not_of(" \t\n") == std::string_view::npos) break;
    }
    RankPath ranks = read_ranks(rest);
    if (ranks.empty()) return wrong(fmt::format("tuple {} cannot be read", paths.size() + 1));
    paths.push_back(std::move(ranks));
  }
  if (paths.empty() || std::ssize(paths) > kMostTreeNodes)
    return wrong(fmt::format("it has {} tuples", paths.size()));
  std::ranges::sort(paths, [](const RankPath& a, const RankPath& b) {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
  });
  std::map<RankPath, int32_t> place;
  TreeShape shape;
  for (const RankPath& path : paths) {
    int32_t parent = -1;
    if (path.size() > 1) {
      const auto at = place.find(RankPath(path.begin(), path.end() - 1));
      if (at == place.end())
        return wrong(fmt::format("the parent of ({}) is missing", fmt::join(path, ", ")));
      parent = at->second;
    }
    if (!place.emplace(path, static_cast<int32_t>(shape.nodes.size())).second)
      return wrong("a tuple is there twice");
    shape.nodes.push_back({parent, path.back(), static_cast<int32_t>(path.size())});
  }
  return shape;
}

// best[d][n]: the accepted drafts of a tree of at most n nodes below a node that was accepted, with
// d levels left. rest[i][n] is the same for the children of rank i and later.
namespace {

class Sequoia {
 public:
  Sequoia(std::span<const double> rates, int nodes, int depth) : rates_(rates), nodes_(nodes) {
    const auto size = static_cast<size_t>(nodes) + 1;
    best_.assign(static_cast<size_t>(depth) + 1, std::vector<double>(size, 0.0));
    rest_.resize(best_.size());
    for (size_t d = 1; d < best_.size(); ++d) {
      rest_[d].assign(rates.size() + 1, std::vector<double>(size, 0.0));
      for (size_t i = rates.size(); i-- > 0;) {
        for (int n = 0; n <= nodes; ++n) at(d, i, n) = try_children(d, i, n, nullptr);
      }
      best_[d] = rest_[d][0];
    }
  }

  void build(size_t depth, int nodes, int32_t parent, int32_t level, TreeShape& shape) const {
    for (size_t i = 0; i < rates_.size() && nodes > 0 && depth > 0; ++i) {
      int taken = 0;
      try_children(depth, i, nodes, &taken);
      nodes -= taken;
      if (taken == 0) continue;
      const auto child = static_cast<int32_t>(shape.nodes.size());
      shape.nodes.push_back({parent, static_cast<int32_t>(i), level});
      build(depth - 1, taken - 1, child, level + 1, shape);
    }
  }

 private:
  double& at(size_t d, size_t i, int n) { return rest_[d][i][static_cast<size_t>(n)]; }
  // The best way to give n nodes to the children i and later; `taken`: how many child i gets.
  double try_children(size_t d, size_t i, int n, int* taken) const {
    double most = rest_[d][i + 1][static_cast<size_t>(n)];
    for (int own = 1; own <= n; ++own) {
      const double value = rates_[i] * (1.0 + best_[d - 1][static_cast<size_t>(own) - 1]) +
                           rest_[d][i + 1][static_cast<size_t>(n - own)];
      if (value <= most) continue;
      most = value;
      if (taken != nullptr) *taken = own;
    }
    return most;
  }

  std::span<const double> rates_;
  int nodes_;
  std::vector<std::vector<double>> best_;
  std::vector<std::vector<std::vector<double>>> rest_;
};

}  // namespace

TreeShape tree_from_rates(std::span<const double> rates, int nodes, int depth) {
  TreeShape shape;
  Sequoia(rates, nodes, depth).build(static_cast<size_t>(depth), nodes, -1, 1, shape);
  return shape;
}

double accepted_drafts(const TreeShape& shape, std::span<const double> rates) {
  std::vector<double> reached;
  double sum = 0.0;
  for (const TreeShape::Node& n : shape.nodes) {
    const double before = n.parent < 0 ? 1.0 : reached[static_cast<size_t>(n.parent)];
    const auto rank = static_cast<size_t>(n.rank);
    reached.push_back(before * (rank < rates.size() ? rates[rank] : 0.0));
    sum += reached.back();
  }
  return sum;
}

// ---- growth ----------------------------------------------------------------------------------

namespace {

// Tokens that take part in a race for choices: a less probable one hardly ever comes first.
constexpr int kRacers = 128;

// What the request's filters leave of the most probable tokens: min-p, top-k, top-p.
void filter_choices(const SamplingParams& p, std::vector<DraftChoice>& choices) {
  const size_t before = choices.size();
  if (choices.empty()) return;
  const double best = choices.front().log_probability;
  std::erase_if(choices, [&](const DraftChoice& c) {
    return std::exp(c.log_probability - best) < static_cast<double>(p.min_p);
  });
  if (p.top_k > 0 && std::ssize(choices) > p.top_k) choices.resize(static_cast<size_t>(p.top_k));
  double all = 1.0;
  if (choices.size() < before) {
    all = 0.0;
    for (const DraftChoice& c : choices) all += std::exp(static_cast<double>(c.log_probability));
  }
  double sum = 0.0;
  size_t kept = 0;
  while (kept < choices.size() && sum < all * static_cast<double>(p.top_p))
    sum += std::exp(static_cast<double>(choices[kept++].log_probability));
  choices.resize(kept);
}

void race_choices(const Race& race, std::vector<DraftChoice>& choices) {
  double sum = 0.0;
  for (DraftChoice& c : choices) {
    const double speed = std::exp(static_cast<double>(c.log_probability)) /
                         ops::race_exponential(race.noise(c.token));
    sum += speed;
    c.log_probability = static_cast<float>(std::log(speed));
  }
  for (DraftChoice& c : choices) c.log_probability -= static_cast<float>(std::log(sum));
  std::ranges::stable_sort(choices, std::greater(), &DraftChoice::log_probability);
}

}  // namespace

std::vector<DraftChoice> best_choices(std::span<const float> logits, std::span<const int32_t> ids,
                                      const DraftRequest& request, int64_t position, bool greedy,
                                      int count, LogitScratch& scratch) {
  if (!ids.empty()) logits = logits.first(std::min(logits.size(), ids.size()));
  const float maximum = find_maxima(logits, scratch);
  std::vector<DraftChoice> choices;
  if (!std::isfinite(maximum)) return choices;
  const bool races = !greedy && request.params->temperature > 0.0f;
  const float scale = races ? 1.0f / request.params->temperature : 1.0f;
  const auto total = static_cast<double>(exponential_sums(logits, maximum, scale, scratch));
  const auto rest = static_cast<float>(std::log(total) - kWeightBits * std::log(2.0));
  gather_best(logits, races ? std::max(count, kRacers) : count, scratch);
  for (const Candidate& c : scratch.candidates) {
    const int32_t token = ids.empty() ? c.id : ids[static_cast<size_t>(c.id)];
    choices.push_back({token, (c.logit - maximum) * scale - rest});
  }
  if (races) {
    filter_choices(*request.params, choices);
    race_choices(Race(request.seed, request.sample, position), choices);
  }
  if (std::ssize(choices) > count) choices.resize(static_cast<size_t>(count));
  return choices;
}

int DraftTree::choices(int32_t node) const {
  if (options_->shape.empty()) return options_->top_k;
  const int32_t place = node == kRoot ? -1 : at(node).place;
  int most = 0;
  for (const TreeShape::Node& n : options_->shape.nodes) {
    if (n.parent == place) most = std::max(most, n.rank + 1);
  }
  return most;
}

void DraftTree::grow(int32_t node, std::span<const DraftChoice> choices) {
  const float value = node == kRoot ? 0.0f : at(node).value;
  const int32_t depth = depth_of(node) + 1;
  const TreeShape& shape = options_->shape;
  if (shape.empty()) {
    for (const DraftChoice& c : choices)
      nodes_.push_back({c.token, node, depth, -1, value + c.log_probability});
    return;
  }
  const int32_t place = node == kRoot ? -1 : at(node).place;
  for (size_t i = 0; i < shape.nodes.size(); ++i) {
    const TreeShape::Node& n = shape.nodes[i];
    if (n.parent != place || static_cast<size_t>(n.rank) >= choices.size()) continue;
    const DraftChoice& c = choices[static_cast<size_t>(n.rank)];
    nodes_.push_back({c.token, node, depth, static_cast<int32_t>(i), value + c.log_probability});
  }
}

// The nodes of the tree as it stands, parents first.
std::vector<int32_t> DraftTree::kept() const {
  std::vector<int32_t> order;
  for (size_t i = 0; i < nodes_.size(); ++i) order.push_back(static_cast<int32_t>(i));
  const auto most = static_cast<size_t>(options_->nodes);
  if (!options_->shape.empty() || order.size() <= most) return order;
  std::ranges::stable_sort(order, std::greater(), [&](int32_t i) { return at(i).value; });
  order.resize(most);
  std::ranges::sort(order);
  return order;
}

// What is not among the best nodes now will not be later.
std::vector<int32_t> DraftTree::growing() const {
  std::vector<int32_t> nodes = kept();
  const int32_t level = nodes_.empty() ? 0 : nodes_.back().depth;
  if (level >= depth_) return {};
  std::erase_if(nodes, [&](int32_t i) { return at(i).depth != level || choices(i) == 0; });
  if (!options_->shape.empty()) return nodes;
  std::ranges::stable_sort(nodes, std::greater(), [&](int32_t i) { return at(i).value; });
  if (std::ssize(nodes) > options_->top_k) nodes.resize(static_cast<size_t>(options_->top_k));
  return nodes;
}

void DraftTree::write(DraftRequest& request) const {
  std::vector<int32_t> order = kept();
  std::ranges::stable_sort(order, std::greater(), [&](int32_t i) { return at(i).value; });
  bool first = true;
  std::vector<int32_t> path;
  const std::function<void(int32_t)> walk = [&](int32_t node) {
    bool leaf = true;
    for (const int32_t child : order) {
      if (at(child).parent != node) continue;
      leaf = false;
      path.push_back(at(child).token);
      walk(child);
      path.pop_back();
    }
    if (!leaf || path.empty()) return;
    if (std::exchange(first, false)) {
      request.draft = path;
    } else {
      request.branches.push_back(path);
    }
  };
  walk(DraftTree::kRoot);
}

}  // namespace freshet::speculative
