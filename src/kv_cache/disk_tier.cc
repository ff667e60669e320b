#include "kv_cache/disk_tier.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/units.h"

namespace freshet::kv_cache {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBlocksOfALog = 256;
constexpr int64_t kLogsOfAFolder = 64;  // about; a larger limit makes larger files
constexpr int64_t kPauseSeconds = 10;   // after an error of writing
constexpr int64_t kMarkSeconds = 60;

int64_t steady_seconds() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::seconds>(t).count();
}

std::string system_message() {
  return std::generic_category().message(errno);
}

// The number in "kv-00000012.log"; 0: another name.
uint32_t number_of_log(const std::string& name) {
  uint32_t number = 0;
  if (name.size() != 15 || !name.starts_with("kv-") || !name.ends_with(".log")) return 0;
  const auto [end, error] = std::from_chars(name.data() + 3, name.data() + 11, number);
  return error == std::errc() && end == name.data() + 11 ? number : 0;
}

}  // namespace

Result<std::unique_ptr<DiskTier>> DiskTier::open(DiskTierOptions options) {
  std::unique_ptr<DiskTier> tier(new DiskTier(std::move(options)));
  DiskTierOptions& o = tier->options_;
  while (o.folder.size() > 1 && o.folder.ends_with('/')) o.folder.pop_back();
  if (o.calls != nullptr) tier->calls_ = o.calls;
  if (o.seconds == nullptr) o.seconds = steady_seconds;
  size_t block = 0;
  for (const std::vector<size_t>& group : o.pieces) {
    for (const size_t piece : group) block += piece;
  }
  const auto of_blocks = kBlocksOfALog * static_cast<int64_t>(block);
  tier->log_bytes_ = std::min(std::max(of_blocks, o.limit / kLogsOfAFolder), o.limit / 4);
  if (tier->log_bytes_ < static_cast<int64_t>(block)) {
    return invalid_argument(
        "{} for cached blocks on disk: a block takes {}, so at least {} are "
        "needed",
        format_bytes(static_cast<size_t>(o.limit)), format_bytes(block), format_bytes(4 * block));
  }
  FRESHET_RETURN_IF_ERROR(tier->lock_folder());
  FRESHET_RETURN_IF_ERROR(tier->read_secret());
  FRESHET_RETURN_IF_ERROR(tier->scan());
  return tier;
}

DiskTier::~DiskTier() {
  if (lock_ >= 0) ::close(lock_);
}

Status DiskTier::lock_folder() {
  std::error_code error;
  const fs::path folder(options_.folder);
  fs::create_directories(folder.parent_path(), error);
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    return io_error("cannot make the folder {}: {}", options_.folder, system_message());
  const std::string path = (folder / "lock").string();
  lock_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock_ < 0) return io_error("cannot write {}: {}", path, system_message());
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    return resource_exhausted(
        "another process keeps its cache in {}: give each process a folder of its own",
        options_.folder);
  }
  return {};
}

// Made once, and renamed into place, so that it is there in whole or not at all.
Status DiskTier::read_secret() {
  const std::string path = (fs::path(options_.folder) / "secret").string();
  for (int attempt = 0; attempt < 2; ++attempt) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0) {
      const ssize_t n = ::read(fd, secret_.data(), sizeof secret_);
      ::close(fd);
      if (n == sizeof secret_) return {};
    }
    std::random_device random;
    for (uint64_t& word : secret_) word = (uint64_t{random()} << 32) | random();
    const std::string fresh = path + ".new";
    ::unlink(fresh.c_str());
    const int out = ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const bool written = out >= 0 && ::write(out, secret_.data(), sizeof secret_) == sizeof secret_;
    if (out >= 0) ::close(out);
    if (!written || ::rename(fresh.c_str(), path.c_str()) != 0)
      return io_error("cannot write {}: {}", path, system_message());
  }
  return io_error("cannot read {}", path);
}

std::string DiskTier::path_of(uint32_t log) const {
  return (fs::path(options_.folder) / fmt::format("kv-{:08}.log", log)).string();
}

bool DiskTier::fits_group(const LogRecord& record) const {
  if (record.group < 0 || record.group >= static_cast<int32_t>(options_.pieces.size()))
    return false;
  size_t bytes = 0;
  for (const size_t piece : options_.pieces[static_cast<size_t>(record.group)]) bytes += piece;
  return record.bytes == bytes;
}

Status DiskTier::scan() {
  std::error_code error;
  std::vector<std::pair<int64_t, uint32_t>> by_time;
  int foreign = 0, damaged = 0;
  for (const fs::directory_entry& file : fs::directory_iterator(options_.folder, error)) {
    const uint32_t number = number_of_log(file.path().filename().string());
    if (number == 0) continue;
    next_ = std::max(next_, number + 1);
    auto opened = LogFile::open(file.path().string(), options_.identity, *calls_);
    if (!opened.ok()) {
      ++damaged;
      continue;
    }
    Log& log = logs_[number];
    log.file = std::move(*opened);
    std::error_code no_size;
    const auto size = fs::file_size(file.path(), no_size);
    log.bytes = no_size ? log.file->bytes() : static_cast<int64_t>(size);
    total_ += log.bytes;
    foreign += log.file->kind() == LogKind::kForeign;
    damaged += log.file->kind() == LogKind::kDamaged;
    const bool ours = log.file->kind() == LogKind::kOurs;
    // What cannot be read goes first when room is needed.
    by_time.emplace_back(ours ? log.file->changed_at() : 0, number);
  }
  if (error) return io_error("cannot read the folder {}: {}", options_.folder, error.message());
  std::ranges::sort(by_time);
  for (const auto& [time, number] : by_time) {
    Log& log = logs_.at(number);
    log.used = ++tick_;
    for (const LogRecord& record : log.file->records()) {
      if (!fits_group(record)) continue;
      const Entry entry{record.key, record.group};
      index_[entry] = {number, record};
      log.entries.push_back(entry);
    }
  }
  if (foreign + damaged > 0) {
    log_warning(
        "{}: {} files of another model, setting or version and {} damaged ones are not "
        "used; they go when room is needed",
        options_.folder, foreign, damaged);
  }
  while (total_ > options_.limit && evict_oldest()) {
  }
  return {};
}

bool DiskTier::contains(const BlockKey& key, int group) const {
  const std::lock_guard lock(mutex_);
  return index_.contains({key, group});
}

DiskTier::Stats DiskTier::stats() const {
  const std::lock_guard lock(mutex_);
  Stats s = stats_;
  s.bytes = total_;
  s.blocks = static_cast<int64_t>(index_.size());
  s.files = std::ranges::count_if(
      logs_, [](const auto& log) { return log.second.file->kind() == LogKind::kOurs; });
  return s;
}

// One line a minute: a full disk would fill the log, too.
void DiskTier::complain(const Status& status) {
  ++stats_.failed;
  const int64_t now = options_.seconds();
  if (now - complained_at_ < kMarkSeconds) return;
  complained_at_ = now;
  log_warning("{}; what is not cached is computed again", status.message());
}

void DiskTier::forget(const Entry& entry, uint32_t log) {
  const auto found = index_.find(entry);
  if (found != index_.end() && found->second.log == log) index_.erase(found);
}

bool DiskTier::evict_oldest() {
  auto oldest = logs_.end();
  for (auto it = logs_.begin(); it != logs_.end(); ++it) {
    if (it->first != open_ && (oldest == logs_.end() || it->second.used < oldest->second.used))
      oldest = it;
  }
  if (oldest == logs_.end()) return false;
  for (const Entry& entry : oldest->second.entries) forget(entry, oldest->first);
  ++stats_.evicted;
  drop(oldest);
  return true;
}

// A reader may still hold the file.
void DiskTier::drop(std::map<uint32_t, Log>::iterator log) {
  ::unlink(log->second.file->path().c_str());
  total_ -= log->second.bytes;
  logs_.erase(log);
}

bool DiskTier::make_room(int64_t bytes) {
  while (total_ + bytes > options_.limit) {
    if (!evict_oldest()) return false;
  }
  return true;
}

// The log to append to; nullptr: none can be made.
DiskTier::Log* DiskTier::current() {
  if (open_ != 0 && logs_.at(open_).bytes < log_bytes_) return &logs_.at(open_);
  open_ = 0;
  const uint32_t number = next_++;
  auto made = LogFile::create(path_of(number), options_.identity, *calls_);
  if (!made.ok()) {
    complain(made.status());
    return nullptr;
  }
  Log& log = logs_[number];
  log.file = std::move(*made);
  log.bytes = log.file->bytes();
  log.used = ++tick_;
  total_ += log.bytes;
  open_ = number;
  return &log;
}

bool DiskTier::append(const BlockKey& key, int group, int32_t tokens,
                      std::span<const uint8_t> bytes) {
  const uint64_t sum = checksum_of(bytes, options_.pieces[static_cast<size_t>(group)]);
  std::unique_lock lock(mutex_);
  if (index_.contains({key, group})) return true;
  if (options_.seconds() < paused_to_) return false;
  // Twice: a full disk may have room again when the oldest file is gone.
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (!make_room(static_cast<int64_t>(bytes.size()) + 64)) return false;
    Log* const log = current();
    if (log != nullptr) {
      const uint32_t number = open_;
      const std::shared_ptr<LogFile> file = log->file;
      lock.unlock();  // lookups go on while the disk writes
      const auto written = file->append(key, group, tokens, bytes, sum);
      lock.lock();
      if (written.ok()) {
        const auto found = logs_.find(number);
        total_ += file->bytes() - found->second.bytes;
        found->second.bytes = file->bytes();
        found->second.used = ++tick_;
        found->second.entries.push_back({key, group});
        index_[{key, group}] = {number, *written};
        return true;
      }
      complain(written.status());
      open_ = 0;  // the file is whole up to its last record
      if (const auto failed = logs_.find(number); failed->second.entries.empty()) drop(failed);
      if (written.status().code() != StatusCode::kResourceExhausted) break;
    }
    if (!evict_oldest()) break;
  }
  paused_to_ = options_.seconds() + kPauseSeconds;
  return false;
}

bool DiskTier::read(const BlockKey& key, int group, const BlockPieces& to) {
  std::unique_lock lock(mutex_);
  const auto found = index_.find({key, group});
  if (found == index_.end()) return false;
  const Place place = found->second;
  Log& log = logs_.at(place.log);
  log.used = ++tick_;
  const std::shared_ptr<LogFile> file = log.file;
  const int64_t now = options_.seconds();
  if (now - log.marked_at >= kMarkSeconds) {
    log.marked_at = now;
    file->mark_used();
  }
  lock.unlock();
  const Status status = file->read(place.record, to);
  if (status.ok()) return true;
  lock.lock();
  complain(status);
  forget({key, group}, place.log);
  return false;
}

}  // namespace freshet::kv_cache
