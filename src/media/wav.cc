// WAV: chunks of a name, a length in 32 bits and data, padded to an even length. "fmt " says how
// the samples in "data" are stored.
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>

#include "media/audio_formats.h"

namespace freshet::media {
namespace {

struct WavLayout {
  AudioHeader header;
  int bits = 0;
  bool floats = false;
  std::span<const uint8_t> data;
};

uint64_t wav_word(const uint8_t* at, size_t bytes) {
  uint64_t v = 0;
  for (size_t i = 0; i < bytes; ++i) v |= uint64_t{at[i]} << (8 * i);
  return v;
}

const char* wav_codec(uint64_t tag) {
  switch (tag) {
    case 2:
      return "ADPCM";
    case 6:
      return "A-law";
    case 7:
      return "mu-law";
    case 0x11:
      return "IMA ADPCM";
    case 0x31:
      return "GSM";
    case 0x55:
      return "MP3";
    default:
      return nullptr;
  }
}

Status read_wav_format(std::span<const uint8_t> chunk, WavLayout& out) {
  if (chunk.size() < 16) return invalid_argument("the chunk \"fmt \" is too short");
  uint64_t tag = wav_word(chunk.data(), 2);
  const uint64_t channels = wav_word(chunk.data() + 2, 2);
  const uint64_t rate = wav_word(chunk.data() + 4, 4);
  const uint64_t block = wav_word(chunk.data() + 12, 2);
  out.bits = static_cast<int>(wav_word(chunk.data() + 14, 2));
  if (tag == 0xfffe) {  // extensible: the code is in the first bytes of a GUID
    if (chunk.size() < 40) return invalid_argument("the chunk \"fmt \" is too short");
    tag = wav_word(chunk.data() + 24, 2);
  }
  if (tag != 1 && tag != 3) {
    const char* name = wav_codec(tag);
    return unsupported("samples in {} are not supported; send PCM or FLAC",
                       name != nullptr ? name : fmt::format("code {}", tag).c_str());
  }
  out.floats = tag == 3;
  const bool known = out.floats
                         ? out.bits == 32 || out.bits == 64
                         : out.bits == 8 || out.bits == 16 || out.bits == 24 || out.bits == 32;
  if (!known) {
    return unsupported("{} of {} bits are not supported", out.floats ? "floats" : "integers",
                       out.bits);
  }
  if (channels == 0 || block != channels * static_cast<uint64_t>(out.bits) / 8) {
    return invalid_argument("{} channels of {} bits do not make frames of {} bytes", channels,
                            out.bits, block);
  }
  if (rate > 1'000'000) return invalid_argument("the header states a rate of {} Hz", rate);
  out.header = {AudioFormat::kWav, static_cast<int>(rate), static_cast<int>(channels), 0};
  return {};
}

Result<WavLayout> read_wav(std::span<const uint8_t> bytes) {
  WavLayout out;
  bool has_format = false;
  size_t at = 12;
  while (bytes.size() - at >= 8) {
    const std::span<const uint8_t> rest = bytes.subspan(at + 8);
    uint64_t size = wav_word(bytes.data() + at + 4, 4);
    const bool is_data = std::memcmp(bytes.data() + at, "data", 4) == 0;
    // Programs that write to a pipe do not know the length.
    if (is_data && size == 0xffffffff) size = rest.size();
    if (size > rest.size()) return invalid_argument("the file ends early");
    const std::span<const uint8_t> chunk = rest.first(static_cast<size_t>(size));
    if (std::memcmp(bytes.data() + at, "fmt ", 4) == 0) {
      FRESHET_RETURN_IF_ERROR(read_wav_format(chunk, out));
      has_format = true;
    } else if (is_data) {
      if (!has_format) return invalid_argument("the chunk \"fmt \" is missing");
      out.data = chunk;
      out.header.samples =
          static_cast<int64_t>(size / (static_cast<size_t>(out.header.channels) * out.bits / 8));
      return out;
    }
    at += 8 + static_cast<size_t>(size);
    if (size % 2 != 0 && at < bytes.size()) ++at;
  }
  return invalid_argument("the chunk \"{}\" is missing", has_format ? "data" : "fmt ");
}

double wav_sample(const uint8_t* at, int bits, bool floats) {
  const uint64_t word = wav_word(at, static_cast<size_t>(bits) / 8);
  if (floats) {
    return bits == 32 ? std::bit_cast<float>(static_cast<uint32_t>(word))
                      : std::bit_cast<double>(word);
  }
  if (bits == 8) return (static_cast<double>(word) - 128) / 128;  // the only unsigned one
  const auto value = static_cast<int32_t>(static_cast<uint32_t>(word) << (32 - bits));
  return value / 2147483648.0;
}

}  // namespace

Result<AudioHeader> wav_header(std::span<const uint8_t> bytes) {
  FRESHET_ASSIGN_OR_RETURN(const WavLayout wav, read_wav(bytes));
  return wav.header;
}

Status decode_wav(std::span<const uint8_t> bytes, std::vector<float>& samples) {
  FRESHET_ASSIGN_OR_RETURN(const WavLayout wav, read_wav(bytes));
  const size_t width = static_cast<size_t>(wav.bits) / 8;
  const auto channels = static_cast<size_t>(wav.header.channels);
  samples.resize(static_cast<size_t>(wav.header.samples));
  const uint8_t* at = wav.data.data();
  for (float& sample : samples) {
    double sum = 0;
    for (size_t c = 0; c < channels; ++c, at += width) sum += wav_sample(at, wav.bits, wav.floats);
    sample = static_cast<float>(sum / static_cast<double>(channels));
    if (!std::isfinite(sample)) return invalid_argument("a sample is not a finite number");
  }
  return {};
}

}  // namespace freshet::media
