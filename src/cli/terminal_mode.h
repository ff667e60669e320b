// The modes of the terminal at standard input.
//
// There is one terminal, so this is one state of the process. restore() may be called from any
// thread, the others from one.
#pragma once

namespace freshet::cli::terminal_mode {

// Remembers the modes to restore. `screen`: where the terminal shows things. False: standard input
// is not a terminal.
bool save(int screen);
// Keys arrive one by one, not echoed; Ctrl-C is a key. Pastes arrive between marks.
void edit();
// The same, but Ctrl-C is a signal: what is typed while an answer is written is kept unseen.
void wait();
// Lines arrive whole, edited and echoed by the terminal itself; it knows UTF-8.
void lines();
void restore();

}  // namespace freshet::cli::terminal_mode
