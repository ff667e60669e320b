#include "cli/keys.h"

#include <algorithm>
#include <cerrno>
#include <string_view>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/utf8.h"
#include "cli/text_width.h"

namespace freshet::cli {
namespace {

constexpr int kClosedByte = -1, kWokenByte = -2, kNoByte = -3;
constexpr int kEscapeMs = 50;  // the rest of a sequence follows its escape at once
constexpr char kEscape = '\x1b';
constexpr std::string_view kPasteEnd = "\x1b[201~";

struct ControlKey {
  char byte;
  KeyKind kind;
};
constexpr ControlKey kControlKeys[] = {
    {'\x00', KeyKind::kEndOfInput},  // Ctrl-D typed while the terminal still sent lines
    {'\x01', KeyKind::kHome},
    {'\x02', KeyKind::kLeft},
    {'\x03', KeyKind::kInterrupt},
    {'\x04', KeyKind::kEndOfInput},
    {'\x05', KeyKind::kEnd},
    {'\x06', KeyKind::kRight},
    {'\x08', KeyKind::kBackspace},
    {'\t', KeyKind::kTab},
    {'\n', KeyKind::kEnter},  // also Ctrl-J, and Enter while the terminal still sent lines
    {'\x0b', KeyKind::kEraseLineEnd},
    {'\x0c', KeyKind::kClearScreen},
    {'\r', KeyKind::kEnter},
    {'\x0e', KeyKind::kDown},
    {'\x10', KeyKind::kUp},
    {'\x12', KeyKind::kSearch},
    {'\x15', KeyKind::kEraseLineBegin},
    {'\x17', KeyKind::kEraseWordLeft},
    {'\x19', KeyKind::kYank},
    {'\x1a', KeyKind::kSuspend},
    {'\x7f', KeyKind::kBackspace},
};

struct SequenceKey {
  std::string_view text;  // after the escape
  KeyKind kind;
};
constexpr SequenceKey kSequenceKeys[] = {
    {"[A", KeyKind::kUp},
    {"OA", KeyKind::kUp},
    {"[B", KeyKind::kDown},
    {"OB", KeyKind::kDown},
    {"[C", KeyKind::kRight},
    {"OC", KeyKind::kRight},
    {"[D", KeyKind::kLeft},
    {"OD", KeyKind::kLeft},
    {"[H", KeyKind::kHome},
    {"OH", KeyKind::kHome},
    {"[1~", KeyKind::kHome},
    {"[7~", KeyKind::kHome},
    {"[F", KeyKind::kEnd},
    {"OF", KeyKind::kEnd},
    {"[4~", KeyKind::kEnd},
    {"[8~", KeyKind::kEnd},
    {"[3~", KeyKind::kDelete},
    {"[1;5C", KeyKind::kWordRight},
    {"[1;5D", KeyKind::kWordLeft},
    {"[1;3C", KeyKind::kWordRight},
    {"[1;3D", KeyKind::kWordLeft},
    {"[13;2u", KeyKind::kNewline},
    {"[27;2;13~", KeyKind::kNewline},
};

}  // namespace

Keys::Keys() : wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Keys::~Keys() {
  if (wake_ >= 0) ::close(wake_);
}

void Keys::wake() {
  const uint64_t one = 1;
  if (wake_ >= 0) (void)!::write(wake_, &one, sizeof one);
}

void Keys::forget_wake() {
  uint64_t count;
  if (wake_ >= 0) (void)!::read(wake_, &count, sizeof count);
}

// Reads what there is. False: there is nothing, and `result` says why.
bool Keys::fill(int timeout_ms, int& result) {
  for (;;) {
    pollfd fds[2] = {{0, POLLIN, 0}, {wake_, POLLIN, 0}};
    const int ready = ::poll(fds, 2, timeout_ms);
    if (ready < 0 && errno == EINTR) continue;
    result = ready < 0 ? kClosedByte : kNoByte;
    if (ready <= 0) return false;
    if (fds[1].revents != 0) {
      forget_wake();
      result = kWokenByte;
      return false;
    }
    char bytes[4096];
    const ssize_t n = ::read(0, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    result = kClosedByte;
    if (n <= 0) return false;
    buffer_.assign(bytes, static_cast<size_t>(n));
    at_ = 0;
    return true;
  }
}

int Keys::byte(Wait wait) {
  int result = 0;
  if (at_ == buffer_.size() && !fill(wait == Wait::kForever ? -1 : kEscapeMs, result))
    return result;
  return static_cast<unsigned char>(buffer_[at_++]);
}

bool Keys::pending() {
  pollfd input{0, POLLIN, 0};
  return at_ < buffer_.size() || ::poll(&input, 1, 0) > 0;
}

std::optional<std::string> Keys::next_bytes() {
  int result = 0;
  if (at_ == buffer_.size() && !fill(-1, result)) {
    if (result == kWokenByte) return std::nullopt;
    return std::string();
  }
  const std::string bytes = buffer_.substr(at_);
  at_ = buffer_.size();
  return bytes;
}

Key Keys::next() {
  const int b = byte(Wait::kForever);
  if (b == kClosedByte) return {KeyKind::kClosed};
  if (b < 0) return {KeyKind::kWoken};
  const char c = static_cast<char>(b);
  if (c == kEscape) return escape();
  for (const ControlKey& k : kControlKeys) {
    if (k.byte == c) return {k.kind};
  }
  if (b < 0x20) return {KeyKind::kUnknown};
  return character(c);
}

// The characters typed so far, as one text: a fast typist or a paste without marks costs one
// redraw.
Key Keys::character(char first) {
  std::string text(1, first);
  const auto lead = static_cast<unsigned char>(first);
  for (size_t needed = lead < 0xC0   ? 1
                       : lead < 0xE0 ? 2
                       : lead < 0xF0 ? 3
                                     : 4;
       text.size() < needed;) {
    const int b = byte(Wait::kShort);
    if (b < 0) break;
    text += static_cast<char>(b);
  }
  while (at_ < buffer_.size() && static_cast<unsigned char>(buffer_[at_]) >= 0x20 &&
         static_cast<unsigned char>(buffer_[at_]) < 0x7F)
    text += buffer_[at_++];
  return {KeyKind::kText, without_controls(text)};
}

Key Keys::escape() {
  const int b = byte(Wait::kShort);
  if (b == kClosedByte) return {KeyKind::kClosed};
  if (b == kWokenByte) return {KeyKind::kWoken};
  switch (b) {
    case '\n':
    case '\r':
      return {KeyKind::kNewline};
    case 'b':
      return {KeyKind::kWordLeft};
    case 'f':
      return {KeyKind::kWordRight};
    case 'd':
      return {KeyKind::kEraseWordRight};
    case 0x7f:
    case 0x08:
      return {KeyKind::kEraseWordLeft};
    case '[':
    case 'O':
      --at_;
      return sequence();
    default:
      return {KeyKind::kUnknown};
  }
}

Key Keys::sequence() {
  std::string text;
  for (;;) {
    const int b = byte(Wait::kShort);
    if (b < 0) return {KeyKind::kUnknown};
    text += static_cast<char>(b);
    if (text.size() > 1 && b >= 0x40 && b <= 0x7E) break;  // the final byte
    if (text.size() > 16) return {KeyKind::kUnknown};
  }
  if (text == "[200~") return paste();
  for (const SequenceKey& k : kSequenceKeys) {
    if (k.text == text) return {k.kind};
  }
  return {KeyKind::kUnknown};
}

Key Keys::paste() {
  std::string text;
  while (!text.ends_with(kPasteEnd)) {
    const int b = byte(Wait::kForever);
    if (b == kClosedByte) return {KeyKind::kClosed};
    if (b < 0) return {KeyKind::kWoken};
    text += static_cast<char>(b);
  }
  text.resize(text.size() - kPasteEnd.size());
  std::string lines;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\r' && i + 1 < text.size() && text[i + 1] == '\n') continue;
    lines += text[i] == '\r' ? '\n' : text[i];
  }
  return {KeyKind::kPaste, without_controls(lines)};
}

}  // namespace freshet::cli
