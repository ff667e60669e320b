// compressed-tensors, the layout of release 0.20: a module X has
//
//   pack-quantized        X.weight_packed I32 [N, K*b/32] (dense: numbers may lie across words),
//                         X.weight_scale [N, G], X.weight_shape I64 [2]; zero points:
//                         X.weight_zero_point I32 [N*b/32, G]
//   int-quantized         X.weight I8 [N, K], X.weight_scale [N, G]; static: X.input_scale [1]
//   float-quantized       X.weight F8_E4M3 [N, K], X.weight_scale [1], [N, 1] or by block;
//                         static: X.input_scale [1]
//   nvfp4-pack-quantized  X.weight_packed U8 [N, K/2], X.weight_scale F8_E4M3 [N, K/16],
//                         X.weight_global_scale F32 [1] and, with activations,
//                         X.input_global_scale F32 [1]: both divisors
//   mxfp4-pack-quantized  X.weight_packed U8 [N, K/2], X.weight_scale U8 [N, K/32] (E8M0)
//   mxfp8-quantized       X.weight F8_E4M3 [N, K], X.weight_scale U8 [N, K/32]
#include <algorithm>
#include <set>

#include "quantizer/containers/loader_facts.h"
#include "quantizer/containers/packing.h"
#include "quantizer/containers/rows.h"
#include "quantizer/containers/scheme.h"

namespace freshet::quantizer {
namespace {

constexpr const char* kLayoutVersion = "0.20.0";  // of compressed-tensors

// The `format` of a scheme; nullptr if there is none.
const char* compressed_format(const Scheme& s) {
  if (s.levels == Levels::kInteger) {
    return s.activations == Activations::kNone ? "pack-quantized" : "int-quantized";
  }
  if (s.levels == Levels::kE2M1) {
    if (s.scale == ScaleType::kE4M3 && s.group == 16) return "nvfp4-pack-quantized";
    return s.scale == ScaleType::kE8M0 && s.group == 32 ? "mxfp4-pack-quantized" : nullptr;
  }
  if (s.levels == Levels::kE4M3) {
    if (s.scale == ScaleType::kE8M0) return s.group == 32 ? "mxfp8-quantized" : nullptr;
    return "float-quantized";
  }
  return nullptr;
}

Status compressed_supports(const Scheme& s) {
  if (compressed_format(s) == nullptr) {
    return unsupported("compressed-tensors has no format for scheme {}", s.name);
  }
  if (s.activations != Activations::kNone && !s.symmetric) {
    return unsupported("compressed-tensors: scheme {} has zero points with quantised activations",
                       s.name);
  }
  if (s.name.starts_with("LLM_INT8")) {
    return unsupported("compressed-tensors has no columns of 16 bits at run time, as scheme {} has",
                       s.name);
  }
  return {};
}

// Release 0.20 refuses configurations with this order.
Status act_order_refused() {
  return unsupported(
      "compressed-tensors dropped groups in act-order (weight_g_idx) with release 0.20: take "
      "static "
      "act-order, or --format gptq");
}

Scheme compressed_fit(Scheme s, std::string_view dtype) {
  if (s.scale == ScaleType::kF16 && dtype == "bfloat16") s.scale = ScaleType::kBF16;
  return s;
}

// Global scales are stored as divisors.
Status compressed_settle(CodedMatrix& m, const Scheme& s) {
  if (s.levels != Levels::kE2M1 || s.scale != ScaleType::kE4M3) return {};
  m.global_scale = 1.0f / divisor_for(m.global_scale);
  if (m.input_scale > 0) m.input_scale = 1.0f / divisor_for(m.input_scale);
  return {};
}

// Zero points are packed along the rows: word i of a group holds those of rows from 32 * i / bits.
std::vector<uint32_t> packed_zeros(const CodedMatrix& m, int bits, int64_t groups) {
  const int64_t words = ceil_div(m.rows * bits, 32);
  std::vector<uint32_t> out(static_cast<size_t>(words * groups));
  std::vector<uint8_t> of_group(static_cast<size_t>(m.rows));
  std::vector<uint32_t> packed(static_cast<size_t>(words));
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = 0; r < m.rows; ++r) {
      of_group[static_cast<size_t>(r)] = m.zeros[static_cast<size_t>(r * groups + g)];
    }
    pack_bits(of_group.data(), m.rows, bits, packed.data());
    for (int64_t w = 0; w < words; ++w) {
      out[static_cast<size_t>(w * groups + g)] = packed[static_cast<size_t>(w)];
    }
  }
  return out;
}

using Packed = Result<std::vector<StoredTensor>>;

Packed pack_integers(const std::string& stem, const CodedMatrix& m, const Scheme& s) {
  const int64_t words = ceil_div(m.cols * s.bits, 32), groups = column_groups(m, s);
  std::vector<uint32_t> packed(static_cast<size_t>(m.rows * words));
  for (int64_t r = 0; r < m.rows; ++r) {
    pack_bits(m.codes.data() + r * m.cols, m.cols, s.bits, packed.data() + r * words);
  }
  FRESHET_ASSIGN_OR_RETURN(StoredTensor scales, scale_tensor(stem + ".weight_scale",
                                                             {m.rows, groups}, m.scales, s.scale));
  std::vector<StoredTensor> out;
  out.push_back(i32_tensor(stem + ".weight_packed", {m.rows, words}, packed));
  out.push_back(std::move(scales));
  out.push_back({stem + ".weight_shape", "I64", {2}, bytes_of(std::vector{m.rows, m.cols})});
  if (!s.symmetric) {
    out.push_back(i32_tensor(stem + ".weight_zero_point", {ceil_div(m.rows * s.bits, 32), groups},
                             packed_zeros(m, s.bits, groups)));
  }
  return out;
}

// A byte per number: int-quantized, float-quantized, mxfp8-quantized.
Packed pack_byte_codes(const std::string& stem, const CodedMatrix& m, const Scheme& s) {
  std::vector<int64_t> shape = {row_groups(m, s), column_groups(m, s)};
  if (s.group_rows == 0 && s.group == 0) shape = {1};
  FRESHET_ASSIGN_OR_RETURN(StoredTensor scales, scale_tensor(stem + ".weight_scale",
                                                             std::move(shape), m.scales, s.scale));
  std::vector<StoredTensor> out;
  out.push_back(byte_tensor(stem + ".weight", m, s));
  out.push_back(std::move(scales));
  if (needs_input_scale(s)) {
    out.push_back(f32_tensor(stem + ".input_scale", {1}, std::vector{m.input_scale}));
  }
  return out;
}

Packed pack_e2m1(const std::string& stem, const CodedMatrix& m, const Scheme& s) {
  FRESHET_ASSIGN_OR_RETURN(
      StoredTensor scales,
      scale_tensor(stem + ".weight_scale", {m.rows, column_groups(m, s)}, m.scales, s.scale));
  std::vector<StoredTensor> out;
  out.push_back(nibble_tensor(stem + ".weight_packed", m));
  out.push_back(std::move(scales));
  if (s.scale != ScaleType::kE4M3) return out;
  out.push_back(
      f32_tensor(stem + ".weight_global_scale", {1}, std::vector{divisor_for(m.global_scale)}));
  if (needs_input_scale(s)) {
    out.push_back(
        f32_tensor(stem + ".input_global_scale", {1}, std::vector{divisor_for(m.input_scale)}));
  }
  return out;
}

Packed compressed_pack(const std::string& stem, const CodedMatrix& m, const Scheme& s,
                       const ModelFacts&) {
  FRESHET_RETURN_IF_ERROR(compressed_supports(s));
  FRESHET_RETURN_IF_ERROR(check_matrix(stem, m, s));
  if (!m.group_of_column.empty()) return act_order_refused();
  if (s.levels == Levels::kE2M1) return pack_e2m1(stem, m, s);
  const bool packs = s.levels == Levels::kInteger && s.activations == Activations::kNone;
  return packs ? pack_integers(stem, m, s) : pack_byte_codes(stem, m, s);
}

// QuantizationArgs with the keys that every scheme has.
json::Object arguments(int bits, const char* type, const char* strategy, json::Value dynamic) {
  json::Object o;
  o["num_bits"] = bits;
  o["type"] = type;
  o["symmetric"] = true;
  o["strategy"] = strategy;
  o["group_size"] = nullptr;
  o["dynamic"] = std::move(dynamic);
  return o;
}

const char* scale_dtype(ScaleType type) {
  if (type == ScaleType::kE8M0) return "torch.uint8";
  return type == ScaleType::kE4M3 ? "torch.float8_e4m3fn" : nullptr;
}

json::Value weight_arguments(const Scheme& s) {
  const char* strategy = s.scale == ScaleType::kE4M3 ? "tensor_group"
                         : s.group_rows > 1          ? "block"
                         : s.group > 0               ? "group"
                         : s.group_rows == 0         ? "tensor"
                                                     : "channel";
  json::Object o =
      arguments(s.bits, s.levels == Levels::kInteger ? "int" : "float", strategy, false);
  o["symmetric"] = s.symmetric;
  if (s.group_rows > 1) {
    o["block_structure"] = json::Array{s.group_rows, s.group};
  } else if (s.group > 0) {
    o["group_size"] = s.group;
  }
  if (const char* dtype = scale_dtype(s.scale)) o["scale_dtype"] = dtype;
  return o;
}

json::Value input_arguments(const Scheme& s) {
  json::Object o;
  switch (s.activations) {
    case Activations::kNone:
      return nullptr;
    case Activations::kInt8Token:
      return arguments(8, "int", "token", true);
    case Activations::kInt8Tensor:
      return arguments(8, "int", "tensor", false);
    case Activations::kFp8Token:
      return arguments(8, "float", "token", true);
    case Activations::kFp8Tensor:
      return arguments(8, "float", "tensor", false);
    case Activations::kFp8Group128:
      o = arguments(8, "float", "group", true);
      o["group_size"] = 128;
      return o;
    case Activations::kNvfp4:
      o = arguments(4, "float", "tensor_group", "local");
      o["group_size"] = 16;
      break;
    case Activations::kMxfp4:
    case Activations::kMxfp8:
      o = arguments(s.activations == Activations::kMxfp4 ? 4 : 8, "float", "group", true);
      o["group_size"] = 32;
      break;
  }
  o["scale_dtype"] = scale_dtype(s.scale);
  return o;
}

Result<json::Value> compressed_config(const ConfigRequest& request) {
  FRESHET_CHECK(!request.groups.empty(), "a request has a scheme");
  if (request.act_order) return act_order_refused();
  json::Object groups;
  std::set<std::string> formats;
  // Readers take the first group that matches, so the default comes last.
  std::vector<const SchemeGroup*> order;
  for (size_t i = 1; i < request.groups.size(); ++i) order.push_back(&request.groups[i]);
  order.push_back(&request.groups.front());
  for (const SchemeGroup* g : order) {
    FRESHET_RETURN_IF_ERROR(compressed_supports(g->scheme));
    json::Array targets;
    for (const std::string& module : g->modules) targets.emplace_back(module);
    if (targets.empty()) targets.emplace_back("Linear");
    json::Object o;
    o["targets"] = std::move(targets);
    o["weights"] = weight_arguments(g->scheme);
    o["input_activations"] = input_arguments(g->scheme);
    o["output_activations"] = nullptr;
    o["format"] = compressed_format(g->scheme);
    groups[fmt::format("group_{}", groups.size())] = std::move(o);
    formats.insert(compressed_format(g->scheme));
  }
  json::Object o;
  o["quant_method"] = "compressed-tensors";
  o["format"] = formats.size() == 1 ? *formats.begin() : "mixed-precision";
  o["quantization_status"] = "compressed";
  o["config_groups"] = std::move(groups);
  o["ignore"] = ignored_names(request);
  o["kv_cache_scheme"] =
      request.kv_cache_fp8 ? json::Value(arguments(8, "float", "tensor", false)) : nullptr;
  o["sparsity_config"] = json::Object();
  o["transform_config"] = json::Object();
  o["global_compression_ratio"] = nullptr;
  o["version"] = kLayoutVersion;
  return json::Value(std::move(o));
}

Loader compressed_vllm(std::string engine, const Scheme& s, const ModelFacts& facts) {
  if (s.levels == Levels::kInteger) {
    if (s.activations == Activations::kNone) return marlin_loader(std::move(engine), s, facts);
    if (s.bits == 8 && s.group == 0) return loads_in(std::move(engine));
    return not_in(std::move(engine),
                  "its kernels for 4-bit weights and int8 activations run on "
                  "ARM CPUs only");
  }
  if (s.levels == Levels::kE2M1 || s.scale == ScaleType::kE8M0) {
    return loads_in(std::move(engine), "2026 releases; natively on Blackwell GPUs");
  }
  return loads_in(std::move(engine), "natively on GPUs of compute capability 8.9 and later");
}

std::vector<Loader> compressed_loaders(const Scheme& s, const ModelFacts& facts) {
  const bool whole = s.levels == Levels::kInteger;
  const int64_t multiple = s.levels == Levels::kE4M3 && s.scale != ScaleType::kE8M0 ? 128
                           : whole && s.activations != Activations::kNone           ? 1
                                                                                    : 32;
  std::vector<Loader> out;
  out.push_back(freshet_loader(facts, multiple));
  out.push_back(compressed_vllm("vLLM", s, facts));
  out.push_back(compressed_vllm("SGLang", s, facts));
  out.push_back(loads_in("transformers", "with compressed-tensors 0.20 or later"));
  out.push_back(llama_cpp_loader());
  return out;
}

}  // namespace

const Container kCompressedTensorsContainer = {
    "compressed-tensors", compressed_supports, compressed_fit,
    compressed_settle,    compressed_pack,     compressed_config,
    no_side_files,        compressed_loaders,  KvScaleNames::kAttention};

}  // namespace freshet::quantizer
