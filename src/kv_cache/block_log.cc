#include "kv_cache/block_log.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"

namespace freshet::kv_cache {
namespace {

constexpr uint64_t kLogMagic = 0x3147'4F4C'564B'5246;  // "FRKVLOG1"
constexpr uint32_t kLogVersion = 1;
constexpr uint32_t kRecordMagic = 0x4B4C4246;  // "FBLK"
constexpr uint64_t kLongestIdentity = uint64_t{1} << 20;

struct LogHeader {
  uint64_t magic = kLogMagic;
  uint32_t version = kLogVersion;
  uint32_t identity_bytes = 0;
  uint64_t identity_hash = 0;
  uint64_t hash = 0;  // of the fields before
};
static_assert(sizeof(LogHeader) == 32);

struct RecordHeader {
  uint32_t magic = kRecordMagic;
  int32_t group = 0;
  int32_t tokens = 0;
  uint32_t reserved = 0;
  BlockKey key;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
  uint64_t offset = 0;  // of this header in its file
  uint64_t hash = 0;    // of the fields before
};
static_assert(sizeof(RecordHeader) == 64);

template <class Header>
uint64_t hash_of_header(const Header& h) {
  return hash_bytes({reinterpret_cast<const uint8_t*>(&h), offsetof(Header, hash)});
}

template <class Header>
std::span<const uint8_t> as_bytes_of(const Header& h) {
  return {reinterpret_cast<const uint8_t*>(&h), sizeof h};
}

std::string last_error() {
  return std::generic_category().message(errno);
}

}  // namespace

ssize_t LogCalls::write(int fd, const void* data, size_t bytes, int64_t offset) {
  return ::pwrite(fd, data, bytes, offset);
}

ssize_t LogCalls::read(int fd, std::span<const iovec> to, int64_t offset) {
  return ::preadv(fd, to.data(), static_cast<int>(to.size()), offset);
}

uint64_t checksum_of(const BlockPieces& pieces) {
  uint64_t sum = 0;
  for (const std::span<uint8_t> piece : pieces) sum = hash_bytes(piece, sum);
  return sum;
}

uint64_t checksum_of(std::span<const uint8_t> bytes, std::span<const size_t> piece_bytes) {
  uint64_t sum = 0;
  for (const size_t size : piece_bytes) {
    sum = hash_bytes(bytes.first(size), sum);
    bytes = bytes.subspan(size);
  }
  return sum;
}

Result<std::unique_ptr<LogFile>> LogFile::create(const std::string& path, std::string_view identity,
                                                 LogCalls& calls) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return io_error("cannot make {}: {}", path, last_error());
  std::unique_ptr<LogFile> log(new LogFile(path, fd, calls));
  LogHeader h;
  h.identity_bytes = static_cast<uint32_t>(identity.size());
  const std::span<const uint8_t> text(reinterpret_cast<const uint8_t*>(identity.data()),
                                      identity.size());
  h.identity_hash = hash_bytes(text);
  h.hash = hash_of_header(h);
  Status written = log->write(as_bytes_of(h), 0);
  if (written.ok()) written = log->write(text, sizeof h);
  if (!written.ok()) {
    ::unlink(path.c_str());
    return written;
  }
  log->kind_ = LogKind::kOurs;
  log->identity_ = identity;
  log->end_ = static_cast<int64_t>(sizeof h + identity.size());
  return log;
}

Result<std::unique_ptr<LogFile>> LogFile::open(const std::string& path, std::string_view identity,
                                               LogCalls& calls) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (fd < 0) return io_error("cannot open {}: {}", path, last_error());
  std::unique_ptr<LogFile> log(new LogFile(path, fd, calls));
  struct stat s{};
  if (::fstat(fd, &s) != 0 || !S_ISREG(s.st_mode)) return io_error("{} is not a file", path);
  log->end_ = s.st_size;
  log->changed_at_ = s.st_mtime;
  log->read_header(identity);
  if (log->kind_ == LogKind::kOurs) log->read_records();
  return log;
}

LogFile::~LogFile() {
  if (fd_ >= 0) ::close(fd_);
}

bool LogFile::read_exactly(void* to, size_t bytes, int64_t offset) const {
  auto* at = static_cast<uint8_t*>(to);
  while (bytes > 0) {
    const iovec piece{at, bytes};
    const ssize_t n = calls_.read(fd_, {&piece, 1}, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
    offset += n;
  }
  return true;
}

void LogFile::read_header(std::string_view identity) {
  LogHeader h;
  if (!read_exactly(&h, sizeof h, 0) || h.magic != kLogMagic) return;
  // A later version may have another header behind these two fields.
  if (h.version != kLogVersion) {
    kind_ = LogKind::kForeign;
    return;
  }
  if (h.hash != hash_of_header(h) || h.identity_bytes > kLongestIdentity) return;
  std::string text(h.identity_bytes, '\0');
  if (!read_exactly(text.data(), text.size(), sizeof h)) return;
  if (hash_bytes({reinterpret_cast<const uint8_t*>(text.data()), text.size()}) != h.identity_hash)
    return;
  kind_ = text == identity ? LogKind::kOurs : LogKind::kForeign;
  identity_ = std::move(text);
}

void LogFile::read_records() {
  const int64_t size = end_;
  int64_t at = static_cast<int64_t>(sizeof(LogHeader) + identity_.size());
  while (true) {
    RecordHeader h;
    const auto body = at + static_cast<int64_t>(sizeof h);
    if (body > size || !read_exactly(&h, sizeof h, at)) break;
    if (h.magic != kRecordMagic || h.hash != hash_of_header(h) ||
        h.offset != static_cast<uint64_t>(at) || h.bytes > static_cast<uint64_t>(size - body))
      break;
    records_.push_back({h.key, h.group, h.tokens, body, h.bytes, h.checksum});
    at = body + static_cast<int64_t>(h.bytes);
  }
  end_ = at;
}

Status LogFile::write(std::span<const uint8_t> bytes, int64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = calls_.write(fd_, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0 || (n < 0 && (errno == ENOSPC || errno == EDQUOT)))
      return resource_exhausted("cannot write {}: the disk is full", path_);
    if (n < 0) return io_error("cannot write {}: {}", path_, last_error());
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += n;
  }
  return {};
}

Result<LogRecord> LogFile::append(const BlockKey& key, int32_t group, int32_t tokens,
                                  std::span<const uint8_t> bytes, uint64_t checksum) {
  RecordHeader h;
  h.group = group;
  h.tokens = tokens;
  h.key = key;
  h.bytes = bytes.size();
  h.checksum = checksum;
  h.offset = static_cast<uint64_t>(end_);
  h.hash = hash_of_header(h);
  const auto body = end_ + static_cast<int64_t>(sizeof h);
  // The bytes first: a header is there only if its block is.
  Status written = write(bytes, body);
  if (written.ok()) written = write(as_bytes_of(h), end_);
  if (!written.ok()) {
    // What is left behind the end is overwritten by the next record, or ignored as damaged.
    (void)!::ftruncate(fd_, end_);
    return written;
  }
  end_ = body + static_cast<int64_t>(bytes.size());
  return LogRecord{key, group, tokens, body, bytes.size(), checksum};
}

Status LogFile::read(const LogRecord& record, const BlockPieces& to) const {
  constexpr size_t kMostPieces = 256;  // of one call; the system allows 1,024
  int64_t offset = record.offset;
  size_t done = 0;  // bytes of the piece `i` that have been read
  for (size_t i = 0; i < to.size();) {
    iovec pieces[kMostPieces];
    size_t count = 0;
    for (size_t p = i; p < to.size() && count < kMostPieces; ++p) {
      const std::span<uint8_t> rest = to[p].subspan(p == i ? done : 0);
      pieces[count++] = {rest.data(), rest.size()};
    }
    const ssize_t n = calls_.read(fd_, {pieces, count}, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return io_error("cannot read {}: {}", path_, n < 0 ? last_error() : "it ends");
    offset += n;
    for (auto left = static_cast<size_t>(n); left > 0 && i < to.size();) {
      const size_t step = std::min(left, to[i].size() - done);
      left -= step;
      done += step;
      if (done < to[i].size()) break;
      ++i;
      done = 0;
    }
  }
  if (checksum_of(to) != record.checksum)
    return io_error("{}: the checksum of a block is wrong", path_);
  return {};
}

void LogFile::mark_used() const {
  (void)::futimens(fd_, nullptr);
}

}  // namespace freshet::kv_cache
