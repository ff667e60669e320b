// A file mapped read-only into memory. Movable, not copyable; thread-safe to read. If a mapped file
// is truncated, access raises SIGBUS: model files must not change while in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"

namespace freshet {

class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  int64_t changed_ns() const { return changed_ns_; }  // time of the last write, since 1970
  // Tells the kernel that [offset, offset + size) will not be read again, so that its pages leave
  // the resident set. The bytes stay readable.
  void release(size_t offset, size_t size) const;
  // Asks the kernel to read [offset, offset + size) ahead.
  void prefetch(size_t offset, size_t size) const;
  // Asks for huge pages, which not every file system supports.
  void use_huge_pages() const;

 private:
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  int64_t changed_ns_ = 0;
  std::string path_;
};

}  // namespace freshet
