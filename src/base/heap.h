// The heap of the process. Thread-safe.
#pragma once

namespace freshet {

// From now on, freed blocks of a MiB and more go back to the system at once. On its own glibc
// raises this limit up to 32 MiB as such blocks are freed, and then each thread keeps what it had
// at most. No effect with other C libraries.
void give_back_large_blocks();

}  // namespace freshet
