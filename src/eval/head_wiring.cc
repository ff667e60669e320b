#include "eval/head_wiring.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <set>

#include "speculative/draft_head.h"

namespace freshet::eval {
namespace {

using models::HeadKind;
using models::HeadOverrides;
using models::HeadPlan;

constexpr int64_t kPiece = 128;        // rows of a step
constexpr size_t kLongest = 512;       // tokens of a text
constexpr size_t kBlockDistance = 4;   // tokens from one block of a DFlash head to the next
constexpr double kBeyondChance = 2.5;  // standard errors

// A model with room for one sequence, which is run from its start.
class SingleRun {
 public:
  static Result<SingleRun> create(std::unique_ptr<runtime::LoadedModel> model, ops::KvType type,
                                  size_t boundaries) {
    SingleRun run;
    FRESHET_RETURN_IF_ERROR(model->reserve({kPiece, kPiece, static_cast<int64_t>(kLongest)}));
    const size_t groups = kv_cache_spec(model->spec(), type).groups.size();
    const std::vector<int32_t> blocks(groups, static_cast<int32_t>(kLongest / ops::kBlockTokens));
    FRESHET_ASSIGN_OR_RETURN(run.cache_, model->make_cache(type, blocks));
    FRESHET_ASSIGN_OR_RETURN(run.logits_, model->make_logits(kPiece));
    Memory* const memory = model->ops().host_memory();
    const auto hidden = static_cast<size_t>(model->spec().hidden_size);
    run.hidden_ = hidden;
    const auto states = [&] { return Buffer::allocate(kPiece * hidden * sizeof(float), memory); };
    FRESHET_ASSIGN_OR_RETURN(run.best_, Buffer::allocate(kPiece * sizeof(int32_t), memory));
    FRESHET_ASSIGN_OR_RETURN(run.last_, states());
    for (size_t b = 0; b < boundaries; ++b) {
      FRESHET_ASSIGN_OR_RETURN(Buffer more, states());
      run.boundaries_.push_back(std::move(more));
    }
    if (model->spec().features) {
      run.width_ = static_cast<size_t>(model->spec().features->width);
      FRESHET_ASSIGN_OR_RETURN(run.features_,
                               Buffer::allocate(kPiece * run.width_ * sizeof(float), memory));
    }
    run.model_ = std::move(model);
    return run;
  }

  // Rows [first, first + ids.size()) of the sequence. Returns their best tokens; states() has what
  // the target shows. `features`: [ids, width] of a head.
  std::span<const int32_t> run(std::span<const int32_t> ids, int64_t first, const float* features) {
    const auto count = static_cast<int32_t>(ids.size());
    ForwardBatch b;
    b.token_ids.assign(ids.begin(), ids.end());
    b.positions.resize(ids.size());
    std::iota(b.positions.begin(), b.positions.end(), static_cast<int32_t>(first));
    b.query_start = {0, count};
    b.context_len = {static_cast<int32_t>(first) + count};
    const std::optional<FeatureSpec>& head = model_->spec().features;
    const bool stores = head && head->use == FeatureSpec::Use::kStored;
    if (!stores || features == nullptr) {
      b.logit_rows.resize(ids.size());
      std::iota(b.logit_rows.begin(), b.logit_rows.end(), 0);
      b.best_only.assign(ids.size(), 1);
    }
    if (stores && features == nullptr)
      b.spans.assign(ids.size(), {static_cast<int32_t>(first), b.context_len[0]});
    b.tables.resize(cache_.spec().groups.size());
    for (BlockTables& t : b.tables) {
      t.stride = kTablePiece;
      t.ids.assign(kTablePiece, -1);
      std::iota(t.ids.begin(), t.ids.begin() + kLongest / ops::kBlockTokens, 0);
    }
    if (features != nullptr) {
      std::memcpy(features_.as<float>(), features, ids.size() * width_ * sizeof(float));
      b.features = features_.as<float>();
    }
    std::vector<float*> boundaries;
    for (Buffer& boundary : boundaries_) boundaries.push_back(boundary.as<float>());
    model_->model().forward(
        b, cache_, {logits_.as<float>(), last_.as<float>(), best_.as<int32_t>(), boundaries});
    const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
    int32_t* const best = best_.as<int32_t>();
    for (size_t i = 0; i < b.logit_rows.size(); ++i) {
      if (best[i] != StepResults::kSeeLogits) continue;
      const std::span row(logits_.as<float>() + i * vocab, vocab);
      best[i] = static_cast<int32_t>(std::ranges::max_element(row) - row.begin());
    }
    return {best, b.logit_rows.size()};
  }

  const float* last(size_t row) const { return last_.as<float>() + row * hidden_; }
  const float* boundary(size_t which, size_t row) const {
    return boundaries_[which].as<float>() + row * hidden_;
  }
  size_t hidden() const { return hidden_; }
  runtime::LoadedModel& model() const { return *model_; }

 private:
  std::unique_ptr<runtime::LoadedModel> model_;
  KvStorage cache_;
  Buffer logits_, best_, last_, features_;
  std::vector<Buffer> boundaries_;
  size_t hidden_ = 0, width_ = 0;
};

// What the target makes of a text.
struct Seen {
  std::vector<int32_t> ids;
  std::vector<int32_t> best;                   // [ids] the token after each
  std::vector<float> last;                     // [ids, hidden]
  std::vector<std::vector<float>> boundaries;  // [captured] of [ids, hidden]
};

std::vector<WiringVariant> variants_of(HeadKind kind, const HeadPlan& plan, bool short_list) {
  std::vector<WiringVariant> all;
  const auto add = [&](std::string name, HeadOverrides overrides) {
    all.push_back({std::move(name), overrides, 0.0, {}});
  };
  add("as configured", {});
  const bool layers = kind == HeadKind::kEagle3 || kind == HeadKind::kDFlash;
  if (layers) {
    add("layer ids - 1", {.shift_layers = -1});
    add("layer ids + 1", {.shift_layers = 1});
    add("last layer first", {.reverse_layers = true});
  }
  if (kind == HeadKind::kEagle3) {
    const bool before = plan.spec.features->normed_residual;
    if (plan.spec.features->feature_norm) {
      add(before ? "norm after residual" : "norm before residual", {.flip_residual_norm = true});
    }
  } else if (!layers) {
    add("states before the final norm", {.before_norm = true});
    const bool features_first = plan.spec.features->features_first;
    add(features_first ? "embedding before states" : "states before embedding",
        {.swap_inputs = true});
  }
  if (plan.spec.features->bias) add("without bias", {.drop_bias = true});
  if (short_list) add("d2t with ids", {.absolute_ids = true});
  return all;
}

// The states that a plan reads, side by side.
std::vector<float> features_of(const Seen& seen, const HeadPlan& plan,
                               const std::vector<int>& captured, size_t hidden) {
  std::vector<const std::vector<float>*> parts;
  if (plan.reads_last) parts.push_back(&seen.last);
  for (const int boundary : plan.boundaries) {
    const auto at = std::ranges::find(captured, boundary) - captured.begin();
    parts.push_back(&seen.boundaries[static_cast<size_t>(at)]);
  }
  std::vector<float> out;
  out.reserve(seen.ids.size() * parts.size() * hidden);
  for (size_t i = 0; i < seen.ids.size(); ++i) {
    for (const auto* part : parts) {
      const auto from = part->begin() + static_cast<std::ptrdiff_t>(i * hidden);
      out.insert(out.end(), from, from + static_cast<std::ptrdiff_t>(hidden));
    }
  }
  return out;
}

class Diagnosis {
 public:
  Diagnosis(HeadKind kind, const loader::Checkpoint& head, ops::KvType type)
      : kind_(kind), head_(head), type_(type) {}

  Status plan(const ModelSpec& target) {
    FRESHET_ASSIGN_OR_RETURN(const HeadPlan plan, models::plan_head(kind_, head_, target));
    result.variants = variants_of(kind_, plan, plan.spec.vocab_size != target.vocab_size);
    std::set<int> wanted;
    for (WiringVariant& v : result.variants) {
      const auto varied = models::plan_head(kind_, head_, target, v.overrides);
      if (!varied.ok()) v.error = varied.status().message();
      if (varied.ok()) wanted.insert(varied->boundaries.begin(), varied->boundaries.end());
    }
    captured_.assign(wanted.begin(), wanted.end());
    return {};
  }

  Status read(std::unique_ptr<runtime::LoadedModel> target,
              const std::vector<std::vector<int32_t>>& texts) {
    FRESHET_RETURN_IF_ERROR(target->model().capture(captured_));
    FRESHET_ASSIGN_OR_RETURN(SingleRun run,
                             SingleRun::create(std::move(target), type_, captured_.size()));
    for (const std::vector<int32_t>& text : texts) {
      Seen seen;
      const std::span ids = std::span(text).first(std::min(text.size(), kLongest));
      seen.ids.assign(ids.begin(), ids.end());
      seen.boundaries.resize(captured_.size());
      each_piece(ids.size(), [&](size_t first, size_t count) {
        const auto best = run.run(ids.subspan(first, count), static_cast<int64_t>(first), nullptr);
        seen.best.insert(seen.best.end(), best.begin(), best.end());
        const size_t numbers = count * run.hidden();
        seen.last.insert(seen.last.end(), run.last(0), run.last(0) + numbers);
        for (size_t b = 0; b < captured_.size(); ++b) {
          auto& to = seen.boundaries[b];
          to.insert(to.end(), run.boundary(b, 0), run.boundary(b, 0) + numbers);
        }
      });
      seen_.push_back(std::move(seen));
    }
    target_.emplace(std::move(run));
    return {};
  }

  // Whether each first draft of the variant is right.
  Result<std::vector<bool>> right(const HeadOverrides& overrides) {
    runtime::LoadedModel& target = target_->model();
    FRESHET_ASSIGN_OR_RETURN(models::DraftHead head, models::load_head(kind_, head_, target.model(),
                                                                       target.ops(), overrides));
    FRESHET_ASSIGN_OR_RETURN(
        SingleRun run,
        SingleRun::create(std::make_unique<runtime::LoadedModel>(compute_, std::move(head.model)),
                          type_, 0));
    std::vector<bool> out;
    for (const Seen& seen : seen_) {
      const std::vector<float> features =
          features_of(seen, head.plan, captured_, target_->hidden());
      const size_t width = features.size() / seen.ids.size();
      const auto compare = [&](int32_t id, size_t place) {
        if (!head.target_ids.empty()) id = head.target_ids[static_cast<size_t>(id)];
        out.push_back(id == seen.best[place]);
      };
      if (head.plan.block > 0) {
        blocks(run, head.plan, seen, features, compare);
        continue;
      }
      // The head at i has the token at i + 1, and drafts the one behind it.
      each_piece(seen.ids.size() - 1, [&](size_t first, size_t count) {
        const auto best = run.run(std::span(seen.ids).subspan(first + 1, count),
                                  static_cast<int64_t>(first), features.data() + first * width);
        for (size_t i = 0; i < count; ++i) compare(best[i], first + i + 1);
      });
    }
    return out;
  }

  // The first drafts of a DFlash head: `compare` gets each, and the place of the token before it.
  template <class Compare>
  static void blocks(SingleRun& run, const HeadPlan& plan, const Seen& seen,
                     const std::vector<float>& features, const Compare& compare) {
    const size_t width = features.size() / seen.ids.size();
    size_t stored = 0;
    for (size_t known = kBlockDistance; known < seen.ids.size(); known += kBlockDistance) {
      const size_t rows = std::min(static_cast<size_t>(plan.block), kLongest - known);
      if (rows < 2) break;
      run.run(std::span(seen.ids).subspan(stored, known - stored), static_cast<int64_t>(stored),
              features.data() + stored * width);
      stored = known;  // the next call overwrites the block's keys and values
      std::vector<int32_t> block(rows, plan.mask_token);
      block[0] = seen.ids[known];
      compare(run.run(block, static_cast<int64_t>(known), nullptr)[1], known);
    }
  }

  void set_compute(std::shared_ptr<runtime::Compute> compute) { compute_ = std::move(compute); }

  Wiring result;

 private:
  template <class Use>
  static void each_piece(size_t size, const Use& use) {
    for (size_t first = 0; first < size; first += kPiece)
      use(first, std::min<size_t>(kPiece, size - first));
  }

  HeadKind kind_;
  const loader::Checkpoint& head_;
  ops::KvType type_;
  std::shared_ptr<runtime::Compute> compute_;
  std::vector<int> captured_;
  std::vector<Seen> seen_;
  std::optional<SingleRun> target_;
};

// Whether `a` is right more often than `b` on the same drafts, beyond chance.
bool beats(const std::vector<bool>& a, const std::vector<bool>& b) {
  double wins = 0.0, losses = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    wins += a[i] && !b[i];
    losses += b[i] && !a[i];
  }
  return wins - losses > kBeyondChance * std::sqrt(wins + losses);
}

}  // namespace

Result<Wiring> diagnose_wiring(const speculative::Config& config, const WiringOptions& options) {
  const auto kind = speculative::head_kind(config.method);
  FRESHET_CHECK(kind.has_value());
  FRESHET_ASSIGN_OR_RETURN(auto compute, runtime::Compute::open(options.loading));
  FRESHET_ASSIGN_OR_RETURN(const ops::KvType type, compute->kv_type(options.kv_cache_dtype));
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(options.loading.model));
  FRESHET_ASSIGN_OR_RETURN(const auto own, speculative::open_head(config));
  Diagnosis diagnosis(*kind, own ? *own : checkpoint, type);
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(checkpoint));
  FRESHET_RETURN_IF_ERROR(diagnosis.plan(spec));
  diagnosis.set_compute(compute);
  FRESHET_ASSIGN_OR_RETURN(auto target,
                           runtime::LoadedModel::load(compute, checkpoint, options.loading));
  FRESHET_RETURN_IF_ERROR(diagnosis.read(std::move(target), options.texts));
  std::vector<WiringVariant>& variants = diagnosis.result.variants;
  std::vector<std::vector<bool>> right(variants.size());
  size_t best = 0;
  for (size_t v = 0; v < variants.size(); ++v) {
    if (options.goes_on &&
        !options.goes_on(static_cast<double>(v) / static_cast<double>(variants.size())))
      return cancelled("interrupted");
    if (!variants[v].error.empty()) continue;
    auto tried = diagnosis.right(variants[v].overrides);
    if (!tried.ok()) {
      variants[v].error = tried.status().message();
      continue;
    }
    right[v] = std::move(*tried);
    diagnosis.result.drafts = std::ssize(right[v]);
    variants[v].acceptance = static_cast<double>(std::ranges::count(right[v], true)) /
                             static_cast<double>(std::max<size_t>(1, right[v].size()));
    if (variants[v].acceptance > variants[best].acceptance || !variants[best].error.empty())
      best = v;
  }
  const bool better = best > 0 && (right[0].empty() || beats(right[best], right[0]));
  diagnosis.result.best = better ? best : 0;
  return std::move(diagnosis.result);
}

}  // namespace freshet::eval
