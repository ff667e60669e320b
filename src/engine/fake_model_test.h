// A model for tests of the engine: a hash instead of a transformer.
//
// The key of position p is a hash of all tokens up to p. It is computed from the key of p - 1,
// which is read from the cache through the block table of each group, as attention would. Logits
// are pseudo-random functions of the keys that the last position sees. Any error in blocks, copies,
// windows or positions changes the tokens that follow.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "layers/model.h"
#include "sampling/plain_sampler_test.h"

namespace freshet::engine {

class FakeModel final : public Model {
 public:
  static constexpr int kVocab = 97;

  // `draws`: the model samples tokens, as a device does; they arrive with finish().
  explicit FakeModel(std::vector<int> windows, bool draws = false)
      : windows_(std::move(windows)), draws_(draws) {
    spec_.architecture = "fake";
    spec_.vocab_size = kVocab;
    spec_.hidden_size = 1;
    spec_.max_context = 1 << 16;
  }

  KvCacheSpec kv_spec() const {
    KvCacheSpec kv;
    for (size_t i = 0; i < windows_.size(); ++i) {
      ops::KvShape shape;  // 128 bytes a block: one 64-bit key a slot
      shape.type = ops::KvType::kF32;
      shape.kv_heads = 1;
      shape.key_dim = 1;
      shape.value_dim = 1;
      kv.layers.push_back({shape});
      kv.groups.push_back({windows_[i], {static_cast<int>(i)}});
    }
    return kv;
  }

  const ModelSpec& spec() const override { return spec_; }
  size_t workspace_bytes(int64_t, int64_t, int64_t) const override { return 0; }
  Status reserve(int64_t, int64_t, int64_t) override { return {}; }
  std::vector<WeightInfo> weights() const override { return {}; }

  bool samples() const override { return draws_; }
  int ahead() const {
    return ahead_;
  }  // steps that were started before the previous one was finished
  void start(const ForwardBatch& batch, const KvStorage& cache, const StepResults& results,
             int turn) override {
    if (!draws_) return forward(batch, cache, results);
    FRESHET_CHECK(turn == (started_++ + 1) % 2 && started_ - finished_ <= 2);
    ahead_ += started_ - finished_ > 1;
    ForwardBatch b = batch;
    FRESHET_CHECK(b.ids_from.size() == b.token_ids.size());
    for (size_t t = 0; t < b.token_ids.size(); ++t) {
      if (b.ids_from[t] >= 0) b.token_ids[t] = sampled_.at(static_cast<size_t>(b.ids_from[t]));
    }
    if (!b.samples.empty()) b.best_only.clear();
    const size_t rows = b.logit_rows.size();
    std::vector<int32_t>& sampled = drawn_[turn];
    sampled.assign(rows, StepResults::kSeeLogits);
    forward(b, cache, {results.logits, results.hidden, sampled.data()});
    for (size_t row = 0; row < rows && !b.samples.empty(); ++row) {
      const PlainSampler sampler(b.samples, row, b.token_ids);
      float* logits = results.logits + row * kVocab;
      if (sampler.here()) sampled[row] = sampler.sample({logits, logits + kVocab});
    }
    sampled_ = sampled;
    std::fill_n(results.best, rows, -77);
  }
  void finish(const ForwardBatch& batch, const StepResults& results, int turn) override {
    if (!draws_) return;
    FRESHET_CHECK(turn == (finished_++ + 1) % 2 && finished_ <= started_);
    std::ranges::copy(drawn_[turn], results.best);
    for (size_t row = 0; row < batch.logit_rows.size(); ++row)
      FRESHET_CHECK(batch.names_token(row) == (results.best[row] != StepResults::kSeeLogits));
  }

  // Where only the argmax is needed, every other row of logits is left out, as on a device.
  void forward(const ForwardBatch& b, const KvStorage& cache, const StepResults& results) override {
    float* const hidden = results.hidden;
    size_t row = 0;
    bool single = true;  // single tokens come first
    for (int s = 0; s < b.sequences(); ++s) {
      const auto seq = static_cast<size_t>(s);
      const bool one = b.query_start[seq + 1] - b.query_start[seq] == 1;
      FRESHET_CHECK(single || !one, "a single token behind several");
      single = one;
      for (int32_t t = b.query_start[seq]; t < b.query_start[seq + 1]; ++t) {
        const int32_t p = b.positions[static_cast<size_t>(t)];
        FRESHET_CHECK(p == b.context_len[seq] - b.query_start[seq + 1] + t);
        uint64_t seen = 0;
        for (size_t g = 0; g < windows_.size(); ++g)
          seen = mix(seen + one_group(b, cache, g, seq, t, p));
        if (hidden != nullptr) hidden[t] = static_cast<float>(seen >> 50);
        if (row == b.logit_rows.size() || b.logit_rows[row] != t) continue;
        const bool only_best = !b.best_only.empty() && b.best_only[row] != 0;
        put(seen, only_best && (draws_ || p % 2 == 0), results, row++);
      }
    }
    FRESHET_CHECK(row == b.logit_rows.size());
  }

 private:
  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }

  uint8_t* slot(const ForwardBatch& b, const KvStorage& cache, size_t g, size_t s,
                int32_t p) const {
    const BlockTables& t = b.tables[g];
    const int32_t block =
        t.ids[s * static_cast<size_t>(t.stride) + static_cast<size_t>(p / ops::kBlockTokens)];
    const ops::KvView view = cache.layer(static_cast<int>(g));
    FRESHET_CHECK(block >= 0 && block < view.blocks, "block {} at position {}", block, p);
    return view.data + static_cast<size_t>(block) * view.shape.block_bytes() +
           static_cast<size_t>(p % ops::kBlockTokens) * sizeof(uint64_t);
  }

  uint64_t one_group(const ForwardBatch& b, const KvStorage& cache, size_t g, size_t s, int32_t t,
                     int32_t p) const {
    uint64_t before = 0;
    const int window = windows_[g];
    if (p > 0 && window != 1) std::memcpy(&before, slot(b, cache, g, s, p - 1), sizeof before);
    const uint64_t key = mix(before + 0x9E3779B97F4A7C15 +
                             static_cast<uint64_t>(b.token_ids[static_cast<size_t>(t)]));
    std::memcpy(slot(b, cache, g, s, p), &key, sizeof key);
    // The oldest key in the window takes part, so that both of its ends matter.
    uint64_t oldest = 0;
    const int32_t first = window == 0 ? 0 : std::max(0, p - window + 1);
    std::memcpy(&oldest, slot(b, cache, g, s, first), sizeof oldest);
    return mix(key) + mix(oldest ^ 0x5851F42D4C957F2D);
  }

  static void put(uint64_t seen, bool only_best, const StepResults& results, size_t row) {
    float* logits = results.logits + row * kVocab;
    write(seen, logits);
    if (results.best == nullptr) return;
    results.best[row] = StepResults::kSeeLogits;
    if (!only_best) return;
    results.best[row] = static_cast<int32_t>(std::max_element(logits, logits + kVocab) - logits);
    std::fill_n(logits, kVocab, std::numeric_limits<float>::quiet_NaN());
  }
  static void write(uint64_t seen, float* row) {
    for (int v = 0; v < kVocab; ++v) {
      row[v] =
          static_cast<float>(mix(seen + static_cast<uint64_t>(v) * 0x9E3779B9) >> 40) * 0x1p-21f;
    }
  }

  std::vector<int> windows_;
  bool draws_ = false;
  int started_ = 0, finished_ = 0, ahead_ = 0;
  std::vector<int32_t> sampled_, drawn_[2];
  ModelSpec spec_;
};

}  // namespace freshet::engine
