// FLAC by libFLAC. Frames are averaged over their channels as they come.
#include <algorithm>
#include <cstring>

#include <FLAC/stream_decoder.h>

#include "media/audio_formats.h"

namespace freshet::media {
namespace {

struct FlacReader {
  std::span<const uint8_t> bytes;
  size_t at = 0;
  AudioHeader header;
  const AudioLimits* limits = nullptr;
  std::vector<float>* samples = nullptr;
  bool broken = false;  // lost synchronisation or a wrong checksum
  Status status;
};

FLAC__StreamDecoderReadStatus flac_read(const FLAC__StreamDecoder*, FLAC__byte buffer[],
                                        size_t* count, void* client) {
  auto& reader = *static_cast<FlacReader*>(client);
  *count = std::min(*count, reader.bytes.size() - reader.at);
  if (*count == 0) return FLAC__STREAM_DECODER_READ_STATUS_END_OF_STREAM;
  std::memcpy(buffer, reader.bytes.data() + reader.at, *count);
  reader.at += *count;
  return FLAC__STREAM_DECODER_READ_STATUS_CONTINUE;
}

FLAC__StreamDecoderWriteStatus flac_write(const FLAC__StreamDecoder*, const FLAC__Frame* frame,
                                          const FLAC__int32* const channels[], void* client) {
  auto& reader = *static_cast<FlacReader*>(client);
  const auto& about = frame->header;
  if (static_cast<int>(about.channels) != reader.header.channels ||
      static_cast<int>(about.sample_rate) != reader.header.rate) {
    reader.status = invalid_argument("the rate or the channels change within the file");
    return FLAC__STREAM_DECODER_WRITE_STATUS_ABORT;
  }
  const auto total = static_cast<int64_t>(reader.samples->size() + about.blocksize);
  reader.status = check_audio_length(total, reader.header.rate, *reader.limits);
  if (!reader.status.ok()) return FLAC__STREAM_DECODER_WRITE_STATUS_ABORT;
  const double scale =
      1.0 / (static_cast<double>(int64_t{1} << (about.bits_per_sample - 1)) * about.channels);
  for (unsigned i = 0; i < about.blocksize; ++i) {
    double sum = 0;
    for (unsigned c = 0; c < about.channels; ++c) sum += channels[c][i];
    reader.samples->push_back(static_cast<float>(sum * scale));
  }
  return FLAC__STREAM_DECODER_WRITE_STATUS_CONTINUE;
}

void flac_error(const FLAC__StreamDecoder*, FLAC__StreamDecoderErrorStatus, void* client) {
  static_cast<FlacReader*>(client)->broken = true;
}

}  // namespace

Result<AudioHeader> flac_header(std::span<const uint8_t> bytes) {
  // "fLaC", a block header of 4 bytes, then STREAMINFO: from its byte 10 on 20 bits of rate, 3 of
  // channels - 1, 5 of bits - 1 and 36 of samples.
  if (bytes.size() < 42) return invalid_argument("the file ends in its header");
  if ((bytes[4] & 0x7f) != 0) return invalid_argument("the block STREAMINFO is missing");
  const uint8_t* at = bytes.data() + 18;
  AudioHeader header;
  header.format = AudioFormat::kFlac;
  header.rate = at[0] << 12 | at[1] << 4 | at[2] >> 4;
  header.channels = (at[2] >> 1 & 7) + 1;
  header.samples =
      int64_t{at[3] & 15} << 32 | int64_t{at[4]} << 24 | at[5] << 16 | at[6] << 8 | at[7];
  return header;
}

Status decode_flac(std::span<const uint8_t> bytes, const AudioHeader& header,
                   const AudioLimits& limits, std::vector<float>& samples) {
  FlacReader reader;
  reader.bytes = bytes;
  reader.header = header;
  reader.limits = &limits;
  reader.samples = &samples;
  samples.reserve(static_cast<size_t>(std::min<int64_t>(header.samples, 1 << 20)));
  FLAC__StreamDecoder* decoder = FLAC__stream_decoder_new();
  if (decoder == nullptr) return resource_exhausted("no memory for the decoder");
  FLAC__stream_decoder_set_md5_checking(decoder, 1);
  const bool started = FLAC__stream_decoder_init_stream(
                           decoder, flac_read, nullptr, nullptr, nullptr, nullptr, flac_write,
                           nullptr, flac_error, &reader) == FLAC__STREAM_DECODER_INIT_STATUS_OK;
  bool done = started;
  // Frame by frame, to stop at the first damage.
  while (done && !reader.broken && reader.status.ok() &&
         FLAC__stream_decoder_get_state(decoder) != FLAC__STREAM_DECODER_END_OF_STREAM) {
    done = FLAC__stream_decoder_process_single(decoder) != 0;
  }
  const bool checksum = FLAC__stream_decoder_finish(decoder) != 0;
  FLAC__stream_decoder_delete(decoder);
  FRESHET_RETURN_IF_ERROR(reader.status);
  if (!done || reader.broken) return invalid_argument("the file is broken");
  if (header.samples > 0 && static_cast<int64_t>(samples.size()) != header.samples) {
    return invalid_argument("the file ends early: {} of {} samples", samples.size(),
                            header.samples);
  }
  if (!checksum) return invalid_argument("the samples do not match the checksum");
  return {};
}

}  // namespace freshet::media
