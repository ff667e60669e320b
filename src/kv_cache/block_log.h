// The file format of cached blocks: a log of records, each one block of one group.
//
// A file begins with a header: magic, version of the format, and the identity, a text that lists
// everything that the bits of a block depend on (model, types, layout, kernels). Then records
// follow: a header of 64 bytes with the block's key and the checksum of its bytes, and the bytes,
// one layer after another. Numbers are little-endian. Headers have checksums of their own, so a
// reader stops at the first byte that a killed writer left out; the bytes are checked when they are
// read. All files of one identity have the same block sizes. Files are made with mode 0600.
//
// LogCalls are the system calls that may fail, so that tests can make them fail. A LogFile may be
// read by several threads, and is appended to by one.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sys/uio.h>

#include "base/status.h"
#include "kv_cache/block_key.h"

namespace freshet::kv_cache {

class LogCalls {
 public:
  virtual ~LogCalls() = default;
  virtual ssize_t write(int fd, const void* data, size_t bytes, int64_t offset);
  virtual ssize_t read(int fd, std::span<const iovec> to, int64_t offset);
};

// The bytes of a block, where they lie: one piece for each layer of its group.
using BlockPieces = std::vector<std::span<uint8_t>>;
// The checksum of the same bytes is the same in one piece per layer and in one run, which is
// `bytes` cut as the pieces are.
uint64_t checksum_of(const BlockPieces& pieces);
uint64_t checksum_of(std::span<const uint8_t> bytes, std::span<const size_t> piece_bytes);

struct LogRecord {
  BlockKey key;
  int32_t group = 0;
  int32_t tokens = 0;
  int64_t offset = 0;  // of the bytes
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

// What a file turned out to be.
enum class LogKind {
  kOurs,     // of this version and identity
  kForeign,  // of another version or identity
  kDamaged,  // not even a header
};

class LogFile {
 public:
  // A new file, which must not exist. Errors: kIo, kResourceExhausted (the disk is full).
  static Result<std::unique_ptr<LogFile>> create(const std::string& path, std::string_view identity,
                                                 LogCalls& calls);
  // Reads the headers of an existing file. Records up to the first damaged one are kept.
  // Errors: kIo, also if the file is a link.
  static Result<std::unique_ptr<LogFile>> open(const std::string& path, std::string_view identity,
                                               LogCalls& calls);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  const std::string& path() const { return path_; }
  LogKind kind() const { return kind_; }
  const std::string& identity() const { return identity_; }  // of kOurs and kForeign, if readable
  int64_t bytes() const { return end_; }
  int64_t changed_at() const { return changed_at_; }  // seconds since 1970, when it was opened
  const std::vector<LogRecord>& records() const { return records_; }

  // Appends a record and returns it. After an error, those of create(), the file is as before.
  Result<LogRecord> append(const BlockKey& key, int32_t group, int32_t tokens,
                           std::span<const uint8_t> bytes, uint64_t checksum);
  // Reads the record's bytes into the pieces. An error if they cannot be read or the checksum
  // differs; the pieces are undefined then.
  Status read(const LogRecord& record, const BlockPieces& to) const;
  void mark_used() const;  // its time of change becomes now

 private:
  LogFile(std::string path, int fd, LogCalls& calls)
      : path_(std::move(path)), fd_(fd), calls_(calls) {}
  Status write(std::span<const uint8_t> bytes, int64_t offset);
  bool read_exactly(void* to, size_t bytes, int64_t offset) const;
  void read_header(std::string_view identity);
  void read_records();

  std::string path_;
  int fd_ = -1;
  LogCalls& calls_;
  LogKind kind_ = LogKind::kDamaged;
  std::string identity_;
  int64_t end_ = 0;  // behind the last record
  int64_t changed_at_ = 0;
  std::vector<LogRecord> records_;
};

}  // namespace freshet::kv_cache
