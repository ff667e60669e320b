// AWQ, version "gemm": a module X has X.qweight I32 [K, N/8] and X.qzeros I32 [G, N/8], packed
// along N, and X.scales F16 [G, N]. In each eight outputs the even ones come first. Symmetric
// matrices have zero points of 8.
#include <algorithm>

#include "quantizer/containers/loader_facts.h"
#include "quantizer/containers/packing.h"
#include "quantizer/containers/rows.h"

namespace freshet::quantizer {
namespace {

constexpr int64_t kOutputsPerWord = 8;
constexpr int kAwqOutput[kOutputsPerWord] = {0, 2, 4, 6, 1, 3, 5, 7};  // of each nibble

Status awq_supports(const Scheme& s) {
  if (s.levels != Levels::kInteger || s.bits != 4 || s.group_rows != 1 ||
      s.activations != Activations::kNone) {
    return unsupported("awq holds 4-bit integers with 16-bit activations, not scheme {}", s.name);
  }
  if (s.scale != ScaleType::kF16 && s.scale != ScaleType::kBF16) {
    return unsupported("awq has scales of 16 bits, unlike scheme {}", s.name);
  }
  return {};
}

Result<std::vector<StoredTensor>> awq_pack(const std::string& stem, const CodedMatrix& m,
                                           const Scheme& s, const ModelFacts&) {
  FRESHET_RETURN_IF_ERROR(awq_supports(s));
  FRESHET_RETURN_IF_ERROR(check_matrix(stem, m, s));
  if (m.rows % kOutputsPerWord != 0) {
    return unsupported(
        "matrix '{}' has {} rows: awq packs eight at a time; take compressed-tensors", stem,
        m.rows);
  }
  if (!m.group_of_column.empty()) {
    return unsupported("matrix '{}' is in act-order, which awq cannot store: take gptq", stem);
  }
  const int64_t groups = column_groups(m, s), across = m.rows / kOutputsPerWord;
  // number(r, i): the number of row r and column or group i.
  const auto pack = [&](int64_t down, const auto& number) {
    std::vector<uint32_t> words(static_cast<size_t>(down * across));
    for (int64_t w = 0; w < across; ++w) {
      for (int64_t i = 0; i < down; ++i) {
        uint32_t word = 0;
        for (int k = 0; k < kOutputsPerWord; ++k) {
          word |= uint32_t{number(w * kOutputsPerWord + kAwqOutput[k], i)} << (4 * k);
        }
        words[static_cast<size_t>(i * across + w)] = word;
      }
    }
    return words;
  };
  FRESHET_ASSIGN_OR_RETURN(StoredTensor scale, turned_scales(stem + ".scales", m, s));
  const auto code = [&](int64_t r, int64_t c) {
    return m.codes[static_cast<size_t>(r * m.cols + c)];
  };
  const auto zero = [&](int64_t r, int64_t g) {
    return s.symmetric ? uint8_t{8} : m.zeros[static_cast<size_t>(r * groups + g)];
  };
  std::vector<StoredTensor> out;
  out.push_back(i32_tensor(stem + ".qweight", {m.cols, across}, pack(m.cols, code)));
  out.push_back(i32_tensor(stem + ".qzeros", {groups, across}, pack(groups, zero)));
  out.push_back(std::move(scale));
  return out;
}

Result<json::Value> awq_config(const ConfigRequest& request) {
  FRESHET_ASSIGN_OR_RETURN(const Scheme s, only_scheme(request, "awq"));
  json::Object o;
  o["quant_method"] = "awq";
  o["bits"] = s.bits;
  o["group_size"] = s.group > 0 ? s.group : -1;
  o["zero_point"] = true;
  o["version"] = "gemm";
  o["modules_to_not_convert"] = ignored_names(request);
  return json::Value(std::move(o));
}

std::vector<Loader> awq_loaders(const Scheme& s, const ModelFacts& facts) {
  std::vector<Loader> out;
  out.push_back(freshet_loader(facts, 32));
  out.push_back(marlin_loader("vLLM", s, facts));
  out.push_back(marlin_loader("SGLang", s, facts));
  out.push_back(loads_in("transformers", "with GPTQModel"));
  out.push_back(llama_cpp_loader());
  return out;
}

}  // namespace

const Container kAwqContainer = {"awq",    awq_supports, as_it_is,      nothing_to_settle,
                                 awq_pack, awq_config,   no_side_files, awq_loaders};

}  // namespace freshet::quantizer
