// Reads keys and pastes from a terminal.
//
// Understands the sequences of xterm and its relatives. Used by one thread, except that wake() is
// thread-safe.
#pragma once

#include <optional>
#include <string>

namespace freshet::cli {

enum class KeyKind {
  kText,   // `text` was typed
  kPaste,  // `text` was pasted
  kEnter,
  kNewline,  // Alt-Enter
  kBackspace,
  kDelete,
  kLeft,
  kRight,
  kUp,
  kDown,
  kHome,
  kEnd,
  kWordLeft,
  kWordRight,
  kEraseWordLeft,
  kEraseWordRight,
  kEraseLineBegin,
  kEraseLineEnd,
  kYank,
  kSearch,
  kClearScreen,
  kTab,
  kInterrupt,
  kEndOfInput,
  kSuspend,
  kUnknown,
  kWoken,   // wake() was called
  kClosed,  // the terminal is gone
};

struct Key {
  KeyKind kind = KeyKind::kUnknown;
  std::string text = {};  // valid UTF-8 without control characters, except line breaks and tabs
};

class Keys {
 public:
  Keys();
  ~Keys();
  Keys(const Keys&) = delete;
  Keys& operator=(const Keys&) = delete;

  Key next();
  // Bytes as they come, for terminals that send lines; "" at the end. nullopt: woken.
  std::optional<std::string> next_bytes();
  // Whether more input is there already.
  bool pending();
  // Ends a wait in next() or next_bytes(), or the next one.
  void wake();
  void forget_wake();

 private:
  enum class Wait { kForever, kShort };
  // The next byte; -1: closed, -2: woken, -3: nothing within a short wait.
  int byte(Wait wait);
  bool fill(int timeout_ms, int& result);
  Key escape();
  Key sequence();
  Key paste();
  Key character(char first);

  int wake_;
  std::string buffer_;
  size_t at_ = 0;
};

}  // namespace freshet::cli
