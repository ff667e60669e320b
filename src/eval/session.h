// A model and a cache for measuring it: forward passes over a few sequences, without a scheduler.
//
// Sequence s owns the same blocks all the time, so nothing is allocated after open(). Each run() is
// one ragged batch, as the engine gives it to the model. Used by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "runtime/loaded_model.h"

namespace freshet::eval {

struct SessionOptions : runtime::LoadOptions {
  // Of another session, which takes turns with this one; nullptr: its own. Then the options of
  // runtime::ComputeOptions do not count.
  std::shared_ptr<runtime::Compute> compute;
  std::string kv_cache_dtype = "auto";  // f32 in the reference path, f16 otherwise
  int sequences = 1;
  int64_t context = 0;     // tokens a sequence may grow to
  int64_t batch = 512;     // most tokens of a run()
  int64_t logit_rows = 1;  // most logits rows of a run()
};

class Session {
 public:
  static Result<std::unique_ptr<Session>> open(const SessionOptions& options);
  // For plans: reads the configuration only.
  static Result<ModelSpec> read_spec(const std::string& model);

  const Model& model() const { return loaded_->model(); }
  const ops::Ops& ops() const { return loaded_->ops(); }
  std::string device() const { return loaded_->device(); }  // "cpu", or the GPU's name
  int threads() const { return pool().size(); }
  ThreadPool& pool() const { return loaded_->compute().pool(); }  // idle outside run()
  // For further sessions on the same threads and device (SessionOptions::compute).
  std::shared_ptr<runtime::Compute> compute() const { return compute_; }
  const SessionOptions& options() const { return options_; }
  size_t weight_bytes() const { return loaded_->weight_bytes(); }
  ops::KvType kv_type() const { return kv_type_; }

  // Tokens that follow what the sequence holds.
  struct Piece {
    int sequence = 0;
    std::span<const int32_t> ids;
    int64_t logits_from = -1;  // rows wanted: this piece's tokens from here on; < 0: none
  };
  // Returns the wanted rows, piece after piece: [rows, vocab]; valid until the next run().
  // REQUIRES: the limits of the options.
  std::span<float> run(std::span<const Piece> pieces);
  void reset(int sequence) { length_[static_cast<size_t>(sequence)] = 0; }
  int64_t length(int sequence) const { return length_[static_cast<size_t>(sequence)]; }
  // Whether set_length() can take a sequence back to a prefix of what it has run.
  bool rewinds() const { return state_group_ < 0; }
  // Pretends that the sequence holds `tokens` tokens; their keys and values are arbitrary.
  void set_length(int sequence, int64_t tokens);

 private:
  explicit Session(const SessionOptions& options) : options_(options) {}
  Status make_cache();

  SessionOptions options_;
  std::shared_ptr<runtime::Compute> compute_;
  std::unique_ptr<runtime::LoadedModel> loaded_;
  KvStorage cache_;
  int state_group_ = -1;
  ops::KvType kv_type_ = ops::KvType::kF16;
  int64_t blocks_ = 0;           // of a sequence, in each group
  std::vector<int64_t> length_;  // [sequences]
  ForwardBatch batch_;
  Buffer logits_;
};

}  // namespace freshet::eval
