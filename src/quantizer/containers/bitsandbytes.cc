// bitsandbytes: a module X has
//
//   4 bits   X.weight U8 [N*K/2, 1] (the first of a pair in the high half), X.weight.absmax F32 for
//            each 64 numbers, X.weight.quant_map F32 [16] and
//            X.weight.quant_state.bitsandbytes__nf4 (or fp4), the bytes of a JSON object. With
//            double quantisation absmax is U8, and there are X.weight.nested_absmax F32 and
//            X.weight.nested_quant_map F32 [256]
//   8 bits   X.weight I8 [N, K] and X.SCB F32 [N], the greatest magnitude of each row: a number is
//            code * SCB / 127
//
// bitsandbytes looks for outliers of 8 bits in each batch. Ours are found by calibration and
// listed: X.outlier_columns I32 [n], and the numbers of these columns in X.outlier_weight [N, n],
// in 16 bits. Readers that know only X.weight have codes there, too.
//
// Blocks of 64 run through the matrix as a whole. Here they end with rows: rows that are no
// multiple of 64 are refused.
#include <array>
#include <cmath>
#include <cstring>

#include "quant/levels4.h"
#include "quantizer/containers/double_quantisation.h"
#include "quantizer/containers/loader_facts.h"
#include "quantizer/containers/packing.h"
#include "quantizer/containers/rows.h"
#include "tensor/dtype.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kBnbBlock = 64;
constexpr float kMostCode = 127.0f;

bool bnb_table(const Scheme& s) {
  return s.levels == Levels::kNF4 || s.levels == Levels::kFP4;
}

Status bnb_supports(const Scheme& s) {
  const bool table = bnb_table(s) && s.group == kBnbBlock && s.group_rows == 1;
  const bool whole = s.levels == Levels::kInteger && s.bits == 8 && s.group == 0 &&
                     s.group_rows == 1 && s.symmetric && s.activations == Activations::kInt8Token;
  if ((table || whole) && s.scale == ScaleType::kF32) return {};
  return unsupported("bitsandbytes holds the schemes NF4, FP4 and LLM_INT8, not {}", s.name);
}

// The nearest scale with 16 significant bits: readers that store it in 24 bits keep it, and 127
// times it is an F32, so that the division gives it back.
float settled_scale(float scale) {
  int exponent = 0;
  const float mantissa = std::frexp(scale, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 16)), exponent - 16);
}

// The SCB that means this scale.
float scb_of(float scale) {
  const float near = scale * kMostCode;
  for (const float v : {near, std::nextafterf(near, 0.0f), std::nextafterf(near, INFINITY)}) {
    if (v / kMostCode == scale) return v;
  }
  return near;
}

// Outlier columns keep the model's own type where that has 16 bits.
Scheme bnb_fit(Scheme scheme, std::string_view dtype) {
  scheme.outlier_type = dtype == "bfloat16" ? ScaleType::kBF16 : ScaleType::kF16;
  return scheme;
}

Status bnb_settle(CodedMatrix& m, const Scheme& s) {
  if (s.levels == Levels::kInteger) {
    for (float& scale : m.scales) scale = settled_scale(scale);
  } else if (s.double_quantised && m.double_scales.codes.empty()) {
    m.double_scales = double_quantise(m.scales);
    m.scales = scales_of(m.double_scales);
  }
  return {};
}

using BnbTensors = Result<std::vector<StoredTensor>>;

BnbTensors pack_int8(const std::string& stem, const CodedMatrix& m, const Scheme& s) {
  std::vector<float> scb;
  for (const float scale : m.scales) {
    scb.push_back(scb_of(scale));
    if (scb.back() / kMostCode == scale) continue;
    return internal_error("matrix '{}': scale {} is not settled for bitsandbytes", stem, scale);
  }
  std::vector<StoredTensor> out;
  out.push_back(byte_tensor(stem + ".weight", m, s));
  out.push_back(f32_tensor(stem + ".SCB", {m.rows}, scb));
  if (!m.outliers) return out;
  const auto count = std::ssize(m.outliers->columns);
  StoredTensor columns{stem + ".outlier_columns", "I32", {count}, {}};
  columns.bytes.resize(m.outliers->columns.size() * sizeof(int32_t));
  if (count > 0)
    std::memcpy(columns.bytes.data(), m.outliers->columns.data(), columns.bytes.size());
  out.push_back(std::move(columns));
  if (count == 0) return out;
  const bool bf16 = s.outlier_type == ScaleType::kBF16;
  StoredTensor values{stem + ".outlier_weight", bf16 ? "BF16" : "F16", {m.rows, count}, {}};
  for (const float v : m.outliers->values) {
    const uint16_t bits = bf16 ? f32_to_bf16(v) : f32_to_f16(v);
    values.bytes.push_back(static_cast<uint8_t>(bits));
    values.bytes.push_back(static_cast<uint8_t>(bits >> 8));
  }
  out.push_back(std::move(values));
  return out;
}

// The bytes of quant_state: a JSON object as Python writes it.
std::string quant_state(const CodedMatrix& m, const Scheme& s, const ModelFacts& facts) {
  json::Object o;
  o["quant_type"] = s.levels == Levels::kNF4 ? "nf4" : "fp4";
  o["blocksize"] = kBnbBlock;
  o["dtype"] = facts.dtype;
  o["shape"] = json::Array{m.rows, m.cols};
  if (s.double_quantised) {
    o["nested_blocksize"] = kScalesPerBlock;
    o["nested_dtype"] = "float32";
    o["nested_offset"] = static_cast<double>(m.double_scales.offset);
  }
  return json::write(json::Value(std::move(o)), {.spaces = true});
}

BnbTensors pack_table(const std::string& stem, const CodedMatrix& m, const Scheme& s,
                      const ModelFacts& facts) {
  if (m.cols % kBnbBlock != 0) {
    return unsupported("matrix '{}' has rows of {} numbers, not whole blocks of {}", stem, m.cols,
                       kBnbBlock);
  }
  const std::string weight = stem + ".weight";
  StoredTensor codes{weight, "U8", {m.rows * m.cols / 2, 1}, {}};
  codes.bytes.resize(m.codes.size() / 2);
  for (size_t i = 0; i < codes.bytes.size(); ++i) {
    codes.bytes[i] = static_cast<uint8_t>(m.codes[2 * i] << 4 | m.codes[2 * i + 1]);
  }
  std::vector<StoredTensor> out;
  out.push_back(std::move(codes));
  const auto blocks = static_cast<int64_t>(m.scales.size());
  if (s.double_quantised) {
    const DoubleScales& d = m.double_scales;
    if (scales_of(d) != m.scales) {
      return internal_error("matrix '{}': its scales are not settled for bitsandbytes", stem);
    }
    out.push_back({weight + ".absmax", "U8", {blocks}, d.codes});
    out.push_back(f32_tensor(weight + ".nested_absmax", {std::ssize(d.absmax)}, d.absmax));
    out.push_back(f32_tensor(weight + ".nested_quant_map", {256}, dynamic_map()));
  } else {
    out.push_back(f32_tensor(weight + ".absmax", {blocks}, m.scales));
  }
  const bool nf4 = s.levels == Levels::kNF4;
  out.push_back(
      f32_tensor(weight + ".quant_map", {16},
                 nf4 ? std::to_array(quant::kNf4Levels) : std::to_array(quant::kFp4Levels)));
  const std::string state = quant_state(m, s, facts);
  out.push_back({fmt::format("{}.quant_state.bitsandbytes__{}", weight, nf4 ? "nf4" : "fp4"),
                 "U8",
                 {std::ssize(state)},
                 std::vector<uint8_t>(state.begin(), state.end())});
  return out;
}

BnbTensors bnb_pack(const std::string& stem, const CodedMatrix& m, const Scheme& s,
                    const ModelFacts& facts) {
  FRESHET_RETURN_IF_ERROR(bnb_supports(s));
  FRESHET_RETURN_IF_ERROR(check_matrix(stem, m, s));
  return bnb_table(s) ? pack_table(stem, m, s, facts) : pack_int8(stem, m, s);
}

Result<json::Value> bnb_config(const ConfigRequest& request) {
  FRESHET_ASSIGN_OR_RETURN(const Scheme s, only_scheme(request, "bitsandbytes"));
  const bool table = bnb_table(s);
  json::Object o;
  o["quant_method"] = "bitsandbytes";
  o["load_in_4bit"] = table;
  o["load_in_8bit"] = !table;
  o["bnb_4bit_quant_type"] = s.levels == Levels::kNF4 ? "nf4" : "fp4";
  o["bnb_4bit_use_double_quant"] = s.double_quantised;
  o["bnb_4bit_compute_dtype"] = request.dtype;
  o["bnb_4bit_quant_storage"] = "uint8";
  o["llm_int8_threshold"] =
      s.outlier_threshold > 0.0f ? static_cast<double>(s.outlier_threshold) : 6.0;
  o["llm_int8_has_fp16_weight"] = false;
  o["llm_int8_enable_fp32_cpu_offload"] = false;
  o["llm_int8_skip_modules"] = ignored_names(request);
  return json::Value(std::move(o));
}

std::vector<Loader> bnb_loaders(const Scheme& s, const ModelFacts& facts) {
  std::vector<Loader> out;
  out.push_back(freshet_loader(facts, bnb_table(s) ? kBnbBlock : 1));
  if (s.outlier_threshold > 0.0f) {
    constexpr char kUnknown[] = "its loader refuses tensors that it does not know";
    out.push_back(not_in("vLLM", kUnknown));
    out.push_back(not_in("SGLang", kUnknown));
    out.push_back(loads_in("transformers",
                           "with bitsandbytes, which finds outliers itself, in each batch, and "
                           "reports the tensors with ours as unexpected"));
    out.push_back(llama_cpp_loader());
    return out;
  }
  out.push_back(loads_in("vLLM"));
  out.push_back(loads_in("SGLang"));
  out.push_back(loads_in("transformers", "with bitsandbytes"));
  out.push_back(llama_cpp_loader());
  return out;
}

}  // namespace

const Container kBitsAndBytesContainer = {"bitsandbytes", bnb_supports, bnb_fit,       bnb_settle,
                                          bnb_pack,       bnb_config,   no_side_files, bnb_loaders};

}  // namespace freshet::quantizer
