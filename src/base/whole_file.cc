#include "base/whole_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace freshet {
namespace {

// 0, or the error.
int write_piece(int fd, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return 0;
}

int write_beside(const std::string& partial, const std::string& path,
                 std::span<const std::span<const uint8_t>> pieces, Durable durable) {
  const int fd = ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return errno;
  int error = 0;
  for (const std::span<const uint8_t> piece : pieces) {
    if (error == 0) error = write_piece(fd, piece);
  }
  struct stat there{};
  if (error == 0 && ::lstat(path.c_str(), &there) == 0 && S_ISREG(there.st_mode) &&
      ::fchmod(fd, there.st_mode & 07777) != 0)
    error = errno;
  if (error == 0 && durable == Durable::kYes && ::fsync(fd) != 0) error = errno;
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(partial.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) ::unlink(partial.c_str());
  return error;
}

}  // namespace

Status write_whole_file(const std::string& path, std::span<const std::span<const uint8_t>> pieces,
                        Durable durable) {
  const std::string partial = fmt::format("{}.{}.partial", path, ::getpid());
  const int error = write_beside(partial, path, pieces, durable);
  return error == 0 ? Status() : io_error("cannot write {}: {}", path, std::strerror(error));
}

Status write_whole_file(const std::string& path, std::string_view text, Durable durable) {
  const std::span<const uint8_t> piece(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  return write_whole_file(path, {&piece, 1}, durable);
}

}  // namespace freshet
