// The matrices of experts: statistics that several share, and second moments of a few at a time.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "quantizer/quantize_job.h"

namespace freshet::quantizer {
namespace {

// The statistics of all tokens of several.
InputStats pooled_stats(const std::vector<const InputStats*>& parts) {
  InputStats out = *parts.front();
  for (const InputStats* p : parts) {
    if (p != parts.front()) out.tokens += p->tokens;
  }
  const auto pool = [&](std::vector<float> InputStats::* member) {
    std::vector<float>& to = out.*member;
    std::vector<double> sum(to.size());
    for (const InputStats* p : parts) {
      const double share = static_cast<double>(p->tokens) / static_cast<double>(out.tokens);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += share * (p->*member)[i];
    }
    for (size_t i = 0; i < sum.size(); ++i) to[i] = static_cast<float>(sum[i]);
  };
  pool(&InputStats::mean_abs);
  pool(&InputStats::mean_square);
  pool(&InputStats::gram);
  for (const InputStats* p : parts) {
    for (size_t i = 0; i < out.max_abs.size(); ++i)
      out.max_abs[i] = std::max(out.max_abs[i], p->max_abs[i]);
  }
  return out;
}

// Adds up second moments as pooled_stats() does, one after the other.
class PooledGram {
 public:
  explicit PooledGram(int64_t tokens) : tokens_(tokens) {}
  void add(const InputStats& part) {
    const double share = static_cast<double>(part.tokens) / static_cast<double>(tokens_);
    sum_.resize(part.gram.size());
    for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += share * part.gram[i];
  }
  std::vector<float> take() {
    std::vector<float> out(sum_.begin(), sum_.end());
    sum_ = {};
    return out;
  }

 private:
  int64_t tokens_;
  std::vector<double> sum_;
};

size_t gram_bytes(int64_t cols) {
  return static_cast<size_t>(cols * cols) * sizeof(float);
}

}  // namespace

// An expert that few tokens chose is quantised by what all experts of its layer read.
void QuantizeJob::share_experts(std::vector<Work>& work) {
  constexpr int64_t kFewTokens = 64;
  pooled_.clear();
  const auto few = [](const Work& w) {
    return w.tensor.expert >= 0 && (w.stats == nullptr || w.stats->tokens < kFewTokens);
  };
  std::map<models::Role, InputStats*> of_role;
  for (Work& w : work) {
    if (!few(w)) continue;
    const auto [place, added] = of_role.emplace(w.tensor.role, nullptr);
    if (added) {
      std::vector<const InputStats*> parts;
      for (const Work& other : work) {
        const bool counts = other.tensor.role == w.tensor.role && other.stats != nullptr;
        if (counts && std::ranges::count(parts, other.stats) == 0) parts.push_back(other.stats);
      }
      if (!parts.empty()) {
        pooled_.push_back(std::make_unique<InputStats>(pooled_stats(parts)));
        place->second = pooled_.back().get();
      }
    }
    if (place->second == nullptr) continue;
    w.stats = place->second;
    w.note = "few tokens chose this expert: statistics of all of its layer";
  }
}

// Whether the second moments of all experts of a part at once would exceed the memory that was
// given. Scaled channels need the moments of all matrices that read a norm, so they go together.
bool QuantizeJob::takes_passes(const std::vector<Work>& work) const {
  const MethodSet& method = options_.method;
  if (!method.gptq || method.awq || method.smoothquant) return false;
  std::set<std::pair<int, models::InputOf>> inputs;
  size_t bytes = 0;
  for (const Work& w : work) {
    if (inputs.emplace(w.tensor.expert, w.tensor.input).second) bytes += gram_bytes(w.tensor.cols);
  }
  const bool experts =
      std::ranges::any_of(work, [](const Work& w) { return w.tensor.expert >= 0; });
  return experts && bytes > options_.memory;
}

// Runs the part once for as many inputs as the memory holds moments of, quantises what reads them,
// and goes on with the next inputs. Matrices with pooled statistics come last. `seen`: all
// statistics but the moments.
Status QuantizeJob::quantise_in_passes(const models::Part& part, std::vector<Work>& work,
                                       const InputCollector& seen,
                                       std::vector<StoredTensor>& stored) {
  struct Pool {
    InputStats* stats;
    PooledGram gram;
    models::Role role;
  };
  std::vector<Pool> pools;
  std::vector<bool> pooled(work.size(), false), done(work.size(), false);
  for (size_t i = 0; i < work.size(); ++i) {
    for (const auto& stats : pooled_) pooled[i] = pooled[i] || stats.get() == work[i].stats;
    const auto same = [&](const Pool& p) { return p.stats == work[i].stats; };
    if (pooled[i] && std::ranges::none_of(pools, same))
      pools.push_back({work[i].stats, PooledGram(work[i].stats->tokens), work[i].tensor.role});
  }
  // The inputs in the order of the matrices, with the matrices' places.
  std::vector<std::pair<int32_t, std::vector<size_t>>> inputs;
  for (size_t i = 0; i < work.size(); ++i) {
    if (work[i].own == nullptr) continue;
    const int32_t reader = seen.first_reader(work[i].own);
    const auto found = std::ranges::find(inputs, reader, [](const auto& in) { return in.first; });
    if (found != inputs.end()) {
      found->second.push_back(i);
    } else {
      inputs.push_back({reader, {i}});
    }
  }
  for (size_t next = 0; next < inputs.size();) {
    InputCollector::Wants wants{.gram = true};
    const size_t first = next;
    for (size_t bytes = 0; next < inputs.size(); ++next) {
      bytes += gram_bytes(work[inputs[next].second.front()].tensor.cols);
      if (next > first && bytes > options_.memory) break;
      wants.gram_of.push_back(inputs[next].first);
    }
    FRESHET_ASSIGN_OR_RETURN(const auto collected, runner_->collect(part, wants));
    std::vector<bool> others(work.size(), true);  // than those of this pass
    for (size_t k = first; k < next; ++k) {
      std::set<const Pool*> added;
      for (const size_t i : inputs[k].second) {
        InputStats* const own = collected.of(work[i].tensor, working_.reader());
        FRESHET_CHECK(own != nullptr && !own->gram.empty());
        for (Pool& p : pools) {
          if (p.role == work[i].tensor.role && added.insert(&p).second) p.gram.add(*own);
        }
        if (pooled[i]) continue;
        work[i].stats = own;
        others[i] = false;
      }
    }
    FRESHET_RETURN_IF_ERROR(quantise_work(work, others, stored));
    for (size_t k = first; k < next; ++k) {
      for (const size_t i : inputs[k].second) {
        if (pooled[i]) continue;
        done[i] = true;
        work[i].stats = nullptr;  // it goes with this pass
      }
    }
  }
  for (Pool& p : pools) p.stats->gram = p.gram.take();
  return quantise_work(work, done, stored);
}

}  // namespace freshet::quantizer
