#include "engine/encoder_content.h"

#include <random>
#include <span>

namespace freshet::engine {
namespace {

template <class T>
std::span<const uint8_t> bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace

std::string encoder_content(const Request& request, const kv_cache::BlockSecret& secret) {
  std::string content;
  if (request.frames > 0) {
    const kv_cache::BlockKey hash = kv_cache::siphash128(secret, bytes_of(request.features));
    content = 's' + std::to_string(request.frames) + ':';
    content.append(reinterpret_cast<const char*>(&hash), sizeof hash);
  } else if (!request.encoder_ids.empty()) {
    const auto ids = bytes_of(request.encoder_ids);
    content = 't';
    content.append(reinterpret_cast<const char*>(ids.data()), ids.size());
  }
  return content;
}

kv_cache::BlockSecret random_secret() {
  std::random_device random;
  const auto word = [&] { return (uint64_t{random()} << 32) | random(); };
  return {word(), word()};
}

}  // namespace freshet::engine
