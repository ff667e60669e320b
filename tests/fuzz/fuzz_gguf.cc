// Any bytes as a GGUF file: no crash, and everything it lists lies inside the bytes.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "loader/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const auto f = loader::GgufFile::parse({data, size}, "fuzz");
  if (!f.ok()) {
    FRESHET_CHECK(!f.status().message().empty());
    return 0;
  }
  for (const auto& [key, value] : f->metadata()) {
    f->get_ints(key);
    f->get_floats(key);
    f->get_f32(key);
    f->get_bool(key);
    size_t bytes = 0;
    for (const std::string_view s : value.strings) bytes += s.size() + 8;
    FRESHET_CHECK(bytes + value.raw.size() <= size);
  }
  for (const loader::TensorSource& t : f->tensors()) {
    FRESHET_CHECK(t.data >= data && t.bytes <= static_cast<size_t>(data + size - t.data));
    if (!t.format) continue;
    const int64_t block = quant::info(*t.format).block_size;
    FRESHET_CHECK(t.elements() % block == 0);
    std::vector<float> out(static_cast<size_t>(block));
    if (t.elements() > 0) quant::info(*t.format).decode(t.data, out.data(), block);
  }
  return 0;
}
