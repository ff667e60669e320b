#include "models/mmproj.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace freshet::models {
namespace {

using loader::GgufFile;
using loader::TensorSource;

constexpr int64_t kMostSide = 1 << 16;  // of a picture, in pixels

struct Projector {
  std::string_view name;  // clip.projector_type
  std::string_view model_type;
};
constexpr Projector kProjectors[] = {
    {"mlp", "llava"},
    {"gemma3", "gemma3"},
    {"idefics3", "idefics3"},
    {"qwen2vl_merger", "qwen2_vl"},
    {"qwen2.5vl_merger", "qwen2_5_vl"},
    {"qwen3vl_merger", "qwen3_vl"},
};

// The tokens that stand for rows of pictures, by the names of published vocabularies.
constexpr std::string_view kImageTokens[] = {"<|image_pad|>", "<image_soft_token>", "<image>"};

// The shortest decimal of an F32, so that 1e-6 stays 1e-6; or the constant of CLIP's processors
// that it was rounded from.
double decimal(float v) {
  for (const double constant :
       {0.48145466, 0.4578275, 0.40821073, 0.26862954, 0.26130258, 0.27577711}) {
    if (static_cast<float>(constant) == v) return constant;
  }
  return std::stod(fmt::format("{}", v));
}

class Mmproj {
 public:
  explicit Mmproj(const loader::Checkpoint& checkpoint)
      : checkpoint_(checkpoint), gguf_(*checkpoint.tower()) {}

  Status read() {
    const auto name = text("clip.projector_type", text("clip.vision.projector_type", "mlp"));
    for (const Projector& known : kProjectors) {
      if (known.name == name) type_ = known.model_type;
    }
    if (type_.empty()) {
      std::string names;
      for (const Projector& known : kProjectors)
        names += (names.empty() ? "" : ", ") + std::string(known.name);
      return unsupported("{}: towers with the projector '{}' are not read; known are {}", path(),
                         name, names);
    }
    for (const auto& [key, out] : {std::pair{"image_size", &side_},
                                   {"patch_size", &patch_},
                                   {"embedding_length", &hidden_},
                                   {"block_count", &layers_}}) {
      const auto value = gguf_.get_int(vision(key));
      if (!value || *value < 1 || *value > kMostSide)
        return invalid_argument("{}: '{}' is missing or out of range", path(), vision(key));
      *out = *value;
    }
    scale_ = number("projector.scale_factor", type_ == "gemma3" ? 4 : 2);
    merge_ = number("spatial_merge_size", 2);
    return {};
  }

  Result<json::Value> config() const {
    json::Object whole;
    whole["model_type"] = type_;
    whole["vision_config"] = vision_config();
    FRESHET_ASSIGN_OR_RETURN(whole["image_token_id"], image_token());
    if (type_ == "llava") {
      // The file has no further layers than those that are used.
      whole["vision_feature_layer"] = layers_;
      whole["vision_feature_select_strategy"] = clip() ? "default" : "full";
      whole["multimodal_projector_bias"] = has("mm.0.bias");
    }
    if (type_ == "gemma3") whole["mm_tokens_per_image"] = square_rows();
    if (type_ == "idefics3") whole["scale_factor"] = scale_;
    return json::Value(std::move(whole));
  }

  json::Value preprocessor() const {
    json::Object p;
    const bool patches = type_.starts_with("qwen");
    p["image_processor_type"] = std::string(processor());
    for (const auto& [key, name] :
         {std::pair{"image_mean", "image_mean"}, {"image_std", "image_std"}}) {
      if (const auto values = gguf_.get_floats(vision(key)); values && values->size() == 3) {
        json::Array list;
        for (const float v : *values) list.emplace_back(decimal(v));
        p[name] = std::move(list);
      }
    }
    json::Object size;
    if (patches) {
      // The limits of the published processors: the files rarely have them.
      const bool three = type_ == "qwen3_vl";
      size["shortest_edge"] = number("image_min_pixels", three ? 65536 : 3136);
      size["longest_edge"] = number("image_max_pixels", three ? 16777216 : 12845056);
      p["patch_size"] = patch_;
      p["merge_size"] = merge_;
    } else if (type_ == "idefics3") {
      json::Object tile;
      tile["longest_edge"] = side_;
      p["max_image_size"] = std::move(tile);
      size["longest_edge"] = number("preproc_image_size", 4 * side_);
    } else if (clip()) {
      size["shortest_edge"] = side_;
      json::Object crop;
      crop["height"] = side_;
      crop["width"] = side_;
      p["crop_size"] = std::move(crop);
    } else {
      size["height"] = side_;
      size["width"] = side_;
    }
    p["size"] = std::move(size);
    return json::Value(std::move(p));
  }

 private:
  const std::string& path() const { return gguf_.file()->path(); }
  static std::string vision(std::string_view key) { return "clip.vision." + std::string(key); }
  std::string text(std::string_view key, const std::string& fallback) const {
    const auto value = gguf_.get_string(key);
    return value ? std::string(*value) : fallback;
  }
  int64_t number(std::string_view key, int64_t fallback) const {
    return gguf_.get_int(vision(key)).value_or(fallback);
  }
  bool has(std::string_view tensor) const { return gguf_.find_tensor(tensor) != nullptr; }
  bool clip() const { return has("v.class_embd"); }
  int64_t square_rows() const {
    const int64_t in_row = side_ / patch_ / std::max<int64_t>(1, scale_);
    return in_row * in_row;
  }

  std::string_view processor() const {
    if (type_ == "gemma3") return "Gemma3ImageProcessor";
    if (type_ == "idefics3") return "Idefics3ImageProcessor";
    if (type_ == "qwen3_vl") return "Qwen3VLImageProcessor";
    if (type_.starts_with("qwen")) return "Qwen2VLImageProcessor";
    return clip() ? "CLIPImageProcessor" : "SiglipImageProcessor";
  }

  // What feed_forward_length says is another number in some files.
  int64_t mlp_width() const {
    const TensorSource* const up = gguf_.find_tensor("v.blk.0.ffn_up.weight");
    if (up == nullptr || up->shape.size() != 2) return number("feed_forward_length", 1);
    return up->shape[0] == hidden_ ? up->shape[1] : up->shape[0];
  }

  json::Value vision_config() const {
    json::Object v;
    v["model_type"] = clip() ? "clip_vision_model" : "siglip_vision_model";
    v["embed_dim"] = hidden_;
    v["num_hidden_layers"] = layers_;
    v["num_attention_heads"] = number("attention.head_count", 16);
    v["intermediate_size"] = mlp_width();
    v["image_size"] = side_;
    v["patch_size"] = patch_;
    v["spatial_merge_size"] = merge_;
    if (const auto eps = gguf_.get_f32(vision("attention.layer_norm_epsilon")))
      v["layer_norm_eps"] = decimal(*eps);
    v["hidden_act"] = activation();
    if (type_ == "qwen2_5_vl") windows(v);
    if (type_ == "qwen3_vl") deep_layers(v);
    return json::Value(std::move(v));
  }

  const char* activation() const {
    if (gguf_.get_bool("clip.use_silu").value_or(false)) return "silu";
    if (!gguf_.get_bool("clip.use_gelu").value_or(false)) return "quick_gelu";
    return clip() ? "gelu" : "gelu_pytorch_tanh";
  }

  // Each n-th layer sees the whole picture, or the layers of a list do.
  void windows(json::Object& v) const {
    json::Array full;
    if (const auto list = gguf_.get_ints(vision("wa_layer_indexes"))) {
      for (const int64_t layer : *list) full.emplace_back(layer);
    } else {
      const int64_t every = std::max<int64_t>(1, number("n_wa_pattern", 8));
      for (int64_t layer = every - 1; layer < layers_; layer += every) full.emplace_back(layer);
    }
    v["fullatt_block_indexes"] = std::move(full);
    v["window_size"] = number("window_size", 112);
  }

  void deep_layers(json::Object& v) const {
    json::Array deep;
    const auto flags = gguf_.get_ints(vision("is_deepstack_layers"));
    for (size_t layer = 0; flags && layer < flags->size(); ++layer) {
      if ((*flags)[layer] != 0) deep.emplace_back(static_cast<int64_t>(layer));
    }
    v["deepstack_visual_indexes"] = std::move(deep);
    const TensorSource* const positions = gguf_.find_tensor("v.position_embd.weight");
    if (positions != nullptr && !positions->shape.empty())
      v["num_position_embeddings"] = positions->shape.front();
  }

  // The unknown token, which no text contains, stands in where the vocabulary has none.
  Result<json::Value> image_token() const {
    const GgufFile& model = *checkpoint_.gguf();
    const auto* const tokens = model.get_strings("tokenizer.ggml.tokens");
    for (const std::string_view name : kImageTokens) {
      if (tokens == nullptr) break;
      const auto found = std::ranges::find(*tokens, name);
      if (found != tokens->end()) return json::Value(static_cast<int64_t>(found - tokens->begin()));
    }
    if (const auto unknown = model.get_int("tokenizer.ggml.unknown_token_id"))
      return json::Value(*unknown);
    return invalid_argument(
        "{} has no token for pictures in its vocabulary: it does not belong to {}",
        checkpoint_.path(), path());
  }

  const loader::Checkpoint& checkpoint_;
  const GgufFile& gguf_;
  std::string_view type_;
  int64_t side_ = 0, patch_ = 0, hidden_ = 0, layers_ = 0, scale_ = 2, merge_ = 2;
};

}  // namespace

Result<json::Value> whole_config(const loader::Checkpoint& checkpoint) {
  if (checkpoint.tower() == nullptr) return checkpoint.config();
  Mmproj file(checkpoint);
  FRESHET_RETURN_IF_ERROR(file.read());
  return file.config();
}

Result<json::Value> mmproj_preprocessor(const loader::Checkpoint& checkpoint) {
  Mmproj file(checkpoint);
  FRESHET_RETURN_IF_ERROR(file.read());
  return file.preprocessor();
}

}  // namespace freshet::models
