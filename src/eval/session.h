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
#include "eval/evictions.h"
#include "eval/pictures.h"
#include "kv_cache/sparse_attention.h"
#include "runtime/loaded_model.h"

namespace freshet::eval {

struct SessionOptions : runtime::LoadOptions {
  // Of another session, which takes turns with this one; nullptr: its own. Then the options of
  // runtime::ComputeOptions do not count.
  std::shared_ptr<runtime::Compute> compute;
  bool encodes = false;  // pieces have what an encoder reads
  bool states = false;   // run_states() is wanted, of models without logits, too
  // Of another session, which takes turns with this one: only caches differ. nullptr: its own.
  // Then `compute` and the options of runtime::LoadOptions do not count.
  std::shared_ptr<runtime::LoadedModel> loaded;
  std::string kv_cache_dtype = "auto";    // f32 in the reference path, f16 otherwise
  std::vector<int> kv_cache_skip_layers;  // that keep what auto means
  // Every token reads selectively, not only generated ones.
  kv_cache::SparseAttention sparse;
  kv_cache::Retention eviction;  // evicts keys, see evictions.h; nullptr: none
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
  std::shared_ptr<runtime::LoadedModel> loaded() const { return loaded_; }
  const SessionOptions& options() const { return options_; }
  size_t weight_bytes() const { return loaded_->weight_bytes(); }
  const KvTypes& kv_types() const { return kv_types_; }

  // Tokens that follow what the sequence holds.
  struct Piece {
    int sequence = 0;
    std::span<const int32_t> ids;
    int64_t logits_from = -1;  // rows wanted: this piece's tokens from here on; < 0: none
    std::span<const int32_t> token_types = {};  // empty: all of type 0
    // Of encoder-decoders: what the encoder reads, with the sequence's first piece. Its
    // `sequence` is not used.
    EncoderInput encoder = {};
    // Of the sequence, whose later tokens have it, too; or nullptr.
    const SeenPictures* pictures = nullptr;
  };
  // Returns the wanted rows, piece after piece: [rows, vocab]; valid until the next run().
  // REQUIRES: the limits of the options.
  std::span<float> run(std::span<const Piece> pieces);
  // Returns the states after the final norm of all tokens, [tokens, hidden]; valid until the next
  // run. Texts of a model that reads both ways are given whole.
  std::span<const float> run_states(std::span<const Piece> pieces);
  void reset(int sequence) {
    length_[static_cast<size_t>(sequence)] = 0;
    encoded_[static_cast<size_t>(sequence)] = 0;
    if (evictions_ != nullptr) evictions_->reset(sequence);
  }
  int64_t length(int sequence) const { return length_[static_cast<size_t>(sequence)]; }
  // Whether set_length() can take a sequence back to a prefix of what it has run.
  bool rewinds() const { return state_group_ < 0 && evictions_ == nullptr; }
  // Pretends that the sequence holds `tokens` tokens; their keys and values are arbitrary.
  void set_length(int sequence, int64_t tokens);

 private:
  explicit Session(const SessionOptions& options) : options_(options) {}
  Status make_cache();
  void fill_batch(std::span<const Piece> pieces);
  void fill_tables(const Piece& piece, int row);
  Status start_evictions(KvCacheSpec& spec);
  int64_t run_evicting(const Piece& piece, int64_t row);

  SessionOptions options_;
  std::shared_ptr<runtime::Compute> compute_;
  std::shared_ptr<runtime::LoadedModel> loaded_;
  KvStorage cache_;
  std::unique_ptr<Evictions> evictions_;  // nullptr: none
  int state_group_ = -1;
  KvTypes kv_types_;
  std::vector<int64_t> length_;        // [sequences]
  std::vector<int32_t> encoded_;       // [sequences] positions of the encoder's output
  std::vector<int64_t> group_blocks_;  // of a sequence, in each group
  ForwardBatch batch_;
  Buffer logits_;
  std::vector<float> states_;
};

}  // namespace freshet::eval
