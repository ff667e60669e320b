// GPTQ: a module X has X.qweight I32 [K*b/32, N] packed along K (32 numbers in b words, numbers of
// 3 bits may lie across words), X.qzeros I32 [G, N*b/32], X.scales [G, N] and X.g_idx I32 [K].
// Version 1 stores zero points minus one, which overflows for zero points of 0; so checkpoints with
// zero points are of version 2 ("gptq_v2"), and symmetric ones of version 1, which more engines
// read.
#include <algorithm>

#include "quantizer/containers/loader_facts.h"
#include "quantizer/containers/packing.h"
#include "quantizer/containers/rows.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kNumbersAtOnce = 32;

Status gptq_supports(const Scheme& s) {
  constexpr int kBits[] = {2, 3, 4, 8};
  if (s.levels != Levels::kInteger || s.activations != Activations::kNone || s.group_rows != 1) {
    return unsupported("gptq holds integers in groups with 16-bit activations, not scheme {}",
                       s.name);
  }
  if (std::ranges::find(kBits, s.bits) == std::end(kBits)) {
    return unsupported("gptq has 2, 3, 4 and 8 bits, and scheme {} has {}", s.name, s.bits);
  }
  if (s.scale != ScaleType::kF16 && s.scale != ScaleType::kBF16) {
    return unsupported("gptq has scales of 16 bits, unlike scheme {}", s.name);
  }
  return {};
}

Scheme gptq_fit(Scheme s, std::string_view dtype) {
  if (s.scale == ScaleType::kF16 && dtype == "bfloat16") s.scale = ScaleType::kBF16;
  return s;
}

std::vector<uint32_t> packed_columns(const CodedMatrix& m, int bits) {
  std::vector<uint32_t> words(static_cast<size_t>(m.cols / kNumbersAtOnce * bits * m.rows));
  uint32_t block[8];
  // Some rows at a time, so that neighbouring words are written together.
  constexpr int64_t kRowsAtOnce = 16;
  for (int64_t first = 0; first < m.rows; first += kRowsAtOnce) {
    const int64_t end = std::min(m.rows, first + kRowsAtOnce);
    for (int64_t k = 0; k < m.cols / kNumbersAtOnce; ++k) {
      for (int64_t r = first; r < end; ++r) {
        pack_bits(m.codes.data() + r * m.cols + k * kNumbersAtOnce, kNumbersAtOnce, bits, block);
        for (int64_t b = 0; b < bits; ++b) {
          words[static_cast<size_t>((k * bits + b) * m.rows + r)] = block[b];
        }
      }
    }
  }
  return words;
}

std::vector<uint32_t> gptq_zeros(const CodedMatrix& m, const Scheme& s, int64_t groups) {
  const int64_t words = m.rows * s.bits / 32;
  std::vector<uint32_t> out(static_cast<size_t>(groups * words));
  std::vector<uint8_t> of_group(static_cast<size_t>(m.rows),
                                static_cast<uint8_t>((1 << (s.bits - 1)) - 1));
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = 0; r < m.rows && !s.symmetric; ++r) {
      of_group[static_cast<size_t>(r)] = m.zeros[static_cast<size_t>(r * groups + g)];
    }
    pack_bits(of_group.data(), m.rows, s.bits, out.data() + g * words);
  }
  return out;
}

Result<std::vector<StoredTensor>> gptq_pack(const std::string& stem, const CodedMatrix& m,
                                            const Scheme& s, const ModelFacts&) {
  FRESHET_RETURN_IF_ERROR(gptq_supports(s));
  FRESHET_RETURN_IF_ERROR(check_matrix(stem, m, s));
  if (m.cols % kNumbersAtOnce != 0 || m.rows * s.bits % 32 != 0) {
    return unsupported(
        "matrix '{}' [{}, {}] does not fill whole words of gptq: rows and columns must be "
        "multiples of 32; take compressed-tensors",
        stem, m.rows, m.cols);
  }
  const int64_t groups = column_groups(m, s);
  std::vector<int32_t> index = m.group_of_column;
  for (int64_t c = 0; c < m.cols && m.group_of_column.empty(); ++c) {
    index.push_back(static_cast<int32_t>(c / group_columns(m, s)));
  }
  FRESHET_ASSIGN_OR_RETURN(StoredTensor scale, turned_scales(stem + ".scales", m, s));
  std::vector<StoredTensor> out;
  out.push_back(
      i32_tensor(stem + ".qweight", {m.cols * s.bits / 32, m.rows}, packed_columns(m, s.bits)));
  out.push_back(
      i32_tensor(stem + ".qzeros", {groups, m.rows * s.bits / 32}, gptq_zeros(m, s, groups)));
  out.push_back(std::move(scale));
  out.push_back({stem + ".g_idx", "I32", {m.cols}, bytes_of(index)});
  return out;
}

// A regular expression for one name.
std::string exactly(const std::string& name) {
  std::string out = "^";
  for (const char c : name) {
    if (c == '.') out += '\\';
    out += c;
  }
  return out + "$";
}

Result<json::Value> gptq_config(const ConfigRequest& request) {
  FRESHET_CHECK(!request.groups.empty(), "a request has a scheme");
  const Scheme& s = request.groups.front().scheme;
  json::Object dynamic;
  bool head = true;
  for (const std::string& name : request.ignore) {
    if (name == "lm_head") {
      head = false;
    } else {
      dynamic["-:" + exactly(name)] = json::Object();
    }
  }
  for (size_t i = 1; i < request.groups.size(); ++i) {
    const Scheme& other = request.groups[i].scheme;
    FRESHET_RETURN_IF_ERROR(gptq_supports(other));
    if (other.symmetric != s.symmetric) {
      return unsupported("gptq stores zero points for all layers or for none: {} and {}", s.name,
                         other.name);
    }
    json::Object settings;
    settings["bits"] = other.bits;
    settings["group_size"] = other.group > 0 ? other.group : -1;
    for (const std::string& name : request.groups[i].modules) {
      dynamic["+:" + exactly(name)] = settings;
    }
  }
  json::Object o;
  o["quant_method"] = "gptq";
  o["bits"] = s.bits;
  o["group_size"] = s.group > 0 ? s.group : -1;
  o["sym"] = s.symmetric;
  o["desc_act"] = request.act_order;
  o["checkpoint_format"] = s.symmetric ? "gptq" : "gptq_v2";
  o["pack_dtype"] = "int32";
  o["lm_head"] = head;
  for (const auto& [key, value] : request.settings) o[key] = value;
  if (!dynamic.empty()) o["dynamic"] = std::move(dynamic);
  json::Object meta;
  meta["quantizer"] = json::Array{json::Value(request.producer)};
  o["meta"] = std::move(meta);
  return json::Value(std::move(o));
}

std::vector<std::pair<std::string, json::Value>> gptq_side_files(const json::Value& config) {
  return {{"quantize_config.json", config}};
}

std::vector<Loader> gptq_loaders(const Scheme& s, const ModelFacts& facts) {
  std::vector<Loader> out;
  out.push_back(freshet_loader(facts, 32));
  if (s.bits < 4) {
    out.push_back(not_in("vLLM", "it dropped GPTQ of 2 and 3 bits in 2026"));
    out.push_back(not_in("SGLang", "its kernels take 4 or 8 bits"));
  } else if (!s.symmetric) {
    out.push_back(not_in("vLLM",
                         "its Marlin kernels take GPTQ without zero points: take "
                         "compressed-tensors or awq, or a symmetric scheme"));
    out.push_back(not_in("SGLang", "its Marlin kernels take GPTQ without zero points"));
  } else {
    out.push_back(marlin_loader("vLLM", s, facts));
    out.push_back(marlin_loader("SGLang", s, facts));
  }
  out.push_back(loads_in("transformers", "with GPTQModel"));
  out.push_back(llama_cpp_loader());
  return out;
}

}  // namespace

const Container kGptqContainer = {"gptq",    gptq_supports, gptq_fit,        nothing_to_settle,
                                  gptq_pack, gptq_config,   gptq_side_files, gptq_loaders};

}  // namespace freshet::quantizer
