#include "media/log_mel.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace freshet::media {
namespace {

// Slaney's scale: linear below 1,000 Hz (15 mel), logarithmic above.
constexpr double kMelBreak = 15;
constexpr double kHertzBreak = 1000;
const double kMelStep = std::log(6.4) / 27;

double mel_of(double hertz) {
  if (hertz < kHertzBreak) return 3 * hertz / 200;
  return kMelBreak + std::log(hertz / kHertzBreak) / kMelStep;
}

double hertz_of(double mel) {
  if (mel < kMelBreak) return 200 * mel / 3;
  return kHertzBreak * std::exp(kMelStep * (mel - kMelBreak));
}

// Position `i` of a signal of n samples that is mirrored at both ends.
int64_t mirrored_at(int64_t i, int64_t n) {
  if (n == 1) return 0;
  const int64_t period = 2 * (n - 1);
  i = ((i % period) + period) % period;
  return i < n ? i : period - i;
}

}  // namespace

Result<MelSettings> mel_settings(const json::Value& preprocessor) {
  MelSettings out;
  int64_t seconds = 30;
  const auto read = [&](std::string_view key, auto& value, int64_t most) -> Status {
    const json::Value* found = preprocessor.find(key);
    if (found == nullptr || found->is_null()) return {};
    const auto number = found->is_number() ? found->as_int64() : std::nullopt;
    if (!number || *number < 1 || *number > most) {
      return invalid_argument("\"{}\" must be an integer from 1 to {}", key, most);
    }
    value = static_cast<std::remove_reference_t<decltype(value)>>(*number);
    return {};
  };
  FRESHET_RETURN_IF_ERROR(read("sampling_rate", out.rate, 192'000));
  FRESHET_RETURN_IF_ERROR(read("feature_size", out.mels, 1024));
  FRESHET_RETURN_IF_ERROR(read("n_fft", out.frame, 16'384));
  FRESHET_RETURN_IF_ERROR(read("hop_length", out.hop, 16'384));
  FRESHET_RETURN_IF_ERROR(read("chunk_length", seconds, 120));
  out.samples = static_cast<int>(seconds) * out.rate;
  if (out.frame % 2 != 0) return unsupported("\"n_fft\" must be even, not {}", out.frame);
  if (out.samples < out.hop) return invalid_argument("\"hop_length\" is longer than the window");
  if (preprocessor.get_double("dither", 0) != 0) {
    return unsupported("\"dither\" is not supported; set it to 0");
  }
  return out;
}

LogMel::LogMel(const MelSettings& settings) : settings_(settings), fft_(settings.frame) {
  // In single precision, as torch does it: quiet bands beside loud ones show the difference.
  const auto step = static_cast<float>(2 * std::numbers::pi / settings.frame);
  for (int i = 0; i < settings.frame; ++i) {
    const float phase = static_cast<float>(i) * step;
    const auto cosine = static_cast<float>(std::cos(static_cast<double>(phase)));
    window_.push_back(cosine * -0.5F + 0.5F);
  }
  const double top = mel_of(8000);
  std::vector<double> edges;
  for (int i = 0; i < settings.mels + 2; ++i) {
    edges.push_back(hertz_of(top * i / (settings.mels + 1)));
  }
  const int bins = settings.frame / 2 + 1;
  for (size_t m = 0; m < static_cast<size_t>(settings.mels); ++m) {
    MelFilter filter;
    const double norm = 2 / (edges[m + 2] - edges[m]);
    for (int bin = 0; bin < bins; ++bin) {
      const double hertz = static_cast<double>(settings.rate / 2) * bin / (bins - 1);
      const double rising = (hertz - edges[m]) / (edges[m + 1] - edges[m]);
      const double falling = (edges[m + 2] - hertz) / (edges[m + 2] - edges[m + 1]);
      const double weight = std::max(0.0, std::min(rising, falling)) * norm;
      if (weight == 0) continue;
      if (filter.weights.empty()) filter.first = bin;
      filter.weights.resize(static_cast<size_t>(bin - filter.first) + 1);
      filter.weights.back() = static_cast<float>(weight);
    }
    filters_.push_back(std::move(filter));
  }
}

void LogMel::frame_energies(std::span<const float> samples, int frame,
                            std::vector<double>& windowed, std::vector<double>& power,
                            RealFft::Workspace& space, float* out) const {
  const auto stride = static_cast<size_t>(settings_.frames());
  const int64_t start = int64_t{frame} * settings_.hop - settings_.frame / 2;
  const auto given = static_cast<int64_t>(samples.size());
  bool silent = true;
  for (int64_t i = 0; i < settings_.frame; ++i) {
    const int64_t at = mirrored_at(start + i, settings_.samples);
    const double sample = at < given ? samples[static_cast<size_t>(at)] : 0.0F;
    silent = silent && sample == 0;
    windowed[static_cast<size_t>(i)] = sample * window_[static_cast<size_t>(i)];
  }
  if (silent)
    std::fill(power.begin(), power.end(), 0);
  else
    fft_.power(windowed.data(), power.data(), space);
  for (size_t m = 0; m < filters_.size(); ++m) {
    double energy = 0;
    const double* bin = power.data() + filters_[m].first;
    for (const float weight : filters_[m].weights) energy += weight * *bin++;
    out[m * stride + static_cast<size_t>(frame)] =
        static_cast<float>(std::log10(std::max(energy, 1e-10)));
  }
}

std::vector<float> LogMel::features(std::span<const float> samples, ThreadPool* pool) const {
  samples = samples.first(std::min(samples.size(), static_cast<size_t>(settings_.samples)));
  const int frames = settings_.frames();
  std::vector<float> out(static_cast<size_t>(settings_.mels) * frames);
  constexpr int kBlock = 64;
  const auto block = [&](int64_t index, int) {
    std::vector<double> windowed(static_cast<size_t>(settings_.frame));
    std::vector<double> power(static_cast<size_t>(settings_.frame) / 2 + 1);
    RealFft::Workspace space;
    const int last = std::min(frames, static_cast<int>(index + 1) * kBlock);
    for (int f = static_cast<int>(index) * kBlock; f < last; ++f) {
      frame_energies(samples, f, windowed, power, space, out.data());
    }
  };
  const int blocks = (frames + kBlock - 1) / kBlock;
  if (pool != nullptr) {
    pool->parallel_for(blocks, block);
  } else {
    for (int i = 0; i < blocks; ++i) block(i, 0);
  }
  const float least = *std::max_element(out.begin(), out.end()) - 8.0F;
  for (float& v : out) v = (std::max(v, least) + 4.0F) / 4.0F;
  return out;
}

}  // namespace freshet::media
