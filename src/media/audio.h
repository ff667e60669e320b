// Sound files as mono samples: WAV and FLAC.
//
// WAV: PCM of 8, 16, 24 and 32 bits, floats of 32 and 64 bits, plain or extensible; FLAC by
// libFLAC. Channels are averaged. Samples are floats from -1 to 1 (a file of floats may exceed
// this). The limits are checked on the header, and again while decoding where a header may leave
// the length open (FLAC) or lie. Decoding takes 4 bytes for each sample of the result beside a
// block of the decoder. A file that ends early is an error. Pure; safe to call from many threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace freshet::media {

struct AudioLimits {
  size_t encoded_bytes = size_t{25} << 20;
  int64_t samples = 100'000'000;  // of one channel, before and after resampling
  int64_t seconds = 4 * 3600;
  int channels = 32;
};

enum class AudioFormat { kWav, kFlac };

struct AudioHeader {
  AudioFormat format = AudioFormat::kWav;
  int rate = 0;  // Hz, from 1,000 to 384,000
  int channels = 0;
  int64_t samples = 0;  // of one channel; 0: not stated (FLAC)
};

Result<AudioHeader> read_audio_header(std::span<const uint8_t> bytes,
                                      const AudioLimits& limits = {});

struct Sound {
  int rate = 0;
  std::vector<float> samples;
};

// At the file's own rate.
Result<Sound> decode_audio(std::span<const uint8_t> bytes, const AudioLimits& limits = {});

// At `rate`. Resampling is a convolution with a windowed sinc of 48 zero crossings on each side
// (Kaiser, beta 9): level below 0.88 of the lower Nyquist frequency, at least 80 dB down above it.
Result<std::vector<float>> decode_audio_at(std::span<const uint8_t> bytes, int rate,
                                           const AudioLimits& limits = {});
std::vector<float> resample_audio(std::span<const float> samples, int from_rate, int to_rate);

}  // namespace freshet::media
