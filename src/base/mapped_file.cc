#include "base/mapped_file.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace freshet {

Result<MappedFile> MappedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const auto code = errno == ENOENT ? StatusCode::kNotFound : StatusCode::kIo;
    return Status(code,
                  fmt::format("cannot open {}: {}", path, std::generic_category().message(errno)));
  }
  struct stat st{};
  if (::fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    ::close(fd);
    return io_error("{} is not a regular file", path);
  }
  MappedFile file;
  file.path_ = path;
  file.size_ = static_cast<size_t>(st.st_size);
  file.changed_ns_ = int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec;
  if (file.size_ > 0) {
    void* p = ::mmap(nullptr, file.size_, PROT_READ, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
      const int error = errno;
      ::close(fd);
      return io_error("cannot map {}: {}", path, std::generic_category().message(error));
    }
    file.data_ = static_cast<const uint8_t*>(p);
  }
  ::close(fd);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept {
  *this = std::move(other);
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(changed_ns_, other.changed_ns_);
  std::swap(path_, other.path_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), size_);
}

namespace {
// Gives advice for the whole pages inside (inward) or around (outward) the range.
void advise(const uint8_t* data, size_t file_size, size_t offset, size_t size, bool inward,
            int advice) {
  if (data == nullptr || offset >= file_size) return;
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t end = std::min(file_size, offset + size);
  const size_t first = inward ? (offset + page - 1) / page * page : offset / page * page;
  const size_t last = inward && end != file_size ? end / page * page : end;
  if (first < last) ::madvise(const_cast<uint8_t*>(data) + first, last - first, advice);
}
}  // namespace

void MappedFile::release(size_t offset, size_t size) const {
  advise(data_, size_, offset, size, true, MADV_DONTNEED);
}

void MappedFile::prefetch(size_t offset, size_t size) const {
  advise(data_, size_, offset, size, false, MADV_WILLNEED);
}

void MappedFile::use_huge_pages() const {
  if (data_ != nullptr) ::madvise(const_cast<uint8_t*>(data_), size_, MADV_HUGEPAGE);
}

}  // namespace freshet
