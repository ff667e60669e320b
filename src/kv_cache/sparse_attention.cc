#include "kv_cache/sparse_attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include <fmt/ranges.h>

#include "base/json.h"

namespace freshet::kv_cache {
namespace {

constexpr int32_t kLeastBudget = 64;
constexpr int32_t kMostBudget = 1 << 24;
constexpr int32_t kMostDenseLayers = 1 << 16;
constexpr std::array<std::string_view, 4> kNames = {"none", "quest", "sparq", "static"};

int32_t whole_blocks(int32_t tokens) {
  return (tokens + ops::kBlockTokens - 1) / ops::kBlockTokens * ops::kBlockTokens;
}

// Reads the keys of one object.
class Keys {
 public:
  Keys(const json::Object& object, std::string_view policy) : object_(object), policy_(policy) {}

  // usual < 0: the key is needed.
  int32_t number(const char* key, int32_t usual, int32_t least, int32_t most) {
    known_.push_back(key);
    const json::Value* const value = object_.find(key);
    if (value == nullptr) {
      if (usual < 0) fail(invalid_argument("sparse_attention: \"{}\" is missing", key));
      return std::max(usual, 0);
    }
    const auto number = value->is_number() ? value->as_int64() : std::nullopt;
    if (!number || *number < least || *number > most) {
      fail(invalid_argument("sparse_attention: \"{}\" must be a whole number from {} to {}", key,
                            least, most));
      return least;
    }
    return static_cast<int32_t>(*number);
  }

  std::string_view word(const char* key, std::string_view usual,
                        std::initializer_list<std::string_view> words) {
    known_.push_back(key);
    const json::Value* const value = object_.find(key);
    if (value == nullptr) return usual;
    const auto found =
        value->is_string() ? std::ranges::find(words, value->as_string()) : words.end();
    if (found != words.end()) return *found;
    fail(
        invalid_argument("sparse_attention: \"{}\" must be one of {}", key, fmt::join(words, " ")));
    return usual;
  }

  // The first error; an unknown key comes before a missing one.
  Status status() const {
    for (const auto& [key, value] : object_) {
      if (key == "policy" || std::ranges::find(known_, key) != known_.end()) continue;
      return invalid_argument("sparse_attention: {} has no \"{}\"{}{}", policy_, key,
                              known_.empty() ? "" : "; it has ", fmt::join(known_, " "));
    }
    return status_;
  }

 private:
  void fail(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

  const json::Object& object_;
  std::string_view policy_;
  std::vector<std::string_view> known_;
  Status status_;
};

void read_budget(Keys& keys, SparseAttention& sparse) {
  sparse.budget = whole_blocks(keys.number("budget", -1, kLeastBudget, kMostBudget));
  sparse.dense_layers = keys.number("dense_layers", 2, 0, kMostDenseLayers);
}

void read_pattern(Keys& keys, SparseAttention& sparse) {
  sparse.window = whole_blocks(keys.number("window", -1, ops::kBlockTokens, kMostBudget));
  sparse.sinks = whole_blocks(keys.number("sinks", 64, 0, kMostBudget));
  sparse.stride = whole_blocks(keys.number("stride", 0, 0, kMostBudget));
  sparse.dense_layers = keys.number("dense_layers", 0, 0, kMostDenseLayers);
  const std::string_view rows = keys.word("rows", "all", {"all", "prompt", "generated"});
  sparse.prompt = rows != "generated";
  sparse.generated = rows != "prompt";
  sparse.dense_last = keys.number("dense_last", 0, 0, kMostBudget);
}

}  // namespace

std::string_view SparseAttention::name() const {
  return kNames[static_cast<size_t>(policy)];
}

ops::BlockSelection SparseAttention::rule(int32_t prompt_tokens) const {
  constexpr int32_t kNever = std::numeric_limits<int32_t>::max();
  ops::BlockSelection r;
  if (!selects()) return r;
  r.before = prompt ? std::max(0, prompt_tokens - dense_last) : 0;
  r.from = generated ? prompt_tokens : kNever;
  r.blocks = budget / ops::kBlockTokens;
  r.components = policy == SparsePolicy::kSparq ? components : 0;
  r.sinks = sinks / ops::kBlockTokens;
  r.window = window / ops::kBlockTokens;
  r.stride = stride / ops::kBlockTokens;
  return r;
}

int32_t SparseAttention::sharable(int32_t prompt_tokens, int32_t count) const {
  if (!selects()) return count;
  if (!prompt) return std::min(count, prompt_tokens);
  const bool alike = generated && dense_last == 0;  // every query follows the pattern
  return alike ? count : std::min(count, std::max(0, prompt_tokens - dense_last));
}

std::string SparseAttention::salt() const {
  if (!selects() || !prompt) return {};
  return fmt::format("\nstatic {} {} {} {}", sinks, window, stride, dense_layers);
}

Result<SparseAttention> make_sparse_attention(std::string_view text) {
  auto parsed = json::parse(text);
  if (!parsed.ok() || !parsed->is_object()) {
    return invalid_argument(
        "sparse_attention must be a JSON object such as {{\"policy\": \"quest\", \"budget\": "
        "1024}}{}",
        parsed.ok() ? "" : fmt::format(": {}", parsed.status().message()));
  }
  const json::Value* const name = parsed->find("policy");
  if (name == nullptr || !name->is_string()) {
    return invalid_argument("sparse_attention: \"policy\" must name a policy: {}",
                            fmt::join(kNames, " "));
  }
  const auto found = std::ranges::find(kNames, name->as_string());
  if (found == kNames.end()) {
    return invalid_argument("sparse_attention: unknown policy \"{}\"; known: {}", name->as_string(),
                            fmt::join(kNames, " "));
  }
  SparseAttention sparse;
  sparse.policy = static_cast<SparsePolicy>(found - kNames.begin());
  Keys keys(parsed->as_object(), *found);
  if (sparse.policy == SparsePolicy::kStatic) {
    read_pattern(keys, sparse);
  } else if (sparse.selects()) {
    read_budget(keys, sparse);
    if (sparse.policy == SparsePolicy::kSparq)
      sparse.components = (keys.number("components", 16, 8, 256) + 7) / 8 * 8;
  }
  FRESHET_RETURN_IF_ERROR(keys.status());
  return sparse;
}

}  // namespace freshet::kv_cache
