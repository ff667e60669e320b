// The residual streams of calibration windows between two parts of a model.
//
// Window w has lengths[w] rows of `width` F32 numbers. They are held in memory if they take at most
// `memory` bytes, otherwise in an unnamed file in `folder`. Errors of the file system, a full disk
// included, name the folder. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace freshet::quantizer {

class StreamStore {
 public:
  static Result<StreamStore> create(std::vector<int64_t> lengths, int64_t width, size_t memory,
                                    const std::string& folder);
  StreamStore(StreamStore&& other) noexcept;
  StreamStore& operator=(StreamStore&&) = delete;
  ~StreamStore();

  int64_t windows() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t length(int64_t window) const { return lengths_[static_cast<size_t>(window)]; }
  int64_t width() const { return width_; }
  bool on_disk() const { return file_ >= 0; }

  // `rows`: [length(window), width].
  Status read(int64_t window, float* rows) const;
  Status write(int64_t window, const float* rows);

 private:
  StreamStore(std::vector<int64_t> lengths, int64_t width);
  size_t bytes_of(int64_t window) const;
  size_t offset_of(int64_t window) const;

  std::vector<int64_t> lengths_;
  std::vector<int64_t> first_;  // [windows]: rows in front
  int64_t width_;
  std::string folder_;
  int file_ = -1;
  std::vector<float> held_;
};

}  // namespace freshet::quantizer
