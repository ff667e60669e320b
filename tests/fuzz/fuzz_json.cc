// Any bytes as JSON: no crash, and a parsed value can be written and parsed back unchanged.
#include <cstddef>
#include <cstdint>

#include "base/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const auto value = json::parse({reinterpret_cast<const char*>(data), size});
  if (!value.ok()) {
    FRESHET_CHECK(!value.status().message().empty());
    return 0;
  }
  for (const json::WriteOptions& options :
       {json::WriteOptions{}, json::WriteOptions{.ascii = true, .sort_keys = true},
        json::WriteOptions{.indent = 1}}) {
    const auto again = json::parse(json::write(*value, options));
    FRESHET_CHECK(again.ok(), "{}", again.status().message());
    FRESHET_CHECK(*again == *value);
  }
  const json::Value copy = *value;
  FRESHET_CHECK(json::write(copy) == json::write(*value));
  return 0;
}
