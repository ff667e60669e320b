#include "models/nearest.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "models/registry.h"
#include "models/weight_reader.h"

namespace freshet::models {
namespace {

using Names = std::set<std::string>;

// Keys that do not decide what a decoder computes.
constexpr std::string_view kOtherKeys[] = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "initializer_range",
    "is_decoder",
    "layer_types",
    "model_type",
    "output_router_logits",
    "pretraining_tp",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "max_window_layers",
    "sliding_window",
    "use_sliding_window",
};

bool decides(std::string_view key) {
  return !key.ends_with("_token_id") && !key.ends_with("dropout") && !key.ends_with("_pdrop") &&
         std::ranges::count(kOtherKeys, key) == 0;
}

// A tensor's name without its suffix, with # for numbers.
std::string pattern_of(std::string name) {
  for (const std::string_view suffix :
       {".weight", ".bias", "_bias", ".qweight", ".weight_packed"}) {
    if (name.ends_with(suffix)) name.resize(name.size() - suffix.size());
  }
  for (const std::string_view prefix : {"language_model.model.", "model.language_model."}) {
    if (name.starts_with(prefix)) name = "model." + name.substr(prefix.size());
  }
  std::string out;
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string part = name.substr(at, end - at);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string::npos;
    out += (at == 0 ? "" : ".") + (number ? "#" : part);
    at = end + 1;
  }
  return out;
}

// Scales, zero points and the like of quantised weights, and tables that a model makes again.
bool belongs_to_weight(const std::string& name) {
  for (const std::string_view part : {"scale", "qzeros", "g_idx", "weight_shape", "inv_freq",
                                      "zero_point", ".absmax", "quant_map", "quant_state"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

Names tensors_of(const loader::Checkpoint& checkpoint) {
  Names names;
  for (const loader::TensorSource& t : checkpoint.tensors()) {
    if (!belongs_to_weight(t.name)) names.insert(pattern_of(t.name));
  }
  return names;
}

// Roles of which a branch needs one.
using Needs = std::vector<std::vector<Role>>;

void add_needs(const AttentionSpec& a, Needs& needs) {
  for (const Role role : {Role::kQuery, Role::kKey, Role::kValue}) {
    needs.push_back({role, Role::kQkv});
  }
  needs.push_back({Role::kOutput});
  if (a.qk_norm != QkNorm::kNone && a.qk_norm_spec.weight) {
    needs.insert(needs.end(), {{Role::kQueryNorm}, {Role::kKeyNorm}});
  }
  if (a.sinks) needs.push_back({Role::kSinks});
}

void add_needs(const MlaSpec& a, Needs& needs) {
  needs.push_back({a.q_rank > 0 ? Role::kQueryDown : Role::kQuery});
  needs.insert(needs.end(), {{Role::kKvDown}, {Role::kKvUp, Role::kValueUp}, {Role::kOutput}});
}

void add_needs(const MlpSpec& mlp, Needs& needs) {
  if (mlp.gated) needs.push_back({Role::kGate, Role::kGateUp});
  needs.insert(needs.end(), {{Role::kUp, Role::kGateUp}, {Role::kDown}});
  if (mlp.xielu) needs.push_back({Role::kXieluPositive});
}

void add_needs(const MoeSpec& moe, Needs& needs) {
  needs.push_back({Role::kRouter});
  needs.push_back({Role::kExpertUp, Role::kExpertsUp, Role::kExpertsGateUp});
  needs.push_back({Role::kExpertDown, Role::kExpertsDown});
  if (moe.router_correction) needs.push_back({Role::kRouterCorrection});
  if (moe.shared_ff > 0) needs.push_back({Role::kSharedDown});
  if (moe.shared_gate) needs.push_back({Role::kSharedScale});
}

void add_needs(const LinearSpec&, Needs& needs) {
  needs.push_back({Role::kSideLinear});
}

void add_needs(const CrossAttentionSpec&, Needs& needs) {
  needs.insert(needs.end(),
               {{Role::kCrossQuery}, {Role::kCrossKey}, {Role::kCrossValue}, {Role::kCrossOutput}});
}

// Layers with states.
template <class Spec>
void add_needs(const Spec&, Needs& needs) {
  needs.push_back({Role::kStateIn, Role::kQuery, Role::kQkv});
  needs.push_back({Role::kStateOut, Role::kOutput});
}

Needs needs_of(const ModelSpec& spec) {
  Needs needs = {{Role::kEmbedding, Role::kHead}};
  if (spec.final_norm && spec.final_norm->weight) needs.push_back({Role::kFinalNorm});
  for (const LayerSpec* layer : {&spec.layers.front(), &spec.layers.back()}) {
    for (const BranchSpec& branch : layer->branches) {
      const bool attends = std::holds_alternative<AttentionSpec>(branch.body) ||
                           std::holds_alternative<MlaSpec>(branch.body);
      if (std::holds_alternative<CrossAttentionSpec>(branch.body)) {
        if (branch.norms.in) needs.push_back({Role::kCrossIn});
        add_needs(std::get<CrossAttentionSpec>(branch.body), needs);
        continue;
      }
      if (branch.side == Side::kOpens) {
        needs.push_back({Role::kSideIn});
      } else if (branch.norms.in)
        needs.push_back({attends ? Role::kAttentionIn : Role::kMlpIn});
      if (branch.norms.out) needs.push_back({attends ? Role::kAttentionOut : Role::kMlpOut});
      std::visit([&](const auto& body) { add_needs(body, needs); }, branch.body);
    }
  }
  return needs;
}

std::vector<std::string> patterns_of(const WeightNames& names, Role role) {
  std::vector<std::string> patterns;
  for (int choice = 0;; ++choice) {
    const std::string stem = names.stem(role, 0, 0, choice);
    if (stem.empty()) return patterns;
    patterns.push_back(pattern_of(stem));
  }
}

struct Candidate {
  std::string_view type;
  Names places_missing;  // tensors of the checkpoint without a place
  Names lacking;         // tensors that the architecture needs
  Names unread;          // keys

  size_t distance() const { return 2 * lacking.size() + places_missing.size(); }
};

// nullopt: the architecture cannot read the configuration.
std::optional<Candidate> compare(const loader::Checkpoint& checkpoint, const json::Value& config,
                                 const Names& tensors, const Architecture& architecture) {
  Names asked;
  Config reader(config);
  reader.record(&asked);
  const ModelSpec spec = architecture.spec(reader);
  if (!reader.status().ok() || !validate(spec).ok()) return std::nullopt;
  const bool gguf = checkpoint.kind() == loader::Checkpoint::Kind::kGguf;
  const WeightNames names = gguf ? WeightNames::gguf(architecture.gguf_names)
                                 : WeightNames::safetensors(architecture.names);
  Candidate c{architecture.type, tensors, {}, {}};
  for (int role = 0; role < static_cast<int>(Role::kCount); ++role) {
    for (const std::string& p : patterns_of(names, static_cast<Role>(role))) {
      c.places_missing.erase(p);
    }
  }
  for (const std::vector<Role>& roles : needs_of(spec)) {
    std::string first;
    bool found = false;
    for (const Role role : roles) {
      for (const std::string& p : patterns_of(names, role)) {
        if (first.empty()) first = p;
        found = found || tensors.contains(p);
      }
    }
    if (!found && !first.empty()) c.lacking.insert(first);
  }
  if (gguf) return c;
  for (const auto& [key, value] : config.as_object()) {
    if (decides(key) && !value.is_null() && !asked.contains(key)) c.unread.insert(key);
  }
  return c;
}

std::string listed(const Names& names) {
  constexpr size_t kMost = 5;
  std::vector<std::string_view> some;
  for (const std::string& name : names) {
    if (some.size() < kMost) some.push_back(name);
  }
  const std::string more =
      names.size() > kMost ? fmt::format(" and {} more", names.size() - kMost) : "";
  return fmt::format("{}{}", fmt::join(some, ", "), more);
}

}  // namespace

std::string nearest_architecture(const loader::Checkpoint& checkpoint) {
  const Result<json::Value> config = config_of(checkpoint);
  if (!config.ok() || !config->is_object()) return {};
  const Names tensors = tensors_of(checkpoint);
  std::optional<Candidate> best;
  for (const Architecture& architecture : architectures()) {
    std::optional<Candidate> c = compare(checkpoint, *config, tensors, architecture);
    if (!c) continue;
    const auto rank = [](const Candidate& x) { return std::pair(x.distance(), x.unread.size()); };
    if (!best || rank(*c) < rank(*best)) best = std::move(c);
  }
  if (!best) return {};
  if (2 * best->places_missing.size() > tensors.size()) {
    return fmt::format("none is near: {} has places for {} of its {} kinds of tensors", best->type,
                       tensors.size() - best->places_missing.size(), tensors.size());
  }
  std::string line = fmt::format("nearest is {}", best->type);
  std::string_view before = ": ";
  const auto add = [&](std::string_view what, const Names& names) {
    if (names.empty()) return;
    line += fmt::format("{}{} {}", before, what, listed(names));
    before = "; ";
  };
  add("it has no place for", best->places_missing);
  add("it needs", best->lacking);
  add("it does not read", best->unread);
  return line;
}

}  // namespace freshet::models
