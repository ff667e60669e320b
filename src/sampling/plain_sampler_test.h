// Samples by a sampling descriptor (ops/sample.h) in the simplest way: it sorts whole rows, adds
// up weights one by one and races without any shortcut. For tests of samplers, and for fake models
// that act as a device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "ops/sample.h"
#include "sampling/logits.h"

namespace freshet {

class PlainSampler {
 public:
  // `tokens`: of the batch, for a row's `last`.
  PlainSampler(std::span<const int32_t> words, size_t row, std::span<const int32_t> tokens = {})
      : words_(words), tokens_(tokens) {
    std::memcpy(static_cast<void*>(&row_), words.data() + row * ops::kSampleRowWords, sizeof row_);
  }
  bool here() const { return row_.how != ops::SampleRow::kNotHere; }

  int32_t sample(std::vector<float> logits) const {
    change(logits);
    std::vector<Candidate> c;
    for (size_t i = 0; i < logits.size(); ++i) {
      if (logits[i] > kNone) c.push_back({static_cast<int32_t>(i), logits[i], 0});
    }
    std::sort(c.begin(), c.end(), better);
    if (c.empty()) return -1;
    const float most = c.front().logit;
    if (row_.how == ops::SampleRow::kBest || std::isinf(most)) return c.front().id;
    if (row_.top_k > 0 && static_cast<size_t>(row_.top_k) < c.size())
      c.resize(static_cast<size_t>(row_.top_k));
    std::erase_if(c, [&](const Candidate& x) { return x.logit < most + row_.min_p_cut; });
    for (Candidate& x : c) x.weight = whole(exp_fraction((x.logit - most) * row_.scale));
    if (row_.top_p < 1.0f) {
      const double mass = static_cast<double>(row_.top_p) * static_cast<double>(total(c));
      Weight sum = 0;
      size_t kept = 0;
      while (kept == 0 || (kept < c.size() && sum < static_cast<Weight>(mass)))
        sum += c[kept++].weight;
      c.resize(kept);
    }
    uint64_t first = std::numeric_limits<uint64_t>::max();
    int32_t winner = -1;
    for (const Candidate& x : c) {
      if (x.weight == 0) continue;
      const uint64_t noise = ops::race_noise(row_.race, static_cast<uint32_t>(x.id));
      const uint64_t time = ops::race_time(noise, x.weight);
      if (time > first || (time == first && x.id > winner)) continue;
      first = time;
      winner = x.id;
    }
    return winner;
  }

 private:
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  static Weight total(const std::vector<Candidate>& c) {
    Weight sum = 0;
    for (const Candidate& x : c) sum += x.weight;
    return sum;
  }
  template <class T>
  std::vector<T> list(ops::SampleRow::List which) const {
    std::vector<T> items(static_cast<size_t>(which.count));
    if (which.count > 0)
      std::memcpy(items.data(), &words_[static_cast<size_t>(which.at)], items.size() * sizeof(T));
    return items;
  }
  void change(std::vector<float>& logits) const {
    const auto mask = list<uint32_t>(row_.allowed);
    for (size_t i = 0; i < std::min(logits.size(), mask.size() * 32); ++i) {
      if ((mask[i / 32] >> (i % 32) & 1) == 0) logits[i] = kNone;
    }
    auto seen = list<ops::SampleRow::Seen>(row_.seen);
    if (row_.last >= 0) {
      const int32_t id = tokens_[static_cast<size_t>(row_.last)];
      const auto known = std::ranges::find_if(seen, [&](const auto& t) { return t.id == id; });
      if (known == seen.end()) {
        seen.push_back({id, 1});
      } else {
        ++known->outputs;
      }
    }
    for (const auto& [id, outputs] : seen) {
      float& l = logits[static_cast<size_t>(id)];
      l = l > 0.0f ? l / row_.repetition : l * row_.repetition;
      l -= row_.frequency * static_cast<float>(outputs);
      if (outputs > 0) l -= row_.presence;
    }
    for (const auto& [id, bias] : list<ops::SampleRow::Bias>(row_.biases))
      logits[static_cast<size_t>(id)] += bias;
    for (const int32_t id : list<int32_t>(row_.barred)) logits[static_cast<size_t>(id)] = kNone;
  }

  std::span<const int32_t> words_, tokens_;
  ops::SampleRow row_;
};

}  // namespace freshet
