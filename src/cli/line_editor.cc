#include "cli/line_editor.h"

#include <algorithm>
#include <csignal>
#include <iostream>
#include <optional>
#include <string_view>
#include <utility>

#include <sys/ioctl.h>
#include <unistd.h>

#include "base/env.h"
#include "base/utf8.h"
#include "cli/edit_buffer.h"
#include "cli/input_history.h"
#include "cli/keys.h"
#include "cli/output.h"
#include "cli/terminal_mode.h"
#include "cli/text_width.h"

namespace freshet::cli {
namespace {

constexpr std::string_view kQuotes = "\"\"\"";
constexpr char kLeaveHint[] = "(Ctrl-C again or Ctrl-D leaves)";

// Whether more lines belong to the message: after a backslash, or inside quotes.
bool wants_more(const std::string& message) {
  if (message.ends_with('\\')) return true;
  if (!message.starts_with(kQuotes)) return false;
  return message.size() < 2 * kQuotes.size() || !message.ends_with(kQuotes);
}

// Without the marks of a message of several lines.
std::string without_marks(std::string message) {
  if (message.starts_with(kQuotes) && message.size() >= 2 * kQuotes.size() &&
      message.ends_with(kQuotes)) {
    message = message.substr(kQuotes.size(), message.size() - 2 * kQuotes.size());
    if (message.starts_with('\n')) message.erase(0, 1);
  }
  while (message.ends_with('\n')) message.pop_back();
  return message;
}

// Ends the line of a message that goes on.
void continue_message(std::string& message) {
  if (message.ends_with('\\')) message.pop_back();
  message += '\n';
}

std::string history_entry(const std::string& message, bool typed) {
  // Recalled from the history it would be typed text, and a command.
  return !typed && message.starts_with('/') ? " " + message : message;
}

}  // namespace

struct LineEditor::Impl {
  enum class Kind { kPlain, kLines, kKeys };

  Impl(std::string shown, std::string history_file)
      : prompt(std::move(shown)), history(std::move(history_file)) {}

  Event read_keys(std::string& message);
  Event read_lines(std::string& message);
  Event read_plain(std::string& message);
  // Handles a key; an event if the message ends.
  std::optional<Event> take(const Key& key);
  std::optional<Event> interrupt();
  bool edit(KeyKind key);
  void recall(const std::string* entry);
  void search();
  void suspend();
  void redraw();
  void leave_rows();
  void show(std::string_view text) { (void)!::write(screen, text.data(), text.size()); }
  winsize size() const;

  std::string prompt;
  InputHistory history;
  Kind kind = Kind::kPlain;
  int screen = 1;
  Keys keys;
  EditBuffer buffer;
  size_t cursor_row = 0;  // on the screen, below the first row drawn
  std::optional<std::string> searched;
  bool hinted = false;  // the last key was a Ctrl-C at an empty prompt
  bool typed = true;
  std::string left_over;  // lines read ahead
};

LineEditor::LineEditor(std::string prompt, std::string history) {
  const bool input = stdin_is_terminal();
  impl_ = std::make_unique<Impl>(std::move(prompt), input ? std::move(history) : "");
  impl_->screen = ::isatty(1) == 1 ? 1 : 2;
  if (!input || ::isatty(impl_->screen) != 1 || !terminal_mode::save(impl_->screen)) return;
  const bool dumb = env(EnvVar::kTerm).value_or("") == "dumb";
  impl_->kind = dumb ? Impl::Kind::kLines : Impl::Kind::kKeys;
  if (dumb) {
    terminal_mode::lines();
  } else {
    terminal_mode::wait();
  }
}

LineEditor::~LineEditor() {
  terminal_mode::restore();
}

bool LineEditor::is_terminal() const {
  return impl_->kind != Impl::Kind::kPlain;
}

bool LineEditor::typed() const {
  return impl_->typed;
}

void LineEditor::cancel() {
  impl_->keys.wake();
}

void LineEditor::forget_cancel() {
  impl_->keys.forget_wake();
}

winsize LineEditor::Impl::size() const {
  winsize s{};
  (void)::ioctl(screen, TIOCGWINSZ, &s);
  if (s.ws_col == 0) s.ws_col = 80;
  if (s.ws_row == 0) s.ws_row = 24;
  return s;
}

// Draws the rows around the cursor, as many as the screen holds.
void LineEditor::Impl::redraw() {
  const winsize s = size();
  const EditBuffer::Layout l = buffer.layout(s.ws_col, prompt);
  const size_t most = std::max<size_t>(s.ws_row, 2) - 1;
  const size_t first = l.cursor_row >= most ? l.cursor_row - most + 1 : 0;
  const size_t end = std::min(l.rows.size(), first + most);
  std::string text;
  if (cursor_row > 0) text += fmt::format("\x1b[{}A", cursor_row);
  text += "\r\x1b[J";
  for (size_t i = first; i < end; ++i) text += (i > first ? "\r\n" : "") + l.rows[i];
  if (end - 1 > l.cursor_row) text += fmt::format("\x1b[{}A", end - 1 - l.cursor_row);
  text += '\r';
  if (l.cursor_column > 0) text += fmt::format("\x1b[{}C", l.cursor_column);
  cursor_row = l.cursor_row - first;
  show(text);
}

// Moves below what is drawn.
void LineEditor::Impl::leave_rows() {
  buffer.to_end();
  redraw();
  show("\r\n");
  cursor_row = 0;
}

void LineEditor::Impl::recall(const std::string* entry) {
  if (entry != nullptr) buffer.set(*entry);
}

void LineEditor::Impl::search() {
  if (!searched) searched = buffer.text();
  const std::string* found = history.find_older(buffer.text(), *searched);
  if (found == nullptr) {
    show("\a");
  } else {
    recall(found);
  }
}

void LineEditor::Impl::suspend() {
  leave_rows();
  terminal_mode::restore();
  (void)::raise(SIGTSTP);
  terminal_mode::edit();
}

std::optional<LineEditor::Event> LineEditor::Impl::interrupt() {
  const bool empty = buffer.empty();
  leave_rows();
  buffer.clear();
  history.rewind();
  if (!empty) return Event::kCancelled;
  if (hinted) return Event::kEnd;
  hinted = true;
  show(std::string(kLeaveHint) + "\r\n");
  return std::nullopt;
}

// Handles keys that only move or erase.
bool LineEditor::Impl::edit(KeyKind key) {
  switch (key) {
    case KeyKind::kBackspace:
      buffer.erase_left();
      return true;
    case KeyKind::kDelete:
      buffer.erase_right();
      return true;
    case KeyKind::kLeft:
      buffer.left();
      return true;
    case KeyKind::kRight:
      buffer.right();
      return true;
    case KeyKind::kHome:
      buffer.line_begin();
      return true;
    case KeyKind::kEnd:
      buffer.line_end();
      return true;
    case KeyKind::kWordLeft:
      buffer.word_left();
      return true;
    case KeyKind::kWordRight:
      buffer.word_right();
      return true;
    case KeyKind::kEraseWordLeft:
      buffer.erase_word_left();
      return true;
    case KeyKind::kEraseWordRight:
      buffer.erase_word_right();
      return true;
    case KeyKind::kEraseLineBegin:
      buffer.erase_to_line_begin();
      return true;
    case KeyKind::kEraseLineEnd:
      buffer.erase_to_line_end();
      return true;
    case KeyKind::kYank:
      buffer.yank();
      return true;
    default:
      return false;
  }
}

std::optional<LineEditor::Event> LineEditor::Impl::take(const Key& key) {
  if (key.kind == KeyKind::kInterrupt) return interrupt();
  hinted = false;
  if (key.kind != KeyKind::kSearch) searched.reset();
  if (edit(key.kind)) return std::nullopt;
  switch (key.kind) {
    case KeyKind::kText:
    case KeyKind::kPaste:
      buffer.insert(key.text, key.kind == KeyKind::kPaste);
      break;
    case KeyKind::kTab:
      buffer.insert("\t");
      break;
    case KeyKind::kNewline:
      buffer.insert("\n");
      break;
    case KeyKind::kEnter:
      if (buffer.at_end() && wants_more(buffer.text())) {
        if (buffer.text().ends_with('\\')) buffer.erase_left();
        buffer.insert("\n");
        break;
      }
      // Before the screen shows that the message is sent: a Ctrl-C from then on stops the answer.
      terminal_mode::wait();
      leave_rows();
      return Event::kLine;
    case KeyKind::kUp:
      if (!buffer.up()) recall(history.older(buffer.text()));
      break;
    case KeyKind::kDown:
      if (!buffer.down()) recall(history.newer());
      break;
    case KeyKind::kSearch:
      search();
      break;
    case KeyKind::kClearScreen:
      show("\x1b[H\x1b[2J");
      cursor_row = 0;
      break;
    case KeyKind::kSuspend:
      suspend();
      break;
    case KeyKind::kEndOfInput:
      if (buffer.empty()) {
        leave_rows();
        return Event::kEnd;
      }
      buffer.erase_right();
      break;
    case KeyKind::kClosed:
      return Event::kEnd;
    case KeyKind::kWoken:
      leave_rows();
      buffer.clear();
      return Event::kCancelled;
    default:
      break;
  }
  return std::nullopt;
}

LineEditor::Event LineEditor::Impl::read_keys(std::string& message) {
  terminal_mode::edit();
  buffer.clear();
  history.rewind();
  searched.reset();
  hinted = false;
  cursor_row = 0;
  redraw();
  std::optional<Event> event;
  while (!event) {
    event = take(keys.next());
    if (!event && !keys.pending()) redraw();
  }
  terminal_mode::wait();
  if (*event != Event::kLine) return *event;
  message = without_marks(buffer.text());
  typed = !buffer.begins_pasted() && !buffer.text().starts_with(kQuotes);
  history.add(history_entry(message, typed));
  return *event;
}

// The terminal edits lines and sends whole ones.
LineEditor::Event LineEditor::Impl::read_lines(std::string& message) {
  show(prompt);
  for (;;) {
    const size_t end = left_over.find('\n');
    if (end == std::string::npos) {
      const auto bytes = keys.next_bytes();
      if (!bytes) {
        left_over.clear();
        show("\n");
        if (std::exchange(hinted, true)) return Event::kEnd;
        show(std::string(kLeaveHint) + "\n");
        return Event::kCancelled;
      }
      if (bytes->empty()) return Event::kEnd;
      left_over += *bytes;
      continue;
    }
    message += left_over.substr(0, end);
    left_over.erase(0, end + 1);
    hinted = false;
    if (!wants_more(message)) break;
    continue_message(message);
  }
  typed = !message.starts_with(kQuotes);
  message = without_marks(without_controls(message));
  return Event::kLine;
}

LineEditor::Event LineEditor::Impl::read_plain(std::string& message) {
  std::string line;
  for (;;) {
    if (!std::getline(std::cin, line)) {
      if (message.empty()) return Event::kEnd;
      break;
    }
    if (line.ends_with('\r')) line.pop_back();
    message += line;
    if (!wants_more(message)) break;
    continue_message(message);
  }
  typed = !message.starts_with(kQuotes);
  message = without_marks(std::move(message));
  return Event::kLine;
}

LineEditor::Event LineEditor::read(std::string& message) {
  message.clear();
  switch (impl_->kind) {
    case Impl::Kind::kKeys:
      return impl_->read_keys(message);
    case Impl::Kind::kLines:
      return impl_->read_lines(message);
    case Impl::Kind::kPlain:
      break;
  }
  return impl_->read_plain(message);
}

}  // namespace freshet::cli
