#include "quantizer/tensor_loss.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "quantizer/planned_reader.h"

namespace freshet::quantizer {
namespace {

using quant::Format;

constexpr int64_t kHeadTokens = 64;  // whose logits are in memory at once

// The first windows of the text, the last of them cut.
Windows first_tokens(const Windows& windows, int64_t tokens) {
  Windows out;
  for (const auto& window : windows) {
    if (tokens <= 0) break;
    const auto count = static_cast<int64_t>(std::min<int64_t>(std::ssize(window), tokens));
    out.emplace_back(window.begin(), window.begin() + count);
    tokens -= count;
  }
  return out;
}

// A coarse type that the tensor's rows can have.
std::optional<Format> probe_of(const Planned& p) {
  for (const Format f : {Format::kQ3_K, Format::kQ4_0}) {
    if (p.cols() % quant::info(f).block_size == 0) return f;
  }
  return std::nullopt;
}

// KL divergence of softmax(q) from softmax(p), in nats.
double divergence(const float* p, const float* q, int64_t n) {
  const auto log_sum = [n](const float* x) {
    const double most = *std::max_element(x, x + n);
    double sum = 0.0;
    for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] - most);
    return most + std::log(sum);
  };
  const double of_p = log_sum(p), of_q = log_sum(q);
  double out = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const double log_p = p[i] - of_p;
    out += std::exp(log_p) * (log_p - (q[i] - of_q));
  }
  return std::max(out, 0.0);
}

// The final norm and the head on their own.
class Head {
 public:
  static Result<Head> load(const WorkingModel& working) {
    ops::Ops& ops = working.compute()->ops();
    Head head;
    head.spec_ = &working.model().spec;
    FRESHET_ASSIGN_OR_RETURN(
        head.model_,
        models::load_head(working.checkpoint(), *working.model().architecture, *head.spec_, ops));
    FRESHET_RETURN_IF_ERROR(head.model_->reserve(kHeadTokens, kHeadTokens, kHeadTokens));
    const KvCacheSpec cache = kv_cache_spec(head.model_->spec(), ops::KvType::kF32);
    FRESHET_ASSIGN_OR_RETURN(KvStorage storage,
                             KvStorage::allocate(cache, cache.pools(1, 1), ops.memory()));
    head.cache_ = std::make_unique<KvStorage>(std::move(storage));
    return head;
  }
  // Of at most kHeadTokens tokens.
  void logits(const float* stream, int64_t tokens, float* out) {
    ForwardBatch batch;
    batch.token_ids.assign(static_cast<size_t>(tokens), 0);
    batch.positions.resize(batch.token_ids.size());
    std::iota(batch.positions.begin(), batch.positions.end(), 0);
    batch.logit_rows = batch.positions;
    batch.query_start = {0, static_cast<int32_t>(tokens)};
    batch.context_len = {static_cast<int32_t>(tokens)};
    batch.features = stream;
    StepResults results;
    results.logits = out;
    model_->forward(batch, *cache_, results);
  }

 private:
  const ModelSpec* spec_ = nullptr;
  std::unique_ptr<Model> model_;
  std::unique_ptr<KvStorage> cache_;
};

class LossMeter {
 public:
  LossMeter(WorkingModel& working, const Windows& windows, const TensorLossOptions& options)
      : working_(working),
        windows_(windows),
        options_(options),
        parts_(models::parts_of(working.model().spec)),
        planned_(working.compute()->pool()) {}

  Result<TensorLosses> run(const std::vector<Planned>& plan) {
    FRESHET_RETURN_IF_ERROR(find_places(plan));
    FRESHET_RETURN_IF_ERROR(read_end());
    FRESHET_ASSIGN_OR_RETURN(base_, runner());
    TensorLosses out;
    size_t done = 0;
    for (size_t part = 0; part <= parts_.size(); ++part) {
      for (const Planned* p : at_[part]) {
        if (options_.progress &&
            !options_.progress(static_cast<double>(done++) / static_cast<double>(count_)))
          return cancelled("interrupted");
        FRESHET_ASSIGN_OR_RETURN(out.slopes[p->name], slope(*p, part));
      }
      if (part < parts_.size()) FRESHET_RETURN_IF_ERROR(base_->advance(parts_[part]));
    }
    for (const auto& [name, slope] : out.slopes)
      out.typical += slope / static_cast<double>(out.slopes.size());
    return out;
  }

 private:
  Result<std::unique_ptr<PartRunner>> runner() const {
    PartRunner::Options o;
    o.memory = options_.memory;
    o.folder = options_.folder;
    return PartRunner::create(working_.compute(), working_.checkpoint(), working_.model(), windows_,
                              o);
  }

  // The part that reads each tensor first; behind the last part is the head.
  Status find_places(const std::vector<Planned>& plan) {
    std::map<std::string, size_t> part_of;
    for (size_t i = 0; i < parts_.size(); ++i) {
      FRESHET_ASSIGN_OR_RETURN(const auto linears, working_.linears(parts_[i]));
      for (const models::LinearTensor& t : linears) part_of.emplace(t.source->name, i);
    }
    at_.resize(parts_.size() + 1);
    const bool tied = working_.model().spec.tied_embeddings;
    for (const Planned& p : plan) {
      const bool whole = !p.transposed && p.offset == 0.0f && p.values.empty() &&
                         !p.parts.empty() && p.has_own_rows();
      if (!whole || !is_quantised({p.name, p.shape}) || !probe_of(p) ||
          options_.overrides->fixes(p.name, tied))
        continue;
      const auto found = part_of.find(p.parts.front().source->name);
      if (found != part_of.end()) {
        at_[found->second].push_back(&p);
      } else if (p.name == "token_embd.weight") {
        at_.front().push_back(&p);
      } else if (p.name == "output.weight") {
        at_.back().push_back(&p);
      } else {
        continue;
      }
      ++count_;
    }
    return {};
  }

  // The stream behind the last layer of the unchanged model.
  Status read_end() {
    FRESHET_ASSIGN_OR_RETURN(const auto all, runner());
    for (const models::Part& part : parts_) FRESHET_RETURN_IF_ERROR(all->advance(part));
    FRESHET_ASSIGN_OR_RETURN(end_, stream_of(*all));
    FRESHET_ASSIGN_OR_RETURN(Head head, Head::load(working_));
    head_ = std::make_unique<Head>(std::move(head));
    return {};
  }

  Result<std::vector<float>> stream_of(const PartRunner& runner) const {
    const auto hidden = static_cast<size_t>(working_.model().spec.hidden_size);
    std::vector<float> out(static_cast<size_t>(runner.tokens()) * hidden);
    float* to = out.data();
    for (size_t w = 0; w < windows_.size(); ++w) {
      FRESHET_RETURN_IF_ERROR(runner.read(static_cast<int64_t>(w), to));
      to += windows_[w].size() * hidden;
    }
    return out;
  }

  // Rounds the tensor, in the working model. Returns its relative error.
  Result<double> disturb(const Planned& p) {
    const quant::FormatInfo& f = quant::info(*probe_of(p));
    FRESHET_ASSIGN_OR_RETURN(const std::span<const float> numbers, planned_.read(p));
    const int64_t cols = p.cols();
    std::vector<float> rounded(numbers.size());
    std::vector<std::pair<double, double>> sums(static_cast<size_t>(p.rows()));
    working_.compute()->pool().parallel_for(p.rows(), [&](int64_t r, int) {
      std::span<const float> w;
      if (options_.importance != nullptr && options_.overrides->uses_importance(p.name))
        w = options_.importance->of(p.name, p.expert_of(r), cols);
      const float* const x = numbers.data() + r * cols;
      float* const y = rounded.data() + r * cols;
      std::vector<uint8_t> encoded(quant::row_bytes(*probe_of(p), cols));
      f.encode(x, encoded.data(), cols, w.empty() ? nullptr : w.data());
      f.decode(encoded.data(), y, cols);
      auto& [error, energy] = sums[static_cast<size_t>(r)];
      for (int64_t c = 0; c < cols; ++c) {
        const double weight = w.empty() ? 1.0 : double{w[static_cast<size_t>(c)]};
        error += weight * (double{x[c]} - y[c]) * (double{x[c]} - y[c]);
        energy += weight * x[c] * x[c];
      }
    });
    double error = 0.0, energy = 0.0;
    for (const auto& [e, of] : sums) {
      error += e;
      energy += of;
    }
    const float* from = rounded.data();
    for (size_t i = 0; i < p.parts.size();) {
      const std::string& name = p.parts[i].source->name;
      FRESHET_ASSIGN_OR_RETURN(std::vector<float> values, working_.read_all(name));
      for (; i < p.parts.size() && p.parts[i].source->name == name; ++i) {
        const Planned::Part& part = p.parts[i];
        for (int64_t r = 0; r < part.rows; ++r, from += cols) {
          std::copy_n(from, cols, values.begin() + part.source_row(r) * cols);
        }
      }
      FRESHET_RETURN_IF_ERROR(working_.write_all(name, values));
    }
    return energy > 0.0 ? error / energy : 0.0;
  }

  Result<double> slope(const Planned& p, size_t part) {
    FRESHET_ASSIGN_OR_RETURN(const double error, disturb(p));
    auto loss = loss_from(part, p.name == "token_embd.weight" || p.name == "output.weight");
    for (const Planned::Part& one : p.parts) working_.restore(one.source->name);
    if (!loss.ok()) return loss.status();
    return error > 0.0 ? *loss / error : 0.0;
  }

  // The divergence of the working model, whose parts in front of this one are unchanged.
  Result<double> loss_from(size_t part, bool own_head) {
    std::vector<float> stream;
    if (part < parts_.size()) {
      FRESHET_ASSIGN_OR_RETURN(const auto rest, runner());
      if (part > 0) FRESHET_RETURN_IF_ERROR(rest->copy_streams(*base_));
      for (size_t i = part; i < parts_.size(); ++i)
        FRESHET_RETURN_IF_ERROR(rest->advance(parts_[i]));
      FRESHET_ASSIGN_OR_RETURN(stream, stream_of(*rest));
    }
    const std::vector<float>& changed = part < parts_.size() ? stream : end_;
    std::optional<Head> other;
    if (own_head) {
      FRESHET_ASSIGN_OR_RETURN(Head head, Head::load(working_));
      other.emplace(std::move(head));
    }
    const auto hidden = static_cast<int64_t>(working_.model().spec.hidden_size);
    const auto vocab = static_cast<int64_t>(working_.model().spec.vocab_size);
    const int64_t tokens = std::ssize(end_) / hidden;
    std::vector<float> a(static_cast<size_t>(kHeadTokens * vocab)), b(a.size());
    std::vector<double> sums(static_cast<size_t>(tokens));
    for (int64_t first = 0; first < tokens; first += kHeadTokens) {
      const int64_t count = std::min(kHeadTokens, tokens - first);
      head_->logits(end_.data() + first * hidden, count, a.data());
      (other ? *other : *head_).logits(changed.data() + first * hidden, count, b.data());
      working_.compute()->pool().parallel_for(count, [&](int64_t t, int) {
        sums[static_cast<size_t>(first + t)] =
            divergence(a.data() + t * vocab, b.data() + t * vocab, vocab);
      });
    }
    return std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(tokens);
  }

  WorkingModel& working_;
  const Windows& windows_;
  const TensorLossOptions& options_;
  std::vector<models::Part> parts_;
  PlannedReader planned_;
  std::vector<std::vector<const Planned*>> at_;  // by the part that reads them
  size_t count_ = 0;
  std::unique_ptr<PartRunner> base_;
  std::vector<float> end_;
  std::unique_ptr<Head> head_;
};

}  // namespace

Result<TensorLosses> measure_losses(WorkingModel& working, const std::vector<Planned>& plan,
                                    const Windows& windows, const TensorLossOptions& options) {
  const Windows piece = first_tokens(windows, options.tokens);
  return LossMeter(working, piece, options).run(plan);
}

}  // namespace freshet::quantizer
