// JPEG by libjpeg: baseline and progressive, grey, RGB, YCbCr, CMYK and YCCK.
#include <csetjmp>
#include <cstdio>
#include <cstring>

#include <jerror.h>
#include <jpeglib.h>

#include "media/decode_formats.h"

namespace freshet::media {
namespace {

struct JpegErrors {
  jpeg_error_mgr manager{};  // first: libjpeg knows its address only
  char message[JMSG_LENGTH_MAX] = {};
  std::jmp_buf jump{};
};

struct JpegProgress {
  jpeg_progress_mgr manager{};  // first, as above
  int max_scans = 0;
};

extern "C" {
[[noreturn]] void freshet_jpeg_error(j_common_ptr common) {
  auto* errors = reinterpret_cast<JpegErrors*>(common->err);
  errors->manager.format_message(common, errors->message);
  std::longjmp(errors->jump, 1);
}
// Most warnings mean data that is damaged or missing, which libjpeg would replace with grey. Bytes
// between segments and odd Adobe markers are common and harmless.
void freshet_jpeg_message(j_common_ptr common, int level) {
  const int code = common->err->msg_code;
  if (level < 0 && code != JWRN_EXTRANEOUS_DATA && code != JWRN_ADOBE_XFORM) {
    freshet_jpeg_error(common);
  }
}
void freshet_jpeg_progress(j_common_ptr common) {
  auto* progress = reinterpret_cast<JpegProgress*>(common->progress);
  auto* errors = reinterpret_cast<JpegErrors*>(common->err);
  if (reinterpret_cast<j_decompress_ptr>(common)->input_scan_number > progress->max_scans) {
    std::snprintf(errors->message, sizeof(errors->message), "more than %d scans",
                  progress->max_scans);
    std::longjmp(errors->jump, 1);
  }
}
}

// C * (255 - K) / 255 rounded, for inverted inks: what is stored is 255 - ink.
uint8_t ink_to_light(int stored_ink, int stored_black) {
  const int product = (255 - stored_ink) * stored_black + 128;
  const int shade = ((product >> 8) + product) >> 8;
  return static_cast<uint8_t>(stored_black - shade < 0 ? 0 : stored_black - shade);
}

void row_to_rgb(const uint8_t* in, int components, int width, uint8_t* rgb) {
  for (int x = 0; x < width; ++x, in += components, rgb += 3) {
    if (components == 1) {
      rgb[0] = rgb[1] = rgb[2] = in[0];
    } else {
      for (int c = 0; c < 3; ++c) rgb[c] = ink_to_light(in[c], in[3]);
    }
  }
}

// The part that the library may leave by a jump: no object with a destructor lives in it.
bool read_jpeg(jpeg_decompress_struct& jpeg, JpegErrors& errors, JpegProgress& progress,
               std::span<const uint8_t> bytes, std::vector<uint8_t>& line, Picture& picture) {
  if (setjmp(errors.jump) != 0) return false;
  jpeg_create_decompress(&jpeg);
  jpeg.progress = &progress.manager;
  jpeg_mem_src(&jpeg, bytes.data(), bytes.size());
  jpeg_read_header(&jpeg, TRUE);
  if (jpeg.image_width != static_cast<JDIMENSION>(picture.width) ||
      jpeg.image_height != static_cast<JDIMENSION>(picture.height)) {
    std::snprintf(errors.message, sizeof(errors.message), "two headers state different sizes");
    return false;
  }
  switch (jpeg.num_components) {
    case 1:
      jpeg.out_color_space = JCS_GRAYSCALE;
      break;
    case 3:
      jpeg.out_color_space = JCS_RGB;
      break;
    case 4:
      jpeg.out_color_space = JCS_CMYK;
      break;
    default:
      std::snprintf(errors.message, sizeof(errors.message), "%d colour components",
                    jpeg.num_components);
      return false;
  }
  jpeg_start_decompress(&jpeg);
  const int components = jpeg.output_components;
  if (components != 3) line.resize(static_cast<size_t>(picture.width) * components);
  for (int y = 0; y < picture.height; ++y) {
    JSAMPROW to = components == 3 ? picture.row(y) : line.data();
    jpeg_read_scanlines(&jpeg, &to, 1);
    if (components != 3) row_to_rgb(line.data(), components, picture.width, picture.row(y));
  }
  jpeg_finish_decompress(&jpeg);
  return true;
}

}  // namespace

Result<PictureSize> jpeg_size(std::span<const uint8_t> bytes) {
  // Markers FF xx with a length up to the start of frame, which has the size.
  size_t at = 2;
  while (at + 4 <= bytes.size()) {
    const uint8_t marker = bytes[at + 1];
    if (bytes[at] != 0xff || marker == 0xff || marker == 0) {  // filling
      ++at;
      continue;
    }
    if (marker == 0x01 || (marker >= 0xd0 && marker <= 0xd8)) {  // without a length
      at += 2;
      continue;
    }
    const size_t length = size_t{bytes[at + 2]} << 8 | bytes[at + 3];
    const bool frame =
        marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
    if (frame) {
      if (at + 10 > bytes.size() || length < 8) break;
      return PictureSize{int64_t{bytes[at + 7]} << 8 | bytes[at + 8],
                         int64_t{bytes[at + 5]} << 8 | bytes[at + 6]};
    }
    if (length < 2 || marker == 0xda || marker == 0xd9) {
      return invalid_argument("the header has no frame (SOF)");
    }
    at += 2 + length;
  }
  return invalid_argument("the file ends in its header");
}

Status decode_jpeg(std::span<const uint8_t> bytes, int max_scans, Picture& picture) {
  JpegErrors errors;
  jpeg_decompress_struct jpeg{};
  jpeg.err = jpeg_std_error(&errors.manager);
  errors.manager.error_exit = freshet_jpeg_error;
  errors.manager.emit_message = freshet_jpeg_message;
  JpegProgress progress;
  progress.manager.progress_monitor = freshet_jpeg_progress;
  progress.max_scans = max_scans;
  std::vector<uint8_t> line;
  const bool done = read_jpeg(jpeg, errors, progress, bytes, line, picture);
  jpeg_destroy_decompress(&jpeg);
  if (!done) return invalid_argument("the file is broken: {}", errors.message);
  return {};
}

}  // namespace freshet::media
