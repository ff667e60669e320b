#include "grammar/automaton_check.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

namespace freshet::grammar {
namespace {

// Rules that can match the empty string. Each state is reached once: a call that cannot be passed
// yet waits for its rule.
std::vector<bool> nullable_rules(const Automaton& a) {
  std::vector<bool> nullable(a.starts.size(), false);
  struct Place {
    int32_t state;
    int32_t rule;  // rule of the state
  };
  std::vector<std::vector<Place>> waiting(a.starts.size());
  std::vector<char> reached(a.states.size(), 0);
  std::vector<Place> worklist;
  const auto reach = [&](const Place& p) {
    if (!std::exchange(reached[static_cast<size_t>(p.state)], char{1})) worklist.push_back(p);
  };
  for (size_t r = 0; r < a.starts.size(); ++r) reach({a.starts[r], static_cast<int32_t>(r)});
  while (!worklist.empty()) {
    const auto [at, rule] = worklist.back();
    worklist.pop_back();
    const State& s = a.states[static_cast<size_t>(at)];
    for (const Call& c : s.calls) {
      const Place next = {c.next, rule};
      if (nullable[static_cast<size_t>(c.rule)]) {
        reach(next);
      } else {
        waiting[static_cast<size_t>(c.rule)].push_back(next);
      }
    }
    if (!s.final || nullable[static_cast<size_t>(rule)]) continue;
    nullable[static_cast<size_t>(rule)] = true;
    for (const Place& p : std::exchange(waiting[static_cast<size_t>(rule)], {})) reach(p);
  }
  return nullable;
}

// Rules that rule `r` may call before it consumes a byte.
std::set<int32_t> first_calls(const Automaton& a, size_t r, const std::vector<bool>& nullable) {
  std::set<int32_t> called;
  std::vector<int32_t> worklist = {a.starts[r]};
  std::set<int32_t> seen(worklist.begin(), worklist.end());
  while (!worklist.empty()) {
    const State& s = a.states[static_cast<size_t>(worklist.back())];
    worklist.pop_back();
    for (const Call& c : s.calls) {
      called.insert(c.rule);
      if (nullable[static_cast<size_t>(c.rule)] && seen.insert(c.next).second)
        worklist.push_back(c.next);
    }
  }
  return called;
}

}  // namespace

Status check_left_recursion(const Automaton& a, const RuleSet& rules) {
  const std::vector<bool> nullable = nullable_rules(a);
  std::vector<std::set<int32_t>> calls;
  for (size_t r = 0; r < a.starts.size(); ++r) calls.push_back(first_calls(a, r, nullable));
  std::vector<int> colour(a.starts.size(), 0);  // 0 new, 1 open, 2 done
  for (size_t root = 0; root < a.starts.size(); ++root) {
    if (colour[root] != 0) continue;
    std::vector<std::pair<size_t, std::set<int32_t>::const_iterator>> stack = {
        {root, calls[root].begin()}};
    colour[root] = 1;
    while (!stack.empty()) {
      auto& [rule, it] = stack.back();
      if (it == calls[rule].end()) {
        colour[rule] = 2;
        stack.pop_back();
        continue;
      }
      const size_t next = static_cast<size_t>(*it++);
      if (colour[next] == 1) {
        return invalid_argument(
            "rule '{}' is left-recursive: it reaches itself before any character",
            rules.name(static_cast<int>(next)));
      }
      if (colour[next] == 0) {
        colour[next] = 1;
        stack.emplace_back(next, calls[next].begin());
      }
    }
  }
  return {};
}

namespace {

// The states from which the rule can end, found by a backward search from its final states.
std::vector<char> ending_states(const Automaton& a) {
  struct Edge {
    int32_t from;
    int32_t other;  // must be able to end as well; -1: no rule
  };
  const auto each_edge = [&](const auto& visit) {
    for (size_t i = 0; i < a.states.size(); ++i) {
      const int32_t from = static_cast<int32_t>(i);
      for (const Transition& t : a.states[i].bytes) visit(t.target, Edge{from, -1});
      for (const Call& c : a.states[i].calls) {
        const int32_t start = a.starts[static_cast<size_t>(c.rule)];
        visit(c.next, Edge{from, start});
        visit(start, Edge{from, c.next});
      }
    }
  };
  std::vector<size_t> first(a.states.size() + 1, 0);  // incoming edges of each state
  each_edge([&](int32_t to, const Edge&) { ++first[static_cast<size_t>(to) + 1]; });
  for (size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
  std::vector<Edge> edges(first.back());
  std::vector<size_t> at(first.begin(), first.end() - 1);
  each_edge([&](int32_t to, const Edge& e) { edges[at[static_cast<size_t>(to)]++] = e; });
  std::vector<char> good(a.states.size(), 0);
  std::vector<size_t> worklist;
  for (size_t i = 0; i < a.states.size(); ++i) {
    if (!a.states[i].final) continue;
    good[i] = 1;
    worklist.push_back(i);
  }
  while (!worklist.empty()) {
    const size_t to = worklist.back();
    worklist.pop_back();
    for (size_t e = first[to]; e < first[to + 1]; ++e) {
      const size_t from = static_cast<size_t>(edges[e].from);
      if (good[from] || (edges[e].other >= 0 && !good[static_cast<size_t>(edges[e].other)]))
        continue;
      good[from] = 1;
      worklist.push_back(from);
    }
  }
  return good;
}

}  // namespace

bool prune(Automaton& a) {
  const std::vector<char> good = ending_states(a);
  for (State& s : a.states) {
    std::erase_if(s.bytes,
                  [&](const Transition& t) { return !good[static_cast<size_t>(t.target)]; });
    std::erase_if(s.calls, [&](const Call& c) {
      return !good[static_cast<size_t>(c.next)] ||
             !good[static_cast<size_t>(a.starts[static_cast<size_t>(c.rule)])];
    });
    s.only_final = s.final && s.bytes.empty() && s.calls.empty();
  }
  return good[static_cast<size_t>(a.starts[0])] != 0;
}

}  // namespace freshet::grammar
