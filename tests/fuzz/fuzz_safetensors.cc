// Any bytes as a safetensors file: no crash, and the tensors cover the data exactly.
#include <cstddef>
#include <cstdint>

#include "loader/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const auto f = loader::SafetensorsFile::parse({data, size}, "fuzz");
  if (!f.ok()) {
    FRESHET_CHECK(!f.status().message().empty());
    return 0;
  }
  size_t total = 0;
  for (const loader::TensorSource& t : f->tensors()) {
    FRESHET_CHECK(t.data >= data && t.bytes <= static_cast<size_t>(data + size - t.data));
    FRESHET_CHECK(f->find(t.name) == &t);
    if (t.format) FRESHET_CHECK(quant::row_bytes(*t.format, t.elements()) == t.bytes);
    total += t.bytes;
  }
  FRESHET_CHECK(total <= size - 8);
  return 0;
}
