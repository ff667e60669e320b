// quant_method "fp8", as DeepSeek-V3 and Qwen3 publish it: X.weight F8_E4M3 [N, K] with, for blocks
// of 128 by 128, X.weight_scale_inv F32 [N/128, K/128] (rounded up; a factor, in spite of its name)
// and dynamic activations, or one X.weight_scale F32 [] with a static X.input_scale F32 [].
#include "quantizer/containers/loader_facts.h"
#include "quantizer/containers/packing.h"
#include "quantizer/containers/rows.h"
#include "quantizer/containers/scheme.h"

namespace freshet::quantizer {
namespace {

bool fp8_in_blocks(const Scheme& s) {
  return s.group == 128 && s.group_rows == 128 && s.activations == Activations::kFp8Group128;
}

Status fp8_supports(const Scheme& s) {
  const bool tensor = s.group == 0 && s.group_rows == 0 && s.activations == Activations::kFp8Tensor;
  if (s.levels == Levels::kE4M3 && s.scale == ScaleType::kF32 && (tensor || fp8_in_blocks(s))) {
    return {};
  }
  return unsupported("fp8 holds the schemes FP8 and FP8_BLOCK, not {}", s.name);
}

Result<std::vector<StoredTensor>> fp8_pack(const std::string& stem, const CodedMatrix& m,
                                           const Scheme& s, const ModelFacts&) {
  FRESHET_RETURN_IF_ERROR(fp8_supports(s));
  FRESHET_RETURN_IF_ERROR(check_matrix(stem, m, s));
  std::vector<StoredTensor> out;
  out.push_back(byte_tensor(stem + ".weight", m, s));
  if (fp8_in_blocks(s)) {
    out.push_back(
        f32_tensor(stem + ".weight_scale_inv", {row_groups(m, s), column_groups(m, s)}, m.scales));
  } else {
    out.push_back(f32_tensor(stem + ".weight_scale", {}, m.scales));
    out.push_back(f32_tensor(stem + ".input_scale", {}, std::vector{m.input_scale}));
  }
  return out;
}

Result<json::Value> fp8_config(const ConfigRequest& request) {
  FRESHET_ASSIGN_OR_RETURN(const Scheme s, only_scheme(request, "fp8"));
  json::Object o;
  o["quant_method"] = "fp8";
  o["activation_scheme"] = fp8_in_blocks(s) ? "dynamic" : "static";
  o["fmt"] = "e4m3";
  if (fp8_in_blocks(s)) o["weight_block_size"] = json::Array{128, 128};
  o["modules_to_not_convert"] = ignored_names(request);
  return json::Value(std::move(o));
}

std::vector<Loader> fp8_loaders(const Scheme& s, const ModelFacts& facts) {
  const std::string native = "natively on GPUs of compute capability 8.9 and later";
  std::vector<Loader> out;
  out.push_back(freshet_loader(facts, 128));
  out.push_back(loads_in("vLLM", native));
  out.push_back(loads_in("SGLang", native));
  out.push_back(fp8_in_blocks(s)
                    ? loads_in("transformers", "on GPUs")
                    : not_in("transformers", "its fp8 layers have scales for blocks only"));
  out.push_back(llama_cpp_loader());
  return out;
}

}  // namespace

const Container kFp8Container = {"fp8",    fp8_supports, as_it_is,      nothing_to_settle,
                                 fp8_pack, fp8_config,   no_side_files, fp8_loaders};

}  // namespace freshet::quantizer
