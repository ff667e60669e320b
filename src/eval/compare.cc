#include "eval/compare.h"

#include <algorithm>
#include <cmath>

#include "base/hash.h"
#include "eval/divergence.h"
#include "eval/logits.h"

namespace freshet::eval {
namespace {

// Logits rows of a window at once, as in `eval perplexity`.
constexpr int64_t kRowsOfWindow = 128;

// What is kept of the tokens scored so far.
struct Scores {
  Blocks base, model, delta, kl, top;  // windows
  std::vector<double> token_kl;
  double squared_delta_p = 0.0;
  int64_t same_top = 0;
};

// A window on its way through the models. Token i of `inputs` predicts targets[i].
struct OpenWindow {
  std::vector<int32_t> inputs;
  std::span<const int32_t> targets;
  std::vector<std::vector<Divergence>> tokens;  // [models]
};

// Runs some windows through the base and the models, and adds the scores of each.
class SideBySide {
 public:
  SideBySide(Session& base, std::span<Session* const> models, const TextWindows& windows)
      : base_(base), models_(models), windows_(windows), scores_(models.size()) {}

  const Scores& scores(size_t model) const { return scores_[model]; }

  Status score(int64_t first, int64_t count) {
    const bool with_bos = windows_.bos >= 0;
    open_.clear();
    size_t longest = 0;
    for (int64_t w = first; w < first + count; ++w) {
      const auto ids = windows_.at(w);
      OpenWindow& o = open_.emplace_back();
      if (with_bos) o.inputs.push_back(windows_.bos);
      o.inputs.insert(o.inputs.end(), ids.begin(), ids.end() - 1);
      o.targets = ids.subspan(with_bos ? 0 : 1);
      o.tokens.assign(models_.size(), std::vector<Divergence>(o.inputs.size()));
      longest = std::max(longest, o.inputs.size());
      base_.reset(static_cast<int>(w - first));
      for (Session* model : models_) model->reset(static_cast<int>(w - first));
    }
    const auto step = static_cast<size_t>(std::max<int64_t>(1, base_.options().logit_rows / count));
    for (size_t from = 0; from < longest; from += step) run(from, step);
    for (const OpenWindow& o : open_) {
      for (size_t m = 0; m < models_.size(); ++m) {
        FRESHET_RETURN_IF_ERROR(add(o.tokens[m], scores_[m]));
      }
    }
    return {};
  }

 private:
  // At most `step` tokens of each window.
  void run(size_t from, size_t step) {
    struct Row {
      size_t window, token;
    };
    std::vector<Row> rows;
    std::vector<Session::Piece> pieces;
    for (size_t w = 0; w < open_.size(); ++w) {
      const std::span<const int32_t> inputs(open_[w].inputs);
      if (from >= inputs.size()) continue;
      const size_t n = std::min(step, inputs.size() - from);
      pieces.push_back({static_cast<int>(w), inputs.subspan(from, n), 0});
      for (size_t i = 0; i < n; ++i) rows.push_back({w, from + i});
    }
    const std::span<const float> p = base_.run(pieces);
    const auto vocab = static_cast<size_t>(base_.model().spec().vocab_size);
    for (size_t m = 0; m < models_.size(); ++m) {
      const std::span<const float> q = models_[m]->run(pieces);
      base_.pool().parallel_for(std::ssize(rows), [&](int64_t r, int) {
        const auto [window, token] = rows[static_cast<size_t>(r)];
        const size_t at = static_cast<size_t>(r) * vocab;
        OpenWindow& o = open_[window];
        o.tokens[m][token] =
            divergence(p.subspan(at, vocab), q.subspan(at, vocab), o.targets[token]);
      });
    }
  }

  // The tokens of one window.
  static Status add(std::span<const Divergence> tokens, Scores& scores) {
    double base = 0.0, model = 0.0, kl = 0.0;
    int64_t top = 0;
    for (const Divergence& d : tokens) {
      base += d.base_nats;
      model += d.model_nats;
      kl += d.kl;
      scores.token_kl.push_back(d.kl);
      top += d.same_top ? 1 : 0;
      const double delta_p = std::exp(-d.model_nats) - std::exp(-d.base_nats);
      scores.squared_delta_p += delta_p * delta_p;
    }
    if (!std::isfinite(base)) return internal_error("the base model's logits are not finite");
    if (!std::isfinite(model) || !std::isfinite(kl))
      return internal_error("the logits of the model that is compared are not finite");
    const auto n = static_cast<double>(tokens.size());
    scores.base.add(base, n);
    scores.model.add(model, n);
    scores.delta.add(model - base, n);
    scores.kl.add(kl, n);
    scores.top.add(static_cast<double>(top), n);
    scores.same_top += top;
    return {};
  }

  Session& base_;
  std::span<Session* const> models_;
  const TextWindows& windows_;
  std::vector<Scores> scores_;  // [models]
  std::vector<OpenWindow> open_;
};

ModelComparison comparison_of(const Scores& scores, const TextWindows& windows) {
  ModelComparison c;
  c.window = windows.window;
  c.windows = windows.windows();
  c.tokens = std::ssize(scores.token_kl);
  c.fingerprint = windows.fingerprint();
  c.base_nats = mean_and_error(scores.base);
  c.model_nats = mean_and_error(scores.model);
  c.delta = mean_and_error(scores.delta);
  c.delta_interval = bootstrap_mean(scores.delta);
  c.kl = mean_and_error(scores.kl);
  c.kl_interval = bootstrap_mean(scores.kl);
  std::vector<double> token_kl = scores.token_kl;
  std::ranges::sort(token_kl);
  c.kl_median = percentile(token_kl, 0.5);
  c.kl_p99 = percentile(token_kl, 0.99);
  c.kl_p999 = percentile(token_kl, 0.999);
  const auto tokens = static_cast<double>(c.tokens);
  c.top1_agreement = static_cast<double>(scores.same_top) / tokens;
  c.top1_standard_error = mean_and_error(scores.top).standard_error;
  c.rms_delta_p = std::sqrt(scores.squared_delta_p / tokens);
  return c;
}

// Both must run in the same arithmetic: otherwise its differences are taken for the model's.
Result<std::string> same_arithmetic(const Session& base, const Session& model) {
  const auto text = [](const Session& s) {
    return fmt::format("{}, cache {}{}", s.device(), s.kv_types().describe(),
                       s.options().reference ? ", reference" : "");
  };
  if (text(base) != text(model)) {
    return invalid_argument("the base runs with ({}) and the model with ({}): give both the same",
                            text(base), text(model));
  }
  return text(base);
}

Status same_size(const ModelSpec& base, const ModelSpec& model) {
  if (base.vocab_size == model.vocab_size) return {};
  return invalid_argument("their vocabularies differ: {} and {} tokens", base.vocab_size,
                          model.vocab_size);
}

Status check_context(const ModelSpec& spec, int64_t window, const std::string& name) {
  if (spec.max_context <= 0 || window <= spec.max_context) return {};
  return invalid_argument("{} handles {} tokens: --window {} is too long for it", name,
                          spec.max_context, window);
}

}  // namespace

std::span<const int32_t> TextWindows::at(int64_t w) const {
  const auto i = static_cast<size_t>(w);
  const size_t begin = i == 0 ? 0 : ends[i - 1];
  return std::span(ids).subspan(begin, ends[i] - begin);
}

std::string TextWindows::fingerprint() const {
  const auto hash = [](const auto& values, uint64_t seed) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
    return hash_bytes({bytes, values.size() * sizeof values[0]}, seed);
  };
  return fmt::format("{:016x}", hash(ends, hash(ids, static_cast<uint32_t>(bos))));
}

Result<TextWindows> cut_windows(const Tokenizer& tokenizer, std::span<const std::string> texts,
                                int64_t window) {
  TextWindows result;
  result.window = window;
  result.bos = tokenizer.bos().value_or(-1);
  const size_t fewest = result.bos >= 0 ? 1 : 2;  // so that there is a token to score
  for (const std::string& text : texts) {
    const auto ids = tokenizer.encode(text, {.add_special = false});
    for (size_t at = 0; at + fewest <= ids.size(); at += static_cast<size_t>(window)) {
      const size_t end = std::min(ids.size(), at + static_cast<size_t>(window));
      result.ids.insert(result.ids.end(), ids.begin() + static_cast<std::ptrdiff_t>(at),
                        ids.begin() + static_cast<std::ptrdiff_t>(end));
      result.ends.push_back(result.ids.size());
    }
  }
  if (result.ends.empty()) return invalid_argument("the text has no token to score");
  return result;
}

Result<std::vector<ModelComparison>> compare_each(Session& base, std::span<Session* const> models,
                                                  const TextWindows& windows,
                                                  const CompareProgress& progress) {
  const ModelSpec& spec = base.model().spec();
  for (const Session* model : models) {
    FRESHET_RETURN_IF_ERROR(same_size(spec, model->model().spec()));
  }
  FRESHET_RETURN_IF_ERROR(check_ids(windows.ids, spec.vocab_size));
  SideBySide all(base, models, windows);
  const int64_t at_once = base.options().sequences;
  for (int64_t w = 0; w < windows.windows(); w += at_once) {
    const int64_t count = std::min(at_once, windows.windows() - w);
    FRESHET_RETURN_IF_ERROR(all.score(w, count));
    if (!progress(static_cast<double>(w + count) / static_cast<double>(windows.windows())))
      return cancelled("interrupted");
  }
  std::vector<ModelComparison> result;
  for (size_t m = 0; m < models.size(); ++m) {
    result.push_back(comparison_of(all.scores(m), windows));
  }
  return result;
}

Result<ModelComparison> compare(Session& base, Session& model, const TextWindows& windows,
                                const CompareProgress& progress) {
  FRESHET_RETURN_IF_ERROR(same_size(base.model().spec(), model.model().spec()));
  FRESHET_ASSIGN_OR_RETURN(std::string arithmetic, same_arithmetic(base, model));
  Session* const models[] = {&model};
  FRESHET_ASSIGN_OR_RETURN(auto all, compare_each(base, models, windows, progress));
  all[0].arithmetic = std::move(arithmetic);
  return std::move(all[0]);
}

Status same_vocabulary(const Tokenizer& base, const Tokenizer& model) {
  if (base.bos() != model.bos()) {
    const auto id = [](const std::optional<int32_t>& bos) {
      return bos ? std::to_string(*bos) : std::string("none");
    };
    return invalid_argument("their BOS tokens differ: {} and {}", id(base.bos()), id(model.bos()));
  }
  for (int32_t id = 0; id < std::min(base.vocab_size(), model.vocab_size()); ++id) {
    // Files may name ids that have no token, such as those that pad a vocabulary.
    const std::string_view a = base.token_bytes(id), b = model.token_bytes(id);
    if (a != b && !a.empty() && !b.empty()) {
      json::Array both{json::Value(a), json::Value(b)};
      return invalid_argument("token {} differs: {}", id,
                              json::write(json::Value(std::move(both))));
    }
  }
  return {};
}

Result<Comparer> Comparer::make(Options options) {
  if (options.base_name.empty()) options.base_name = options.base.model;
  FRESHET_ASSIGN_OR_RETURN(ModelSpec spec, Session::read_spec(options.base.model));
  FRESHET_RETURN_IF_ERROR(check_context(spec, options.window, options.base_name));
  FRESHET_ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::load(options.base.model));
  FRESHET_ASSIGN_OR_RETURN(auto windows, cut_windows(tokenizer, options.texts, options.window));
  SessionOptions& s = options.base;
  s.sequences = static_cast<int>(std::min<int64_t>(options.batch, windows.windows()));
  s.context = options.window + 1;
  s.batch = s.logit_rows = kRowsOfWindow * s.sequences;
  Comparer comparer(std::move(options), std::move(tokenizer), std::move(windows));
  comparer.base_spec_ = std::move(spec);
  return comparer;
}

Result<ModelComparison> Comparer::compare_with(const SessionOptions& model, const std::string& name,
                                               const CompareProgress& progress) {
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, Session::read_spec(model.model));
  FRESHET_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(model.model));
  FRESHET_RETURN_IF_ERROR(check_context(spec, options_.window, name));
  const std::string both = fmt::format("{} and {} cannot be compared", options_.base_name, name);
  FRESHET_RETURN_IF_ERROR(same_size(base_spec_, spec).with_context(both));
  FRESHET_RETURN_IF_ERROR(same_vocabulary(tokenizer_, tokenizer).with_context(both));
  FRESHET_ASSIGN_OR_RETURN(const auto cut, cut_windows(tokenizer, options_.texts, options_.window));
  if (cut.fingerprint() != windows_.fingerprint())
    return invalid_argument("{}: their tokenizers split the text differently", both);
  if (base_ == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(base_size_, model_size(options_.base.model));
    FRESHET_ASSIGN_OR_RETURN(base_, options_.open(options_.base));
  }
  SessionOptions s = options_.base;
  s.model = model.model;
  s.weight_cache_dir = model.weight_cache_dir;
  s.on_progress = model.on_progress;
  s.compute = base_->compute();
  auto opened = options_.open(s);
  if (opened.status().code() == StatusCode::kUnsupported && base_->device() != "cpu") {
    return unsupported("{}; with --device cpu both models run on the processor",
                       opened.status().message());
  }
  FRESHET_ASSIGN_OR_RETURN(const auto session, std::move(opened));
  FRESHET_ASSIGN_OR_RETURN(ModelComparison c, eval::compare(*base_, *session, windows_, progress));
  c.base = options_.base_name;
  c.model = name;
  c.base_size = base_size_;
  FRESHET_ASSIGN_OR_RETURN(c.model_size, model_size(model.model));
  return c;
}

}  // namespace freshet::eval
