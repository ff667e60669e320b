#include "media/image_settings.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <string_view>

#include <fmt/ranges.h>

namespace freshet::media {
namespace {

constexpr std::array<double, 3> kClipMean{0.48145466, 0.4578275, 0.40821073};
constexpr std::array<double, 3> kClipDeviation{0.26862954, 0.26130258, 0.27577711};
constexpr std::array<double, 3> kHalf{0.5, 0.5, 0.5};
constexpr int64_t kMaxSide = 1 << 14;
constexpr double kMostReal = 1e6;

// A member that is present and not null.
const json::Value* member(const json::Value& object, std::string_view key) {
  const json::Value* value = object.find(key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

// Reads fields and keeps the first error.
class Fields {
 public:
  explicit Fields(const json::Value& object) : object_(object) {}
  const Status& status() const { return status_; }
  bool has(std::string_view key) const { return member(object_, key) != nullptr; }

  void flag(std::string_view key, bool& out) {
    const json::Value* value = member(object_, key);
    if (value == nullptr) return;
    if (!value->is_bool()) return fail(key, "true or false");
    out = value->as_bool();
  }

  template <class T>
  void number(std::string_view key, T& out, int64_t max) {
    if (const json::Value* value = member(object_, key)) number_in(*value, key, out, max);
  }

  void real(std::string_view key, double& out) {
    const json::Value* value = member(object_, key);
    if (value == nullptr) return;
    if (!value->is_number()) return fail(key, "a number");
    out = value->as_double();
    if (!(std::abs(out) <= kMostReal)) fail(key, "a number of at most a million");
  }

  void channels(std::string_view key, std::array<double, 3>& out, bool positive) {
    const json::Value* value = member(object_, key);
    if (value == nullptr) return;
    if (value->is_number()) {
      out.fill(value->as_double());
    } else {
      if (!value->is_array() || value->as_array().size() != 3) return fail(key, "three numbers");
      for (size_t c = 0; c < 3; ++c) {
        if (!value->as_array()[c].is_number()) return fail(key, "three numbers");
        out[c] = value->as_array()[c].as_double();
      }
    }
    for (const double v : out) {
      if (positive && !(v > 1e-6)) return fail(key, "positive numbers");
      if (!(std::abs(v) <= kMostReal)) return fail(key, "numbers of at most a million");
    }
  }

  // {"height", "width"}, {"shortest_edge"}, {"longest_edge"} or a number, which is `plain`.
  void size(std::string_view key, ImageSettings& out, int ImageSettings::* plain) {
    const json::Value* value = member(object_, key);
    if (value == nullptr) return;
    out.height = out.width = out.shortest_edge = out.longest_edge = 0;
    if (value->is_number()) return number_in(*value, key, out.*plain, kMaxSide);
    if (!value->is_object()) return fail(key, "a number or an object");
    Fields inner(*value);
    inner.number("height", out.height, kMaxSide);
    inner.number("width", out.width, kMaxSide);
    inner.number("shortest_edge", out.shortest_edge, kMaxSide);
    inner.number("longest_edge", out.longest_edge, kMaxSide);
    keep(key, inner.status());
  }

  void crop_size(ImageSettings& out) {
    const json::Value* value = member(object_, "crop_size");
    if (value == nullptr) return;
    if (value->is_number()) {
      number_in(*value, "crop_size", out.crop_height, kMaxSide);
      out.crop_width = out.crop_height;
      return;
    }
    Fields inner(*value);
    inner.number("height", out.crop_height, kMaxSide);
    inner.number("width", out.crop_width, kMaxSide);
    keep("crop_size", inner.status());
  }

  void filter(Filter& out) {
    const json::Value* value = member(object_, "resample");
    if (value == nullptr) return;
    const auto number = value->is_number() ? value->as_int64() : std::nullopt;
    const auto known = number ? filter_of(*number) : std::nullopt;
    if (!known) return fail("resample", "a filter of Pillow (0 to 5)");
    out = *known;
  }

  void grids(std::vector<std::array<int, 2>>& out) {
    const json::Value* value = member(object_, "image_grid_pinpoints");
    if (value == nullptr) return;
    constexpr const char* kWanted = "a list of [height, width]";
    if (!value->is_array() || value->as_array().empty() || value->as_array().size() > 256) {
      return fail("image_grid_pinpoints", kWanted);
    }
    out.clear();
    for (const json::Value& pair : value->as_array()) {
      if (!pair.is_array() || pair.as_array().size() != 2) {
        return fail("image_grid_pinpoints", kWanted);
      }
      std::array<int, 2> grid{};
      for (size_t i = 0; i < 2; ++i) {
        number_in(pair.as_array()[i], "image_grid_pinpoints", grid[i], kMaxSide);
      }
      out.push_back(grid);
    }
  }

 private:
  template <class T>
  void number_in(const json::Value& value, std::string_view key, T& out, int64_t max) {
    const auto number = value.is_number() ? value.as_int64() : std::nullopt;
    if (!number || *number < 1 || *number > max) {
      return fail(key, fmt::format("an integer from 1 to {}", max));
    }
    out = static_cast<T>(*number);
  }
  void fail(std::string_view key, std::string_view wanted) {
    if (status_.ok()) status_ = invalid_argument("\"{}\" must be {}", key, wanted);
  }
  void keep(std::string_view key, const Status& status) {
    if (status_.ok()) status_ = status.with_context(key);
  }

  const json::Value& object_;
  Status status_;
};

struct ProcessorClass {
  std::string_view name;
  ImageFamily family;
  Filter filter;
  const std::array<double, 3>* mean;
  const std::array<double, 3>* deviation;
  bool center_crop;
};
constexpr ProcessorClass kClasses[] = {
    {"CLIP", ImageFamily::kSingle, Filter::kBicubic, &kClipMean, &kClipDeviation, true},
    {"Llava", ImageFamily::kSingle, Filter::kBicubic, &kClipMean, &kClipDeviation, true},
    {"Siglip", ImageFamily::kSingle, Filter::kBicubic, &kHalf, &kHalf, false},
    {"Gemma3", ImageFamily::kSingle, Filter::kBilinear, &kHalf, &kHalf, false},
    {"LlavaNext", ImageFamily::kLlavaNext, Filter::kBicubic, &kClipMean, &kClipDeviation, true},
    {"Qwen2VL", ImageFamily::kQwen, Filter::kBicubic, &kClipMean, &kClipDeviation, false},
    {"Qwen2_5_VL", ImageFamily::kQwen, Filter::kBicubic, &kClipMean, &kClipDeviation, false},
    {"Qwen3VL", ImageFamily::kQwen, Filter::kBicubic, &kHalf, &kHalf, false},
    {"Idefics3", ImageFamily::kIdefics3, Filter::kLanczos, &kHalf, &kHalf, false},
    {"SmolVLM", ImageFamily::kIdefics3, Filter::kLanczos, &kHalf, &kHalf, false},
    {"Mllama", ImageFamily::kMllama, Filter::kBilinear, &kHalf, &kHalf, false},
    {"Pixtral", ImageFamily::kPixtral, Filter::kBicubic, &kClipMean, &kClipDeviation, false},
};

struct ModelClass {
  std::string_view model_type;
  std::string_view processor;  // if the files do not name one
  const char* marker;
};
constexpr ModelClass kModels[] = {
    {"llava", "CLIP", "<image>"},
    {"llava_next", "LlavaNext", "<image>"},
    {"gemma3", "Gemma3", "<start_of_image>"},
    {"qwen2_vl", "Qwen2VL", "<|image_pad|>"},
    {"qwen2_5_vl", "Qwen2VL", "<|image_pad|>"},
    {"qwen3_vl", "Qwen3VL", "<|image_pad|>"},
    {"qwen3_vl_moe", "Qwen3VL", "<|image_pad|>"},
    {"qwen3_5", "Qwen3VL", "<|image_pad|>"},
    {"qwen3_5_moe", "Qwen3VL", "<|image_pad|>"},
    {"mistral3", "Pixtral", "[IMG]"},
    {"idefics3", "Idefics3", "<image>"},
    {"smolvlm", "SmolVLM", "<image>"},
    {"mllama", "Mllama", "<|image|>"},
};

// "CLIPImageProcessorFast" is "CLIP".
std::string_view class_of(std::string_view type) {
  for (const std::string_view end : {"Fast", "Pil", "ImageProcessor", "FeatureExtractor"}) {
    if (type.ends_with(end)) type.remove_suffix(end.size());
  }
  return type;
}

Result<const ProcessorClass*> find_class(std::string_view name) {
  for (const ProcessorClass& known : kClasses) {
    if (known.name == name) return &known;
  }
  std::vector<std::string_view> names;
  for (const ProcessorClass& known : kClasses) names.push_back(known.name);
  return unsupported("image processor \"{}\" is not supported; known are {}", name,
                     fmt::join(names, ", "));
}

// The squares that a picture becomes have sides of image_size / patch_size patches.
Status count_tokens(const json::Value& processor, const json::Value& config, ImageSettings& out) {
  static const json::Value kNothing{json::Object()};
  const json::Value* vision = member(config, "vision_config");
  if (vision == nullptr) vision = &kNothing;
  Fields tower(*vision);
  Fields model(config);
  Fields words(processor);
  int side = out.crop_height > 0 ? out.crop_height : out.height;
  int patch = out.family == ImageFamily::kIdefics3 ? 32 : 14;
  tower.number("patch_size", patch, kMaxSide);
  const std::string type = config.get_string("model_type", "");
  if (out.family == ImageFamily::kIdefics3) {
    int scale = 2;
    side = out.tile_side;
    model.number("scale_factor", scale, 64);
    out.square_rows = (side / patch / scale) * (side / patch / scale);
    words.number("image_seq_len", out.square_rows, kMaxSide);
  } else if (out.family == ImageFamily::kPixtral) {
    tower.number("patch_size", out.patch_size, 1024);
    if (type == "mistral3") out.merge_size = 2;
    model.number("spatial_merge_size", out.merge_size, 16);
    const int64_t merged = int64_t{out.patch_size} * out.merge_size;
    const int64_t longest = std::max({out.longest_edge, out.height, out.width});
    const int64_t most = (longest + merged - 1) / merged * merged;
    out.max_pixels = most * most;
  } else if (type == "gemma3") {
    out.square_rows = 256;
    model.number("mm_tokens_per_image", out.square_rows, kMaxSide);
    words.number("image_seq_length", out.square_rows, kMaxSide);
  } else if (out.family == ImageFamily::kSingle || out.family == ImageFamily::kLlavaNext) {
    out.square_patches = side / patch;
    // A tower of CLIP has one row more, the class, which the strategy "default" drops
    // whatever the tower.
    const bool clip = vision->get_string("model_type", "clip_vision_model").starts_with("clip");
    const std::string strategy = config.get_string("vision_feature_select_strategy", "default");
    out.square_rows = out.square_patches * out.square_patches + (clip ? 1 : 0);
    if (strategy == "default") --out.square_rows;
  }
  FRESHET_RETURN_IF_ERROR(tower.status().with_context("vision_config"));
  FRESHET_RETURN_IF_ERROR(model.status());
  FRESHET_RETURN_IF_ERROR(words.status());
  const bool counted = out.family == ImageFamily::kQwen || out.family == ImageFamily::kMllama ||
                       out.family == ImageFamily::kPixtral;
  if (!counted && out.square_rows < 1) {
    return invalid_argument("a square of {} pixels has no image tokens at patches of {}", side,
                            patch);
  }
  return {};
}

// Sizes that the steps need.
Status check_sizes(const ImageSettings& s) {
  const bool both = s.height > 0 && s.width > 0;
  switch (s.family) {
    case ImageFamily::kSingle:
      if (s.resize && !both && s.shortest_edge == 0) {
        return invalid_argument("\"size\" must give height and width, or shortest_edge");
      }
      break;
    case ImageFamily::kLlavaNext:
      if (!both && s.shortest_edge == 0) return invalid_argument("\"size\" must give a side");
      break;
    case ImageFamily::kQwen:
      break;
    case ImageFamily::kIdefics3:
      if (s.resize && !both && s.longest_edge == 0) {
        return invalid_argument("\"size\" must give height and width, or longest_edge");
      }
      break;
    case ImageFamily::kPixtral:
      if ((!both && s.longest_edge == 0) || !s.resize || s.center_crop)
        return invalid_argument("\"size\" must give longest_edge, to resize to");
      break;
    case ImageFamily::kMllama:
      if (!both || s.height != s.width || !s.resize) {
        return invalid_argument("\"size\" must give an equal height and width, to resize to");
      }
      break;
  }
  if (s.center_crop && (s.crop_height == 0 || s.crop_width == 0)) {
    return invalid_argument("\"crop_size\" must give height and width");
  }
  return {};
}

Status read_family(Fields& fields, const json::Value& object, ImageSettings& out) {
  switch (out.family) {
    case ImageFamily::kSingle:
    case ImageFamily::kLlavaNext:
      if (out.center_crop)
        out.shortest_edge = out.crop_height = out.crop_width = 224;
      else
        out.height = out.width = 224;
      fields.size("size", out,
                  out.center_crop ? &ImageSettings::shortest_edge : &ImageSettings::height);
      if (out.height > 0 && out.width == 0) out.width = out.height;
      fields.flag("do_center_crop", out.center_crop);
      fields.crop_size(out);
      out.grids = {{336, 672}, {672, 336}, {672, 672}, {1008, 336}, {336, 1008}};
      fields.grids(out.grids);
      break;
    case ImageFamily::kQwen: {
      constexpr int64_t kMost = int64_t{1} << 28;
      if (const json::Value* size = member(object, "size")) {
        Fields inner(*size);
        inner.number("shortest_edge", out.min_pixels, kMost);
        inner.number("longest_edge", out.max_pixels, kMost);
        inner.number("min_pixels", out.min_pixels, kMost);
        inner.number("max_pixels", out.max_pixels, kMost);
        FRESHET_RETURN_IF_ERROR(inner.status().with_context("size"));
      }
      fields.number("min_pixels", out.min_pixels, kMost);
      fields.number("max_pixels", out.max_pixels, kMost);
      fields.number("patch_size", out.patch_size, 1024);
      fields.number("temporal_patch_size", out.temporal_patch_size, 16);
      fields.number("merge_size", out.merge_size, 16);
      break;
    }
    case ImageFamily::kIdefics3: {
      out.longest_edge = 4 * 364;
      fields.size("size", out, &ImageSettings::longest_edge);
      fields.flag("do_image_splitting", out.split);
      if (const json::Value* tile = member(object, "max_image_size")) {
        Fields inner(*tile);
        inner.number("longest_edge", out.tile_side, kMaxSide);
        FRESHET_RETURN_IF_ERROR(inner.status().with_context("max_image_size"));
      }
      break;
    }
    case ImageFamily::kMllama:
      out.height = out.width = 224;
      fields.size("size", out, &ImageSettings::height);
      fields.number("max_image_tiles", out.max_tiles, 64);
      break;
    case ImageFamily::kPixtral:
      out.longest_edge = 1024;
      out.patch_size = 16;
      out.temporal_patch_size = out.merge_size = 1;
      fields.size("size", out, &ImageSettings::longest_edge);
      break;
  }
  return fields.status();
}

void name_tokens(std::string_view model_type, ImageSettings& out) {
  for (const ModelClass& model : kModels) {
    if (model.model_type == model_type) out.marker = model.marker;
  }
  if (out.family == ImageFamily::kPixtral) out.marker = "[IMG]";
  if (model_type == "gemma3") {
    out.before = "\n\n<start_of_image>";
    out.after = "<end_of_image>\n\n";
  }
}

Result<json::Value> optional_file(const std::string& path) {
  if (!std::filesystem::exists(path)) return json::Value(json::Object());
  return json::parse_file(path);
}

}  // namespace

std::string ImageSettings::fingerprint() const {
  std::string text =
      fmt::format("{} {} {}{}{}{}{} {} {} {} {} {} {} {} {} {}", static_cast<int>(family),
                  static_cast<int>(filter), resize, center_crop, pad_to_square, rescale, normalize,
                  rescale_factor, fmt::join(mean, ","), fmt::join(deviation, ","), height, width,
                  shortest_edge, longest_edge, crop_height, crop_width);
  text += fmt::format(" {} {} {} {} {} {} {} {} {} {}", min_pixels, max_pixels, patch_size,
                      temporal_patch_size, merge_size, split, tile_side, max_tiles, square_rows,
                      square_patches);
  for (const auto& grid : grids) text += fmt::format(" {}x{}", grid[0], grid[1]);
  return text;
}

Result<ImageSettings> image_settings(const json::Value& preprocessor, const json::Value& processor,
                                     const json::Value& config) {
  const json::Value* object = &preprocessor;
  if (const json::Value* nested = member(processor, "image_processor")) {
    if (!preprocessor.is_object() || preprocessor.as_object().empty()) object = nested;
  }
  const std::string model_type = config.get_string("model_type", "");
  std::string type = object->get_string("image_processor_type", "");
  if (type.empty()) type = object->get_string("feature_extractor_type", "");
  if (type.empty()) {
    for (const ModelClass& model : kModels) {
      if (model.model_type == model_type) type = model.processor;
    }
  }
  if (type.empty()) {
    return invalid_argument(
        "\"image_processor_type\" is missing, and models of type \"{}\" have no "
        "default",
        model_type);
  }
  FRESHET_ASSIGN_OR_RETURN(const ProcessorClass* known, find_class(class_of(type)));
  ImageSettings out;
  out.family = known->family;
  out.filter = known->filter;
  out.mean = *known->mean;
  out.deviation = *known->deviation;
  out.center_crop = known->center_crop;
  Fields fields(*object);
  FRESHET_RETURN_IF_ERROR(read_family(fields, *object, out));
  fields.filter(out.filter);
  fields.flag("do_resize", out.resize);
  fields.flag("do_rescale", out.rescale);
  fields.flag("do_normalize", out.normalize);
  if (known->name == "Llava") fields.flag("do_pad", out.pad_to_square);
  fields.real("rescale_factor", out.rescale_factor);
  fields.channels("image_mean", out.mean, false);
  fields.channels("image_std", out.deviation, true);
  FRESHET_RETURN_IF_ERROR(fields.status());
  if (object->get_bool("do_pan_and_scan", false)) {
    return unsupported("\"do_pan_and_scan\" is not supported; set it to false");
  }
  FRESHET_RETURN_IF_ERROR(check_sizes(out));
  FRESHET_RETURN_IF_ERROR(count_tokens(processor, config, out));
  name_tokens(model_type, out);
  return out;
}

Result<ImageSettings> load_image_settings(const std::string& folder) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value preprocessor,
                           optional_file(folder + "/preprocessor_config.json"));
  FRESHET_ASSIGN_OR_RETURN(const json::Value processor,
                           optional_file(folder + "/processor_config.json"));
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, json::parse_file(folder + "/config.json"));
  auto settings = image_settings(preprocessor, processor, config);
  if (!settings.ok()) return settings.status().with_context(folder + "/preprocessor_config.json");
  return settings;
}

}  // namespace freshet::media
