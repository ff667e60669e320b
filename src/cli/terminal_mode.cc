#include "cli/terminal_mode.h"

#include <atomic>
#include <string_view>

#include <termios.h>
#include <unistd.h>

namespace freshet::cli::terminal_mode {
namespace {

constexpr std::string_view kMarkPastes = "\x1b[?2004h", kUnmarkPastes = "\x1b[?2004l";

termios saved_modes{};
int screen = 1;
std::atomic<bool> modes_changed = false;
std::atomic<bool> pastes_marked = false;

void keys(bool signals) {
  termios modes = saved_modes;
  modes.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | IEXTEN);
  if (!signals) modes.c_lflag &= ~static_cast<tcflag_t>(ISIG);
  modes.c_iflag &= ~static_cast<tcflag_t>(IXON | ISTRIP | ICRNL);
  modes.c_cc[VMIN] = 1;
  modes.c_cc[VTIME] = 0;
  modes_changed = true;
  if (!pastes_marked.exchange(true)) (void)!::write(screen, kMarkPastes.data(), kMarkPastes.size());
  ::tcsetattr(0, TCSADRAIN, &modes);
}

}  // namespace

bool save(int screen_fd) {
  screen = screen_fd;
  return ::tcgetattr(0, &saved_modes) == 0;
}

void edit() {
  keys(false);
}

void wait() {
  keys(true);
}

void lines() {
  termios modes = saved_modes;
  modes.c_iflag |= IUTF8;
  modes_changed = true;
  ::tcsetattr(0, TCSADRAIN, &modes);
}

void restore() {
  if (!modes_changed.exchange(false)) return;
  if (pastes_marked.exchange(false))
    (void)!::write(screen, kUnmarkPastes.data(), kUnmarkPastes.size());
  ::tcsetattr(0, TCSANOW, &saved_modes);
}

}  // namespace freshet::cli::terminal_mode
