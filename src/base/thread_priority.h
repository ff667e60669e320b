// The priority of a thread. Thread-safe.
#pragma once

namespace freshet {

// The calling thread runs when others leave it time. Where threads have no priorities of their own,
// nothing changes.
void give_way();

}  // namespace freshet
