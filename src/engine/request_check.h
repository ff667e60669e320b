// Checks of a request (freshet/engine.h) against what an engine can serve. Pure.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/retention.h"
#include "engine/sparse.h"
#include "freshet/engine.h"
#include "layers/spec.h"

namespace freshet::engine {

// Of a model's encoder.
struct EncoderLimits {
  int64_t positions = 0;  // of its output; 0: the model has no encoder
  int mel_bins = 0;       // of the sounds that it reads; 0: it reads text
};
EncoderLimits limits_of(const ModelSpec* encoder);

struct RequestLimits {
  int64_t vocab = 0;
  int max_model_len = 0;
  int max_num_seqs = 0;
  bool has_tokenizer = false;
  bool speculates = false;
  bool generates = true;    // the model has a head over the vocabulary
  bool classifies = false;  // ... or one that gives scores
  int token_types = 0;      // that its tokens may have
  EncoderLimits encoder;
  const KvCacheSpec* cache = nullptr;  // nullptr: keys of live sequences cannot be evicted here
  kv_cache::Retention retention = {};  // of requests that name none
  const ModelSpec* spec = nullptr;     // needed if `sees`
  bool sees = false;                   // the model has a tower for pictures
  int64_t most_tokens_together = 0;    // of a prompt, in one step
  // Of requests that name none. If it does not select, keys have no bounds and none may.
  kv_cache::SparseAttention sparse = {};
  bool on_device = false;
};

// The first thing that is wrong with `request`.
std::optional<RequestError> find_error(const Request& request, const RequestLimits& limits);

}  // namespace freshet::engine
