#include "hub/blob_writer.h"

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

namespace freshet::hub {
namespace {

constexpr size_t kBlockSize = 1 << 20;
constexpr size_t kMostBlocks = 8;

class Digest {
 public:
  explicit Digest(const EVP_MD* kind) : kind_(kind), context_(EVP_MD_CTX_new()) { reset(); }
  ~Digest() { EVP_MD_CTX_free(context_); }
  Digest(const Digest&) = delete;
  Digest& operator=(const Digest&) = delete;

  void reset() { FRESHET_CHECK(EVP_DigestInit_ex(context_, kind_, nullptr) == 1); }
  void update(const char* data, size_t size) {
    FRESHET_CHECK(EVP_DigestUpdate(context_, data, size) == 1);
  }
  // Of everything so far; more may follow.
  std::string hex() const {
    EVP_MD_CTX* copy = EVP_MD_CTX_new();
    unsigned char bytes[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    FRESHET_CHECK(EVP_MD_CTX_copy_ex(copy, context_) == 1);
    FRESHET_CHECK(EVP_DigestFinal_ex(copy, bytes, &size) == 1);
    EVP_MD_CTX_free(copy);
    std::string text;
    for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", bytes[i]);
    return text;
  }

 private:
  const EVP_MD* kind_;
  EVP_MD_CTX* context_;
};

Status disk_error(const char* what, const std::string& path) {
  return io_error("cannot {} {}: {}", what, path, std::generic_category().message(errno));
}

// Feeds the file from its beginning to the digest; returns the number of bytes.
Result<int64_t> digest_file(int fd, const std::string& path, Digest& digest) {
  std::vector<char> block(kBlockSize);
  for (int64_t at = 0;;) {
    const ssize_t n = ::pread(fd, block.data(), block.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return disk_error("read", path);
    if (n == 0) return at;
    digest.update(block.data(), static_cast<size_t>(n));
    at += n;
  }
}

}  // namespace

struct BlobWriter::Impl {
  std::string path;
  int fd = -1;
  int64_t size = 0;
  std::string block;  // not yet queued
  Digest digest{EVP_sha256()};

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::string> queue;
  std::vector<std::string> spare;  // used blocks: allocating a megabyte each time costs page faults
  bool busy = true;                // the thread works on something: at first on what the file holds
  bool stop = false;
  Status status;
  std::thread thread;

  void work() {
    Status done = digest_file(fd, path, digest).status();
    std::unique_lock lock(mutex);
    for (;;) {
      if (status.ok()) status = done;
      busy = false;
      changed.notify_all();
      changed.wait(lock, [this] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      std::string next = std::move(queue.front());
      queue.pop_front();
      busy = true;
      const bool failed = !status.ok();
      lock.unlock();
      done = failed ? Status() : write_block(next);
      next.clear();
      lock.lock();
      spare.push_back(std::move(next));
    }
  }

  Status write_block(const std::string& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t n = ::write(fd, bytes.data() + at, bytes.size() - at);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return disk_error("write", path);
      at += static_cast<size_t>(n);
    }
    digest.update(bytes.data(), bytes.size());
    return {};
  }

  // Queues what has gathered; waits while the queue is full.
  bool queue_block() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return queue.size() < kMostBlocks || !status.ok(); });
    if (!status.ok()) return false;
    if (!block.empty()) queue.push_back(std::move(block));
    block.clear();
    if (block.capacity() < kBlockSize && !spare.empty()) {
      block = std::move(spare.back());
      spare.pop_back();
    }
    changed.notify_all();
    return true;
  }

  bool idle() const {
    const std::lock_guard lock(mutex);
    return queue.empty() && !busy;
  }

  Status wait_until_idle() {
    (void)queue_block();
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return queue.empty() && !busy; });
    return status;
  }
};

BlobWriter::BlobWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

BlobWriter::~BlobWriter() {
  (void)impl_->queue_block();
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
    impl_->changed.notify_all();
  }
  impl_->thread.join();
  ::close(impl_->fd);
}

Result<std::unique_ptr<BlobWriter>> BlobWriter::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd < 0) return disk_error("open", path);
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  impl->fd = fd;
  impl->size = static_cast<int64_t>(::lseek(fd, 0, SEEK_END));
  impl->thread = std::thread([p = impl.get()] { p->work(); });
  return std::unique_ptr<BlobWriter>(new BlobWriter(std::move(impl)));
}

int64_t BlobWriter::size() const {
  return impl_->size;
}

bool BlobWriter::write(std::string_view bytes) {
  impl_->block += bytes;
  impl_->size += static_cast<int64_t>(bytes.size());
  // A slow download reaches the disk at once, so that a kill loses little.
  if (impl_->block.size() < kBlockSize && !impl_->idle()) return true;
  return impl_->queue_block();
}

Status BlobWriter::restart() {
  FRESHET_RETURN_IF_ERROR(impl_->wait_until_idle());
  if (::ftruncate(impl_->fd, 0) != 0) return disk_error("empty", impl_->path);
  impl_->digest.reset();
  impl_->size = 0;
  return {};
}

Result<std::string> BlobWriter::finish() {
  FRESHET_RETURN_IF_ERROR(impl_->wait_until_idle());
  if (::fsync(impl_->fd) != 0) return disk_error("write", impl_->path);
  return impl_->digest.hex();
}

Status BlobWriter::status() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->status;
}

std::string sha256_of(std::string_view bytes) {
  Digest digest(EVP_sha256());
  digest.update(bytes.data(), bytes.size());
  return digest.hex();
}

Result<std::string> git_hash_of_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return disk_error("read", path);
  Digest digest(EVP_sha1());
  struct stat about{};
  const bool known = ::fstat(fd, &about) == 0;
  const std::string head = fmt::format("blob {}", known ? about.st_size : 0);
  digest.update(head.c_str(), head.size() + 1);
  const auto size = digest_file(fd, path, digest);
  ::close(fd);
  if (!size.ok()) return size.status();
  return digest.hex();
}

}  // namespace freshet::hub
