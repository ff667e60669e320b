// What an automaton must be before it runs: free of left recursion, and of ways without an end.
// Both take time in proportion to its size. Pure functions.
#pragma once

#include "grammar/automaton.h"

namespace freshet::grammar {

// An error that names the rule which reaches itself before any byte.
Status check_left_recursion(const Automaton& a, const RuleSet& rules);
// Cuts what can never end: a mask must not lead the model there. False: nothing can.
bool prune(Automaton& a);

}  // namespace freshet::grammar
