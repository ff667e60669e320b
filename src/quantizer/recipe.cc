#include "quantizer/recipe.h"

#include <algorithm>
#include <cctype>

namespace freshet::quantizer {
namespace {

using models::Role;
using quant::Format;

struct Row {
  std::string_view name;
  Format format;
  uint32_t file_type;
  bool mixed;
};

constexpr Row kRows[] = {
    {"f32", Format::kF32, 0, false},        {"f16", Format::kF16, 1, false},
    {"bf16", Format::kBF16, 32, false},     {"q8_0", Format::kQ8_0, 7, false},
    {"q4_0", Format::kQ4_0, 2, false},      {"q4_1", Format::kQ4_1, 3, false},
    {"q5_0", Format::kQ5_0, 8, false},      {"q5_1", Format::kQ5_1, 9, false},
    {"q2_k", Format::kQ2_K, 10, false},     {"q3_k", Format::kQ3_K, 12, false},
    {"q4_k", Format::kQ4_K, 14, false},     {"q4_k_m", Format::kQ4_K, 15, true},
    {"q5_k", Format::kQ5_K, 16, false},     {"q5_k_m", Format::kQ5_K, 17, true},
    {"q6_k", Format::kQ6_K, 18, false},     {"iq4_nl", Format::kIQ4_NL, 25, false},
    {"iq4_xs", Format::kIQ4_XS, 30, false},
};

double bits(Format f) {
  const quant::FormatInfo& i = quant::info(f);
  return 8.0 * i.block_bytes / i.block_size;
}

// The first format that fits rows of `cols` numbers: a wide block falls back to a block of 32, and
// that to plain F16.
Format fitting(Format f, int64_t cols) {
  if (cols % quant::info(f).block_size == 0) return f;
  if (quant::info(f).block_size > 32 && cols % 32 == 0) {
    if (bits(f) < 4.3) return Format::kIQ4_NL;
    return bits(f) < 5.0 ? Format::kQ5_0 : Format::kQ8_0;
  }
  return Format::kF16;
}

// The layers whose value and down projections get more bits in a mixed recipe.
bool favoured(int layer, int layers) {
  return layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
}

bool is_router(Role role) {
  return role == Role::kRouter || role == Role::kRouterCorrection || role == Role::kSharedScale;
}

}  // namespace

Result<Recipe> Recipe::by_name(std::string_view name) {
  std::string lower(name);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const Row& row : kRows) {
    if (row.name != lower) continue;
    if (quant::info(row.format).encode == nullptr) break;
    Recipe r;
    r.name_ = row.name;
    r.format_ = row.format;
    r.file_type_ = row.file_type;
    r.mixed_ = row.mixed;
    return r;
  }
  return invalid_argument("unknown type '{}'; the types are {}", name, names());
}

std::string Recipe::names() {
  std::string text;
  for (const Row& row : kRows) {
    if (quant::info(row.format).encode == nullptr) continue;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", row.name);
  }
  return text;
}

Format Recipe::format_for(Role role, int layer, int layers, int64_t cols, bool head) const {
  if (is_router(role)) return Format::kF32;
  Format f = format_;
  const double favoured_bits = bits(Format::kQ6_K);
  if (head && bits(f) < favoured_bits) f = Format::kQ6_K;
  const bool sensitive = role == Role::kValue || role == Role::kDown || role == Role::kExpertsDown;
  if (mixed_ && sensitive && favoured(layer, layers)) f = Format::kQ6_K;
  return fitting(f, cols);
}

}  // namespace freshet::quantizer
