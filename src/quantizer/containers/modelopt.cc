// NVIDIA ModelOpt: a module X has
//
//   FP8                        X.weight F8_E4M3 [N, K], X.weight_scale F32 [], X.input_scale F32 []
//   FP8_PER_CHANNEL_PER_TOKEN  X.weight F8_E4M3 [N, K], X.weight_scale F32 [N]
//   NVFP4, W4A16_NVFP4         X.weight U8 [N, K/2], X.weight_scale F8_E4M3 [N, K/16],
//                              X.weight_scale_2 F32 [] and for NVFP4 X.input_scale F32 []
//
// All scales are factors. hf_quant_config.json repeats the configuration in an older form.
#include "quantizer/containers/loader_facts.h"
#include "quantizer/containers/packing.h"
#include "quantizer/containers/rows.h"
#include "quantizer/containers/scheme.h"

namespace freshet::quantizer {
namespace {

// quant_algo; nullptr if there is none.
const char* modelopt_algorithm(const Scheme& s) {
  if (s.levels == Levels::kE2M1 && s.scale == ScaleType::kE4M3 && s.group == 16) {
    return s.activations == Activations::kNvfp4 ? "NVFP4" : "W4A16_NVFP4";
  }
  if (s.levels != Levels::kE4M3 || s.scale != ScaleType::kF32 || s.group != 0) return nullptr;
  if (s.group_rows == 0 && s.activations == Activations::kFp8Tensor) return "FP8";
  const bool channels = s.group_rows == 1 && s.activations == Activations::kFp8Token;
  return channels ? "FP8_PER_CHANNEL_PER_TOKEN" : nullptr;
}

Status modelopt_supports(const Scheme& s) {
  if (modelopt_algorithm(s) != nullptr) return {};
  return unsupported("modelopt holds the schemes FP8, FP8_DYNAMIC, NVFP4 and NVFP4A16, not {}",
                     s.name);
}

Result<std::vector<StoredTensor>> modelopt_pack(const std::string& stem, const CodedMatrix& m,
                                                const Scheme& s, const ModelFacts&) {
  FRESHET_RETURN_IF_ERROR(modelopt_supports(s));
  FRESHET_RETURN_IF_ERROR(check_matrix(stem, m, s));
  std::vector<StoredTensor> out;
  if (s.levels == Levels::kE2M1) {
    FRESHET_ASSIGN_OR_RETURN(
        StoredTensor scales,
        scale_tensor(stem + ".weight_scale", {m.rows, column_groups(m, s)}, m.scales, s.scale));
    out.push_back(nibble_tensor(stem + ".weight", m));
    out.push_back(std::move(scales));
    out.push_back(f32_tensor(stem + ".weight_scale_2", {}, std::vector{m.global_scale}));
  } else {
    const std::vector<int64_t> shape =
        s.group_rows == 0 ? std::vector<int64_t>{} : std::vector{m.rows};
    out.push_back(byte_tensor(stem + ".weight", m, s));
    out.push_back(f32_tensor(stem + ".weight_scale", shape, m.scales));
  }
  if (needs_input_scale(s)) {
    out.push_back(f32_tensor(stem + ".input_scale", {}, std::vector{m.input_scale}));
  }
  return out;
}

Result<json::Value> modelopt_config(const ConfigRequest& request) {
  FRESHET_ASSIGN_OR_RETURN(const Scheme s, only_scheme(request, "modelopt"));
  FRESHET_RETURN_IF_ERROR(modelopt_supports(s));
  json::Object o;
  o["quant_method"] = "modelopt";
  o["quant_algo"] = modelopt_algorithm(s);
  if (s.group > 0) o["group_size"] = s.group;
  o["ignore"] = ignored_names(request);
  if (request.kv_cache_fp8) {
    json::Object kv;
    kv["dynamic"] = false;
    kv["num_bits"] = 8;
    kv["type"] = "float";
    o["kv_cache_scheme"] = std::move(kv);
  }
  json::Object producer;
  const size_t cut = request.producer.find(' ');
  producer["name"] = request.producer.substr(0, cut);
  producer["version"] = cut == std::string::npos ? "" : request.producer.substr(cut + 1);
  o["producer"] = std::move(producer);
  return json::Value(std::move(o));
}

std::vector<std::pair<std::string, json::Value>> modelopt_side_files(const json::Value& config) {
  json::Object quantization;
  quantization["quant_algo"] = config.get_string("quant_algo", "");
  quantization["kv_cache_quant_algo"] =
      config.find("kv_cache_scheme") != nullptr ? json::Value("FP8") : json::Value();
  if (const json::Value* group = config.find("group_size")) quantization["group_size"] = *group;
  if (const json::Value* ignore = config.find("ignore")) {
    quantization["exclude_modules"] = *ignore;
  }
  json::Object o;
  if (const json::Value* producer = config.find("producer")) o["producer"] = *producer;
  o["quantization"] = std::move(quantization);
  return {{"hf_quant_config.json", std::move(o)}};
}

std::vector<Loader> modelopt_loaders(const Scheme& s, const ModelFacts& facts) {
  const bool fp4 = s.levels == Levels::kE2M1;
  const std::string native =
      fp4 ? "natively on Blackwell GPUs" : "natively on GPUs of compute capability 8.9 and later";
  std::vector<Loader> out;
  out.push_back(freshet_loader(facts, fp4 ? 32 : 128));
  out.push_back(loads_in("vLLM", native));
  const std::string_view algorithm = modelopt_algorithm(s);
  if (algorithm == "FP8" || algorithm == "NVFP4") {
    out.push_back(loads_in("SGLang", native));
  } else {
    out.push_back(not_in("SGLang", fmt::format("it has no ModelOpt {}", algorithm)));
  }
  out.push_back(not_in("transformers", "it has no reader of ModelOpt: take compressed-tensors"));
  out.push_back(llama_cpp_loader());
  return out;
}

}  // namespace

const Container kModelOptContainer = {
    "modelopt",      modelopt_supports,   as_it_is,         nothing_to_settle,        modelopt_pack,
    modelopt_config, modelopt_side_files, modelopt_loaders, KvScaleNames::kProjection};

}  // namespace freshet::quantizer
