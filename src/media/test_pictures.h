// Pictures from a formula, the same as in tools/golden_media.py, and checksums. For tests.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "base/json.h"
#include "media/picture.h"

namespace freshet::media {

inline uint8_t test_pixel(uint32_t i, uint32_t x, uint32_t y, uint32_t c) {
  uint32_t v = 0;
  switch (i % 4) {
    case 0:
      v = x * 374761393u + y * 668265263u + c * 2246822519u + i * 3266489917u;
      v = (v ^ (v >> 13)) * 1274126177u;
      v ^= v >> 16;
      break;
    case 1:
      v = (x * 7 + y * 3 * (c + 1) + i * 11) >> 1;
      break;
    case 2:
      v = ((x / (3 + i % 5) + y / (2 + i % 7) + c) & 1) * 255;
      break;
    default:
      v = x % 9 == c || y % 11 == 2 ? 250 : 5 + c * 3;
  }
  return static_cast<uint8_t>(v);
}

inline Picture test_picture(int i, int width = 0, int height = 0) {
  Picture p(width > 0 ? width : 1 + i * 37 % 97, height > 0 ? height : 1 + i * 61 % 89);
  for (int y = 0; y < p.height; ++y) {
    for (int x = 0; x < p.width; ++x) {
      for (int c = 0; c < 3; ++c) {
        p.row(y)[x * 3 + c] = test_pixel(static_cast<uint32_t>(i), static_cast<uint32_t>(x),
                                         static_cast<uint32_t>(y), static_cast<uint32_t>(c));
      }
    }
  }
  return p;
}

// CRC-32 as zlib computes it, in hexadecimal digits.
inline std::string crc_of(const void* data, size_t bytes) {
  static const auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t n = 0; n < 256; ++n) {
      uint32_t c = n;
      for (int k = 0; k < 8; ++k) c = (c & 1) != 0 ? 0xedb88320u ^ (c >> 1) : c >> 1;
      table[n] = c;
    }
    return table;
  }();
  uint32_t crc = ~0u;
  for (const uint8_t b : std::span(static_cast<const uint8_t*>(data), bytes)) {
    crc = kTable[(crc ^ b) & 255] ^ (crc >> 8);
  }
  return fmt::format("{:08x}", ~crc);
}

inline std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

inline const json::Value& golden_media() {
  static const json::Value kGolden =
      json::parse_file(FRESHET_SOURCE_DIR "/tests/data/media/golden.json").value();
  return kGolden;
}

}  // namespace freshet::media
