#include "kv_cache/sparse_attention.h"

#include "base/json.h"
#include "ops/attention.h"

namespace freshet::kv_cache {
namespace {

constexpr int32_t kLeastBudget = 64;
constexpr int32_t kMostBudget = 1 << 24;
constexpr int32_t kMostDenseLayers = 1 << 16;

Result<int32_t> whole_number(const json::Object& object, const char* key, int32_t usual,
                             int32_t least, int32_t most) {
  const json::Value* const value = object.find(key);
  if (value == nullptr) return usual;
  const auto number = value->is_number() ? value->as_int64() : std::nullopt;
  if (!number || *number < least || *number > most) {
    return invalid_argument("sparse_attention: \"{}\" must be a whole number from {} to {}", key,
                            least, most);
  }
  return static_cast<int32_t>(*number);
}

}  // namespace

Result<SparseAttention> make_sparse_attention(std::string_view text) {
  auto parsed = json::parse(text);
  if (!parsed.ok() || !parsed->is_object()) {
    return invalid_argument(
        "sparse_attention must be a JSON object such as {{\"policy\": \"quest\", \"budget\": "
        "1024}}{}",
        parsed.ok() ? "" : fmt::format(": {}", parsed.status().message()));
  }
  const json::Value* const name = parsed->find("policy");
  if (name == nullptr || !name->is_string())
    return invalid_argument("sparse_attention: \"policy\" must name a policy: quest or none");
  const std::string policy = name->as_string();
  if (policy != "quest" && policy != "none") {
    return invalid_argument("sparse_attention: unknown policy \"{}\"; known: none quest", policy);
  }
  SparseAttention sparse;
  for (const auto& [key, value] : parsed->as_object()) {
    if (key == "policy") continue;
    if (policy == "none" || (key != "budget" && key != "dense_layers")) {
      return invalid_argument("sparse_attention: {} has no \"{}\"{}", policy, key,
                              policy == "none" ? "" : "; it has budget dense_layers");
    }
  }
  if (policy == "none") return sparse;
  const json::Object& object = parsed->as_object();
  FRESHET_ASSIGN_OR_RETURN(const int32_t budget,
                           whole_number(object, "budget", 0, kLeastBudget, kMostBudget));
  if (budget == 0) return invalid_argument("sparse_attention: \"budget\" is missing");
  sparse.budget = (budget + ops::kBlockTokens - 1) / ops::kBlockTokens * ops::kBlockTokens;
  FRESHET_ASSIGN_OR_RETURN(
      sparse.dense_layers,
      whole_number(object, "dense_layers", sparse.dense_layers, 0, kMostDenseLayers));
  return sparse;
}

}  // namespace freshet::kv_cache
