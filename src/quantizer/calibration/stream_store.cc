#include "quantizer/calibration/stream_store.h"

#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace freshet::quantizer {

StreamStore::StreamStore(std::vector<int64_t> lengths, int64_t width)
    : lengths_(std::move(lengths)), width_(width) {
  int64_t rows = 0;
  for (const int64_t length : lengths_) {
    first_.push_back(rows);
    rows += length;
  }
}

StreamStore::StreamStore(StreamStore&& other) noexcept
    : lengths_(std::move(other.lengths_)),
      first_(std::move(other.first_)),
      width_(other.width_),
      folder_(std::move(other.folder_)),
      file_(std::exchange(other.file_, -1)),
      held_(std::move(other.held_)) {}

StreamStore::~StreamStore() {
  if (file_ >= 0) close(file_);
}

Result<StreamStore> StreamStore::create(std::vector<int64_t> lengths, int64_t width, size_t memory,
                                        const std::string& folder) {
  StreamStore store(std::move(lengths), width);
  const int64_t rows = std::accumulate(store.lengths_.begin(), store.lengths_.end(), int64_t{0});
  const auto numbers = static_cast<size_t>(rows * width);
  store.folder_ = folder;
  if (numbers * sizeof(float) <= memory) {
    store.held_.resize(numbers);
    return store;
  }
  // Without a name, it vanishes with the process however that ends.
  std::string path = folder + "/activations-XXXXXX";
  store.file_ = mkstemp(path.data());
  if (store.file_ < 0)
    return invalid_argument("cannot create a file in {}: {}", folder, std::strerror(errno));
  unlink(path.c_str());
  return store;
}

size_t StreamStore::bytes_of(int64_t window) const {
  return static_cast<size_t>(length(window) * width_) * sizeof(float);
}

size_t StreamStore::offset_of(int64_t window) const {
  return static_cast<size_t>(first_[static_cast<size_t>(window)] * width_) * sizeof(float);
}

Status StreamStore::read(int64_t window, float* rows) const {
  const size_t bytes = bytes_of(window), offset = offset_of(window);
  if (file_ < 0) {
    std::memcpy(rows, held_.data() + offset / sizeof(float), bytes);
    return {};
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t got = pread(file_, reinterpret_cast<char*>(rows) + done, bytes - done,
                              static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      return invalid_argument("cannot read activations back from {}: {}", folder_,
                              got == 0 ? "the file is too short" : std::strerror(errno));
    done += static_cast<size_t>(got);
  }
  return {};
}

Status StreamStore::write(int64_t window, const float* rows) {
  const size_t bytes = bytes_of(window), offset = offset_of(window);
  if (file_ < 0) {
    std::memcpy(held_.data() + offset / sizeof(float), rows, bytes);
    return {};
  }
  for (size_t done = 0; done < bytes;) {
    const ssize_t put = pwrite(file_, reinterpret_cast<const char*>(rows) + done, bytes - done,
                               static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0)
      return resource_exhausted("cannot write activations in {}: {}", folder_,
                                std::strerror(errno));
    done += static_cast<size_t>(put);
  }
  return {};
}

}  // namespace freshet::quantizer
