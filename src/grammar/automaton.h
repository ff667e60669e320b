// The executable form of a grammar: one deterministic automaton over bytes per rule, with calls.
//
// State ids are global. A state has byte transitions (disjoint ranges, each to one state) and calls
// (run rule R from its start, then continue in a state), and it may be final (the rule may end
// here). Bytes and calls are the symbols of the subset construction, so at run time the only
// nondeterminism is between calls, and between calls and bytes. Calls are never left-recursive (a
// rule cannot call itself before it has consumed a byte): building fails for such grammars, so
// expansion always terminates. Immutable once built; safe to read from many threads.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "grammar/expression.h"

namespace freshet::grammar {

struct Transition {
  uint8_t first = 0;
  uint8_t last = 0;
  int32_t target = -1;
};
struct Call {
  int32_t rule = -1;
  int32_t next = -1;  // state to continue in after the call
};
struct State {
  std::vector<Transition> bytes;  // ascending
  std::vector<Call> calls;
  bool final = false;
  bool only_final = false;  // final with no transitions or calls: a call need not return here

  int32_t on(uint8_t byte) const {
    for (const Transition& t : bytes) {
      if (byte < t.first) return -1;
      if (byte <= t.last) return t.target;
    }
    return -1;
  }
};

struct Automaton {
  std::vector<State> states;
  std::vector<int32_t> starts;  // start state of each rule
  // Lower bound of the size in memory, for caches.
  size_t bytes() const;
  // The state that every plain character of a JSON string leads to from `state`; -1 if there is no
  // single one, or if the rule might end or call on the way.
  int32_t after_plain_character(int32_t state) const;
};

struct AutomatonLimits {
  size_t states = 200'000;
  size_t nfa_states = 1'000'000;
  size_t work = 20'000'000;  // budget of NFA states visited during the subset construction
};

Result<Automaton> build_automaton(const RuleSet& rules, const AutomatonLimits& limits = {});

}  // namespace freshet::grammar
