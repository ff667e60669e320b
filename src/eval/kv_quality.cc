#include "eval/kv_quality.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <vector>

#include <fmt/ranges.h>

#include "eval/kv_simulations.h"
#include "ops/kv_type.h"

namespace freshet::eval {
namespace {

// Logits rows of a window at once, as in `eval compare`.
constexpr int64_t kRowsAtOnce = 128;

double stored_bytes_per_token(const ModelSpec& spec, ops::KvType type) {
  size_t bytes = 0;
  for (const auto& [s, state_bytes] : kv_cache_spec(spec, type).layers) {
    if (state_bytes > 0) continue;
    bytes += static_cast<size_t>(s.kv_heads) * s.head_bytes() / ops::kBlockTokens;
  }
  return static_cast<double>(bytes);
}

// A type of the cache, as --kv-cache-dtype sets it.
KvPolicy policy_of(ops::KvType type) {
  KvPolicy p;
  p.name = ops::name_of(type);
  p.apply = [type](SessionOptions& s) { s.kv_cache_dtype = ops::name_of(type); };
  p.bytes_per_token = [type](const ModelSpec& spec, int64_t) {
    return stored_bytes_per_token(spec, type);
  };
  return p;
}

// The numbers behind a name: "sparq-512-16" has 512 and 16.
std::vector<std::string_view> numbers_of(std::string_view name) {
  std::vector<std::string_view> numbers;
  for (size_t at = name.find('-'); at != std::string_view::npos;) {
    const size_t next = name.find('-', at + 1);
    numbers.push_back(name.substr(at + 1, next - at - 1));
    at = next;
  }
  return numbers;
}

// "quest-512", "sparq-512-16" or "static-512-64-256": tokens read selectively from an f16 cache.
std::optional<KvPolicy> sparse_policy(std::string_view name) {
  struct Form {
    std::string_view policy;
    std::vector<std::string_view> keys;  // of the numbers in the name
  };
  static const Form kForms[] = {{"quest", {"budget"}},
                                {"sparq", {"budget", "components"}},
                                {"static", {"window", "sinks", "stride"}}};
  const auto form = std::ranges::find(kForms, name.substr(0, name.find('-')), &Form::policy);
  if (form == std::end(kForms)) return std::nullopt;
  const std::vector<std::string_view> numbers = numbers_of(name);
  if (numbers.empty() || numbers.size() > form->keys.size()) return std::nullopt;
  std::string text = fmt::format("{{\"policy\": \"{}\"", form->policy);
  for (size_t i = 0; i < numbers.size(); ++i)
    text += fmt::format(", \"{}\": {}", form->keys[i], numbers[i]);
  const auto made = kv_cache::make_sparse_attention(text + "}");
  if (!made.ok()) return std::nullopt;
  KvPolicy p;
  p.name = name;
  p.apply = [sparse = *made](SessionOptions& s) {
    s.kv_cache_dtype = "f16";
    s.sparse = sparse;
  };
  p.bytes_per_token = [policy = made->policy](const ModelSpec& spec, int64_t) {
    KvCacheSpec cache = kv_cache_spec(spec, ops::KvType::kF16);
    if (policy == kv_cache::SparsePolicy::kQuest) cache = with_bounds(cache);
    if (policy == kv_cache::SparsePolicy::kSparq) cache = with_sums(cache);
    size_t bytes = 0;
    for (const auto& [s, state_bytes] : cache.layers)
      bytes += state_bytes > 0 ? 0 : s.block_bytes() / ops::kBlockTokens;
    return static_cast<double>(bytes);
  };
  return p;
}

// "mikv-512" or "snapkv-512-64": budget and interval of a policy that evicts from an f16 cache.
std::optional<KvPolicy> evicting_policy(std::string_view name) {
  const std::string_view policy = name.substr(0, name.find('-'));
  const std::vector<std::string_view> numbers = numbers_of(name);
  if (numbers.empty() || numbers.size() > 2) return std::nullopt;
  std::string text = fmt::format("{{\"policy\": \"{}\", \"budget\": {}", policy, numbers.front());
  if (numbers.size() == 2) text += fmt::format(", \"interval\": {}", numbers.back());
  const auto made = kv_cache::make_retention(text + "}");
  if (!made.ok() || *made == nullptr) return std::nullopt;
  KvPolicy p;
  p.name = name;
  p.apply = [eviction = *made](SessionOptions& s) {
    s.kv_cache_dtype = "f16";
    s.eviction = eviction;
  };
  p.bytes_per_token = [eviction = *made](const ModelSpec& spec, int64_t tokens) {
    return Evictions::bytes_per_token(*eviction, kv_cache_spec(spec, ops::KvType::kF16), tokens);
  };
  return p;
}

json::Value error_or_null(double error, int64_t windows) {
  return windows < 2 ? json::Value(nullptr) : json::Value(error);
}

// The sessions of one length of window. The base comes first.
class Runs {
 public:
  static Result<Runs> open(const KvQualityOptions& o, std::span<const KvPolicy> policies,
                           int64_t window, int64_t windows, Session* loaded) {
    Runs runs;
    for (const KvPolicy& policy : policies) {
      SessionOptions s = o.session;
      s.sequences = static_cast<int>(std::min<int64_t>(o.batch, windows));
      s.context = window + 1;
      s.batch = s.logit_rows = kRowsAtOnce * s.sequences;
      policy.apply(s);
      if (!policy.simulated) {
        Session* const first = runs.sessions_.empty() ? loaded : runs.sessions_.front().get();
        if (first != nullptr) s.loaded = first->loaded();
      }
      FRESHET_ASSIGN_OR_RETURN(auto session, o.open(s));
      runs.sessions_.push_back(std::move(session));
    }
    for (const auto& session : runs.sessions_) runs.pointers_.push_back(session.get());
    return runs;
  }

  Session& base() { return *sessions_.front(); }
  std::span<Session* const> others() const { return std::span(pointers_).subspan(1); }

 private:
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<Session*> pointers_;
};

std::string row_text(const KvQuality::Row& row) {
  const ModelComparison& c = row.loss;
  return fmt::format(
      "  {:<12} {:>9.0f} {:>10.4f} {:>+8.3f} +- {:.3f} {:>10.6f} +- {:.6f} {:>7.2f} +- {:.2f}\n",
      row.policy, row.bytes_per_token, std::exp(c.model_nats.mean),
      100.0 * std::expm1(c.delta.mean), 100.0 * std::exp(c.delta.mean) * c.delta.standard_error,
      c.kl.mean, c.kl.standard_error, 100.0 * c.top1_agreement, 100.0 * c.top1_standard_error);
}

json::Object row_json(const KvQuality::Row& row) {
  const ModelComparison& c = row.loss;
  json::Object o;
  o["policy"] = row.policy;
  o["simulated"] = row.simulated;
  o["bytes_per_token"] = row.bytes_per_token;
  o["perplexity"] = std::exp(c.model_nats.mean);
  o["nats_per_token"] = c.model_nats.mean;
  o["delta_nats_per_token"] = c.delta.mean;
  o["delta_standard_error"] = error_or_null(c.delta.standard_error, c.windows);
  o["perplexity_ratio"] = std::exp(c.delta.mean);
  o["kl_divergence"] = c.kl.mean;
  o["kl_divergence_standard_error"] = error_or_null(c.kl.standard_error, c.windows);
  o["kl_divergence_p99"] = c.kl_p99;
  o["top1_agreement"] = c.top1_agreement;
  o["top1_standard_error"] = error_or_null(c.top1_standard_error, c.windows);
  return o;
}

}  // namespace

std::span<const KvPolicy> kv_policies() {
  static const std::vector<KvPolicy> kPolicies = [] {
    std::vector<KvPolicy> all;
    for (int i = 0; i < ops::kKvTypeCount; ++i) {
      all.push_back(policy_of(static_cast<ops::KvType>(i)));
    }
    const std::vector<std::string_view> methods = simulated_methods();
    for (int method = 0; method < static_cast<int>(methods.size()); ++method) {
      KvPolicy p;
      p.name = fmt::format("sim-{}", methods[static_cast<size_t>(method)]);
      p.simulated = true;
      p.apply = [method](SessionOptions& s) {
        s.kv_cache_dtype = "f32";
        s.reference = true;
        s.kernels = &simulated_kernels(method);
      };
      p.bytes_per_token = [method](const ModelSpec& spec, int64_t tokens) {
        return simulated_bytes_per_token(spec, method, tokens);
      };
      all.push_back(std::move(p));
    }
    return all;
  }();
  return kPolicies;
}

Result<std::vector<KvPolicy>> kv_policies_by_name(std::span<const std::string> names) {
  std::vector<KvPolicy> found;
  for (const std::string& name : names) {
    auto made = sparse_policy(name);
    if (!made) made = evicting_policy(name);
    if (made) {
      found.push_back(std::move(*made));
      continue;
    }
    const auto policy = std::ranges::find(kv_policies(), name, &KvPolicy::name);
    if (policy == kv_policies().end()) {
      std::vector<std::string_view> known;
      for (const KvPolicy& p : kv_policies()) known.push_back(p.name);
      return invalid_argument(
          "there is no policy {} of keys and values; there are {} quest-N (N tokens from 64), "
          "sparq-N or sparq-N-FEATURES, static-WINDOW, static-WINDOW-SINKS or "
          "static-WINDOW-SINKS-STRIDE, and the policies of --kv-eviction as POLICY-BUDGET or "
          "POLICY-BUDGET-INTERVAL, such as mikv-512",
          name, fmt::join(known, " "));
    }
    found.push_back(*policy);
  }
  return found;
}

Result<KvQuality> kv_quality(const KvQualityOptions& o, const CompareProgress& progress) {
  std::vector<std::string> names = {o.base};
  names.insert(names.end(), o.policies.begin(), o.policies.end());
  FRESHET_ASSIGN_OR_RETURN(const std::vector<KvPolicy> policies, kv_policies_by_name(names));
  if (policies.front().simulated) {
    return invalid_argument("--base {}: a simulation cannot be the base", o.base);
  }
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, Session::read_spec(o.session.model));
  for (const KvPolicy& policy : policies) {
    if (policy.simulated) FRESHET_RETURN_IF_ERROR(check_simulated(spec).with_context(policy.name));
  }
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(o.session.model));
  KvQuality q;
  q.model = o.name;
  q.base = o.base;
  std::optional<Runs> runs;
  double done = 0.0;
  for (const int64_t window : o.windows) {
    FRESHET_ASSIGN_OR_RETURN(const auto windows, cut_windows(tokenizer, o.texts, window));
    const bool whole = windows.windows() > 0 && std::ssize(windows.at(0)) == window;
    if (!whole || (spec.max_context > 0 && window > spec.max_context)) {
      q.skipped.push_back(window);
      continue;
    }
    Session* const loaded = runs ? &runs->base() : nullptr;
    FRESHET_ASSIGN_OR_RETURN(auto opened,
                             Runs::open(o, policies, window, windows.windows(), loaded));
    runs = std::move(opened);
    const auto share = static_cast<double>(o.windows.size());
    FRESHET_ASSIGN_OR_RETURN(const auto losses,
                             compare_each(runs->base(), runs->others(), windows, [&](double part) {
                               return progress((done + part) / share);
                             }));
    done += 1.0;
    KvQuality::Length length{window, {}};
    for (size_t i = 0; i < losses.size(); ++i) {
      const KvPolicy& policy = policies[i + 1];
      length.rows.push_back(
          {policy.name, policy.simulated, policy.bytes_per_token(spec, window), losses[i]});
    }
    q.lengths.push_back(std::move(length));
    q.arithmetic = fmt::format("{}{}", runs->base().device(),
                               runs->base().options().reference ? ", reference" : "");
  }
  if (q.lengths.empty()) {
    return invalid_argument("no window fits: {} handles {} tokens, and a text must fill a window",
                            o.name, spec.max_context);
  }
  return q;
}

std::string kv_quality_text(const KvQuality& q) {
  std::string text;
  for (const KvQuality::Length& length : q.lengths) {
    const ModelComparison& first = length.rows.front().loss;
    text += fmt::format("{}, windows of {}: {} tokens in {} windows; {}: perplexity {:.4f}\n",
                        q.model, length.window, first.tokens, first.windows, q.base,
                        std::exp(first.base_nats.mean));
    text += fmt::format("  {:<12} {:>9} {:>10} {:>18} {:>22} {:>15}\n", "policy", "B/token",
                        "perplexity", "change, %", "KL, nats a token", "same top, %");
    for (const KvQuality::Row& row : length.rows) text += row_text(row);
    for (const KvQuality::Row& row : length.rows) {
      if (row.simulated) text += fmt::format("  {}: simulated, not served\n", row.policy);
    }
  }
  for (const int64_t window : q.skipped) {
    text += fmt::format("windows of {}: beyond the model's context or the text\n", window);
  }
  return text;
}

json::Object kv_quality_json(const KvQuality& q) {
  json::Array lengths, skipped;
  for (const KvQuality::Length& length : q.lengths) {
    const ModelComparison& first = length.rows.front().loss;
    json::Object o;
    o["window"] = length.window;
    o["windows"] = first.windows;
    o["tokens"] = first.tokens;
    o["windows_hash"] = first.fingerprint;
    o["base_perplexity"] = std::exp(first.base_nats.mean);
    json::Array rows;
    for (const KvQuality::Row& row : length.rows) rows.emplace_back(row_json(row));
    o["policies"] = std::move(rows);
    lengths.emplace_back(std::move(o));
  }
  for (const int64_t window : q.skipped) skipped.emplace_back(window);
  json::Object o;
  o["model"] = q.model;
  o["base"] = q.base;
  o["arithmetic"] = q.arithmetic;
  o["lengths"] = std::move(lengths);
  o["skipped_windows"] = std::move(skipped);
  return o;
}

}  // namespace freshet::eval
