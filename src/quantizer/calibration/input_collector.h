// Statistics of the inputs of linear layers, gathered while a part of a model runs.
//
// Projections that read the same numbers share one set of statistics: the first step that a
// projection takes part in tells. Sums follow the order of tokens, so they depend neither on the
// number of threads nor on anything but the sequence of steps. Use on the step thread of a CPU.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/status.h"
#include "ops/hooks.h"
#include "ops/ops.h"
#include "quantizer/methods/input_stats.h"

namespace freshet::quantizer {

class InputCollector final : public ops::ProjectionHooks {
 public:
  struct Wants {
    bool gram = false;
    // The first input of every `sample_every` is kept as it is; 0: none.
    int64_t sample_every = 0;
    // With `gram`: only for the inputs whose first_reader() is one of these; empty: for all.
    std::vector<int32_t> gram_of;
  };
  // `ops` are those of the model, reserved for steps of at most `step_tokens` tokens and inputs of
  // at least `step_cols` columns. `device`: nullptr, or one that sums up gram matrices, as far as
  // its memory goes; it gives the same bits.
  InputCollector(const Wants& wants, ops::Ops& ops, int64_t step_tokens, int64_t step_cols,
                 ops::Device* device = nullptr);
  ~InputCollector() override;

  void before(const ops::Weight& weight, const Matrix& x) override;
  void storing(const Matrix& q, const Matrix& k, const Matrix& v) override;

  void begin_step();  // call before each step
  Status finish();    // and this after the last
  // Of the projection with this Weight::id, after finish(); nullptr: no token came by.
  InputStats* of(int32_t id);
  // The Weight::id of the projection that made these statistics, the same in each run of the part.
  int32_t first_reader(const InputStats* stats) const;
  // The largest magnitudes of keys and values that went to the cache; 0: none did.
  float key_max() const { return key_max_; }
  float value_max() const { return value_max_; }
  // Sums of the squares of queries and of keys, for each of their features; empty: none came by.
  const std::vector<double>& query_squares() const { return query_squares_; }
  const std::vector<double>& key_squares() const { return key_squares_; }

 private:
  struct Shared;  // statistics of one input
  void add_sums(Shared& s, const Matrix& x);
  void add_gram(Shared& s, const Matrix& x);
  void add_gram_there(Shared& s, const Matrix& x);
  void make_room_for_gram(Shared& s);
  int64_t most_summed() const;
  void add_samples(Shared& s, const Matrix& x);

  Wants wants_;
  ops::Ops& ops_;
  int64_t step_tokens_, step_cols_;
  ops::Device* device_;
  Buffer inputs_there_;  // in the device's memory
  std::vector<std::unique_ptr<Shared>> all_;
  std::map<int32_t, Shared*> by_id_;
  std::map<uint64_t, Shared*> in_step_;  // by the hash of the numbers
  float key_max_ = 0.0f, value_max_ = 0.0f;
  std::vector<double> query_squares_, key_squares_;
  std::vector<float> turned_;  // inputs, transposed
  Status failure_;
};

}  // namespace freshet::quantizer
