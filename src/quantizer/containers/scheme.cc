#include "quantizer/containers/scheme.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>

#include "base/nearest.h"

namespace freshet::quantizer {
namespace {

struct Preset {
  const char* name;
  Levels levels;
  int bits;
  int64_t group, group_rows;
  ScaleType scale;
  Activations activations = Activations::kNone;
  bool any_group = false;  // takes _G<n> and _CHANNEL
  bool double_quantised = false;
};

constexpr Preset packed(const char* name, int bits) {
  return {name, Levels::kInteger, bits, 128, 1, ScaleType::kF16, Activations::kNone, true};
}

constexpr Preset kPresets[] = {
    packed("W8A16", 8),
    packed("W7A16", 7),
    packed("W6A16", 6),
    packed("W5A16", 5),
    packed("W4A16", 4),
    packed("W3A16", 3),
    packed("W2A16", 2),
    {"W8A8", Levels::kInteger, 8, 0, 1, ScaleType::kF32, Activations::kInt8Token},
    {"W8A8_STATIC", Levels::kInteger, 8, 0, 1, ScaleType::kF32, Activations::kInt8Tensor},
    {"W4A8", Levels::kInteger, 4, 128, 1, ScaleType::kF16, Activations::kInt8Token, true},
    {"FP8", Levels::kE4M3, 8, 0, 0, ScaleType::kF32, Activations::kFp8Tensor},
    {"FP8_DYNAMIC", Levels::kE4M3, 8, 0, 1, ScaleType::kF32, Activations::kFp8Token},
    {"FP8_BLOCK", Levels::kE4M3, 8, 128, 128, ScaleType::kF32, Activations::kFp8Group128},
    {"NVFP4", Levels::kE2M1, 4, 16, 1, ScaleType::kE4M3, Activations::kNvfp4},
    {"NVFP4A16", Levels::kE2M1, 4, 16, 1, ScaleType::kE4M3},
    {"MXFP4", Levels::kE2M1, 4, 32, 1, ScaleType::kE8M0, Activations::kMxfp4},
    {"MXFP4A16", Levels::kE2M1, 4, 32, 1, ScaleType::kE8M0},
    {"MXFP8", Levels::kE4M3, 8, 32, 1, ScaleType::kE8M0, Activations::kMxfp8},
    {"MXFP8A16", Levels::kE4M3, 8, 32, 1, ScaleType::kE8M0},
    {"NF4", Levels::kNF4, 4, 64, 1, ScaleType::kF32, Activations::kNone, false, true},
    {"FP4", Levels::kFP4, 4, 64, 1, ScaleType::kF32, Activations::kNone, false, true},
    {"LLM_INT8", Levels::kInteger, 8, 0, 1, ScaleType::kF32, Activations::kInt8Token},
};

// bitsandbytes' llm_int8_threshold.
constexpr float kOutlierThreshold = 6.0f;

struct Alias {
  const char* name;
  const char* preset;
};
constexpr Alias kAliases[] = {{"INT8", "W8A8"}, {"INT8_STATIC", "W8A8_STATIC"}};

std::string upper(std::string_view name) {
  std::string out(name);
  for (char& c : out) {
    c = c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return out;
}

const Preset* find_preset(std::string_view name) {
  for (const Alias& a : kAliases) {
    if (name == a.name) name = a.preset;
  }
  const auto* found =
      std::ranges::find_if(kPresets, [&](const Preset& p) { return name == p.name; });
  return found != std::end(kPresets) ? found : nullptr;
}

Status unknown_scheme(std::string_view name) {
  std::vector<std::string> names = scheme_names();
  const std::string list = fmt::format("{}", fmt::join(names, ", "));
  for (const Alias& a : kAliases) names.emplace_back(a.name);
  const std::string close = nearest(upper(name), names);
  return invalid_argument(
      "scheme '{}' is unknown{}; there are {}, and with a suffix _G32 (any group), _CHANNEL, "
      "_ASYM, "
      "_PLAIN or _OUTLIERS",
      name, close.empty() ? "" : fmt::format(": did you mean {}?", close), list);
}

Status wrong_suffix(std::string_view name, const Preset& preset, std::string_view suffix) {
  return invalid_argument("scheme '{}': {} has no form with _{}", name, preset.name, suffix);
}

// The n of "G<n>".
std::optional<int64_t> group_suffix(std::string_view suffix) {
  int64_t n = 0;
  if (suffix.size() < 2 || suffix[0] != 'G') return std::nullopt;
  const char* const end = suffix.data() + suffix.size();
  const auto [stop, error] = std::from_chars(suffix.data() + 1, end, n);
  if (error != std::errc() || stop != end) return std::nullopt;
  return n;
}

Status apply_suffix(std::string_view name, const Preset& preset, std::string_view suffix,
                    Scheme& scheme) {
  const bool table = preset.levels == Levels::kNF4 || preset.levels == Levels::kFP4;
  if (suffix == "PLAIN" && table) {
    scheme.double_quantised = false;
    return {};
  }
  if (suffix == "ASYM" && preset.any_group && preset.activations == Activations::kNone) {
    scheme.symmetric = false;
    return {};
  }
  if (suffix == "OUTLIERS" && std::string_view(preset.name) == "LLM_INT8") {
    scheme.outlier_threshold = kOutlierThreshold;
    return {};
  }
  if (suffix == "CHANNEL" && preset.any_group) {
    scheme.group = 0;
    return {};
  }
  const std::optional<int64_t> n = group_suffix(suffix);
  if (!n || !preset.any_group) return wrong_suffix(name, preset, suffix);
  if (*n < 8 || *n > 65536 || *n % 8 != 0) {
    return invalid_argument("scheme '{}': a group has 8 to 65536 columns, a multiple of 8", name);
  }
  scheme.group = *n;
  return {};
}

}  // namespace

Result<Scheme> scheme_by_name(std::string_view name) {
  const std::string wanted = upper(name);
  std::string_view stem = wanted;
  std::vector<std::string_view> suffixes;
  const Preset* preset = find_preset(stem);
  while (preset == nullptr) {
    const size_t cut = stem.rfind('_');
    if (cut == std::string_view::npos) return unknown_scheme(name);
    suffixes.push_back(stem.substr(cut + 1));
    stem = stem.substr(0, cut);
    preset = find_preset(stem);
  }
  Scheme scheme{preset->name,  preset->levels,      preset->bits,
                preset->group, preset->group_rows,  true,
                preset->scale, preset->activations, preset->double_quantised};
  std::ranges::reverse(suffixes);
  for (const std::string_view suffix : suffixes) {
    FRESHET_RETURN_IF_ERROR(apply_suffix(name, *preset, suffix, scheme));
    if (suffix != "G128") scheme.name += fmt::format("_{}", suffix);
  }
  return scheme;
}

std::vector<std::string> scheme_names() {
  std::vector<std::string> names;
  for (const Preset& p : kPresets) names.emplace_back(p.name);
  return names;
}

bool needs_inputs(const Scheme& scheme) {
  return needs_input_scale(scheme) || scheme.outlier_threshold > 0.0f;
}

bool needs_input_scale(const Scheme& scheme) {
  return scheme.activations == Activations::kFp8Tensor ||
         scheme.activations == Activations::kInt8Tensor ||
         scheme.activations == Activations::kNvfp4;
}

}  // namespace freshet::quantizer
