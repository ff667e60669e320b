// Checks that an automaton must pass before it runs: no left recursion, no paths that cannot end.
// Both take time linear in its size. Pure functions.
#pragma once

#include "grammar/automaton.h"

namespace freshet::grammar {

// Returns an error that names a rule which reaches itself before consuming a byte.
Status check_left_recursion(const Automaton& a, const RuleSet& rules);
// Removes the paths that can never end, because a mask must not lead the model there. False if no
// path can end.
bool prune(Automaton& a);

}  // namespace freshet::grammar
