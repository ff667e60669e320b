#include "engine/request_check.h"

#include <algorithm>

#include "engine/tower_rows.h"
#include "grammar/late_matcher.h"
#include "sampling/params.h"

namespace freshet::engine {

namespace {

std::optional<RequestError> find_retention_error(const Request& r, const RequestLimits& limits) {
  const auto policy = retention_of(r, limits.retention);
  if (!policy.ok()) return wrong("kv_eviction", "{}", policy.status().message());
  if (*policy == nullptr) return {};
  if (limits.cache == nullptr)
    return wrong("kv_eviction", "kv_eviction: this model keeps all keys");
  if (r.params.beam_width > 0)
    return wrong("kv_eviction", "kv_eviction does not go with beam search; use n samples");
  if (r.pooling != Pooling::kNone)
    return wrong("kv_eviction", "kv_eviction does not go with embeddings, which generate nothing");
  const auto schedule = eviction_schedule(**policy, *limits.cache);
  if (!schedule.ok()) return wrong("kv_eviction", "{}", schedule.status().message());
  if (schedule->rules.recodes && limits.on_device)
    return wrong("kv_eviction", "kv_eviction: mikv needs the CPU; use another policy");
  if (schedule->rules.recodes && limits.sparse.selects()) {
    return wrong("kv_eviction",
                 "kv_eviction with mikv does not go with a server of --sparse-attention");
  }
  return {};
}

std::optional<RequestError> find_sparse_error(const Request& r, const RequestLimits& limits) {
  const auto sparse = sparse_of(r, limits.sparse);
  if (!sparse.ok()) return wrong("sparse_attention", "{}", sparse.status().message());
  if (!sparse->selects()) return {};
  if (sparse->policy != limits.sparse.policy) {
    return wrong("sparse_attention",
                 "sparse_attention {} needs a server that was started with --sparse-attention and "
                 "this policy",
                 sparse->name());
  }
  const char* const other = r.params.beam_width > 0              ? "beam search"
                            : r.pooling != Pooling::kNone        ? "embeddings"
                            : *retention_of(r, limits.retention) ? "kv_eviction"
                                                                 : nullptr;
  if (other == nullptr) return {};
  return wrong("sparse_attention",
               "sparse_attention does not go with {}; \"sparse_attention\": {{\"policy\": "
               "\"none\"}} switches it off",
               other);
}

std::optional<RequestError> find_pooling_error(const Request& r, const RequestLimits& limits) {
  if (r.pooling == Pooling::kNone && !limits.generates) {
    return wrong("prompt",
                 "this model writes no text: it gives {} (/v1/embeddings, /v1/score, /v1/rerank, "
                 "/classify)",
                 limits.classifies ? "scores" : "embeddings");
  }
  if (!limits.generates && r.params.prompt_logprobs >= 0)
    return wrong("prompt_logprobs", "this model has no log-probabilities of tokens");
  if (r.pooling == Pooling::kClassify && !limits.classifies)
    return wrong("prompt", "this model has no classification head: it gives no scores");
  if (!r.token_type_ids.empty() && r.token_type_ids.size() != r.prompt.size()) {
    return wrong("token_type_ids", "{} token types for {} tokens", r.token_type_ids.size(),
                 r.prompt.size());
  }
  for (const int32_t type : r.token_type_ids) {
    if (type < 0 || type >= std::max(1, limits.token_types)) {
      return wrong("token_type_ids", "token type {}: the model has types 0 to {}", type,
                   std::max(1, limits.token_types) - 1);
    }
  }
  return {};
}

// The prompt of an encoder-decoder is what the encoder reads, unless that is given apart.
std::optional<RequestError> find_encoder_error(const Request& r, const RequestLimits& limits) {
  const EncoderLimits& e = limits.encoder;
  if (r.cross_weights != nullptr && (e.positions == 0 || r.params.n > 1))
    return wrong("cross_weights", "these are of one text of an encoder-decoder");
  if (r.cross_weights != nullptr && limits.cache == nullptr)
    return wrong("cross_weights", "times of words are found on the CPU only: use --device cpu");
  if (e.positions == 0) {
    if (!r.encoder_ids.empty() || r.frames > 0)
      return wrong("prompt", "this model has no encoder: give a prompt alone");
    return {};
  }
  if (r.pooling != Pooling::kNone)
    return wrong("prompt",
                 "this model gives no embeddings and no scores: it is an encoder-decoder");
  if (r.params.prompt_logprobs >= 0)
    return wrong("prompt_logprobs", "an encoder reads the prompt: it has no log-probabilities");
  if (e.mel_bins > 0) {
    if (r.frames <= 0 || r.features.size() != static_cast<size_t>(r.frames * e.mel_bins))
      return wrong("prompt", "this model reads sound: use /v1/audio/transcriptions");
  } else if (r.frames > 0) {
    return wrong("prompt", "this model reads text, not sound");
  }
  const auto text =
      static_cast<int64_t>(r.encoder_ids.empty() ? r.prompt.size() : r.encoder_ids.size());
  const int64_t positions = r.frames > 0 ? (r.frames + 1) / 2 : text;
  if (positions > e.positions)
    return wrong("prompt", "the prompt has {} positions; the encoder reads {}", positions,
                 e.positions);
  for (const int32_t id : r.encoder_ids) {
    if (id < 0 || id >= limits.vocab)
      return wrong("prompt", "token id {} in the prompt: the model has ids 0 to {}", id,
                   limits.vocab - 1);
  }
  return {};
}

std::optional<RequestError> find_picture_error(const Request& r, const RequestLimits& limits) {
  if (r.pictures.empty()) return {};
  if (!limits.sees) return wrong("prompt", "this model reads text only: it takes no pictures");
  if (r.pooling != Pooling::kNone)
    return wrong("prompt", "pictures go with generated text only, not with embeddings");
  const auto retention = retention_of(r, limits.retention);
  if (retention.ok() && *retention != nullptr)
    return wrong("kv_eviction", "a prompt with pictures keeps all keys: leave out kv_eviction");
  const auto placed = place_request(r, *limits.spec);
  if (!placed.ok()) return wrong("prompt", "{}", placed.status().message());
  if (limits.spec->vision->image_token >= limits.vocab && r.params.prompt_logprobs >= 0)
    return wrong("prompt_logprobs", "the token of pictures has no log-probability here");
  if (limits.spec->vision->cross) {
    const int64_t rows = cross_rows_of(r, *limits.spec), most = most_cross_rows(*limits.spec);
    if (rows > most) {
      return wrong("prompt", "{} pictures: the model reads at most {} at once", r.pictures.size(),
                   std::ssize(r.pictures) * most / rows);
    }
  }
  if (!sees_whole_pictures(*limits.spec)) return {};
  for (const runtime::PicturePlace& place : placed->places) {
    if (place.count <= limits.most_tokens_together) continue;
    return wrong("prompt",
                 "a picture of {} tokens runs in one step, and a step has at most {} "
                 "(--max-num-batched-tokens)",
                 place.count, limits.most_tokens_together);
  }
  return {};
}

}  // namespace

EncoderLimits limits_of(const ModelSpec* encoder) {
  if (encoder == nullptr) return {};
  return {encoder->max_context, encoder->stem ? encoder->stem->mel_bins : 0};
}

std::optional<RequestError> find_error(const Request& r, const RequestLimits& limits) {
  if (auto error = freshet::find_error(r.params, limits.vocab)) return error;
  const auto length = static_cast<int64_t>(r.prompt.size());
  if (length == 0) return wrong("prompt", "the prompt is empty");
  if (auto error = find_encoder_error(r, limits)) return error;
  // Then the decoder begins with a few tokens of its own.
  const bool encoded = limits.encoder.positions > 0 && r.frames == 0 && r.encoder_ids.empty();
  const bool pools = r.pooling != Pooling::kNone || encoded;
  if (pools && !encoded && length > limits.max_model_len) {
    return wrong("prompt", "the prompt has {} tokens; at most {} are possible (max_model_len)",
                 length, limits.max_model_len);
  }
  if (!pools && length >= limits.max_model_len) {
    return wrong(
        "prompt",
        "the prompt has {} tokens; at most {} leave room for a new token (max_model_len {})",
        length, limits.max_model_len - 1, limits.max_model_len);
  }
  // The token of pictures may lie behind the vocabulary.
  const int32_t image = r.pictures.empty() || !limits.sees ? -1 : limits.spec->vision->image_token;
  for (const int32_t id : r.prompt) {
    if (id < 0 || (id >= limits.vocab && id != image)) {
      return wrong("prompt", "token id {} in the prompt: the model has ids 0 to {}", id,
                   limits.vocab - 1);
    }
  }
  if (auto error = find_pooling_error(r, limits)) return error;
  if (auto error = find_picture_error(r, limits)) return error;
  if (r.params.grammar && r.params.beam_width > 0) {
    return wrong("grammar", "structured output and beam search cannot be combined");
  }
  if (r.params.rules != nullptr && r.params.beam_width > 0)
    return wrong("beam_width", "a model's own rules and beam search cannot be combined");
  if (r.params.grammar && (r.params.grammar->trie().vocab_size() > limits.vocab ||
                           (r.params.thought && r.params.thought->vocab_size() > limits.vocab))) {
    return wrong("grammar", "the grammar was compiled for another vocabulary");
  }
  if (limits.speculates && r.params.beam_width > 0) {
    return wrong("beam_width",
                 "beam search does not go with speculative decoding; use n samples, or run without "
                 "--speculative-config");
  }
  if (r.params.rejection_sample_method && !limits.speculates) {
    return wrong("rejection_sample_method",
                 "rejection_sample_method needs a drafter, and this engine runs without "
                 "--speculative-config");
  }
  if (r.params.rejection_sample_method == Acceptance::kSynthetic) {
    return wrong("rejection_sample_method",
                 "synthetic acceptance is chosen in --speculative-config only, for all requests");
  }
  if (auto error = find_retention_error(r, limits)) return error;
  if (auto error = find_sparse_error(r, limits)) return error;
  const int sequences = std::max(r.params.n, r.params.beam_width);
  if (sequences > limits.max_num_seqs) {
    return wrong("n", "{} sequences in one request: at most {} run at once (max_num_seqs)",
                 sequences, limits.max_num_seqs);
  }
  if (!limits.has_tokenizer && !r.params.stop.empty()) {
    return wrong("stop", "stop strings need a vocabulary, and this model has none");
  }
  if (!(r.deadline_s >= 0.0) || r.deadline_s > 1e9) {
    return wrong("deadline_s", "deadline_s must be between 0 and 1e9, not {}", r.deadline_s);
  }
  return {};
}

}  // namespace freshet::engine
