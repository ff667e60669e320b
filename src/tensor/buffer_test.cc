#include "tensor/buffer.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

namespace freshet {
namespace {

size_t resident_bytes() {
  std::ifstream in("/proc/self/statm");
  size_t all = 0, resident = 0;
  in >> all >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(Pieces, AreZeroedAlignedAndApart) {
  Pieces pieces;
  std::vector<Buffer> buffers;
  // Small ones, many in one mapping, one that fills it, one that is larger than any mapping.
  for (const size_t size :
       {size_t{0}, size_t{100}, size_t{524288}, size_t{2359297}, size_t{600001}, size_t{200} << 20,
        size_t{150} << 20, size_t{1} << 20, (size_t{256} << 20) + 1, size_t{700000}}) {
    auto made = pieces.take(size);
    ASSERT_TRUE(made.ok()) << made.status().message();
    ASSERT_EQ(made->size(), size);
    if (size == 0) continue;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(made->data()) % 64, 0u);
    for (const size_t at : {size_t{0}, size / 2, size - 1}) {
      EXPECT_EQ(made->data()[at], 0);
      made->data()[at] = 1;
    }
    buffers.push_back(std::move(*made));
  }
  for (const Buffer& a : buffers) {
    for (const Buffer& b : buffers)
      EXPECT_TRUE(&a == &b || a.data() + a.size() <= b.data() || b.data() + b.size() <= a.data());
  }
}

TEST(Pieces, WasteNoPagesAndGiveThemBack) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer keeps memory of its own for each byte";
#endif
  constexpr size_t kSize = 2359296, kCount = 24;  // a little more than a huge page
  const size_t before = resident_bytes();
  {
    Pieces pieces;
    std::vector<Buffer> buffers;
    for (size_t i = 0; i < kCount; ++i) {
      auto made = pieces.take(kSize);
      ASSERT_TRUE(made.ok());
      std::memset(made->data(), 1, kSize);
      buffers.push_back(std::move(*made));
    }
    EXPECT_LT(resident_bytes() - before, kSize * kCount + (size_t{4} << 20));
    // After the first is freed, the others are unchanged; after all are freed, so is the memory.
    buffers.erase(buffers.begin());
    for (const Buffer& b : buffers)
      EXPECT_TRUE(std::all_of(b.data(), b.data() + kSize, [](uint8_t v) { return v == 1; }));
    buffers.clear();
    EXPECT_LT(resident_bytes(), before + (size_t{4} << 20));
  }
}

}  // namespace
}  // namespace freshet
