#include "models/finite.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/status.h"

namespace freshet::models {
namespace {

constexpr size_t kMaxBlock = 256;

// The offsets of the F16 scales of a block. Found by trying and not listed: in any format, a scale
// is where writing a NaN turns a decoded zero block into NaN.
std::vector<size_t> scale_offsets(const quant::FormatInfo& info) {
  std::vector<size_t> offsets;
  if (info.head_bytes > 0) return offsets;
  const auto bytes = static_cast<size_t>(info.block_bytes);
  FRESHET_CHECK(bytes <= kMaxBlock && static_cast<size_t>(info.block_size) <= kMaxBlock,
                "blocks of {} are larger than expected", info.name);
  for (size_t at = 0; at + 2 <= bytes; ++at) {
    std::array<uint8_t, kMaxBlock> block{};
    std::array<float, kMaxBlock> values{};
    const uint16_t nan = 0x7e00;
    std::memcpy(block.data() + at, &nan, sizeof nan);
    info.decode(block.data(), values.data(), info.block_size);
    if (!all_finite({values.data(), static_cast<size_t>(info.block_size)})) offsets.push_back(at);
  }
  return offsets;
}

bool decoded_finite(const quant::FormatInfo& info, const uint8_t* row, int64_t n) {
  std::array<float, 512> values;  // whole blocks of any format
  for (int64_t i = 0; i < n; i += static_cast<int64_t>(values.size())) {
    const int64_t count = std::min<int64_t>(n - i, static_cast<int64_t>(values.size()));
    info.decode_part(row, i, values.data(), count);
    if (!all_finite({values.data(), static_cast<size_t>(count)})) return false;
  }
  return true;
}

// Numbers whose bits of `exponent` are all set are NaN or infinite. No branch, so that it runs at
// the speed of memory.
template <class Word>
bool words_finite(const uint8_t* data, int64_t n, Word exponent) {
  Word bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, data + i * static_cast<int64_t>(sizeof word), sizeof word);
    bad = static_cast<Word>(bad | ((word & exponent) == exponent));
  }
  return bad == 0;
}

const std::vector<size_t>& offsets_of(quant::Format format) {
  static const std::vector<std::vector<size_t>> table = [] {
    std::vector<std::vector<size_t>> t;
    for (const quant::FormatInfo& info : quant::all_formats()) {
      const auto at = static_cast<size_t>(info.format);
      if (t.size() <= at) t.resize(at + 1);
      t[at] = scale_offsets(info);
    }
    return t;
  }();
  return table[static_cast<size_t>(format)];
}

}  // namespace

bool all_finite(std::span<const float> values) {
  // x * 0 is 0 for every finite x; the sum stays 0 and the loop has no branch.
  float sum = 0;
  for (const float v : values) sum += v * 0.0f;
  return sum == 0.0f;
}

bool all_finite(quant::Format format, const uint8_t* data, int64_t n) {
  const quant::FormatInfo& info = quant::info(format);
  switch (format) {
    case quant::Format::kF32:
      return words_finite<uint32_t>(data, n, 0x7f800000);
    case quant::Format::kF16:
      return words_finite<uint16_t>(data, n, 0x7c00);
    case quant::Format::kBF16:
      return words_finite<uint16_t>(data, n, 0x7f80);
    default:
      break;
  }
  const std::vector<size_t>& offsets = offsets_of(format);
  if (offsets.empty()) return decoded_finite(info, data, n);
  constexpr uint16_t kExponent = 0x7c00;
  const int64_t blocks = n / info.block_size;
  for (const size_t at : offsets) {
    const uint8_t* block = data + at;
    bool bad = false;  // no branch, as above
    for (int64_t b = 0; b < blocks; ++b, block += info.block_bytes) {
      uint16_t scale;
      std::memcpy(&scale, block, sizeof scale);
      bad |= (scale & kExponent) == kExponent;
    }
    if (bad) return false;
  }
  return true;
}

}  // namespace freshet::models
