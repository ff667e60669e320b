// A grammar in the form that runs: one deterministic automaton a rule, over bytes, with calls.
//
// State ids are global. A state has byte transitions (disjoint ranges, each to one state), calls
// (run rule R from its start, then go on in a state), and may be final (the rule may end here).
// Bytes and calls are the symbols of the subset construction, so the only choice left at run time
// is between calls, and between them and bytes. Calls are never left-recursive (a rule cannot call
// itself before it has consumed a byte): building fails on such grammars, so expansion always ends.
// Immutable once built; safe to read from many threads.
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
  int32_t next = -1;  // state to go on in
};
struct State {
  std::vector<Transition> bytes;  // ascending
  std::vector<Call> calls;
  bool final = false;
  bool only_final = false;  // final, and nothing else: a call that would return here need not

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
  std::vector<int32_t> starts;  // of each rule
  // Lower bound of the size in memory, for caches.
  size_t bytes() const;
  // The one state that every plain character of a JSON string leads to from `state`; -1: there is
  // none, or the rule might end or call on the way.
  int32_t after_plain_character(int32_t state) const;
};

struct AutomatonLimits {
  size_t states = 200'000;
  size_t nfa_states = 1'000'000;
  size_t work = 20'000'000;  // places of the NFA that are gone through to make states of them
};

Result<Automaton> build_automaton(const RuleSet& rules, const AutomatonLimits& limits = {});

}  // namespace freshet::grammar
