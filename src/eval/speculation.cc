#include "eval/speculation.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "loader/checkpoint.h"
#include "speculative/draft_head.h"
#include "tokenizer/tokenizer.h"

namespace freshet::eval {
namespace {

using Ids = std::vector<int32_t>;

double clock_seconds() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(t).count();
}

double middle(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Pieces at even distances.
Result<std::vector<Ids>> cut_prompts(const SpeculationOptions& o) {
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, tokenizer::Tokenizer::load(o.engine.model));
  const Ids ids = tokenizer.encode(o.text, {.add_special = false});
  const auto size = static_cast<size_t>(o.prompt_tokens);
  const auto count = static_cast<size_t>(o.prompts);
  if (ids.size() < size) {
    return invalid_argument(
        "the text has {} tokens, and a prompt {}: give a longer text or fewer --prompt-tokens",
        ids.size(), size);
  }
  std::vector<Ids> prompts;
  for (size_t i = 0; i < count; ++i) {
    const size_t from = (ids.size() - size) * i / count;
    Ids prompt;
    if (tokenizer.adds_bos() && tokenizer.bos()) prompt.push_back(*tokenizer.bos());
    prompt.insert(prompt.end(), ids.begin() + static_cast<std::ptrdiff_t>(from),
                  ids.begin() + static_cast<std::ptrdiff_t>(from + size));
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

// A turn: all requests, at most `clients` at a time.
struct Turn {
  std::vector<Ids> outputs;      // [prompts]
  std::vector<double> seconds;   // [prompts] from the first token to the last
  std::vector<int64_t> decoded;  // [prompts] tokens in that time
  double all_seconds = 0.0;      // sums
  int64_t all_decoded = 0;
};

class TurnRunner {
 public:
  TurnRunner(Engine& engine, const SpeculationOptions& options, const std::vector<Ids>& prompts)
      : engine_(engine), o_(options), prompts_(prompts) {}

  Result<Turn> run() {
    turn_ = Turn();
    turn_.outputs.resize(prompts_.size());
    turn_.seconds.assign(prompts_.size(), 0.0);
    turn_.decoded.assign(prompts_.size(), 0);
    first_.assign(prompts_.size(), 0.0);
    std::unique_lock lock(mutex_);
    for (size_t i = 0; i < prompts_.size(); ++i) {
      changed_.wait(lock, [&] { return running_ < o_.clients; });
      if (o_.stop != nullptr && *o_.stop) break;
      ++running_;
      lock.unlock();
      const auto sent = engine_.submit(request(i));
      lock.lock();
      if (sent.ok()) continue;
      --running_;
      error_ = sent.status();
      break;
    }
    changed_.wait(lock, [&] { return running_ == 0; });
    if (o_.stop != nullptr && *o_.stop) return cancelled("interrupted");
    if (!error_.ok()) return error_;
    for (size_t i = 0; i < prompts_.size(); ++i) {
      turn_.all_seconds += turn_.seconds[i];
      turn_.all_decoded += turn_.decoded[i];
    }
    return std::move(turn_);
  }

 private:
  Request request(size_t i) {
    Request r;
    r.prompt = prompts_[i];
    r.params.max_tokens = o_.max_tokens;
    r.params.temperature = o_.temperature;
    r.params.seed = o_.seed + i;
    r.params.ignore_eos = true;
    r.on_delta = [this, i](const Delta& delta) {
      Ids& output = turn_.outputs[i];
      const double now = clock_seconds();
      if (output.empty()) {
        first_[i] = now;
      } else {
        turn_.decoded[i] += std::ssize(delta.ids);
      }
      output.insert(output.end(), delta.ids.begin(), delta.ids.end());
      turn_.seconds[i] = now - first_[i];
      if (delta.error.ok()) return;
      const std::lock_guard lock(mutex_);
      error_ = delta.error;
    };
    r.on_done = [this](const Usage&) {
      const std::lock_guard lock(mutex_);
      --running_;
      changed_.notify_one();
    };
    return r;
  }

  Engine& engine_;
  const SpeculationOptions& o_;
  const std::vector<Ids>& prompts_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0;
  Status error_;
  Turn turn_;                  // a request's part is its callbacks' alone
  std::vector<double> first_;  // [prompts] when the first token came
};

// An engine that holds these requests and little more.
Result<EngineOptions> engine_for(const SpeculationOptions& o, bool drafts) {
  EngineOptions e = o.engine;
  if (!drafts) e.speculative_config.clear();
  e.count_rejections = drafts;
  e.enable_prefix_caching = false;
  e.max_num_seqs = o.clients;
  if (e.max_model_len == 0) e.max_model_len = o.prompt_tokens + o.max_tokens + 2;
  if (e.kv_cache_memory != 0) return e;
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(e.model));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(checkpoint));
  const KvCacheSpec cache = kv_cache_spec(spec, ops::KvType::kF32);  // the largest
  const auto blocks = static_cast<size_t>(e.max_model_len / ops::kBlockTokens + 4);
  // States: one, with one behind each draft, and as many again for checkpoints.
  constexpr size_t kStates = 64;
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    const bool states = static_cast<int>(g) == cache.state_group();
    e.kv_cache_memory += cache.block_bytes(static_cast<int>(g)) * (states ? kStates : blocks) *
                         static_cast<size_t>(o.clients + 1);
  }
  return e;
}

// Both engines, or one after the other.
class Comparison {
 public:
  Comparison(const SpeculationOptions& options, std::vector<Ids> prompts)
      : o_(options), prompts_(std::move(prompts)) {}

  Status run() {
    std::unique_ptr<Engine> plain, drafting;
    FRESHET_ASSIGN_OR_RETURN(drafting, load(true));
    auto second = load(false);
    if (!second.ok() && second.status().code() != StatusCode::kResourceExhausted)
      return second.status();
    if (second.ok()) plain = std::move(*second);
    FRESHET_RETURN_IF_ERROR(warm_up(*drafting));
    if (plain == nullptr) {
      for (int t = 0; t < o_.turns; ++t) FRESHET_RETURN_IF_ERROR(turn(*drafting, true));
      finish(*drafting);
      drafting.reset();
      FRESHET_ASSIGN_OR_RETURN(plain, load(false));
      for (int t = 0; t < o_.turns; ++t) FRESHET_RETURN_IF_ERROR(turn(*plain, false));
      return {};
    }
    FRESHET_RETURN_IF_ERROR(TurnRunner(*plain, o_, prompts_).run().status());
    for (int t = 0; t < o_.turns; ++t) {
      const bool first = t % 2 == 0;
      FRESHET_RETURN_IF_ERROR(turn(first ? *plain : *drafting, !first));
      FRESHET_RETURN_IF_ERROR(turn(first ? *drafting : *plain, first));
    }
    finish(*drafting);
    return {};
  }

  SpeculationResult result() const {
    SpeculationResult r = result_;
    r.turns = o_.turns;
    r.equal = true;
    std::vector<double> speedups, rates, plain_rates;
    for (size_t t = 0; t < plain_.size(); ++t) {
      for (size_t i = 0; i < prompts_.size() && r.equal; ++i) {
        if (plain_[0].outputs[i] == plain_[t].outputs[i] &&
            plain_[t].outputs[i] == drafting_[t].outputs[i])
          continue;
        r.equal = false;
        r.first_different = static_cast<int>(i);
      }
      const auto rate = [](const Turn& turn) {
        return turn.all_seconds > 0.0 ? static_cast<double>(turn.all_decoded) / turn.all_seconds
                                      : 0.0;
      };
      rates.push_back(rate(drafting_[t]));
      plain_rates.push_back(rate(plain_[t]));
      // Tokens that come with a request's first are not in its time.
      if (plain_rates.back() > 0.0) speedups.push_back(rates.back() / plain_rates.back());
    }
    r.speedup = middle(speedups);
    r.tokens_per_s = middle(rates);
    r.plain_tokens_per_s = middle(plain_rates);
    r.predicted_speedup = middle(predictions_);
    r.gauge = middle(gauges_);
    return r;
  }

 private:
  Result<std::unique_ptr<Engine>> load(bool drafts) {
    FRESHET_ASSIGN_OR_RETURN(const EngineOptions e, engine_for(o_, drafts));
    return o_.load(e);
  }

  Status warm_up(Engine& engine) {
    o_.progress("first turn", 0.0);
    FRESHET_RETURN_IF_ERROR(TurnRunner(engine, o_, prompts_).run().status());
    before_ = turn_before_ = engine.stats().speculation;
    return {};
  }

  Status turn(Engine& engine, bool drafts) {
    o_.progress("turns", static_cast<double>(plain_.size() + drafting_.size()) / (2.0 * o_.turns));
    FRESHET_ASSIGN_OR_RETURN(Turn done, TurnRunner(engine, o_, prompts_).run());
    (drafts ? drafting_ : plain_).push_back(std::move(done));
    if (drafts) note_gains(engine.stats().speculation);
    return {};
  }

  // What the engine expected and saw in this turn: medians of turns, as of the measured speeds.
  void note_gains(const EngineStats::Speculation& s) {
    const double taken = s.predicted_step_seconds - turn_before_.predicted_step_seconds;
    const double plain = s.predicted_plain_seconds - turn_before_.predicted_plain_seconds;
    if (taken > 0.0) predictions_.push_back(plain / taken);
    const double seconds = s.step_seconds - turn_before_.step_seconds;
    if (seconds > 0.0) gauges_.push_back((s.plain_seconds - turn_before_.plain_seconds) / seconds);
    turn_before_ = s;
  }

  void finish(const Engine& engine) {
    const EngineStats::Speculation s = engine.stats().speculation;
    result_.drafts = s.drafts - before_.drafts;
    result_.draft_tokens = s.draft_tokens - before_.draft_tokens;
    result_.accepted_tokens = s.accepted_tokens - before_.accepted_tokens;
    if (result_.drafts > 0) {
      const auto drafts = static_cast<double>(result_.drafts);
      result_.acceptance_length = 1.0 + static_cast<double>(result_.accepted_tokens) / drafts;
      for (size_t i = 0; i < s.accepted_per_position.size(); ++i) {
        const int64_t before =
            i < before_.accepted_per_position.size() ? before_.accepted_per_position[i] : 0;
        result_.acceptance_by_position.push_back(
            static_cast<double>(s.accepted_per_position[i] - before) / drafts);
      }
    }
    if (before_.rejection_variance > 0.0) {  // of one turn: every turn has the same draws
      result_.rejections = before_.rejections;
      result_.expected_rejections = before_.expected_rejections;
      result_.z = before_.rejection_z();
    }
  }

  const SpeculationOptions& o_;
  const std::vector<Ids> prompts_;
  EngineStats::Speculation before_, turn_before_;
  std::vector<double> predictions_, gauges_;  // [turns] that drafted
  SpeculationResult result_;
  std::vector<Turn> plain_, drafting_;
};

Result<Wiring> find_wiring(const SpeculationOptions& o, const speculative::Config& config) {
  WiringOptions w;
  w.loading.model = o.engine.model;
  w.loading.threads = o.engine.threads;
  w.loading.device = o.engine.device;
  w.loading.cpu_isa = o.engine.cpu_isa;
  w.loading.reference = o.engine.reference;
  w.loading.force_kernels = o.engine.force_kernels;
  w.loading.weight_cache_dir = o.engine.weight_cache_dir;
  w.kv_cache_dtype = o.engine.kv_cache_dtype;
  w.goes_on = [&](double fraction) {
    o.progress("wiring", fraction);
    return o.stop == nullptr || !*o.stop;
  };
  // Some thousand drafts tell variants apart.
  SpeculationOptions pieces = o;
  pieces.prompt_tokens = std::max(o.prompt_tokens, 256);
  auto texts = cut_prompts(pieces);
  if (!texts.ok()) texts = cut_prompts(o);
  FRESHET_RETURN_IF_ERROR(texts.status());
  w.texts = std::move(*texts);
  return diagnose_wiring(config, w);
}

}  // namespace

Result<SpeculationResult> evaluate_speculation(const SpeculationOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const speculative::Config config,
                           speculative::parse_config(options.engine.speculative_config));
  FRESHET_ASSIGN_OR_RETURN(std::vector<Ids> prompts, cut_prompts(options));
  Comparison comparison(options, std::move(prompts));
  FRESHET_RETURN_IF_ERROR(comparison.run());
  SpeculationResult result = comparison.result();
  result.may_differ = config.acceptance.method != Acceptance::kMatch;
  if (speculative::head_kind(config.method)) {
    FRESHET_ASSIGN_OR_RETURN(result.wiring, find_wiring(options, config));
  }
  return result;
}

// ---- what is printed -------------------------------------------------------------------------

std::string speculation_text(const SpeculationResult& r) {
  std::string text;
  const auto line = [&](std::string_view name, const std::string& value) {
    text += fmt::format("{:<24}{}\n", name, value);
  };
  line("tokens",
       r.equal ? "equal to plain decoding"
               : fmt::format("DIFFER from plain decoding, first in prompt {}{}", r.first_different,
                             r.may_differ ? " (this way of acceptance may)" : ""));
  line("speed-up", fmt::format("{:.2f} ({:.1f} tokens/s, plain {:.1f}; median of {} turns)",
                               r.speedup, r.tokens_per_s, r.plain_tokens_per_s, r.turns));
  line("predicted speed-up", r.predicted_speedup > 0.0 ? fmt::format("{:.2f}", r.predicted_speedup)
                                                       : std::string("not known"));
  line("the engine's own gauge", fmt::format("{:.2f}", r.gauge));
  line("acceptance length", fmt::format("{:.2f} tokens a step with drafts", r.acceptance_length));
  std::string positions;
  for (const double share : r.acceptance_by_position)
    positions += fmt::format("{}{:.3f}", positions.empty() ? "" : " ", share);
  line("acceptance by position", positions.empty() ? "nothing was drafted" : positions);
  line("drafts", fmt::format("{} steps with {} tokens, {} accepted", r.drafts, r.draft_tokens,
                             r.accepted_tokens));
  if (r.rejections) {
    line("rejections", fmt::format("{}, {:.1f} expected (z = {:.2f})", *r.rejections,
                                   r.expected_rejections, r.z));
  }
  if (!r.wiring) return text;
  text +=
      fmt::format("\nwiring of the head (first drafts that are right, of {})\n", r.wiring->drafts);
  for (size_t v = 0; v < r.wiring->variants.size(); ++v) {
    const WiringVariant& variant = r.wiring->variants[v];
    text += fmt::format(
        "  {:<30}{}{}\n", variant.name,
        variant.error.empty() ? fmt::format("{:.3f}", variant.acceptance) : variant.error,
        v == r.wiring->best && v > 0 ? "  fits best" : "");
  }
  text += r.wiring->best == 0
              ? "The configured wiring fits best.\n"
              : fmt::format("The configured wiring is NOT the best: the head fits \"{}\".\n",
                            r.wiring->variants[r.wiring->best].name);
  return text;
}

json::Object speculation_json(const SpeculationResult& r) {
  json::Object o;
  o["equal"] = r.equal;
  o["acceptance_length"] = r.acceptance_length;
  json::Array positions;
  for (const double share : r.acceptance_by_position) positions.emplace_back(share);
  o["acceptance_by_position"] = std::move(positions);
  o["speedup"] = r.speedup;
  o["predicted_speedup"] = r.predicted_speedup;
  o["gauge"] = r.gauge;
  o["tokens_per_s"] = r.tokens_per_s;
  o["plain_tokens_per_s"] = r.plain_tokens_per_s;
  o["drafts"] = r.drafts;
  o["draft_tokens"] = r.draft_tokens;
  o["accepted_tokens"] = r.accepted_tokens;
  o["turns"] = r.turns;
  if (r.rejections) {
    o["rejections"] = *r.rejections;
    o["expected_rejections"] = r.expected_rejections;
    o["z"] = r.z;
  }
  if (!r.wiring) return o;
  json::Array variants;
  for (const WiringVariant& v : r.wiring->variants) {
    json::Object variant;
    variant["wiring"] = v.name;
    if (v.error.empty()) {
      variant["acceptance"] = v.acceptance;
    } else {
      variant["error"] = v.error;
    }
    variants.emplace_back(std::move(variant));
  }
  o["wiring"] = std::move(variants);
  o["best_wiring"] = r.wiring->variants[r.wiring->best].name;
  return o;
}

}  // namespace freshet::eval
