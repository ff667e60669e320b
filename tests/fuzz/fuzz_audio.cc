// Any bytes as a sound file: no crash, bounded memory, and samples within the limits.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "media/audio.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet;
  const media::AudioLimits limits{.encoded_bytes = 1 << 16, .samples = 1 << 16, .channels = 8};
  const std::span<const uint8_t> bytes(data, size);
  const auto header = media::read_audio_header(bytes, limits);
  const auto sound = media::decode_audio(bytes, limits);
  if (!sound.ok()) {
    FRESHET_CHECK(!sound.status().message().empty());
    FRESHET_CHECK(sound.status().message().find('\n') == std::string::npos);
    return 0;
  }
  FRESHET_CHECK(header.ok() && sound->rate == header->rate);
  FRESHET_CHECK(static_cast<int64_t>(sound->samples.size()) <= limits.samples);
  for (const float v : sound->samples) FRESHET_CHECK(std::isfinite(v));
  if (sound->samples.size() > 4096) return 0;
  const auto resampled = media::decode_audio_at(bytes, 16000, limits);
  if (resampled.ok()) FRESHET_CHECK(static_cast<int64_t>(resampled->size()) <= limits.samples + 1);
  return 0;
}
