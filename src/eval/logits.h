// Logits at every position of given sequences, and log-likelihoods of texts.
//
// Both are pure functions of the model and the tokens. One thread drives the session.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/status.h"
#include "eval/session.h"

namespace freshet::eval {

// Tokens that run together at most, because they see one another.
int64_t longest_span(const runtime::PicturePrompt& prompt);

// Calls row(position, logits) for each position of `ids`, in order; logits: [vocab].
// `encoder`: what the encoder reads, of an encoder-decoder, whose decoder's tokens are `ids`.
// `pictures`: of the sequence, or nullptr.
// REQUIRES: session.options().context >= ids.size(), and batches that hold the longest span of the
// pictures beside a step.
Status each_logits(Session& session, std::span<const int32_t> ids, const EncoderInput& encoder,
                   const SeenPictures* pictures,
                   const std::function<Status(int64_t position, std::span<const float>)>& row);

struct PerplexityOptions {
  int64_t window = 512;
  int32_t bos = -1;  // put before each window; < 0: none, and a window's first token is not scored
};

struct Perplexity {
  int64_t tokens = 0;  // scored
  double nats_per_token = 0.0;
  double standard_error = 0.0;  // of nats_per_token, from the windows' means
  int64_t windows = 0;
};

// Over whole windows of `ids`, each on its own; a rest at the end is not scored.
// REQUIRES: session.options().context > window. `progress` may cancel by returning false.
Result<Perplexity> perplexity(Session& session, std::span<const int32_t> ids,
                              const PerplexityOptions& options,
                              const std::function<bool(double fraction)>& progress);

// How many ids the model reads: those that it writes, and that of pictures where it lies behind
// them.
int64_t known_ids(const ModelSpec& spec);

// Checks token ids against a vocabulary. The error names the first that is too large.
Status check_ids(std::span<const int32_t> ids, int64_t vocab);

}  // namespace freshet::eval
