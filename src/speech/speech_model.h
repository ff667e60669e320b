// What a Whisper model's files say about transcribing: its tokens for languages, tasks and times,
// the tokens that it never writes, and its features (generation_config.json,
// preprocessor_config.json).
//
// Immutable and safe to read from many threads.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "freshet/engine.h"
#include "media/log_mel.h"

namespace freshet {
struct ModelSpec;
}

namespace freshet::speech {

struct SpeechTokens {
  int32_t start = -1;  // <|startoftranscript|>
  int32_t end = -1;
  int32_t previous = -1;                    // <|startofprev|>: what was said before follows
  int32_t no_speech = -1;                   // -1: the model has none
  int32_t no_timestamps = -1;               // the first timestamp follows it
  int32_t transcribe = -1, translate = -1;  // -1: of models for English alone
  std::vector<std::pair<std::string, int32_t>> languages;  // by code; empty: English alone
  std::vector<int32_t> suppressed;                         // are never written ...
  std::vector<int32_t> suppressed_at_begin;                // ... nor as the first token
  int max_initial_timestamp = -1;                          // < 0: no limit

  int32_t first_timestamp() const { return no_timestamps + 1; }
  int32_t language(std::string_view code) const;  // -1: unknown
  std::string_view code_of(int32_t token) const;  // "" if it is no language
};

struct SpeechModel {
  SpeechTokens tokens;
  media::MelSettings mel;
  int64_t window_frames = 3000;  // that the encoder reads at once
  int max_tokens = 448;          // of the decoder
  // For times of words: heads of cross-attention, by layer, that look at what is said next; empty:
  // unknown. The width of a filter of their weights.
  std::vector<std::pair<int, int>> alignment_heads;
  int median_filter = 7;

  double seconds_per_frame() const { return static_cast<double>(mel.hop) / mel.rate; }
  // The distance of timestamps: two frames, which the encoder joins.
  double seconds_per_timestamp() const { return 2 * seconds_per_frame(); }
  double window_seconds() const { return static_cast<double>(window_frames) * seconds_per_frame(); }
};

// The features of a model's encoder of sound, a window long: preprocessor_config.json of `folder`,
// checked against the model. REQUIRES: the model has such an encoder.
Result<media::MelSettings> read_mel_settings(const std::string& folder, const ModelSpec& spec);

// Errors: kUnsupported if the model reads no sound; files that lack something are named.
Result<SpeechModel> read_speech_model(const Engine& engine);
// The same from parsed files; `generation` and `preprocessor` may be null.
Result<SpeechTokens> read_speech_tokens(const json::Value& generation, const Tokenizer& tokenizer);

}  // namespace freshet::speech
