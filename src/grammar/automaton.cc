#include "grammar/automaton.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "grammar/automaton_check.h"
#include "grammar/language.h"

namespace freshet::grammar {
namespace {

// The Thompson NFA of one rule. Edges carry a byte range, a rule, or nothing.
struct Nfa {
  struct Edge {
    enum class Kind : uint8_t { kEmpty, kBytes, kRule } kind;
    uint8_t first = 0;
    uint8_t last = 0;
    int32_t rule = -1;
    int32_t target = -1;
  };
  std::vector<std::vector<Edge>> edges;
  int32_t add() {
    edges.emplace_back();
    return static_cast<int32_t>(edges.size()) - 1;
  }
  void empty(int32_t from, int32_t to) {
    edges[static_cast<size_t>(from)].push_back({Edge::Kind::kEmpty, 0, 0, -1, to});
  }
  void bytes(int32_t from, uint8_t first, uint8_t last, int32_t to) {
    edges[static_cast<size_t>(from)].push_back({Edge::Kind::kBytes, first, last, -1, to});
  }
  void call(int32_t from, int32_t rule, int32_t to) {
    edges[static_cast<size_t>(from)].push_back({Edge::Kind::kRule, 0, 0, rule, to});
  }
};

struct Utf8 {
  uint8_t bytes[4];
  int size;
};

Utf8 encode(uint32_t c) {
  if (c < 0x80) return {{static_cast<uint8_t>(c)}, 1};
  if (c < 0x800)
    return {{static_cast<uint8_t>(0xc0 | c >> 6), static_cast<uint8_t>(0x80 | (c & 63))}, 2};
  if (c < 0x10000) {
    return {{static_cast<uint8_t>(0xe0 | c >> 12), static_cast<uint8_t>(0x80 | (c >> 6 & 63)),
             static_cast<uint8_t>(0x80 | (c & 63))},
            3};
  }
  return {{static_cast<uint8_t>(0xf0 | c >> 18), static_cast<uint8_t>(0x80 | (c >> 12 & 63)),
           static_cast<uint8_t>(0x80 | (c >> 6 & 63)), static_cast<uint8_t>(0x80 | (c & 63))},
          4};
}

class NfaBuilder {
 public:
  NfaBuilder(Nfa& nfa, size_t limit) : nfa_(nfa), limit_(limit) {}

  // Adds a path for `e` from `from`; returns its end state.
  Result<int32_t> build(const Expression& e, int32_t from) {
    if (nfa_.edges.size() > limit_)
      return resource_exhausted("the grammar is too large: repetitions multiply its states");
    switch (e.kind) {
      case Expression::Kind::kLiteral: {
        for (const char c : e.literal) {
          const int32_t next = nfa_.add();
          nfa_.bytes(from, static_cast<uint8_t>(c), static_cast<uint8_t>(c), next);
          from = next;
        }
        return from;
      }
      case Expression::Kind::kClass: {
        const int32_t to = nfa_.add();
        for (const CodeRange& r : e.ranges) add_range(r.first, r.last, from, to);
        return to;
      }
      case Expression::Kind::kSequence: {
        for (const Expression& child : e.children) {
          FRESHET_ASSIGN_OR_RETURN(from, build(child, from));
        }
        return from;
      }
      case Expression::Kind::kChoice:
        return build_choice(e, from);
      case Expression::Kind::kRepeat:
        return build_repeat(e, from);
      case Expression::Kind::kRule: {
        const int32_t to = nfa_.add();
        nfa_.call(from, e.rule, to);
        return to;
      }
      case Expression::Kind::kLanguage:
        return build_language(*e.language, e.in_json_string, from);
    }
    return internal_error("unknown expression");
  }

 private:
  Result<int32_t> build_choice(const Expression& e, int32_t from) {
    const int32_t to = nfa_.add();
    std::vector<std::string> literals;
    for (const Expression& child : e.children) {
      if (auto text = only_text(child)) {
        literals.push_back(std::move(*text));
        continue;
      }
      const int32_t begin = nfa_.add();
      nfa_.empty(from, begin);
      FRESHET_ASSIGN_OR_RETURN(const int32_t end, build(child, begin));
      nfa_.empty(end, to);
    }
    add_literals(std::move(literals), from, to);
    return to;
  }

  // Adds the literals as a trie: common prefixes exist once, and no state is reached by two of
  // them.
  void add_literals(std::vector<std::string> literals, int32_t from, int32_t to) {
    if (literals.empty()) return;
    std::sort(literals.begin(), literals.end());
    std::vector<int32_t> path = {nfa_.add()};  // the states of the previous literal
    nfa_.empty(from, path.front());
    std::string_view before;
    for (const std::string_view text : literals) {
      if (path.size() > 1 && text == before) continue;
      const size_t common = static_cast<size_t>(
          std::mismatch(before.begin(), before.end(), text.begin(), text.end()).first -
          before.begin());
      path.resize(common + 1);
      for (size_t i = common; i < text.size(); ++i) {
        const uint8_t byte = static_cast<uint8_t>(text[i]);
        const int32_t next = nfa_.add();
        nfa_.bytes(path.back(), byte, byte, next);
        path.push_back(next);
      }
      nfa_.empty(path.back(), to);
      before = text;
    }
  }

  Result<int32_t> build_repeat(const Expression& e, int32_t from) {
    const Expression& body = e.children.front();
    for (int i = 0; i < e.min; ++i) {
      FRESHET_ASSIGN_OR_RETURN(from, build(body, from));
    }
    if (e.max < 0) {
      const int32_t loop = nfa_.add();
      nfa_.empty(from, loop);
      FRESHET_ASSIGN_OR_RETURN(const int32_t end, build(body, loop));
      nfa_.empty(end, loop);
      const int32_t to = nfa_.add();
      nfa_.empty(loop, to);
      return to;
    }
    const int32_t to = nfa_.add();
    nfa_.empty(from, to);
    for (int i = e.min; i < e.max; ++i) {
      FRESHET_ASSIGN_OR_RETURN(from, build(body, from));
      nfa_.empty(from, to);
    }
    return to;
  }

  // Adds each state of the language once.
  Result<int32_t> build_language(const Language& language, bool quoted, int32_t from) {
    tails_.clear();
    const int32_t base = static_cast<int32_t>(nfa_.edges.size());
    for (size_t i = 0; i < language.states().size(); ++i) nfa_.add();
    const int32_t to = nfa_.add();
    nfa_.empty(from, base);
    for (size_t i = 0; i < language.states().size(); ++i) {
      if (nfa_.edges.size() > limit_)
        return resource_exhausted("the grammar is too large: its texts need too many states");
      const int32_t state = base + static_cast<int32_t>(i);
      const auto& edges = language.states()[i].edges;
      if (language.states()[i].accepts) nfa_.empty(state, to);
      const bool any = edges.size() == 2 && edges[0].first == 0 && edges[0].last == 0xd7ff &&
                       edges[1].first == 0xe000 && edges[1].last == kMaxCodePoint &&
                       edges[0].target == edges[1].target;
      if (quoted && any) {
        any_json_character(state, base + edges[0].target);
        continue;
      }
      for (const auto& e : edges) {
        if (quoted) {
          json_characters(e.first, e.last, state, base + e.target);
        } else {
          add_range(e.first, e.last, state, base + e.target, true);
        }
      }
    }
    tails_.clear();
    return to;
  }

  // States that lead to `to`, looked up by the bytes in between.
  enum Tail { kOneByte = 1, kTwoBytes, kThreeBytes, kControl, kAnyEscape };
  std::pair<int32_t, bool> tail(int32_t to, int kind) {
    const auto [it, fresh] = tails_.try_emplace(std::pair(to, kind), -1);
    if (fresh) it->second = nfa_.add();
    return {it->second, fresh};
  }

  // This many arbitrary continuation bytes, then `to`.
  int32_t continuation(int32_t to, int bytes) {
    if (bytes == 0) return to;
    const auto [state, fresh] = tail(to, bytes);
    if (fresh) nfa_.bytes(state, 0x80, 0xbf, continuation(to, bytes - 1));
    return state;
  }

  void text(int32_t from, std::string_view bytes, int32_t to) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      const int32_t next = i + 1 == bytes.size() ? to : nfa_.add();
      nfa_.bytes(from, static_cast<uint8_t>(bytes[i]), static_cast<uint8_t>(bytes[i]), next);
      from = next;
    }
  }

  // Characters first..last in a JSON string: unescaped, or with the escape that they require.
  void json_characters(uint32_t first, uint32_t last, int32_t from, int32_t to) {
    if (first == 0 && last >= 0x1f) {
      const auto [control, fresh] = tail(to, kControl);
      if (fresh) control_escapes(control, to);
      nfa_.bytes(from, '\\', '\\', control);
      first = 0x20;
    }
    uint32_t plain = first;
    for (uint32_t c = first; c <= std::min(last, 0x7fU); ++c) {
      if (c >= 0x20 && c != '"' && c != '\\') continue;
      if (c > plain) add_range(plain, c - 1, from, to, true);
      plain = c + 1;
      const std::string quoted = quoted_json(std::string(1, static_cast<char>(c))).literal;
      text(from, std::string_view(quoted).substr(1, quoted.size() - 2), to);
    }
    if (plain <= last) add_range(plain, last, from, to, true);
  }

  // After a backslash: \b \f \n \r \t and the other control characters as \u00XX.
  void control_escapes(int32_t from, int32_t to) {
    for (const char c : {'b', 'f', 'n', 'r', 't'}) text(from, std::string(1, c), to);
    const int32_t high = nfa_.add();
    text(from, "u00", high);
    const int32_t low = nfa_.add();
    nfa_.bytes(high, '0', '1', low);
    hex(low, "0-9a-fA-F", to);
  }

  // Pairs "x-y" of a class.
  void hex(int32_t from, std::string_view set, int32_t to) {
    for (size_t i = 0; i + 2 < set.size(); i += 3)
      nfa_.bytes(from, static_cast<uint8_t>(set[i]), static_cast<uint8_t>(set[i + 2]), to);
  }
  int32_t hex_chain(std::initializer_list<std::string_view> sets, int32_t from, int32_t to) {
    size_t left = sets.size();
    for (const std::string_view set : sets) {
      const int32_t next = --left == 0 ? to : nfa_.add();
      hex(from, set, next);
      from = next;
    }
    return from;
  }

  // One code point in every spelling that JSON has for it; a surrogate comes with its other half.
  void any_json_character(int32_t from, int32_t to) {
    add_range(0x20, 0x21, from, to, true);
    add_range(0x23, 0x5b, from, to, true);
    add_range(0x5d, 0xd7ff, from, to, true);
    add_range(0xe000, kMaxCodePoint, from, to, true);
    const auto [escape, fresh] = tail(to, kAnyEscape);
    nfa_.bytes(from, '\\', '\\', escape);
    if (!fresh) return;
    for (const char c : {'"', '\\', '/', 'b', 'f', 'n', 'r', 't'})
      text(escape, std::string(1, c), to);
    constexpr std::string_view kHex = "0-9a-fA-F";
    const int32_t code = nfa_.add();
    nfa_.bytes(escape, 'u', 'u', code);
    hex_chain({"0-9a-cA-Ce-fE-F", kHex, kHex, kHex}, code, to);
    const int32_t d = nfa_.add();
    hex(code, "d-dD-D", d);
    hex_chain({"0-7", kHex, kHex}, d, to);
    const int32_t low = nfa_.add();
    hex_chain({"8-9a-bA-B", kHex, kHex}, d, low);
    const int32_t second = nfa_.add();
    text(low, "\\u", second);
    hex_chain({"d-dD-D", "c-fC-F", kHex, kHex}, second, to);
  }

  // The UTF-8 of [first, last], split where the length or the shape of the encoding changes.
  void add_range(uint32_t first, uint32_t last, int32_t from, int32_t to, bool shared = false) {
    for (const uint32_t edge : {0x7fU, 0x7ffU, 0xffffU}) {
      if (first <= edge && last > edge) {
        add_range(first, edge, from, to, shared);
        first = edge + 1;
      }
    }
    const int size = encode(first).size;
    for (int i = 1; i < size; ++i) {
      const uint32_t mask = (1U << (6 * i)) - 1;
      if ((first & ~mask) == (last & ~mask)) break;
      if ((first & mask) != 0) {
        add_range(first, first | mask, from, to, shared);
        return add_range((first | mask) + 1, last, from, to, shared);
      }
      if ((last & mask) != mask) {
        add_range(first, (last & ~mask) - 1, from, to, shared);
        return add_range(last & ~mask, last, from, to, shared);
      }
    }
    const Utf8 a = encode(first);
    const Utf8 b = encode(last);
    for (int i = 0; i < a.size; ++i) {
      const bool rest_is_free =
          shared &&
          std::all_of(a.bytes + i + 1, a.bytes + a.size, [](uint8_t x) { return x == 0x80; }) &&
          std::all_of(b.bytes + i + 1, b.bytes + b.size, [](uint8_t x) { return x == 0xbf; });
      const int32_t next = rest_is_free      ? continuation(to, a.size - i - 1)
                           : i + 1 == a.size ? to
                                             : nfa_.add();
      nfa_.bytes(from, a.bytes[i], b.bytes[i], next);
      if (rest_is_free) return;
      from = next;
    }
  }

  Nfa& nfa_;
  size_t limit_;
  std::map<std::pair<int32_t, int>, int32_t> tails_;  // state of the language being built
};

using Set = std::vector<int32_t>;  // sorted NFA states

struct SetHash {
  size_t operator()(const Set& s) const {
    size_t h = s.size();
    for (int32_t v : s) h = h * 0x9e3779b97f4a7c15ULL + static_cast<size_t>(v) + (h >> 29);
    return h;
  }
};

// Subset construction of one rule into the shared automaton.
class Determinizer {
 public:
  // `work` counts across all rules.
  Determinizer(const Nfa& nfa, int32_t accept, Automaton& out, const AutomatonLimits& limits,
               size_t& work)
      : nfa_(nfa),
        accept_(accept),
        out_(out),
        limits_(limits),
        work_(work),
        mark_(nfa.edges.size(), 0) {}

  Result<int32_t> run(int32_t start) {
    const int32_t first = state_of(closure({start}));
    while (!pending_.empty()) {
      if (out_.states.size() > limits_.states)
        return resource_exhausted("the grammar is too large: more than {} states", limits_.states);
      if (work_ > limits_.work)
        return resource_exhausted(
            "the grammar is too ambiguous: one text leads to too many positions in it");
      const auto [id, set] = std::move(pending_.back());
      pending_.pop_back();
      expand(id, set);
    }
    return first;
  }

 private:
  Set closure(Set seeds) {
    ++round_;
    Set worklist;
    Set all;
    const auto visit = [&](int32_t s) {
      if (mark_[static_cast<size_t>(s)] == round_) return;
      mark_[static_cast<size_t>(s)] = round_;
      worklist.push_back(s);
      // NFA states with only empty edges are represented by their targets: without them more sets
      // are equal.
      const auto& edges = nfa_.edges[static_cast<size_t>(s)];
      const bool leads_on = std::ranges::all_of(
          edges, [](const Nfa::Edge& e) { return e.kind == Nfa::Edge::Kind::kEmpty; });
      if (!leads_on || s == accept_) all.push_back(s);
      ++work_;
    };
    for (int32_t s : seeds) visit(s);
    while (!worklist.empty()) {
      const int32_t s = worklist.back();
      worklist.pop_back();
      for (const auto& e : nfa_.edges[static_cast<size_t>(s)]) {
        if (e.kind == Nfa::Edge::Kind::kEmpty) visit(e.target);
      }
    }
    std::sort(all.begin(), all.end());
    return all;
  }

  int32_t state_of(Set set) {
    const auto it = ids_.find(set);
    if (it != ids_.end()) return it->second;
    const int32_t id = static_cast<int32_t>(out_.states.size());
    out_.states.emplace_back();
    out_.states.back().final = std::binary_search(set.begin(), set.end(), accept_);
    ids_.emplace(set, id);
    pending_.emplace_back(id, std::move(set));
    return id;
  }

  void expand(int32_t id, const Set& set) {
    std::set<int> cuts;  // boundaries between different sets of byte edges
    std::map<int32_t, Set> calls;
    std::vector<const Nfa::Edge*> byte_edges;
    for (int32_t s : set) {
      for (const auto& e : nfa_.edges[static_cast<size_t>(s)]) {
        if (e.kind == Nfa::Edge::Kind::kBytes) {
          byte_edges.push_back(&e);
          cuts.insert(e.first);
          cuts.insert(e.last + 1);
        } else if (e.kind == Nfa::Edge::Kind::kRule) {
          calls[e.rule].push_back(e.target);
        }
      }
    }
    std::vector<Transition> transitions;
    for (auto cut = cuts.begin(); cut != cuts.end() && std::next(cut) != cuts.end(); ++cut) {
      Set targets;
      work_ += byte_edges.size() / 16;
      for (const auto* e : byte_edges) {
        if (e->first <= *cut && *cut <= e->last) targets.push_back(e->target);
      }
      if (targets.empty()) continue;
      const int32_t target = state_of(closure(std::move(targets)));
      const uint8_t first = static_cast<uint8_t>(*cut);
      const uint8_t last = static_cast<uint8_t>(*std::next(cut) - 1);
      if (!transitions.empty() && transitions.back().target == target &&
          transitions.back().last + 1 == first) {
        transitions.back().last = last;
      } else {
        transitions.push_back({first, last, target});
      }
    }
    std::vector<Call> call_list;
    for (auto& [rule, targets] : calls)
      call_list.push_back({rule, state_of(closure(std::move(targets)))});
    State& state = out_.states[static_cast<size_t>(id)];
    state.bytes = std::move(transitions);
    state.calls = std::move(call_list);
    state.only_final = state.final && state.bytes.empty() && state.calls.empty();
  }

  const Nfa& nfa_;
  const int32_t accept_;
  Automaton& out_;
  const AutomatonLimits& limits_;
  size_t& work_;
  std::vector<uint32_t> mark_;
  uint32_t round_ = 0;
  std::unordered_map<Set, int32_t, SetHash> ids_;
  std::vector<std::pair<int32_t, Set>> pending_;
};

}  // namespace

size_t Automaton::bytes() const {
  size_t n = states.size() * sizeof(State) + starts.size() * sizeof(int32_t);
  for (const State& s : states)
    n += s.bytes.size() * sizeof(Transition) + s.calls.size() * sizeof(Call);
  return n;
}

int32_t Automaton::after_plain_character(int32_t state) const {
  // The single state reached by all bytes of a range; -1 if there is none, or if one may leave the
  // rule there.
  const auto onward = [&](int32_t from, uint8_t first, uint8_t last) {
    for (const Transition& t : states[static_cast<size_t>(from)].bytes) {
      if (first < t.first) return -1;
      if (first > t.last) continue;
      const State& next = states[static_cast<size_t>(t.target)];
      return last <= t.last && !next.final && next.calls.empty() ? t.target : -1;
    }
    return -1;
  };
  const int32_t target = onward(state, ' ', '!');
  if (target < 0 || onward(state, '#', '[') != target || onward(state, ']', 0x7f) != target)
    return -1;
  struct Lead {
    uint8_t first, last, second_first, second_last;
    int more;  // continuation bytes after the second one
  };
  static constexpr Lead kLeads[] = {{0xc2, 0xdf, 0x80, 0xbf, 0}, {0xe0, 0xe0, 0xa0, 0xbf, 1},
                                    {0xe1, 0xec, 0x80, 0xbf, 1}, {0xed, 0xed, 0x80, 0x9f, 1},
                                    {0xee, 0xef, 0x80, 0xbf, 1}, {0xf0, 0xf0, 0x90, 0xbf, 2},
                                    {0xf1, 0xf3, 0x80, 0xbf, 2}, {0xf4, 0xf4, 0x80, 0x8f, 2}};
  for (const Lead& lead : kLeads) {
    int32_t at = onward(state, lead.first, lead.last);
    if (at >= 0) at = onward(at, lead.second_first, lead.second_last);
    for (int i = 0; i < lead.more && at >= 0; ++i) at = onward(at, 0x80, 0xbf);
    if (at != target) return -1;
  }
  return target;
}

Result<Automaton> build_automaton(const RuleSet& rules, const AutomatonLimits& limits) {
  Automaton out;
  size_t work = 0;
  for (int r = 0; r < rules.size(); ++r) {
    if (!rules.defined(r))
      return invalid_argument("rule '{}' is used but not defined", rules.name(r));
    Nfa nfa;
    const int32_t start = nfa.add();
    FRESHET_ASSIGN_OR_RETURN(const int32_t accept,
                             NfaBuilder(nfa, limits.nfa_states).build(rules.body(r), start));
    FRESHET_ASSIGN_OR_RETURN(const int32_t first,
                             Determinizer(nfa, accept, out, limits, work).run(start));
    out.starts.push_back(first);
  }
  FRESHET_RETURN_IF_ERROR(check_left_recursion(out, rules));
  if (!prune(out)) return invalid_argument("the grammar allows no text at all");
  return out;
}

}  // namespace freshet::grammar
