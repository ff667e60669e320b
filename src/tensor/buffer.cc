#include "tensor/buffer.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include <sys/mman.h>

namespace freshet {
namespace {
constexpr size_t kHugePage = size_t{2} << 20;
// Reserves only address space; unused pages are never touched.
constexpr size_t kPage = 4096;
constexpr size_t kWhole = size_t{256} << 20;
constexpr size_t kSmallestPiece = size_t{512} << 10;
}  // namespace

Result<Buffer> Buffer::allocate(size_t bytes, Memory* memory) {
  Buffer b;
  if (bytes == 0) return b;
  if (memory != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(void* const data, memory->take(bytes));
    b.data_ = static_cast<uint8_t*>(data);
    b.size_ = bytes;
    b.memory_ = memory;
    return b;
  }
  b.size_ = bytes;
  if (bytes < kHugePage) {
    b.data_ = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (b.data_ == nullptr) return resource_exhausted("cannot allocate {} bytes", bytes);
    std::memset(b.data_, 0, bytes);
    return b;
  }
  b.mapped_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* p = ::mmap(nullptr, b.mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    b.mapped_ = 0;
    return resource_exhausted("cannot allocate {} bytes", bytes);
  }
  ::madvise(p, b.mapped_, MADV_HUGEPAGE);
  b.data_ = static_cast<uint8_t*>(p);
  return b;
}

Buffer Buffer::part_of(std::span<const uint8_t> bytes, std::shared_ptr<const void> owner) {
  Buffer b;
  b.data_ = const_cast<uint8_t*>(bytes.data());
  b.size_ = bytes.size();
  b.owner_ = std::move(owner);
  return b;
}

Buffer::Buffer(Buffer&& other) noexcept {
  *this = std::move(other);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapped_, other.mapped_);
  std::swap(memory_, other.memory_);
  std::swap(owner_, other.owner_);
  return *this;
}

Buffer::~Buffer() {
  if (owner_ != nullptr) return;
  if (memory_ != nullptr) {
    memory_->give_back(data_);
  } else if (mapped_ > 0) {
    ::munmap(data_, mapped_);
  } else {
    std::free(data_);
  }
}

Result<Buffer> Pieces::take(size_t bytes) {
  const size_t size = (bytes + kPage - 1) / kPage * kPage;
  if (bytes < kSmallestPiece || size > kWhole) return Buffer::allocate(bytes);
  std::shared_ptr<Buffer> whole = whole_.lock();
  if (whole == nullptr || whole->size() - used_ < size) {
    auto made = Buffer::allocate(kWhole);
    if (!made.ok()) return Buffer::allocate(bytes);  // some systems limit address space
    whole = std::make_shared<Buffer>(std::move(*made));
    whole_ = whole;
    used_ = 0;
  }
  Buffer piece = Buffer::part_of({whole->data() + used_, bytes}, whole);
  used_ += size;
  return piece;
}

}  // namespace freshet
