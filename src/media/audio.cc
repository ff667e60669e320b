#include "media/audio.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <string_view>

#include "media/audio_formats.h"

namespace freshet::media {
namespace {

bool sound_has(std::span<const uint8_t> bytes, size_t at, std::string_view text) {
  return bytes.size() >= at + text.size() &&
         std::equal(text.begin(), text.end(), bytes.begin() + static_cast<ptrdiff_t>(at),
                    [](char c, uint8_t b) { return static_cast<uint8_t>(c) == b; });
}

Result<AudioFormat> audio_format(std::span<const uint8_t> bytes) {
  if (sound_has(bytes, 0, "RIFF") && sound_has(bytes, 8, "WAVE")) return AudioFormat::kWav;
  if (sound_has(bytes, 0, "fLaC")) return AudioFormat::kFlac;
  struct Other {
    size_t at;
    std::string_view magic;
    const char* name;
  };
  static constexpr Other kOthers[] = {{0, "ID3", "MP3"},      {0, "\xff\xfb", "MP3"},
                                      {0, "\xff\xf3", "MP3"}, {0, "\xff\xf1", "AAC"},
                                      {0, "OggS", "Ogg"},     {4, "ftyp", "MP4"},
                                      {0, "RF64", "RF64"},    {0, "\x1a\x45\xdf\xa3", "WebM"},
                                      {0, "FORM", "AIFF"}};
  for (const Other& other : kOthers) {
    if (sound_has(bytes, other.at, other.magic)) {
      return unsupported("{} files are not supported; send WAV or FLAC", other.name);
    }
  }
  return invalid_argument("this is no WAV or FLAC file");
}

const char* audio_name(AudioFormat format) {
  return format == AudioFormat::kWav ? "WAV" : "FLAC";
}

constexpr double kZeroCrossings = 48;
constexpr double kBeta = 9;
constexpr double kRolloff = 0.94;

// The modified Bessel function of the first kind, order 0, by its series.
double bessel(double x) {
  double sum = 1;
  double term = 1;
  for (int k = 1; k < 60 && term > sum * 1e-17; ++k) {
    term *= (x / (2 * k)) * (x / (2 * k));
    sum += term;
  }
  return sum;
}

// A sinc under a Kaiser window; `t` in zero crossings.
double windowed_sinc(double t) {
  const double edge = t / kZeroCrossings;
  if (edge <= -1 || edge >= 1) return 0;
  static const double kScale = 1 / bessel(kBeta);
  const double window = bessel(kBeta * std::sqrt(1 - edge * edge)) * kScale;
  if (t == 0) return window;
  const double x = std::numbers::pi * t;
  return std::sin(x) / x * window;
}

// The kernel in a table with linear interpolation between 2,048 points a zero crossing: exact to
// 3e-7, at a size that does not depend on the rates.
class SincKernel {
 public:
  SincKernel() : table_(static_cast<size_t>(kZeroCrossings) * kPoints + 2) {
    for (size_t i = 0; i < table_.size(); ++i) {
      table_[i] = windowed_sinc(static_cast<double>(i) / kPoints);
    }
  }
  double operator()(double t) const {
    const double at = std::abs(t) * kPoints;
    const auto i = static_cast<size_t>(at);
    if (i + 1 >= table_.size()) return 0;
    return table_[i] + (table_[i + 1] - table_[i]) * (at - static_cast<double>(i));
  }

 private:
  static constexpr size_t kPoints = 2048;
  std::vector<double> table_;
};

// The weights of the inputs around an output that lies `phase` / `phases` after an input.
class PhaseWeights {
 public:
  PhaseWeights(int64_t phases, double cutoff)
      : phases_(phases),
        cutoff_(cutoff),
        half_(static_cast<int64_t>(std::ceil(kZeroCrossings / cutoff))),
        row_(static_cast<size_t>(2 * half_)) {
    if (phases * 2 * half_ > kMostStored) return;
    stored_.resize(static_cast<size_t>(phases * 2 * half_));
    for (int64_t p = 0; p < phases; ++p) fill(p, stored_.data() + p * 2 * half_);
  }
  // Of inputs 1 - half() to half() from the input before.
  const float* of(int64_t phase) {
    if (!stored_.empty()) return stored_.data() + phase * 2 * half_;
    fill(phase, row_.data());
    return row_.data();
  }
  int64_t half() const { return half_; }

 private:
  static constexpr int64_t kMostStored = 1 << 20;
  void fill(int64_t phase, float* out) const {
    static const SincKernel kKernel;
    const double offset = static_cast<double>(phase) / static_cast<double>(phases_);
    for (int64_t k = 0; k < 2 * half_; ++k) {
      const double distance = static_cast<double>(k + 1 - half_) - offset;
      out[k] = static_cast<float>(cutoff_ * kKernel(distance * cutoff_));
    }
  }
  int64_t phases_;
  double cutoff_;
  int64_t half_;
  std::vector<float> row_;
  std::vector<float> stored_;
};

// In eight sums, whose order is fixed.
float dot_product(const float* a, const float* b, int64_t n) {
  float sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) sums[i % 8] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

}  // namespace

Status check_audio_length(int64_t samples, int rate, const AudioLimits& limits) {
  if (samples > limits.samples) {
    return resource_exhausted("the sound has {} samples; the limit is {}", samples, limits.samples);
  }
  if (samples > limits.seconds * rate) {
    return resource_exhausted("the sound lasts {} s; the limit is {} s", samples / rate,
                              limits.seconds);
  }
  return {};
}

Result<AudioHeader> read_audio_header(std::span<const uint8_t> bytes, const AudioLimits& limits) {
  if (bytes.empty()) return invalid_argument("the sound file is empty");
  if (bytes.size() > limits.encoded_bytes) {
    return resource_exhausted("the sound file has {} bytes; the limit is {}", bytes.size(),
                              limits.encoded_bytes);
  }
  FRESHET_ASSIGN_OR_RETURN(const AudioFormat format, audio_format(bytes));
  auto header = format == AudioFormat::kWav ? wav_header(bytes) : flac_header(bytes);
  if (!header.ok()) return header.status().with_context(audio_name(format));
  if (header->rate < 1000 || header->rate > 384'000) {
    return invalid_argument("{}: the header states a rate of {} Hz; 1000 to 384000 are supported",
                            audio_name(format), header->rate);
  }
  if (header->channels > limits.channels) {
    return resource_exhausted("the sound has {} channels; the limit is {}", header->channels,
                              limits.channels);
  }
  FRESHET_RETURN_IF_ERROR(check_audio_length(header->samples, header->rate, limits));
  return header;
}

Result<Sound> decode_audio(std::span<const uint8_t> bytes, const AudioLimits& limits) {
  FRESHET_ASSIGN_OR_RETURN(const AudioHeader header, read_audio_header(bytes, limits));
  Sound sound;
  sound.rate = header.rate;
  const Status status = header.format == AudioFormat::kWav
                            ? decode_wav(bytes, sound.samples)
                            : decode_flac(bytes, header, limits, sound.samples);
  if (!status.ok()) return status.with_context(audio_name(header.format));
  return sound;
}

Result<std::vector<float>> decode_audio_at(std::span<const uint8_t> bytes, int rate,
                                           const AudioLimits& limits) {
  FRESHET_ASSIGN_OR_RETURN(Sound sound, decode_audio(bytes, limits));
  if (sound.rate == rate) return std::move(sound.samples);
  const auto samples = static_cast<double>(sound.samples.size()) * rate / sound.rate;
  FRESHET_RETURN_IF_ERROR(check_audio_length(static_cast<int64_t>(samples), rate, limits));
  return resample_audio(sound.samples, sound.rate, rate);
}

std::vector<float> resample_audio(std::span<const float> samples, int from_rate, int to_rate) {
  FRESHET_CHECK(from_rate > 0 && to_rate > 0);
  if (from_rate == to_rate || samples.empty()) return {samples.begin(), samples.end()};
  const int64_t common = std::gcd(from_rate, to_rate);
  const int64_t up = to_rate / common;
  const int64_t down = from_rate / common;
  PhaseWeights weights(up, kRolloff * std::min(1.0, static_cast<double>(up) / down));
  const auto n = static_cast<int64_t>(samples.size());
  std::vector<float> out(static_cast<size_t>((n * up + down - 1) / down));
  const int64_t half = weights.half();
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t position = static_cast<int64_t>(i) * down;
    const int64_t first = position / up + 1 - half;
    const float* w = weights.of(position % up);
    const int64_t begin = std::max<int64_t>(first, 0);  // beyond the ends there is silence
    const int64_t end = std::min(first + 2 * half, n);
    if (end > begin) out[i] = dot_product(samples.data() + begin, w + (begin - first), end - begin);
  }
  return out;
}

}  // namespace freshet::media
