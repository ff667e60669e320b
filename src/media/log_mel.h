// Whisper's log-mel features: the power spectrum of overlapping frames under a Hann window, summed
// by triangular filters on Slaney's mel scale; log10, cut off 8 below its maximum, (x + 4) / 4.
//
// Sums are in double precision and every frame is computed alone, so the result has the same bits
// for any number of threads. The reference (torch in F32) differs by less than 5e-5. An object is
// immutable and safe to use from many threads.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "media/fft.h"

namespace freshet::media {

struct MelSettings {
  int rate = 16000;
  int mels = 80;  // 128 in Whisper large-v3
  int frame = 400;
  int hop = 160;
  int samples = 480'000;  // what a window is padded or cut to: 30 s

  int frames() const { return samples / hop; }
};

// From preprocessor_config.json ("feature_size", "n_fft", "hop_length", "chunk_length" ...).
Result<MelSettings> mel_settings(const json::Value& preprocessor);

class LogMel {
 public:
  explicit LogMel(const MelSettings& settings);
  const MelSettings& settings() const { return settings_; }

  // [mels, frames()], for at most settings().samples samples; the rest is cut off. `pool` may be
  // null.
  std::vector<float> features(std::span<const float> samples, ThreadPool* pool = nullptr) const;

 private:
  // A triangle: the weights of neighbouring frequencies.
  struct MelFilter {
    int first = 0;
    std::vector<float> weights;
  };
  void frame_energies(std::span<const float> samples, int frame, std::vector<double>& windowed,
                      std::vector<double>& power, RealFft::Workspace& space, float* out) const;

  MelSettings settings_;
  RealFft fft_;
  std::vector<float> window_;
  std::vector<MelFilter> filters_;
};

}  // namespace freshet::media
