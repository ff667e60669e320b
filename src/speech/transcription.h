// A sound, transcribed window by window: each begins where the model's timestamps say that the last
// one's text ended (long form of arXiv:2212.04356, section 3.8).
//
// With `retries` a window whose text repeats itself or is unlikely is made again at a higher
// temperature, and one that holds no speech is skipped, by the paper's thresholds.
//
// A Transcription makes the engine's request for its next window and takes what the model wrote for
// it; it never waits, so servers and programs drive it as they like. A sound of at most one window
// is padded with silence, longer ones are cut from the features of the whole, as transformers does.
// Without timestamps a sound must fit one window. One thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "speech/rules.h"
#include "speech/speech_model.h"
#include "speech/word_times.h"

namespace freshet::speech {

// A smaller increment would make a window again hundreds of times.
inline constexpr float kLeastIncrement = 0.05f;

// When a window is made again, and when it is skipped (section 4.5 of the paper).
struct RetryOptions {
  float temperature_increment = 0.2f;  // 0: none, or at least kLeastIncrement
  float compression_ratio = 2.4f;      // made again if the text compresses better than this ...
  float logprob = -1.0f;               // ... or if the mean log-probability of its tokens is lower
  float no_speech = 0.6f;              // skipped if also <|nospeech|> is likelier than this
};

struct TranscribeOptions {
  std::string language;         // code; "": found out from the first window
  bool translate = false;       // to English
  std::vector<int32_t> prompt;  // what was said before: names, spelling
  float temperature = 0.0f;
  std::optional<uint64_t> seed;
  bool timestamps = true;
  std::optional<RetryOptions> retries;
  // The text of earlier windows stands before each window, unless it was made at a temperature
  // above 0.5.
  bool condition_on_previous_text = false;
  std::string cache_salt;  // requests with different salts share nothing in the cache
  bool words = false;      // with times of words. REQUIRES: the model has alignment heads
};

struct Segment {
  int64_t seek = 0;               // frames before the window
  double start = 0.0, end = 0.0;  // seconds
  std::string text;
  std::vector<int32_t> tokens;  // timestamps included
  // With TranscribeOptions::words: when each of `tokens` ends, and the words of the text.
  std::vector<double> token_ends;
  std::vector<Word> words;
  double avg_logprob = 0.0;  // of the window
  double compression_ratio = 0.0;
  double no_speech_prob = 0.0;
  float temperature = 0.0f;  // at which the window was made
};

// The text of a prompt as tokens: the last ones, as many as the model reads.
std::vector<int32_t> prompt_tokens(const SpeechModel& model, const Tokenizer& tokenizer,
                                   const std::string& text);

class Transcription {
 public:
  // `samples` at model.mel.rate, at least one. `model` and `tokenizer` must outlive the object.
  Transcription(const SpeechModel& model, const Tokenizer& tokenizer,
                const TranscribeOptions& options, std::vector<float> samples);

  bool done() const { return seek_ >= frames_; }
  // The next window's request, without callbacks. REQUIRES: !done().
  Request next_window();
  // What the model wrote: all ids of its one sample. If the window is to be made again,
  // next_window() returns it at its next temperature.
  void take(std::span<const int32_t> ids);
  // The text of ids of a window without timestamps, as it arrives.
  std::string plain_text(std::span<const int32_t> ids) const;

  double duration() const { return duration_; }              // seconds
  const std::string& language() const { return language_; }  // code; "" until it is known
  const std::vector<Segment>& segments() const { return segments_; }
  std::string text() const;  // of all segments, without white space around it

 private:
  struct Window {
    int64_t seek = 0, frames = 0;
    std::shared_ptr<WhisperRules> rules;
    std::shared_ptr<CrossWeights> weights;  // if words are asked for
    int64_t text_at = 0;                    // the position of the first token behind the lead
    std::span<const int32_t> tokens;        // of the window, during take()
    std::vector<double> ends;               // [tokens]
  };
  void find_ends();
  void add_words(std::span<const int32_t> tokens, Segment& segment) const;
  void add(std::span<const int32_t> tokens, double start, double end, const Segment& common);
  // Splits a window's tokens at pairs of timestamps; returns how many frames are done with.
  int64_t split(std::span<const int32_t> tokens, const Segment& common);
  std::vector<int32_t> earlier_text() const;
  // What becomes of a window: kept, made again, or skipped since nothing is said in it.
  enum class Verdict { kKeep, kRetry, kSkip };
  Verdict judge(const Segment& window) const;

  const SpeechModel& model_;
  const Tokenizer& tokenizer_;
  const TranscribeOptions options_;
  double duration_ = 0.0;
  std::string language_;
  std::vector<float> features_;  // [mels, stride_]
  int64_t stride_ = 0;
  int64_t frames_ = 0;  // of the sound
  int64_t begun_ = 0;   // with the one that the sound ends in, for times of words
  int64_t seek_ = 0;
  Window window_;
  float temperature_ = 0.0f;   // of the window at hand
  std::vector<int32_t> said_;  // by the windows that the next one is conditioned on
  std::vector<Segment> segments_;
};

}  // namespace freshet::speech
