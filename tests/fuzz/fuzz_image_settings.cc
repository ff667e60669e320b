// Any JSON as a processor's configuration: no crash, and a picture's layout is what its values
// have. The input is {"width", "height", "preprocessor", "processor", "config"}.
#include <cstddef>
#include <cstdint>

#include "media/image_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const auto text = json::parse({reinterpret_cast<const char*>(data), size}, {.depth = 16});
  if (!text.ok() || !text->is_object()) return 0;
  const json::Value nothing{json::Object()};
  const auto part = [&](std::string_view key) {
    const json::Value* value = text->find(key);
    return value != nullptr ? *value : nothing;
  };
  const auto settings =
      media::image_settings(part("preprocessor"), part("processor"), part("config"));
  if (!settings.ok()) {
    FRESHET_CHECK(!settings.status().message().empty());
    return 0;
  }
  const int width = static_cast<int>(text->get_int("width", 20) & 255) + 1;
  const int height = static_cast<int>(text->get_int("height", 20) & 255) + 1;
  const auto layout = media::image_layout(width, height, *settings);
  if (!layout.ok()) return 0;
  int64_t values = 1;
  for (const int64_t side : layout->shape) values *= side;
  FRESHET_CHECK(values > 0);
  if (values > 1 << 20) return 0;
  const auto input = media::image_input(media::Picture(width, height), *settings);
  FRESHET_CHECK(!input.ok() || static_cast<int64_t>(input->values.size()) == values);
  return 0;
}
