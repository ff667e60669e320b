// The readers of single formats, used by audio.cc alone. Pure.
#pragma once

#include <span>

#include "base/status.h"
#include "media/audio.h"

namespace freshet::media {

// Format and length as the header states them; limits are not checked yet.
Result<AudioHeader> wav_header(std::span<const uint8_t> bytes);
Result<AudioHeader> flac_header(std::span<const uint8_t> bytes);

// REQUIRES: `header` is the file's, within `limits`.
Status decode_wav(std::span<const uint8_t> bytes, std::vector<float>& samples);
Status decode_flac(std::span<const uint8_t> bytes, const AudioHeader& header,
                   const AudioLimits& limits, std::vector<float>& samples);

// That a length is within the limits.
Status check_audio_length(int64_t samples, int rate, const AudioLimits& limits);

}  // namespace freshet::media
