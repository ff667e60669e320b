// Sound files in memory, for tests: WAV by hand, FLAC by libFLAC's encoder.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include <FLAC/stream_encoder.h>

#include "base/status.h"

namespace freshet::media {

inline void put_number(std::vector<uint8_t>& out, uint64_t v, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<uint8_t>(v >> (8 * i)));
}

inline void put_chunk(std::vector<uint8_t>& out, std::string_view name,
                      const std::vector<uint8_t>& data) {
  out.insert(out.end(), name.begin(), name.end());
  put_number(out, data.size(), 4);
  out.insert(out.end(), data.begin(), data.end());
  if (data.size() % 2 != 0) out.push_back(0);
}

// `tag`: 1 PCM, 3 floats. `data` as stored.
inline std::vector<uint8_t> wav_of(int tag, int bits, int channels, int rate,
                                   const std::vector<uint8_t>& data, bool extensible = false) {
  std::vector<uint8_t> format;
  put_number(format, extensible ? 0xfffe : static_cast<uint64_t>(tag), 2);
  put_number(format, static_cast<uint64_t>(channels), 2);
  put_number(format, static_cast<uint64_t>(rate), 4);
  put_number(format, static_cast<uint64_t>(rate) * channels * bits / 8, 4);
  put_number(format, static_cast<uint64_t>(channels) * bits / 8, 2);
  put_number(format, static_cast<uint64_t>(bits), 2);
  if (extensible) {
    put_number(format, 22, 2);
    put_number(format, static_cast<uint64_t>(bits), 2);
    put_number(format, 0, 4);
    put_number(format, static_cast<uint64_t>(tag), 2);
    for (const uint8_t b : {0, 0, 0, 0, 16, 0, 128, 0, 0, 170, 0, 56, 155, 113})
      format.push_back(b);
  }
  std::vector<uint8_t> chunks;
  put_chunk(chunks, "fmt ", format);
  put_chunk(chunks, "LIST", {1, 2, 3});  // skipped, of an odd length
  put_chunk(chunks, "data", data);
  std::vector<uint8_t> out;
  for (const char c : std::string_view("RIFF")) out.push_back(static_cast<uint8_t>(c));
  put_number(out, chunks.size() + 4, 4);
  for (const char c : std::string_view("WAVE")) out.push_back(static_cast<uint8_t>(c));
  out.insert(out.end(), chunks.begin(), chunks.end());
  return out;
}

struct FlacSink {
  std::vector<uint8_t> bytes;
  size_t at = 0;
};

// `samples`: channels interleaved.
inline std::vector<uint8_t> flac_of(int bits, int channels, int rate,
                                    const std::vector<int32_t>& samples) {
  FlacSink sink;
  FLAC__StreamEncoder* encoder = FLAC__stream_encoder_new();
  FLAC__stream_encoder_set_bits_per_sample(encoder, static_cast<unsigned>(bits));
  FLAC__stream_encoder_set_channels(encoder, static_cast<unsigned>(channels));
  FLAC__stream_encoder_set_sample_rate(encoder, static_cast<unsigned>(rate));
  FLAC__stream_encoder_set_blocksize(encoder, 256);
  const auto write = [](const FLAC__StreamEncoder*, const FLAC__byte buffer[], size_t count,
                        uint32_t, uint32_t, void* client) {
    auto& to = *static_cast<FlacSink*>(client);
    to.bytes.resize(std::max(to.bytes.size(), to.at + count));
    std::memcpy(to.bytes.data() + to.at, buffer, count);
    to.at += count;
    return FLAC__STREAM_ENCODER_WRITE_STATUS_OK;
  };
  const auto seek = [](const FLAC__StreamEncoder*, FLAC__uint64 at, void* client) {
    static_cast<FlacSink*>(client)->at = at;
    return FLAC__STREAM_ENCODER_SEEK_STATUS_OK;
  };
  const auto tell = [](const FLAC__StreamEncoder*, FLAC__uint64* at, void* client) {
    *at = static_cast<FlacSink*>(client)->at;
    return FLAC__STREAM_ENCODER_TELL_STATUS_OK;
  };
  FRESHET_CHECK(FLAC__stream_encoder_init_stream(encoder, write, seek, tell, nullptr, &sink) ==
                FLAC__STREAM_ENCODER_INIT_STATUS_OK);
  FRESHET_CHECK(FLAC__stream_encoder_process_interleaved(
      encoder, samples.data(), static_cast<unsigned>(samples.size()) / channels));
  FRESHET_CHECK(FLAC__stream_encoder_finish(encoder));
  FLAC__stream_encoder_delete(encoder);
  return sink.bytes;
}

}  // namespace freshet::media
