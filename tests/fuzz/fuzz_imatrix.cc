// Any bytes as an importance matrix, in either form: no crash, and what is read can be merged.
#include <cstddef>
#include <cstdint>

#include "quantizer/imatrix.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  auto m = quantizer::Imatrix::parse({data, size}, "fuzz");
  if (!m.ok()) {
    FRESHET_CHECK(!m.status().message().empty());
    return 0;
  }
  FRESHET_CHECK(!m->entries.empty());
  const quantizer::Importance importance(*m);
  for (const auto& [name, e] : m->entries) {
    const auto experts = std::ssize(e.counts);
    const int64_t cols = std::ssize(e.sum2) / experts;
    FRESHET_CHECK(e.sum2.size() * sizeof(float) <= size);
    FRESHET_CHECK(e.sum.empty() || e.sum.size() == e.sum2.size());
    const auto last = importance.of(name, experts - 1, cols);
    FRESHET_CHECK(last.empty() || std::ssize(last) == cols);
    FRESHET_CHECK(importance.of(name, experts, cols).empty());
  }
  const quantizer::Imatrix copy = *m;
  (void)m->merge(copy);  // sums may overflow, which is an error
  return 0;
}
