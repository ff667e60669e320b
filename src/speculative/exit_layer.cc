#include "speculative/exit_layer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "layers/decoder.h"
#include "speculative/draft_runner.h"
#include "speculative/draft_sampler.h"

namespace freshet::speculative {
namespace {

constexpr int kTexts = 8;
constexpr int kSteps = 24;       // tokens of a text
constexpr int kLeastSteps = 4;   // even if they take longer than the budget
constexpr double kBudget = 0.7;  // seconds
constexpr int kMostDrafts = 15;

double time_in_seconds() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(t).count();
}

// A model with the texts in its cache.
class Reader {
 public:
  static Result<Reader> create(std::unique_ptr<runtime::LoadedModel> model, ops::KvType kv_type) {
    Reader reader;
    const DraftRunnerLimits limits{.max_model_len = kSteps + 1,
                                   .max_tokens = kTexts,
                                   .max_rows = kTexts,
                                   .cache_tokens = kTexts * (kSteps + kv_cache::kBlockTokens),
                                   .kv_type = kv_type};
    FRESHET_ASSIGN_OR_RETURN(reader.runner_, DraftRunner::create(std::move(model), limits));
    for (int i = 0; i < kTexts; ++i) reader.texts_[i].salt = fmt::format("{}", i);
    return reader;
  }

  // Reads a token of each text; the results have the logits. Returns whether there was room.
  bool read(std::span<const int32_t> tokens, std::span<DraftRunner::Work> work) {
    for (size_t i = 0; i < work.size(); ++i) {
      work[i] = {.sequence = &texts_[i],
                 .ids = tokens.subspan(i, 1),
                 .wants_token = true,
                 .wants_logits = true};
    }
    const double from = time_in_seconds();
    runner_->run(work, false);
    const double took = time_in_seconds() - from;
    seconds_ = steps_++ == 0 ? took : std::min(seconds_, took);
    return std::ranges::none_of(work, &DraftRunner::Work::failed);
  }
  double seconds() const { return seconds_; }  // the least of a step

 private:
  std::unique_ptr<DraftRunner> runner_;
  DraftSequence texts_[kTexts];
  double seconds_ = 0.0;
  int steps_ = 0;
};

int32_t best_of(std::span<const float> logits) {
  return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
}

// Draws the next token of each text.
class Writer {
 public:
  explicit Writer(int64_t vocab) : vocab_(vocab), scratch_(vocab) {
    for (int i = 0; i < kTexts; ++i) {
      DraftRequest request{.params = &params_, .seed = static_cast<uint64_t>(i)};
      samplers_[i] = DraftSampler(request, vocab, false);
      texts_[i] = {static_cast<int32_t>((i + 1) * vocab / (kTexts + 1))};
      last_[i] = texts_[i].back();
    }
  }
  std::span<const int32_t> last() const { return last_; }
  void write(std::span<const DraftRunner::Work> work) {
    for (size_t i = 0; i < work.size(); ++i) {
      DraftRequest request{.tokens = texts_[i], .params = &params_, .seed = i};
      const int32_t token = samplers_[i].draw(request, work[i].logits, {}, scratch_, row_);
      last_[i] = token >= 0 ? token : 0;
      texts_[i].push_back(last_[i]);
    }
  }

 private:
  int64_t vocab_;
  SamplingParams params_{.temperature = 1.0f};
  DraftSampler samplers_[kTexts];
  std::vector<int32_t> texts_[kTexts];
  int32_t last_[kTexts] = {};
  SamplerScratch scratch_;
  std::vector<float> row_;
};

}  // namespace

std::unique_ptr<runtime::LoadedModel> first_layers(std::shared_ptr<runtime::Compute> compute,
                                                   const ModelSpec& target,
                                                   std::shared_ptr<const ModelWeights> weights,
                                                   int layers) {
  ModelSpec spec = target;
  spec.layers.resize(static_cast<size_t>(layers));
  ops::Ops& ops = compute->ops();
  return std::make_unique<runtime::LoadedModel>(
      std::move(compute), std::make_unique<Decoder>(std::move(spec), std::move(weights), nullptr,
                                                    std::vector<Model::WeightInfo>(), ops));
}

std::vector<int> exit_candidates(int layers) {
  std::vector<int> candidates;
  for (const int sixteenths : {1, 2, 3, 4, 6, 8}) {
    const int at = std::clamp(layers * sixteenths / 16, 1, layers - 1);
    if (candidates.empty() || candidates.back() < at) candidates.push_back(at);
  }
  return candidates;
}

double exit_gain(double agreement, double cost) {
  double best = 1.0, tokens = 1.0, all = 1.0;
  for (int drafts = 1; drafts <= kMostDrafts; ++drafts) {
    tokens += all *= agreement;
    best = std::max(best, tokens / (1.0 + cost * drafts));
  }
  return best;
}

Result<ExitLayer> measure_exit_layer(std::shared_ptr<runtime::Compute> compute,
                                     const ModelSpec& target,
                                     std::shared_ptr<const ModelWeights> weights,
                                     ops::KvType kv_type) {
  const auto layers = static_cast<int>(target.layers.size());
  FRESHET_ASSIGN_OR_RETURN(Reader model,
                           Reader::create(first_layers(compute, target, weights, layers), kv_type));
  const std::vector<int> candidates = exit_candidates(layers);
  std::vector<Reader> readers;
  for (const int exit : candidates) {
    FRESHET_ASSIGN_OR_RETURN(Reader reader,
                             Reader::create(first_layers(compute, target, weights, exit), kv_type));
    readers.push_back(std::move(reader));
  }
  Writer writer(target.vocab_size);
  std::vector<double> equal(candidates.size(), 0.0);
  std::vector<DraftRunner::Work> work(kTexts), other(kTexts);
  const double until = time_in_seconds() + kBudget;
  int steps = 0;
  for (; steps < kSteps && (steps < kLeastSteps || time_in_seconds() < until); ++steps) {
    if (!model.read(writer.last(), work)) break;
    for (size_t c = 0; c < readers.size(); ++c) {
      if (!readers[c].read(writer.last(), other)) continue;
      for (int i = 0; i < kTexts; ++i)
        equal[c] += best_of(other[i].logits) == best_of(work[i].logits) ? 1.0 : 0.0;
    }
    writer.write(work);
  }
  ExitLayer best;
  for (size_t c = 0; c < readers.size(); ++c) {
    ExitLayer exit{.layers = candidates[c]};
    exit.agreement = equal[c] / std::max(1.0, static_cast<double>(steps) * kTexts);
    exit.cost = readers[c].seconds() / std::max(1e-9, model.seconds());
    exit.gain = exit_gain(exit.agreement, exit.cost);
    if (best.layers == 0 || exit.gain > best.gain) best = exit;
  }
  return best;
}

}  // namespace freshet::speculative
