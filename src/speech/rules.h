// Which tokens a Whisper model may write next (arXiv:2212.04356): the tokens that a transcript
// begins with, then text and timestamps as the model was trained to write them.
//
// The decoder is given <|startoftranscript|> alone, and the rules lead it through the language and
// the task: so the first row of logits tells the language and whether there is speech at all, with
// one pass of the encoder. One object for each request for one sample.
#pragma once

#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "freshet/engine.h"
#include "speech/speech_model.h"

namespace freshet::speech {

struct RuleOptions {
  int32_t language = -1;  // < 0: the likeliest one
  int32_t task = -1;      // < 0: models for English alone have none
  bool timestamps = false;
};

class WhisperRules final : public TokenRules {
 public:
  // `tokens` must outlive the object.
  WhisperRules(const SpeechTokens& tokens, const RuleOptions& options)
      : tokens_(tokens), options_(options), lead_(lead()) {}

  void apply(const std::vector<int32_t>& output, float* logits, int64_t vocab) override;
  // How many tokens of the output are not part of the text.
  int lead_tokens() const { return static_cast<int>(lead_.size()); }
  // The probability of <|nospeech|> as the first token; 0 before the first call.
  double no_speech() const;
  // The mean log-probability of a finished text under these rules, end token included; `ids` is the
  // whole output.
  double mean_logprob(std::span<const int32_t> ids) const;

 private:
  // The logits of the latest row as the rules left them.
  struct Row {
    size_t at = 0;  // tokens before it
    std::vector<float> logits;
    double log_sum = 0.0;
  };
  void keep(size_t at, const float* logits, int64_t vocab);
  std::vector<int32_t> lead() const;
  void limit_timestamps(const int32_t* said, size_t count, float* logits, int64_t vocab) const;

  const SpeechTokens& tokens_;
  const RuleOptions options_;
  const std::vector<int32_t> lead_;  // -1: any language
  mutable std::mutex mutex_;         // of what follows
  double no_speech_ = 0.0;
  Row latest_;
  double logprobs_ = 0.0;  // sum over the tokens of the text before latest_.at
};

}  // namespace freshet::speech
