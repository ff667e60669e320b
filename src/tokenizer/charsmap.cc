#include "tokenizer/charsmap.h"

#include <cstring>

namespace freshet::tokenizer {

Result<Charsmap> Charsmap::parse(std::string_view bytes) {
  uint32_t size = 0;
  if (bytes.size() >= 4) std::memcpy(&size, bytes.data(), 4);
  if (bytes.size() < 4 || size % 4 != 0 || size > bytes.size() - 4) {
    return invalid_argument("the precompiled character map is truncated");
  }
  Charsmap map;
  map.units_.resize(size / 4);
  if (size > 0) std::memcpy(map.units_.data(), bytes.data() + 4, size);
  map.replacements_ = bytes.substr(4 + size);
  return map;
}

std::optional<Charsmap::Match> Charsmap::match(std::string_view text, bool longest) const {
  const auto offset = [](uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); };
  if (units_.empty()) return std::nullopt;
  std::optional<Match> best;
  size_t node = offset(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    node ^= byte;
    if (byte == 0 || node >= units_.size()) break;
    const uint32_t unit = units_[node];
    if ((unit & ((1u << 31) | 0xFF)) != byte) break;
    node ^= offset(unit);
    if ((unit & (1u << 8)) == 0) continue;  // no replacement ends here
    if (node >= units_.size()) break;
    const size_t at = units_[node] & 0x7FFFFFFF;
    const size_t end = at < replacements_.size() ? replacements_.find('\0', at) : std::string::npos;
    if (end == std::string::npos) break;
    best = Match{i + 1, std::string_view(replacements_).substr(at, end - at)};
    if (!longest) break;
  }
  return best;
}

}  // namespace freshet::tokenizer
