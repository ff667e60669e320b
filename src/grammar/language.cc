#include "grammar/language.h"

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "grammar/text_cursor.h"

namespace freshet::grammar {
namespace {

constexpr size_t kMaxNodes = 400'000;

struct Node {
  std::vector<int32_t> empty;
  std::vector<Language::Edge> edges;
};

// Thompson's construction over code points.
class Thompson {
 public:
  std::vector<Node> nodes;

  int32_t add() {
    nodes.emplace_back();
    return static_cast<int32_t>(nodes.size()) - 1;
  }
  Node& at(int32_t n) { return nodes[static_cast<size_t>(n)]; }

  Result<int32_t> build(const Expression& e, int32_t from) {
    if (nodes.size() > kMaxNodes)
      return resource_exhausted("the pattern is too large: repetitions multiply its states");
    switch (e.kind) {
      case Expression::Kind::kLiteral: {
        TextCursor in(e.literal);
        while (!in.at_end()) {
          const auto code = in.code_point();
          if (!code) return invalid_argument("a text that is not UTF-8");
          from = step(from, *code, *code);
        }
        return from;
      }
      case Expression::Kind::kClass: {
        const int32_t to = add();
        for (const CodeRange& r : e.ranges) at(from).edges.push_back({r.first, r.last, to});
        return to;
      }
      case Expression::Kind::kSequence:
        for (const Expression& child : e.children) {
          FRESHET_ASSIGN_OR_RETURN(from, build(child, from));
        }
        return from;
      case Expression::Kind::kChoice:
        return build_choice(e, from);
      case Expression::Kind::kRepeat:
        return build_repeat(e, from);
      default:
        return internal_error("a language cannot hold rules");
    }
  }

 private:
  Result<int32_t> build_choice(const Expression& e, int32_t from) {
    const int32_t to = add();
    // Adds plain texts as a trie, so that no state is reached by two of them.
    std::map<std::pair<int32_t, uint32_t>, int32_t> trie;
    int32_t root = -1;
    for (const Expression& child : e.children) {
      const auto text = only_text(child);
      if (!text) {
        const int32_t begin = add();
        at(from).empty.push_back(begin);
        FRESHET_ASSIGN_OR_RETURN(const int32_t end, build(child, begin));
        at(end).empty.push_back(to);
        continue;
      }
      if (root < 0) {
        root = add();
        at(from).empty.push_back(root);
      }
      int32_t here = root;
      TextCursor in(*text);
      while (!in.at_end()) {
        const auto code = in.code_point();
        if (!code) return invalid_argument("a text that is not UTF-8");
        const auto [it, fresh] = trie.try_emplace({here, *code}, -1);
        if (fresh) it->second = step(here, *code, *code);
        here = it->second;
      }
      at(here).empty.push_back(to);
    }
    return to;
  }

  int32_t step(int32_t from, uint32_t first, uint32_t last) {
    const int32_t to = add();
    at(from).edges.push_back({first, last, to});
    return to;
  }

  Result<int32_t> build_repeat(const Expression& e, int32_t from) {
    const Expression& body = e.children.front();
    for (int i = 0; i < e.min; ++i) {
      FRESHET_ASSIGN_OR_RETURN(from, build(body, from));
    }
    if (e.max < 0) {
      const int32_t loop = add();
      at(from).empty.push_back(loop);
      FRESHET_ASSIGN_OR_RETURN(const int32_t end, build(body, loop));
      at(end).empty.push_back(loop);
      const int32_t to = add();
      at(loop).empty.push_back(to);
      return to;
    }
    const int32_t to = add();
    at(from).empty.push_back(to);
    for (int i = e.min; i < e.max; ++i) {
      FRESHET_ASSIGN_OR_RETURN(from, build(body, from));
      at(from).empty.push_back(to);
    }
    return to;
  }
};

using Set = std::vector<int32_t>;

struct StateSetHash {
  size_t operator()(const Set& s) const {
    size_t h = s.size();
    for (const int32_t v : s) h = (h ^ static_cast<size_t>(v)) * 0x9e3779b97f4a7c15ULL + (h >> 31);
    return h;
  }
};

class Subsets {
 public:
  explicit Subsets(const std::vector<Node>& nodes) : nodes_(nodes), mark_(nodes.size(), 0) {}

  Result<std::vector<Language::State>> run(int32_t start, int32_t accept) {
    accept_ = accept;
    state_of({start});
    // A large set of NFA states costs as much as many states, so both are limited.
    for (size_t i = 0; i < sets_.size(); ++i) {
      if (states_.size() > Language::kMaxStates || work_ > 20 * Language::kMaxStates)
        return resource_exhausted("the pattern is too large: more than {} states",
                                  Language::kMaxStates);
      expand(i);
    }
    return std::move(states_);
  }

 private:
  int32_t state_of(Set seeds) {
    ++round_;
    Set all;
    const auto visit = [&](int32_t n) {
      if (std::exchange(mark_[static_cast<size_t>(n)], round_) != round_) all.push_back(n);
    };
    for (const int32_t n : seeds) visit(n);
    for (size_t i = 0; i < all.size(); ++i) {
      for (const int32_t n : nodes_[static_cast<size_t>(all[i])].empty) visit(n);
    }
    work_ += all.size();
    // NFA states with only empty edges are represented by their targets: without them more sets are
    // equal.
    std::erase_if(all, [&](int32_t n) {
      return n != accept_ && nodes_[static_cast<size_t>(n)].edges.empty();
    });
    std::sort(all.begin(), all.end());
    const auto [it, fresh] = ids_.try_emplace(std::move(all), static_cast<int32_t>(states_.size()));
    if (fresh) {
      states_.emplace_back();
      states_.back().accepts = std::binary_search(it->first.begin(), it->first.end(), accept_);
      sets_.push_back(&it->first);
    }
    return it->second;
  }

  void expand(size_t id) {
    std::vector<Language::Edge> edges;
    std::vector<uint32_t> cuts;
    for (const int32_t n : *sets_[id]) {
      for (const auto& e : nodes_[static_cast<size_t>(n)].edges) {
        edges.push_back(e);
        cuts.push_back(e.first);
        cuts.push_back(e.last + 1);
      }
    }
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    std::vector<Language::Edge> out;
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      Set targets;
      for (const auto& e : edges) {
        if (e.first <= cuts[c] && cuts[c] <= e.last) targets.push_back(e.target);
      }
      if (targets.empty()) continue;
      const int32_t target = state_of(std::move(targets));
      if (!out.empty() && out.back().target == target && out.back().last + 1 == cuts[c]) {
        out.back().last = cuts[c + 1] - 1;
      } else {
        out.push_back({cuts[c], cuts[c + 1] - 1, target});
      }
    }
    states_[id].edges = std::move(out);
  }

  const std::vector<Node>& nodes_;
  int32_t accept_ = 0;
  std::vector<uint32_t> mark_;
  uint32_t round_ = 0;
  size_t work_ = 0;
  std::unordered_map<Set, int32_t, StateSetHash> ids_;
  std::vector<const Set*> sets_;
  std::vector<Language::State> states_;
};

// Removes states that are unreachable from the start or cannot reach acceptance.
std::vector<Language::State> trimmed(std::vector<Language::State> states) {
  const size_t n = states.size();
  if (n == 0) return {};
  std::vector<std::vector<int32_t>> back(n);
  std::vector<int32_t> worklist = {0};
  std::vector<char> reached(n, 0);
  reached[0] = 1;
  std::vector<int32_t> live;
  for (size_t i = 0; i < worklist.size(); ++i) {
    const size_t s = static_cast<size_t>(worklist[i]);
    if (states[s].accepts) live.push_back(worklist[i]);
    for (const auto& e : states[s].edges) {
      back[static_cast<size_t>(e.target)].push_back(worklist[i]);
      if (!std::exchange(reached[static_cast<size_t>(e.target)], char{1}))
        worklist.push_back(e.target);
    }
  }
  std::vector<char> alive(n, 0);
  for (const int32_t s : live) alive[static_cast<size_t>(s)] = 1;
  for (size_t i = 0; i < live.size(); ++i) {
    for (const int32_t p : back[static_cast<size_t>(live[i])]) {
      if (!std::exchange(alive[static_cast<size_t>(p)], char{1})) live.push_back(p);
    }
  }
  if (!alive[0]) return {};
  std::vector<int32_t> renamed(n, -1);
  int32_t count = 0;
  for (size_t s = 0; s < n; ++s) {
    if (alive[s]) renamed[s] = count++;
  }
  std::vector<Language::State> out;
  out.reserve(static_cast<size_t>(count));
  for (size_t s = 0; s < n; ++s) {
    if (!alive[s]) continue;
    auto& edges = states[s].edges;
    std::erase_if(edges, [&](const auto& e) { return renamed[static_cast<size_t>(e.target)] < 0; });
    for (auto& e : edges) e.target = renamed[static_cast<size_t>(e.target)];
    out.push_back(std::move(states[s]));
  }
  return out;
}

// Pairs of states; the second may be dead (-1) if only the first needs to continue.
Result<std::vector<Language::State>> product(const std::vector<Language::State>& a,
                                             const std::vector<Language::State>& b,
                                             bool subtracting) {
  if (a.empty() || (b.empty() && !subtracting)) return std::vector<Language::State>();
  std::vector<Language::State> out;
  std::unordered_map<uint64_t, int32_t> ids;
  std::vector<std::pair<int32_t, int32_t>> pairs;
  const auto state_of = [&](int32_t p, int32_t q) {
    const uint64_t key =
        static_cast<uint64_t>(static_cast<uint32_t>(p)) << 32 | static_cast<uint32_t>(q);
    const auto [it, fresh] = ids.try_emplace(key, static_cast<int32_t>(out.size()));
    if (fresh) {
      const bool other = q >= 0 && b[static_cast<size_t>(q)].accepts;
      out.emplace_back();
      out.back().accepts = a[static_cast<size_t>(p)].accepts && other != subtracting;
      pairs.emplace_back(p, q);
    }
    return it->second;
  };
  state_of(0, b.empty() ? -1 : 0);
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (out.size() > Language::kMaxStates)
      return resource_exhausted("patterns and lengths together need more than {} states",
                                Language::kMaxStates);
    const auto [p, q] = pairs[i];
    static const std::vector<Language::Edge> kNone;
    const auto& mine = a[static_cast<size_t>(p)].edges;
    const auto& others = q < 0 ? kNone : b[static_cast<size_t>(q)].edges;
    std::vector<Language::Edge> edges;
    const auto emit = [&](uint32_t first, uint32_t last, int32_t target) {
      if (!edges.empty() && edges.back().target == target && edges.back().last + 1 == first)
        edges.back().last = last;
      else
        edges.push_back({first, last, target});
    };
    size_t k = 0;
    for (const auto& e : mine) {
      uint32_t at = e.first;
      while (k < others.size() && others[k].last < at) ++k;
      for (size_t j = k; at <= e.last; ++j) {
        const bool more = j < others.size() && others[j].first <= e.last;
        const uint32_t gap_end = more ? others[j].first : e.last + 1;
        if (subtracting && at < gap_end) emit(at, gap_end - 1, state_of(e.target, -1));
        if (!more) break;
        const uint32_t first = std::max(at, others[j].first);
        const uint32_t last = std::min(e.last, others[j].last);
        emit(first, last, state_of(e.target, others[j].target));
        at = last + 1;
      }
    }
    out[i].edges = std::move(edges);
  }
  return out;
}

Expression wrapped(Language language, bool quoted) {
  Expression e;
  e.kind = Expression::Kind::kLanguage;
  e.language = std::make_shared<const Language>(std::move(language));
  e.in_json_string = quoted;
  return e;
}

}  // namespace

Language Language::from_states(std::vector<State> states) {
  Language out;
  out.states_ = trimmed(std::move(states));
  return out;
}

Result<Language> Language::from(const Expression& e) {
  Thompson t;
  const int32_t start = t.add();
  FRESHET_ASSIGN_OR_RETURN(const int32_t accept, t.build(e, start));
  FRESHET_ASSIGN_OR_RETURN(auto states, Subsets(t.nodes).run(start, accept));
  return from_states(std::move(states));
}

// Texts are treated as <begin> text <end>, so that an anchor is a character like any other and may
// stand anywhere; then the marks are removed again.
Result<Language> Language::search(const Expression& e) {
  Expression anything = char_class({}, true);
  anything.ranges.push_back({kTextBegin, kTextEnd});
  anything = repeat(std::move(anything), 0, -1);
  FRESHET_ASSIGN_OR_RETURN(const Language found, from(sequence({anything, e, anything})));
  Language whole = of_length(0, -1);
  std::vector<State> frame(3);
  frame[0].edges = {{kTextBegin, kTextBegin, 1}};
  frame[1].edges = whole.states_[0].edges;
  for (Edge& edge : frame[1].edges) edge.target = 1;
  frame[1].edges.push_back({kTextEnd, kTextEnd, 2});
  frame[2].accepts = true;
  FRESHET_ASSIGN_OR_RETURN(const Language framed, intersect(found, from_states(frame)));
  if (framed.empty()) return framed;
  std::vector<State> states = framed.states_;
  states[0] = states[static_cast<size_t>(states[0].edges.front().target)];
  for (State& s : states) {
    s.accepts = std::erase_if(s.edges, [](const Edge& x) { return x.first == kTextEnd; }) > 0;
  }
  return from_states(std::move(states));
}

Language Language::of_length(int64_t min, int64_t max) {
  const auto ranges = normalize_class({}, true);
  const int64_t count = max < 0 ? min : max;
  std::vector<State> states(static_cast<size_t>(count) + 1);
  for (int64_t i = 0; i <= count; ++i) {
    State& s = states[static_cast<size_t>(i)];
    s.accepts = i >= min;
    const int64_t next = i < count ? i + 1 : max < 0 ? i : -1;
    if (next < 0) continue;
    for (const CodeRange& r : ranges)
      s.edges.push_back({r.first, r.last, static_cast<int32_t>(next)});
  }
  return from_states(std::move(states));
}

Language Language::of(const std::vector<std::string>& strings) {
  std::vector<std::map<uint32_t, int32_t>> trie(1);
  std::vector<char> ends(1, 0);
  for (const std::string& s : strings) {
    size_t at = 0;
    TextCursor in(s);
    while (!in.at_end()) {
      const auto code = in.code_point();
      if (!code) break;  // JSON strings are valid UTF-8 at this point
      const auto [it, fresh] = trie[at].try_emplace(*code, static_cast<int32_t>(trie.size()));
      const size_t next = static_cast<size_t>(it->second);
      if (fresh) {
        trie.emplace_back();
        ends.push_back(0);
      }
      at = next;
    }
    ends[at] = 1;
  }
  std::vector<State> states(trie.size());
  for (size_t i = 0; i < trie.size(); ++i) {
    states[i].accepts = ends[i] != 0;
    for (const auto& [code, target] : trie[i]) states[i].edges.push_back({code, code, target});
  }
  if (strings.empty()) return {};
  return from_states(std::move(states));
}

bool Language::contains(std::string_view utf8) const {
  if (states_.empty()) return false;
  size_t at = 0;
  TextCursor in(utf8);
  while (!in.at_end()) {
    const auto code = in.code_point();
    if (!code) return false;
    const auto& edges = states_[at].edges;
    const auto it = std::find_if(edges.begin(), edges.end(), [&](const Edge& e) {
      return e.first <= *code && *code <= e.last;
    });
    if (it == edges.end()) return false;
    at = static_cast<size_t>(it->target);
  }
  return states_[at].accepts;
}

Result<Language> intersect(const Language& a, const Language& b) {
  FRESHET_ASSIGN_OR_RETURN(auto states, product(a.states_, b.states_, false));
  return Language::from_states(std::move(states));
}

Result<Language> subtract(const Language& a, const Language& b) {
  FRESHET_ASSIGN_OR_RETURN(auto states, product(a.states_, b.states_, true));
  return Language::from_states(std::move(states));
}

Expression language_text(Language language) {
  return language.empty() ? never() : wrapped(std::move(language), false);
}

Expression language_in_json_string(Language language) {
  return language.empty() ? never() : wrapped(std::move(language), true);
}

}  // namespace freshet::grammar
