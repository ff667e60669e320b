#include "speculative/config.h"

#include <algorithm>
#include <cmath>

#include <fmt/ranges.h>

#include "base/json.h"
#include "speculative/registry.h"

namespace freshet::speculative {
namespace {

constexpr int kMostDrafts = 15;  // without num_speculative_tokens
constexpr int kMostFixedDrafts = 63;

Status wrong_type(std::string_view key, std::string_view wanted) {
  return invalid_argument("speculative config: \"{}\" must be {}", key, wanted);
}

Status read(const json::Value& v, std::string_view key, std::string& to) {
  if (!v.is_string()) return wrong_type(key, "a string");
  to = v.as_string();
  return {};
}

Status read(const json::Value& v, std::string_view key, bool& to) {
  if (!v.is_bool()) return wrong_type(key, "true or false");
  to = v.as_bool();
  return {};
}

Status read_int(const json::Value& v, std::string_view key, int low, int high, int& to) {
  const auto number = v.is_number() ? v.as_int64() : std::nullopt;
  if (!number || *number < low || *number > high) {
    return wrong_type(key, fmt::format("a whole number from {} to {}", low, high));
  }
  to = static_cast<int>(*number);
  return {};
}

Status read_share(const json::Value& v, std::string_view key, double high, double& to) {
  if (!v.is_number() || !(v.as_double() >= 0.0) || v.as_double() > high) {
    return wrong_type(key, fmt::format("a number from 0 to {}", high));
  }
  to = v.as_double();
  return {};
}

Status read_rates(const json::Value& v, std::string_view key, Config& c) {
  const std::string wanted = "a list of 1 to 63 numbers from 0 to 1 that do not grow";
  if (!v.is_array() || v.as_array().empty() || v.as_array().size() > kMostFixedDrafts)
    return wrong_type(key, wanted);
  double before = 1.0;
  for (const json::Value& rate : v.as_array()) {
    double share = 0.0;
    if (!read_share(rate, key, before, share).ok()) return wrong_type(key, wanted);
    c.acceptance.rates.push_back(share);
    before = share;
  }
  return {};
}

// A name, or a list of names that are combined.
Status read_methods(const json::Value& v, std::string_view key, Config& c) {
  if (v.is_string()) return read(v, key, c.method);
  const std::string wanted = "a method or a list of methods, as in [\"ngram\", \"eagle3\"]";
  if (!v.is_array() || v.as_array().empty()) return wrong_type(key, wanted);
  for (const json::Value& name : v.as_array()) {
    if (!name.is_string()) return wrong_type(key, wanted);
    c.lookups.emplace_back(name.as_string());
  }
  return {};
}

Status read_acceptance(const json::Value& v, std::string_view key, Config& c) {
  const auto method = v.is_string() ? acceptance_by_name(v.as_string()) : std::nullopt;
  if (!method)
    return wrong_type(key, "match, rejection (or standard), block, typical or synthetic");
  c.acceptance.method = *method;
  return {};
}

Status read_draft_sampling(const json::Value& v, std::string_view key, Config& c) {
  if (!v.is_string() || (v.as_string() != "greedy" && v.as_string() != "probabilistic"))
    return wrong_type(key, "greedy or probabilistic");
  c.greedy_drafts = v.as_string() == "greedy";
  return {};
}

Status read_tree(const json::Value& v, std::string_view key, Config& c) {
  if (!v.is_string()) return wrong_type(key, "a string such as \"[(0,), (1,), (0, 0)]\"");
  auto shape = parse_tree(v.as_string());
  if (!shape.ok()) return invalid_argument("speculative config: {}", shape.status().message());
  c.tree.shape = std::move(*shape);
  return {};
}

Status read_tree_rates(const json::Value& v, std::string_view key, Config& c) {
  const std::string wanted =
      fmt::format("a list of 1 to {} numbers from 0 to 1 with a sum of at most 1", kMostTreeRanks);
  if (!v.is_array() || v.as_array().empty() || v.as_array().size() > kMostTreeRanks)
    return wrong_type(key, wanted);
  double left = 1.0 + 1e-6;
  for (const json::Value& rate : v.as_array()) {
    double share = 0.0;
    if (!read_share(rate, key, left, share).ok()) return wrong_type(key, wanted);
    c.tree_acceptance_rates.push_back(share);
    left -= share;
  }
  return {};
}

struct Key {
  std::string_view name;
  Status (*read)(const json::Value& value, std::string_view key, Config& c);
};

template <auto Member>
Status read_member(const json::Value& v, std::string_view key, Config& c) {
  return read(v, key, c.*Member);
}
template <auto Member, int kLow, int kHigh>
Status read_number(const json::Value& v, std::string_view key, Config& c) {
  return read_int(v, key, kLow, kHigh, c.*Member);
}

template <auto Member, int kLow, int kHigh>
Status read_tree_number(const json::Value& v, std::string_view key, Config& c) {
  return read_int(v, key, kLow, kHigh, c.tree.*Member);
}

Status read_synthetic_length(const json::Value& v, std::string_view key, Config& c);

constexpr Key kKeys[] = {
    {"method", read_methods},
    {"model", read_member<&Config::model>},
    {"num_speculative_tokens", read_number<&Config::num_speculative_tokens, 1, kMostFixedDrafts>},
    {"rejection_sample_method", read_acceptance},
    {"synthetic_acceptance_rates", read_rates},
    {"synthetic_acceptance_length", read_synthetic_length},
    {"posterior_threshold",
     [](const json::Value& v, std::string_view key, Config& c) {
       return read_share(v, key, 1.0, c.acceptance.posterior_threshold);
     }},
    {"posterior_alpha",
     [](const json::Value& v, std::string_view key, Config& c) {
       return read_share(v, key, 1.0, c.acceptance.posterior_alpha);
     }},
    {"draft_sample_method", read_draft_sampling},
    {"prompt_lookup_min", read_number<&Config::prompt_lookup_min, 1, 1024>},
    {"prompt_lookup_max", read_number<&Config::prompt_lookup_max, 1, 1024>},
    {"suffix_decoding_max_tree_depth",
     read_number<&Config::suffix_decoding_max_tree_depth, 1, 1024>},
    {"suffix_decoding_max_cached_requests",
     read_number<&Config::suffix_decoding_max_cached_requests, 0, 1 << 24>},
    {"suffix_decoding_max_spec_factor",
     [](const json::Value& v, std::string_view key, Config& c) {
       return read_share(v, key, 64.0, c.suffix_decoding_max_spec_factor);
     }},
    {"suffix_decoding_min_token_prob",
     [](const json::Value& v, std::string_view key, Config& c) {
       return read_share(v, key, 1.0, c.suffix_decoding_min_token_prob);
     }},
    {"use_heterogeneous_vocab", read_member<&Config::use_heterogeneous_vocab>},
    {"parallel_drafting", read_member<&Config::parallel_drafting>},
    {"exit_layer", read_number<&Config::exit_layer, 1, 4096>},
    {"speculative_token_tree", read_tree},
    {"tree_nodes", read_tree_number<&TreeOptions::nodes, 2, kMostTreeNodes>},
    {"tree_top_k", read_tree_number<&TreeOptions::top_k, 1, kMostTreeRanks>},
    {"tree_max_batch", read_tree_number<&TreeOptions::max_batch, 0, 4096>},
    {"tree_acceptance_rates", read_tree_rates},
};

// The rates of a chain in which every draft is accepted with the same probability, so that a step
// gives `length` tokens on average.
Status read_synthetic_length(const json::Value& v, std::string_view key, Config& c) {
  double length = 0.0;
  if (!read_share(v, key, 64.0, length).ok() || length < 1.0)
    return wrong_type(key, "a number from 1 to 64");
  if (!c.acceptance.rates.empty()) {
    return invalid_argument(
        "speculative config: synthetic_acceptance_rates and synthetic_acceptance_length: give one");
  }
  double low = 0.0, high = 1.0;
  const auto drafts = static_cast<size_t>(c.limit());
  if (length > static_cast<double>(drafts + 1)) {
    return invalid_argument(
        "speculative config: {} {} needs num_speculative_tokens of at least {}, not {}", key,
        length, std::ceil(length) - 1, drafts);
  }
  const auto rates = [&](double share) {
    std::vector<double> r(drafts);
    double all = 1.0;
    for (double& rate : r) rate = all *= share;
    return r;
  };
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    double sum = 1.0;
    for (const double rate : rates(middle)) sum += rate;
    (sum < length ? low : high) = middle;
  }
  c.acceptance.rates = rates(high);
  return {};
}

Status unknown_key(std::string_view name) {
  std::vector<std::string_view> known;
  for (const Key& key : kKeys) known.push_back(key.name);
  return invalid_argument("speculative config: unknown key \"{}\"; known are {}", name,
                          fmt::join(known, ", "));
}

// Rules between keys.
Status complete_tree(Config& c, const Method& method) {
  TreeOptions& tree = c.tree;
  if (!c.tree_acceptance_rates.empty()) {
    if (tree.nodes == 0 || !tree.shape.empty()) {
      return invalid_argument(
          "speculative config: tree_acceptance_rates goes with tree_nodes and without "
          "speculative_token_tree");
    }
    tree.shape = tree_from_rates(c.tree_acceptance_rates, tree.nodes, c.limit());
  } else if (tree.nodes > 0 && !tree.shape.empty()) {
    return invalid_argument(
        "speculative config: tree_nodes and speculative_token_tree exclude each other");
  }
  if (tree.wanted() && c.acceptance.method != Acceptance::kMatch) {
    return invalid_argument(
        "speculative config: draft trees need rejection_sample_method match, the default");
  }
  if (tree.wanted() && !method.trees) {
    return invalid_argument("speculative config: method {} drafts no trees", c.method);
  }
  return {};
}

Result<const Method*> known_method(std::string_view name) {
  if (const Method* const method = find_method(name)) return method;
  std::vector<std::string_view> names;
  for (const Method& m : methods()) names.push_back(m.name);
  return name.empty()
             ? invalid_argument("speculative config: \"method\" is missing; write one of {}",
                                fmt::join(names, ", "))
             : invalid_argument("speculative config: unknown method \"{}\"; known are {}", name,
                                fmt::join(names, ", "));
}

// Of a list, the method that runs a model is `method`, or else the first one.
Status complete_list(Config& c) {
  if (c.lookups.empty()) return {};
  auto main = c.lookups.end();
  for (auto at = c.lookups.begin(); at != c.lookups.end(); ++at) {
    FRESHET_ASSIGN_OR_RETURN(const Method* method, known_method(*at));
    if (std::find(c.lookups.begin(), at, *at) != at)
      return invalid_argument("speculative config: method {} is given twice", *at);
    if (method->looks_up) continue;
    if (main != c.lookups.end()) {
      return invalid_argument(
          "speculative config: methods {} and {} both run a model; combine one of them with ngram "
          "and suffix",
          *main, *at);
    }
    main = at;
  }
  if (main == c.lookups.end()) main = c.lookups.begin();
  c.method = *main;
  c.lookups.erase(main);
  return {};
}

// Of drafters of random weights.
Status check_random(const Config& c, const Method& method) {
  if (method.random == Method::Random::kNo) {
    std::vector<std::string_view> names;
    for (const Method& m : methods()) {
      if (m.random != Method::Random::kNo) names.push_back(m.name);
    }
    return unsupported("method {} has no random weights, which --load-format asks for; {} do",
                       c.method, fmt::join(names, ", "));
  }
  if (method.random == Method::Random::kConfig && c.model.empty()) {
    return invalid_argument(
        "speculative config: method {} needs \"model\", a folder with the drafter's config.json",
        c.method);
  }
  return {};
}

Status complete(Config& c, bool random_weights) {
  FRESHET_RETURN_IF_ERROR(complete_list(c));
  if (c.method == "[ngram]") c.method = "ngram";
  if (c.method.empty() && c.prompt_lookup_max > 0) c.method = "ngram";
  FRESHET_ASSIGN_OR_RETURN(const Method* method, known_method(c.method));
  if (random_weights) FRESHET_RETURN_IF_ERROR(check_random(c, *method));
  if (method->model == Method::Model::kNeeded && c.model.empty() && !random_weights) {
    return invalid_argument(
        "speculative config: method {} needs \"model\", the drafter's folder "
        "or file",
        c.method);
  }
  if (method->model == Method::Model::kNone && !c.model.empty()) {
    return invalid_argument("speculative config: method {} takes no \"model\"", c.method);
  }
  if (c.prompt_lookup_max == 0) {
    c.prompt_lookup_max = c.prompt_lookup_min > 0 ? std::max(c.prompt_lookup_min, 5) : 5;
  }
  if (c.prompt_lookup_min == 0) c.prompt_lookup_min = std::min(2, c.prompt_lookup_max);
  if (c.prompt_lookup_min > c.prompt_lookup_max) {
    return invalid_argument(
        "speculative config: prompt_lookup_min {} is above prompt_lookup_max {}",
        c.prompt_lookup_min, c.prompt_lookup_max);
  }
  FRESHET_RETURN_IF_ERROR(complete_tree(c, *method));
  if (c.parallel_drafting && ((c.method != "draft_model" && c.method != "eagle3") ||
                              c.tree.wanted() || c.use_heterogeneous_vocab)) {
    return invalid_argument(
        "speculative config: parallel_drafting is for methods draft_model and eagle3 with the "
        "target's vocabulary and without trees");
  }
  if ((c.acceptance.method == Acceptance::kSynthetic) != !c.acceptance.rates.empty()) {
    return invalid_argument(
        "speculative config: rejection_sample_method synthetic goes with "
        "synthetic_acceptance_rates or synthetic_acceptance_length");
  }
  return {};
}

}  // namespace

int Config::limit() const {
  return num_speculative_tokens > 0 ? num_speculative_tokens : kMostDrafts;
}

Result<Config> parse_config(std::string_view text, bool random_weights) {
  auto value = json::parse(text);
  if (!value.ok() || !value->is_object()) {
    return invalid_argument(
        "speculative config: not a JSON object{}; write e.g. {{\"method\": \"ngram\"}}",
        value.ok() ? "" : fmt::format(" ({})", value.status().message()));
  }
  Config config;
  // In the order of the table: later keys may look at earlier ones.
  for (const auto& [name, member] : value->as_object()) {
    if (std::ranges::none_of(kKeys, [&](const Key& k) { return k.name == name; }))
      return unknown_key(name);
  }
  for (const Key& key : kKeys) {
    const json::Value* const member = value->find(key.name);
    if (member == nullptr || member->is_null()) continue;
    FRESHET_RETURN_IF_ERROR(key.read(*member, key.name, config));
  }
  FRESHET_RETURN_IF_ERROR(complete(config, random_weights));
  return config;
}

}  // namespace freshet::speculative
