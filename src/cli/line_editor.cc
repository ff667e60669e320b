#include "cli/line_editor.h"

#include <cerrno>
#include <cstdio>
#include <iostream>

#include <histedit.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/utf8.h"
#include "cli/output.h"

namespace freshet::cli {
namespace {

// State for libedit's callbacks.
struct Terminal {
  std::string prompt;
  int wake = -1;  // readable after cancel()
  bool cancelled = false;
};

Terminal& terminal_of(EditLine* edit) {
  void* data = nullptr;
  el_get(edit, EL_CLIENTDATA, &data);
  return *static_cast<Terminal*>(data);
}

char* prompt_of(EditLine* edit) {
  return terminal_of(edit).prompt.data();
}

void take_wake(const Terminal& terminal) {
  uint64_t count;
  (void)!::read(terminal.wake, &count, sizeof count);
}

// Reads a character for libedit; cancel() ends the wait. Returns 1 for a character, 0 at the end.
int get_character(EditLine* edit, wchar_t* out) {
  Terminal& terminal = terminal_of(edit);
  std::string bytes;
  for (;;) {
    pollfd fds[2] = {{0, POLLIN, 0}, {terminal.wake, POLLIN, 0}};
    if (::poll(fds, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return -1;
    }
    if (fds[1].revents != 0) {
      take_wake(terminal);
      terminal.cancelled = true;
      return 0;
    }
    char byte;
    if (::read(0, &byte, 1) != 1) return 0;
    // A Ctrl-D typed before the editor owned the terminal: the kernel delivers it as NUL.
    if (byte == '\0') byte = '\x04';
    bytes += byte;
    const auto first = static_cast<unsigned char>(bytes.front());
    const size_t needed = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (bytes.size() < needed) continue;
    *out = static_cast<wchar_t>(decode_utf8(bytes).code);
    return 1;
  }
}

}  // namespace

struct LineEditor::Impl {
  Terminal terminal;
  std::string history_file;
  EditLine* edit = nullptr;
  History* history = nullptr;

  Event read_terminal(std::string& line);
  void remember(const std::string& line);
};

LineEditor::LineEditor(std::string prompt, std::string history) : impl_(std::make_unique<Impl>()) {
  impl_->terminal.prompt = std::move(prompt);
  impl_->history_file = std::move(history);
  if (!stdin_is_terminal()) return;
  impl_->terminal.wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  impl_->edit = el_init("freshet", stdin, stdout, stderr);
  if (impl_->edit == nullptr) return;
  el_set(impl_->edit, EL_CLIENTDATA, &impl_->terminal);
  el_set(impl_->edit, EL_PROMPT, prompt_of);
  el_set(impl_->edit, EL_EDITOR, "emacs");
  el_set(impl_->edit, EL_SIGNAL, 0);
  el_set(impl_->edit, EL_GETCFN, get_character);
  impl_->history = history_init();
  HistEvent event;
  ::history(impl_->history, &event, H_SETSIZE, 500);
  ::history(impl_->history, &event, H_SETUNIQUE, 1);
  if (!impl_->history_file.empty())
    ::history(impl_->history, &event, H_LOAD, impl_->history_file.c_str());
  el_set(impl_->edit, EL_HIST, ::history, impl_->history);
}

LineEditor::~LineEditor() {
  if (impl_->history != nullptr) history_end(impl_->history);
  if (impl_->edit != nullptr) el_end(impl_->edit);
  if (impl_->terminal.wake >= 0) ::close(impl_->terminal.wake);
}

bool LineEditor::is_terminal() const {
  return impl_->edit != nullptr;
}

void LineEditor::cancel() {
  const uint64_t one = 1;
  if (impl_->terminal.wake >= 0) (void)!::write(impl_->terminal.wake, &one, sizeof one);
}

void LineEditor::forget_cancel() {
  if (impl_->terminal.wake >= 0) take_wake(impl_->terminal);
}

void LineEditor::Impl::remember(const std::string& line) {
  HistEvent event;
  ::history(history, &event, H_ENTER, line.c_str());
  if (!history_file.empty()) ::history(history, &event, H_SAVE, history_file.c_str());
}

LineEditor::Event LineEditor::Impl::read_terminal(std::string& line) {
  int count = 0;
  terminal.cancelled = false;
  // Prepare the terminal before the prompt appears: el_gets would print the prompt first, and the
  // user may type as soon as it is visible.
  el_set(edit, EL_PREP_TERM, 1);
  const char* text = el_gets(edit, &count);
  if (terminal.cancelled) {
    el_reset(edit);
    (void)!::write(1, "\n", 1);
    return Event::kCancelled;
  }
  if (text == nullptr || count <= 0) return Event::kEnd;
  line.assign(text, static_cast<size_t>(count));
  if (line.ends_with('\n')) line.pop_back();
  if (!line.empty()) remember(line);
  return Event::kLine;
}

LineEditor::Event LineEditor::read(std::string& line) {
  line.clear();
  for (;;) {
    std::string piece;
    Event event = Event::kEnd;
    if (is_terminal()) {
      event = impl_->read_terminal(piece);
    } else if (std::getline(std::cin, piece)) {
      event = Event::kLine;
    }
    if (event != Event::kLine) return event;
    const bool more = piece.ends_with('\\');
    if (more) piece.back() = '\n';
    line += piece;
    if (!more) return Event::kLine;
  }
}

}  // namespace freshet::cli
