#include "tests/mmproj_files.h"

#include <algorithm>
#include <regex>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "loader/checkpoint.h"
#include "loader/gguf_writer.h"
#include "quantizer/gguf_export.h"

namespace freshet {
namespace {

using loader::TensorSource;

struct Renamed {
  const char* from;  // a regular expression, of which $1 is the layer
  const char* to;
};
constexpr Renamed kNames[] = {
    {R"(.*embeddings\.class_embedding)", "v.class_embd"},
    {R"(.*(embeddings\.patch_embedding|patch_embed\.proj)\.(\w+))", "v.patch_embd.$2"},
    {R"(.*(embeddings\.position_embedding|pos_embed)\.weight)", "v.position_embd.weight"},
    {R"(.*pre_layrnorm\.(\w+))", "v.pre_ln.$1"},
    {R"(.*(post_layernorm|merger\.ln_q|merger\.norm)\.(\w+))", "v.post_ln.$2"},
    {R"(.*\.(\d+)\.(layer_norm1|norm1)\.(\w+))", "v.blk.$1.ln1.$3"},
    {R"(.*\.(\d+)\.(layer_norm2|norm2)\.(\w+))", "v.blk.$1.ln2.$3"},
    {R"(.*\.(\d+)\.self_attn\.([qkv])_proj\.(\w+))", "v.blk.$1.attn_$2.$3"},
    {R"(.*\.(\d+)\.attn\.qkv\.(\w+))", "v.blk.$1.attn_qkv.$2"},
    {R"(.*\.(\d+)\.(self_attn\.out_proj|attn\.proj)\.(\w+))", "v.blk.$1.attn_out.$3"},
    {R"(.*\.(\d+)\.mlp\.gate_proj\.(\w+))", "v.blk.$1.ffn_gate.$2"},
    {R"(.*\.(\d+)\.mlp\.(fc1|up_proj|linear_fc1)\.(\w+))", "v.blk.$1.ffn_up.$3"},
    {R"(.*\.(\d+)\.mlp\.(fc2|down_proj|linear_fc2)\.(\w+))", "v.blk.$1.ffn_down.$3"},
    {R"(.*(projector\.linear_1|merger\.mlp\.0|merger\.linear_fc1)\.(\w+))", "mm.0.$2"},
    {R"(.*(projector\.linear_2|merger\.mlp\.2|merger\.linear_fc2)\.(\w+))", "mm.2.$2"},
    {R"(.*mm_soft_emb_norm\.weight)", "mm.soft_emb_norm.weight"},
    {R"(.*mm_input_projection_weight)", "mm.input_projection.weight"},
    {R"(.*modality_projection\.proj\.weight)", "mm.model.fc.weight"},
};

// "" for tensors that are not of the tower, or that the converter leaves out.
std::string renamed(const std::string& name, const json::Value& vision) {
  static const std::regex deep(R"(.*deepstack_merger_list\.(\d+)\.(norm|linear_fc)(\d?)\.(\w+))");
  std::smatch found;
  if (std::regex_match(name, found, deep)) {
    const auto& layers = vision.find("deepstack_visual_indexes")->as_array();
    return fmt::format("v.deepstack.{}.{}{}.{}",
                       layers[static_cast<size_t>(std::stoi(found[1]))].as_int64().value(),
                       found[2] == "norm" ? "norm" : "fc", found[3].str(), found[4].str());
  }
  const bool tower = name.find("vis") != name.npos || name.find("projector") != name.npos ||
                     name.find("connector") != name.npos;
  if (!tower || name.find(".head.") != name.npos) return {};
  for (const Renamed& r : kNames) {
    const std::regex from(r.from);
    if (std::regex_match(name, from)) return std::regex_replace(name, from, r.to);
  }
  FRESHET_CHECK(false, "no name for {}", name);
}

struct Written {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;
};

std::vector<float> numbers_of(const TensorSource& t) {
  std::vector<float> values(static_cast<size_t>(t.elements()));
  quant::info(*t.format).decode(t.data, values.data(), t.elements());
  return values;
}

// Every `count`-th of the slices of `length` numbers, from slice `first` on.
std::vector<float> slices(const std::vector<float>& values, size_t length, size_t first,
                          size_t count) {
  std::vector<float> out;
  for (size_t at = first * length; at < values.size(); at += count * length)
    out.insert(out.end(), values.begin() + static_cast<std::ptrdiff_t>(at),
               values.begin() + static_cast<std::ptrdiff_t>(at + length));
  return out;
}

void add_tensor(const TensorSource& t, const std::string& name, std::vector<Written>& out) {
  std::vector<float> values = numbers_of(t);
  std::vector<int64_t> shape = t.shape;
  if (shape.size() == 5) {  // two frames of a convolution
    const auto length = static_cast<size_t>(shape[3] * shape[4]);
    shape.erase(shape.begin() + 2);
    out.push_back({name, shape, slices(values, length, 0, 2)});
    out.push_back({name + ".1", shape, slices(values, length, 1, 2)});
    return;
  }
  if (const size_t at = name.find("attn_qkv"); at != name.npos) {
    shape[0] /= 3;
    for (size_t part = 0; part < 3; ++part) {
      std::string own = name;
      own.replace(at, 8, fmt::format("attn_{}", "qkv"[part]));
      out.push_back({own, shape, slices(values, values.size() / 3, part, 3)});
    }
    return;
  }
  if (name == "mm.soft_emb_norm.weight") {
    for (float& v : values) v += 1;
  }
  out.push_back({name, shape, std::move(values)});
}

void swap_mlp_names(std::vector<Written>& tensors) {
  for (Written& t : tensors) {
    const size_t up = t.name.find("ffn_up"), down = t.name.find("ffn_down");
    if (up != t.name.npos) {
      t.name.replace(up, 6, "ffn_down");
    } else if (down != t.name.npos) {
      t.name.replace(down, 8, "ffn_up");
    }
  }
}

std::vector<float> floats_of(const json::Value& list) {
  std::vector<float> out;
  for (const json::Value& v : list.as_array()) out.push_back(static_cast<float>(v.as_double()));
  return out;
}

void add_windows(const json::Value& vision, loader::GgufWriter& out) {
  const json::Array& full = vision.find("fullatt_block_indexes")->as_array();
  out.add_u32("clip.vision.n_wa_pattern",
              static_cast<uint32_t>(full.front().as_int64().value() + 1));
  out.add_u32("clip.vision.window_size", static_cast<uint32_t>(vision.get_int("window_size", 112)));
  out.add_bool("clip.use_silu", true);
}

void add_deep_layers(const json::Value& vision, uint32_t layers, loader::GgufWriter& out) {
  std::vector<uint8_t> flags(layers, 0);
  for (const json::Value& v : vision.find("deepstack_visual_indexes")->as_array())
    flags[static_cast<size_t>(v.as_int64().value())] = 1;
  loader::GgufValue value;
  value.type = loader::GgufType::kBool;
  value.is_array = true;
  value.count = flags.size();
  value.raw = flags;
  out.add_value("clip.vision.is_deepstack_layers", value);
}

void add_keys(const json::Value& config, const json::Value& processor, loader::GgufWriter& out) {
  const json::Value& vision = *config.find("vision_config");
  const std::string type = config.get_string("model_type", "");
  const auto u32 = [&](const char* key, int64_t v) {
    out.add_u32(std::string("clip.vision.") + key, static_cast<uint32_t>(v));
  };
  const auto get = [&](const char* a, const char* b, int64_t fallback) {
    return vision.get_int(a, vision.get_int(b, fallback));
  };
  int64_t layers = get("num_hidden_layers", "depth", 0);
  // Layers that are not used are not in the file.
  if (type == "llava") layers += 1 + config.get_int("vision_feature_layer", -2);
  const int64_t patch = vision.get_int("patch_size", 14);
  out.add_string("general.architecture", "clip");
  out.add_bool("clip.has_vision_encoder", true);
  u32("image_size", vision.get_int("image_size", 560));
  u32("patch_size", patch);
  u32("embedding_length", get("embed_dim", "hidden_size", 0));
  u32("feed_forward_length", vision.get_int("intermediate_size", 0));
  u32("block_count", layers);
  u32("attention.head_count", get("num_attention_heads", "num_heads", 0));
  out.add_f32("clip.vision.attention.layer_norm_epsilon",
              static_cast<float>(vision.get_double("layer_norm_eps", 1e-6)));
  out.add_f32s("clip.vision.image_mean", floats_of(*processor.find("image_mean")));
  out.add_f32s("clip.vision.image_std", floats_of(*processor.find("image_std")));
  const std::pair<const char*, const char*> kProjectors[] = {{"llava", "mlp"},
                                                             {"gemma3", "gemma3"},
                                                             {"idefics3", "idefics3"},
                                                             {"qwen2_vl", "qwen2vl_merger"},
                                                             {"qwen3_vl", "qwen3vl_merger"},
                                                             {"qwen2_5_vl", "qwen2.5vl_merger"}};
  for (const auto& [model, projector] : kProjectors) {
    if (model == type) out.add_string("clip.projector_type", projector);
  }
  if (type == "gemma3" || type == "idefics3" || type == "qwen3_vl")
    out.add_bool("clip.use_gelu", true);
  const json::Value& size = *processor.find("size");
  if (type == "gemma3") {
    int64_t side = 1;
    while (side * side < config.get_int("mm_tokens_per_image", 256)) ++side;
    u32("projector.scale_factor", vision.get_int("image_size", 0) / patch / side);
  } else if (type == "idefics3") {
    u32("projector.scale_factor", config.get_int("scale_factor", 2));
    u32("preproc_image_size", size.get_int("longest_edge", 0));
  } else if (type.starts_with("qwen")) {
    u32("spatial_merge_size", vision.get_int("spatial_merge_size", 2));
    u32("image_min_pixels", size.get_int("shortest_edge", 0));
    u32("image_max_pixels", size.get_int("longest_edge", 0));
  }
  if (type == "qwen2_5_vl") add_windows(vision, out);
  if (type == "qwen3_vl") add_deep_layers(vision, static_cast<uint32_t>(layers), out);
}

Status write_tower(const loader::Checkpoint& checkpoint, const json::Value& processor, bool swapped,
                   const std::string& path) {
  const json::Value& vision = *checkpoint.config().find("vision_config");
  std::vector<Written> tensors;
  for (const TensorSource& t : checkpoint.tensors()) {
    const std::string name = renamed(t.name, vision);
    if (!name.empty()) add_tensor(t, name, tensors);
  }
  if (swapped) swap_mlp_names(tensors);
  loader::GgufWriter out;
  add_keys(checkpoint.config(), processor, out);
  for (const Written& t : tensors)
    FRESHET_RETURN_IF_ERROR(out.add_tensor(t.name, quant::Format::kF32, t.shape));
  FRESHET_RETURN_IF_ERROR(out.open(path));
  for (const Written& t : tensors) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(t.values.data());
    FRESHET_RETURN_IF_ERROR(out.write({bytes, t.values.size() * sizeof(float)}));
  }
  return out.close();
}

// The folder has no vocabulary, so that the converted file has none.
// `local`: Gemma 3's local layers, which published models have in a fixed pattern.
Status add_tokens(const std::string& from, const std::vector<std::string>& tokens,
                  const std::vector<uint8_t>& local, const std::string& to) {
  FRESHET_ASSIGN_OR_RETURN(const auto file, loader::GgufFile::open(from));
  loader::GgufWriter out;
  for (const auto& [key, value] : file.metadata()) out.add_value(key, value);
  out.add_strings("tokenizer.ggml.tokens", tokens);
  if (!local.empty()) {
    loader::GgufValue value;
    value.type = loader::GgufType::kBool;
    value.is_array = true;
    value.count = local.size();
    value.raw = local;
    out.add_value("gemma3.attention.sliding_window_pattern", value);
  }
  for (const TensorSource& t : file.tensors())
    FRESHET_RETURN_IF_ERROR(out.add_tensor(t.name, *t.format, t.shape));
  FRESHET_RETURN_IF_ERROR(out.open(to));
  for (const TensorSource& t : file.tensors())
    FRESHET_RETURN_IF_ERROR(out.write({t.data, t.bytes}));
  return out.close();
}

}  // namespace

Result<MmprojFiles> write_mmproj_files(const std::string& folder, const std::string& out,
                                       bool swapped) {
  const MmprojFiles files{out + "/model.gguf", out + "/mmproj-model.gguf"};
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(folder));
  FRESHET_ASSIGN_OR_RETURN(const json::Value processor,
                           json::parse_file(folder + "/preprocessor_config.json"));
  const json::Value& config = checkpoint.config();
  const json::Value* const text = config.find("text_config");
  const int64_t image = config.get_int("image_token_id", config.get_int("image_token_index", -1));
  const int64_t vocabulary = text->get_int("vocab_size", 0);
  std::vector<std::string> tokens;
  const std::string type = config.get_string("model_type", "");
  for (int64_t id = 0; id < vocabulary; ++id) tokens.push_back(fmt::format("t{}", id));
  tokens.at(static_cast<size_t>(image)) = type.starts_with("qwen") ? "<|image_pad|>"
                                          : type == "gemma3"       ? "<image_soft_token>"
                                                                   : "<image>";
  std::vector<uint8_t> local;
  if (type == "gemma3") {
    for (const json::Value& layer : text->find("layer_types")->as_array())
      local.push_back(layer.as_string() == "sliding_attention" ? 1 : 0);
  }
  quantizer::ExportOptions options;
  options.output = out + "/text.gguf";
  FRESHET_ASSIGN_OR_RETURN(options.recipe, quantizer::Recipe::by_name("f32"));
  options.name = "test";
  options.warn = [](const std::string&) {};
  ThreadPool pool(1, false);
  FRESHET_RETURN_IF_ERROR(quantizer::export_gguf(checkpoint, pool, options));
  FRESHET_RETURN_IF_ERROR(add_tokens(options.output, tokens, local, files.model));
  FRESHET_RETURN_IF_ERROR(write_tower(checkpoint, processor, swapped, files.tower));
  return files;
}

}  // namespace freshet
