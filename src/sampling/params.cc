#include "sampling/params.h"

#include <cmath>
#include <string_view>
#include <utility>

namespace freshet {
namespace {

constexpr int kMaxSamples = 1024;
constexpr int kMaxLogprobs = 1024;
constexpr int kMaxBeams = 64;
constexpr size_t kMaxStops = 1024;
constexpr size_t kMaxBadWords = 4096;
constexpr size_t kMaxBadWord = 256;  // tokens

using Error = std::optional<RequestError>;

Error in_range(std::string_view name, float v, float low, float high) {
  if (v >= low && v <= high) return {};
  return wrong(name, "{} must be between {} and {}, not {}", name, low, high, v);
}

// (0, high]
Error positive(std::string_view name, float v, float high) {
  if (v > 0.0f && v <= high) return {};
  return wrong(name, "{} must be above 0 and at most {}, not {}", name, high, v);
}

Error count(std::string_view name, int64_t v, int64_t low, int64_t high) {
  if (v >= low && v <= high) return {};
  return wrong(name, "{} must be between {} and {}, not {}", name, low, high, v);
}

Error find_wrong_word(std::string_view name, const std::vector<std::vector<int32_t>>& words,
                      int64_t vocab, size_t most) {
  if (words.size() > most) {
    return wrong(name, "{} holds {} words; at most {} are allowed", name, words.size(), most);
  }
  for (const std::vector<int32_t>& word : words) {
    if (word.empty() || word.size() > kMaxBadWord) {
      return wrong(name, "a word in {} has {} tokens; 1 to {} are allowed", name, word.size(),
                   kMaxBadWord);
    }
    for (const int32_t id : word) {
      if (id < 0 || id >= vocab)
        return wrong(name, "{} names token {}; the model has {}", name, id, vocab);
    }
  }
  return {};
}

Error find_wrong_ban(const SamplingParams& p, int64_t vocab) {
  const auto known = [&](int32_t id) { return id >= 0 && id < vocab; };
  for (const int32_t id : p.allowed_token_ids) {
    if (!known(id)) {
      return wrong("allowed_token_ids", "allowed_token_ids names token {}; the model has {}", id,
                   vocab);
    }
  }
  for (const int32_t id : p.begin_suppress_tokens) {
    if (!known(id)) {
      return wrong("begin_suppress_tokens",
                   "begin_suppress_tokens names token {}; the model has {}", id, vocab);
    }
  }
  if (auto e = find_wrong_word("bad_words", p.bad_words, vocab, kMaxBadWords)) return e;
  // suppress_tokens are among them.
  if (auto e = find_wrong_word("bad_words_ids", p.bad_words_ids, vocab, 2 * kMaxBadWords)) return e;
  return count("no_repeat_ngram_size", p.no_repeat_ngram_size, 0, 1 << 20);
}

Error find_wrong_token(const SamplingParams& p, int64_t vocab) {
  for (const auto& [id, bias] : p.logit_bias) {
    if (id < 0 || id >= vocab)
      return wrong("logit_bias", "logit_bias names token {}; the model has {}", id, vocab);
    if (!std::isfinite(bias))
      return wrong("logit_bias", "logit_bias of token {} must be finite, not {}", id, bias);
  }
  for (const int32_t id : p.stop_token_ids) {
    if (id < 0 || id >= vocab)
      return wrong("stop_token_ids", "stop_token_ids names token {}; the model has {}", id, vocab);
  }
  if (p.stop.size() > kMaxStops) {
    return wrong("stop", "stop holds {} strings; at most {} are allowed", p.stop.size(), kMaxStops);
  }
  for (const std::string& s : p.stop) {
    if (s.empty()) return wrong("stop", "a stop string must not be empty");
  }
  return find_wrong_ban(p, vocab);
}

// Beams are scored by the model's own probabilities, so parameters that change or report the
// probabilities of tokens do not apply.
Error find_wrong_beam(const SamplingParams& p) {
  if (p.n > p.beam_width)
    return wrong("n", "n ({}) must not exceed beam_width ({})", p.n, p.beam_width);
  const std::pair<bool, const char*> without[] = {
      {p.logprobs >= 0, "logprobs"},
      {!p.logit_bias.empty(), "logit_bias"},
      {!p.allowed_token_ids.empty(), "allowed_token_ids"},
      {p.min_tokens > 0, "min_tokens"},
      {p.repetition_penalty != 1.0f, "repetition_penalty"},
      {p.presence_penalty != 0.0f, "presence_penalty"},
      {p.frequency_penalty != 0.0f, "frequency_penalty"},
  };
  for (const auto& [given, name] : without) {
    if (given) return wrong(name, "{} and beam search do not go together", name);
  }
  return {};
}

}  // namespace

Error find_error(const SamplingParams& p, int64_t vocab) {
  if (auto e = in_range("temperature", p.temperature, 0.0f, 100.0f)) return e;
  if (p.top_k < 0) return wrong("top_k", "top_k must be 0 (all) or more, not {}", p.top_k);
  if (auto e = positive("top_p", p.top_p, 1.0f)) return e;
  if (auto e = in_range("min_p", p.min_p, 0.0f, 1.0f)) return e;
  if (auto e = positive("typical_p", p.typical_p, 1.0f)) return e;
  if (auto e = positive("repetition_penalty", p.repetition_penalty, 1000.0f)) return e;
  if (auto e = in_range("presence_penalty", p.presence_penalty, -2.0f, 2.0f)) return e;
  if (auto e = in_range("frequency_penalty", p.frequency_penalty, -2.0f, 2.0f)) return e;
  if (p.max_tokens < 1)
    return wrong("max_tokens", "max_tokens must be at least 1, not {}", p.max_tokens);
  if (auto e = count("min_tokens", p.min_tokens, 0, p.max_tokens)) return e;
  if (auto e = count("logprobs", p.logprobs, -1, kMaxLogprobs)) return e;
  if (auto e = count("prompt_logprobs", p.prompt_logprobs, -1, kMaxLogprobs)) return e;
  if (auto e = count("n", p.n, 1, kMaxSamples)) return e;
  if (auto e = count("beam_width", p.beam_width, 0, kMaxBeams)) return e;
  if (p.beam_width > 0) {
    if (auto e = find_wrong_beam(p)) return e;
  }
  if (!std::isfinite(p.length_penalty)) {
    return wrong("length_penalty", "length_penalty must be finite, not {}", p.length_penalty);
  }
  return find_wrong_token(p, vocab);
}

}  // namespace freshet
