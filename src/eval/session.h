// A model and a cache for measuring it: forward passes over a few sequences, without a scheduler.
//
// Sequence s owns the same blocks all the time, so nothing is allocated after open(). Each run() is
// one ragged batch, exactly what the engine hands to the model. Used by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kv_cache/kv_storage.h"
#include "layers/model.h"
#include "ops/ops.h"

namespace freshet::eval {

struct SessionOptions {
  std::string model;  // folder or file
  int threads = 0;
  std::string device = "cpu";  // cpu, cuda, auto
  // "dummy:FORMAT": random weights in the shape of `model`, a folder with a configuration
  std::string load_format = "auto";
  std::string cpu_isa;
  bool reference = false;
  std::vector<std::string> force_kernels;
  std::string weight_cache_dir;         // as in EngineOptions
  std::string kv_cache_dtype = "auto";  // f32 in the reference path, f16 otherwise
  int sequences = 1;
  int64_t context = 0;     // tokens a sequence may grow to
  int64_t batch = 512;     // most tokens of a run()
  int64_t logit_rows = 1;  // most logits rows of a run()
  std::function<void(const std::string& stage, double fraction)> on_progress;
};

class Session {
 public:
  static Result<std::unique_ptr<Session>> open(const SessionOptions& options);
  // For plans: reads the configuration only.
  static Result<ModelSpec> read_spec(const std::string& model);

  const Model& model() const { return *model_; }
  const ops::Ops& ops() const { return *ops_; }
  std::string device() const;  // "cpu", or the GPU's name
  int threads() const { return pool_.size(); }
  const SessionOptions& options() const { return options_; }
  size_t weight_bytes() const;
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
  // Pretends that the sequence holds `tokens` tokens; their keys and values are whatever is there.
  void set_length(int sequence, int64_t tokens);

 private:
  Session(const SessionOptions& options, int threads) : options_(options), pool_(threads) {}
  Status load();
  Status make_dummy();
  Status make_cache();

  SessionOptions options_;
  ThreadPool pool_;
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<Model> model_;
  KvStorage cache_;
  ops::KvType kv_type_ = ops::KvType::kF16;
  int64_t blocks_ = 0;           // of a sequence, in each group
  std::vector<int64_t> length_;  // [sequences]
  ForwardBatch batch_;
  Buffer logits_;
};

}  // namespace freshet::eval
