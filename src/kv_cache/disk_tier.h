// The tier of blocks on a disk: a folder of log files (block_log.h) and an index in memory.
//
// A file holds a few hundred blocks; the newest is appended to. If the files exceed the limit, or
// the disk is full, the file that was used least recently goes, with all of its blocks. At start
// the index is rebuilt from the headers of the records; files of another identity or version are
// not read, but count towards the limit and go first. The folder has mode 0700, belongs to one
// process at a time (a lock), and holds a secret, which makes the keys. Nothing is synced: after a
// crash of the machine, checksums tell what has reached the disk. Any error is a miss.
//
// append() is for one thread; the others may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "kv_cache/block_key.h"
#include "kv_cache/block_log.h"

namespace freshet::kv_cache {

struct DiskTierOptions {
  std::string folder;
  int64_t limit = 0;                        // bytes of all files
  std::string identity;                     // see block_log.h
  std::vector<std::vector<size_t>> pieces;  // [groups][layers of the group] bytes of a block
  LogCalls* calls = nullptr;                // must outlive the tier; nullptr: the system's
  int64_t (*seconds)() = nullptr;           // a clock; nullptr: steady
};

class DiskTier {
 public:
  struct Stats {
    int64_t bytes = 0;    // of all files
    int64_t blocks = 0;   // in the index
    int64_t files = 0;    // that are read
    int64_t evicted = 0;  // files
    int64_t failed = 0;   // reads and writes
  };

  // Errors: the folder cannot be made or is in use, or the limit is too small.
  static Result<std::unique_ptr<DiskTier>> open(DiskTierOptions options);
  ~DiskTier();

  const BlockSecret& secret() const { return secret_; }
  int64_t limit() const { return options_.limit; }
  bool contains(const BlockKey& key, int group) const;
  // Writes a block; `bytes` has the pieces one after another. False: it was not written.
  bool append(const BlockKey& key, int group, int32_t tokens, std::span<const uint8_t> bytes);
  // Reads a block into its pieces. False: it is not there, or not intact; then it is forgotten.
  bool read(const BlockKey& key, int group, const BlockPieces& to);
  Stats stats() const;

 private:
  struct Entry {
    BlockKey key;
    int32_t group = 0;
    bool operator==(const Entry&) const = default;
  };
  struct EntryHash {
    size_t operator()(const Entry& e) const {
      return static_cast<size_t>(e.key.low + static_cast<uint64_t>(e.group) * 0x9E3779B97F4A7C15);
    }
  };
  struct Log {
    std::shared_ptr<LogFile> file;
    int64_t bytes = 0;
    uint64_t used = 0;      // when it was used last, in ticks
    int64_t marked_at = 0;  // seconds: when its time of change was set last
    std::vector<Entry> entries;
  };
  struct Place {
    uint32_t log = 0;
    LogRecord record;
  };

  explicit DiskTier(DiskTierOptions options) : options_(std::move(options)) {}
  Status lock_folder();
  Status read_secret();
  Status scan();
  std::string path_of(uint32_t log) const;
  bool fits_group(const LogRecord& record) const;
  Log* current();
  bool make_room(int64_t bytes);
  bool evict_oldest();
  void drop(std::map<uint32_t, Log>::iterator log);
  void forget(const Entry& entry, uint32_t log);
  void complain(const Status& status);

  DiskTierOptions options_;
  LogCalls system_calls_;
  LogCalls* calls_ = &system_calls_;
  BlockSecret secret_{};
  int lock_ = -1;
  int64_t log_bytes_ = 0;  // a file of this size is closed

  mutable std::mutex mutex_;
  std::map<uint32_t, Log> logs_;  // by number: the highest is the newest
  std::unordered_map<Entry, Place, EntryHash> index_;
  uint32_t next_ = 1;
  uint32_t open_ = 0;  // the log that is appended to; 0: none
  uint64_t tick_ = 0;
  int64_t total_ = 0;      // bytes of all logs
  int64_t paused_to_ = 0;  // seconds: after an error nothing is written before
  int64_t complained_at_ = -1'000'000;
  Stats stats_;
};

}  // namespace freshet::kv_cache
