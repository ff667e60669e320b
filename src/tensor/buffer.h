// Memory owners and views.
//
// Buffer owns zeroed, 64-byte aligned memory: of the host (large buffers use transparent huge
// pages), or of a Memory, such as a device's. Or it refers to a part of memory owned elsewhere,
// such as a mapped file, which must not be written. Moving a Buffer keeps its address. Pieces makes
// Buffers that share huge pages. Matrix is a non-owning view of F32 rows. Arena allocates from one
// Buffer whose size comes from the memory plan: an allocation is a pointer bump, reset() frees
// everything, and exceeding the plan is a failed check, because nothing is allocated at run time.
// None of them is synchronised.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"

namespace freshet {

// Memory outside the heap: a device's memory, or pinned memory. Must outlive its buffers.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Result<void*> take(size_t bytes) = 0;  // zeroed, aligned to 64
  virtual void give_back(void* memory) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0;  // both in this memory
};

class Buffer {
 public:
  Buffer() = default;
  // Fails if the system does not have that much memory. nullptr: host memory.
  static Result<Buffer> allocate(size_t bytes, Memory* memory = nullptr);
  // Memory owned elsewhere; the owner decides whether it may be written. `owner` keeps it alive.
  static Buffer part_of(std::span<const uint8_t> bytes, std::shared_ptr<const void> owner);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  Memory* memory() const { return memory_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_);
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  size_t mapped_ = 0;  // bytes to unmap; 0: from the heap
  Memory* memory_ = nullptr;
  std::shared_ptr<const void> owner_;  // keeps the memory alive if it is not ours
};

// Allocates large buffers close together. On its own, each would end within a huge page, which
// wastes a tenth of the size of a model with small layers. Memory is freed when all of its buffers
// are gone.
class Pieces {
 public:
  Result<Buffer> take(size_t bytes);  // like Buffer::allocate()

 private:
  std::weak_ptr<Buffer> whole_;
  size_t used_ = 0;
};

// rows x cols F32 values, row r starting at data + r * stride (in floats).
struct Matrix {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  float* row(int64_t r) const { return data + r * stride; }
  Matrix slice_rows(int64_t first, int64_t count) const {
    return {data + first * stride, count, cols, stride};
  }
  Matrix slice_cols(int64_t first, int64_t count) const {
    return {data + first, rows, count, stride};
  }
};

class Arena {
 public:
  Arena() = default;
  explicit Arena(Buffer buffer) : buffer_(static_cast<Buffer&&>(buffer)) {}

  // 64-byte aligned, not zeroed.
  void* allocate(size_t bytes) {
    const size_t at = used_;
    used_ += (bytes + 63) / 64 * 64;
    FRESHET_CHECK(used_ <= buffer_.size(), "arena planned for {} bytes, asked for {}",
                  buffer_.size(), used_);
    if (used_ > peak_) peak_ = used_;
    return buffer_.data() + at;
  }
  template <class T>
  T* allocate_array(int64_t n) {
    return static_cast<T*>(allocate(static_cast<size_t>(n) * sizeof(T)));
  }
  Matrix matrix(int64_t rows, int64_t cols) {
    return {allocate_array<float>(rows * cols), rows, cols, cols};
  }

  size_t mark() const { return used_; }
  void rewind(size_t mark) { used_ = mark; }  // frees everything allocated since mark()
  void reset() { used_ = 0; }
  size_t peak() const { return peak_; }
  size_t capacity() const { return buffer_.size(); }

 private:
  Buffer buffer_;
  size_t used_ = 0;
  size_t peak_ = 0;
};

}  // namespace freshet
