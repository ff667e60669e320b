// PNG by libpng. Every chunk that does not change pixels is skipped, so that none of them can make
// the library take memory.
#include <csetjmp>
#include <cstring>

#include <png.h>

#include "media/decode_formats.h"

namespace freshet::media {
namespace {

struct PngInput {
  std::span<const uint8_t> bytes;
  size_t at = 0;
  char error[160] = {};
  std::jmp_buf jump{};
};

extern "C" {
void freshet_png_read(png_structp png, png_bytep out, size_t count) {
  auto* in = static_cast<PngInput*>(png_get_io_ptr(png));
  if (count > in->bytes.size() - in->at) png_error(png, "the file ends early");
  std::memcpy(out, in->bytes.data() + in->at, count);
  in->at += count;
}
[[noreturn]] void freshet_png_error(png_structp png, png_const_charp message) {
  auto* in = static_cast<PngInput*>(png_get_error_ptr(png));
  std::strncpy(in->error, message, sizeof(in->error) - 1);
  std::longjmp(in->jump, 1);
}
void freshet_png_warning(png_structp, png_const_charp) {}
}

// What is read, in memory that outlives a jump out of the library.
struct PngRows {
  int bits = 0;   // of a channel
  int color = 0;  // PNG_COLOR_TYPE_*
  int channels = 0;
  bool interlaced = false;
  uint8_t palette[256][3] = {};     // entries that the file lacks are black
  std::vector<uint8_t> samples;     // one row, or the picture if it is interlaced
  std::vector<png_bytep> pointers;  // to the rows, if it is interlaced
  size_t row_bytes = 0;
};

void to_rgb(const PngRows& in, const uint8_t* samples, int width, uint8_t* rgb) {
  const size_t bytes = in.bits == 16 ? 2 : 1;
  const size_t step = bytes * static_cast<size_t>(in.channels);
  // Grey of 1, 2 or 4 bits spans the whole range: 255 is a multiple of 1, 3 and 15.
  const int scale = in.bits < 8 ? 255 / ((1 << in.bits) - 1) : 1;
  for (int x = 0; x < width; ++x, samples += step, rgb += 3) {
    switch (in.color) {
      case PNG_COLOR_TYPE_PALETTE:
        std::memcpy(rgb, in.palette[samples[0]], 3);
        break;
      case PNG_COLOR_TYPE_GRAY: {
        const bool over = in.bits == 16 && samples[0] != 0;
        const int value = in.bits == 16 ? samples[1] : samples[0] * scale;
        rgb[0] = rgb[1] = rgb[2] = static_cast<uint8_t>(over ? 255 : value);
        break;
      }
      case PNG_COLOR_TYPE_GRAY_ALPHA:
        rgb[0] = rgb[1] = rgb[2] = samples[0];
        break;
      default:
        rgb[0] = samples[0];
        rgb[1] = samples[bytes];
        rgb[2] = samples[2 * bytes];
    }
  }
}

// The part that the library may leave by a jump: no object with a destructor lives in it. False:
// see in.error.
bool read_png(png_structp png, png_infop info, PngInput& in, PngRows& rows, Picture& picture) {
  if (setjmp(in.jump) != 0) return false;
  png_set_read_fn(png, &in, freshet_png_read);
  png_set_user_limits(png, static_cast<png_uint_32>(picture.width),
                      static_cast<png_uint_32>(picture.height));
  png_set_chunk_malloc_max(png, 1 << 16);
  png_set_chunk_cache_max(png, 16);
  static constexpr png_byte kSkipped[] =
      "iCCP\0zTXt\0iTXt\0tEXt\0sPLT\0eXIf\0pCAL\0sCAL\0tIME\0hIST\0oFFs\0pHYs\0cHRM\0gAMA\0sRGB\0sB"
      "IT\0"
      "bKGD\0tRNS";
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, kSkipped, sizeof(kSkipped) / 5);
  png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, nullptr, 0);
  png_read_info(png, info);
  rows.bits = png_get_bit_depth(png, info);
  rows.color = png_get_color_type(png, info);
  rows.channels = png_get_channels(png, info);
  if (rows.color == PNG_COLOR_TYPE_PALETTE) {
    png_colorp colors = nullptr;
    int count = 0;
    if (png_get_PLTE(png, info, &colors, &count) == 0) png_error(png, "the palette is missing");
    for (int i = 0; i < count && i < 256; ++i) {
      rows.palette[i][0] = colors[i].red;
      rows.palette[i][1] = colors[i].green;
      rows.palette[i][2] = colors[i].blue;
    }
  }
  if (rows.bits < 8) png_set_packing(png);
  rows.interlaced = png_set_interlace_handling(png) > 1;
  png_read_update_info(png, info);
  rows.row_bytes = png_get_rowbytes(png, info);
  const auto height = static_cast<size_t>(picture.height);
  rows.samples.resize(rows.row_bytes * (rows.interlaced ? height : 1));
  if (rows.interlaced) {
    rows.pointers.resize(height);
    for (size_t y = 0; y < height; ++y) {
      rows.pointers[y] = rows.samples.data() + y * rows.row_bytes;
    }
    png_read_image(png, rows.pointers.data());
  }
  for (int y = 0; y < picture.height; ++y) {
    const uint8_t* samples = rows.samples.data();
    if (rows.interlaced) {
      samples += static_cast<size_t>(y) * rows.row_bytes;
    } else {
      png_read_row(png, rows.samples.data(), nullptr);
    }
    to_rgb(rows, samples, picture.width, picture.row(y));
  }
  png_read_end(png, nullptr);
  return true;
}

}  // namespace

Result<PictureSize> png_size(std::span<const uint8_t> bytes) {
  // The signature, then a chunk IHDR: length, name, width, height.
  if (bytes.size() < 33) return invalid_argument("the file ends in its header");
  if (std::memcmp(bytes.data() + 8, "\0\0\0\rIHDR", 8) != 0) {
    return invalid_argument("the header (IHDR) is missing");
  }
  const auto word = [&](size_t at) {
    return int64_t{bytes[at]} << 24 | int64_t{bytes[at + 1]} << 16 | int64_t{bytes[at + 2]} << 8 |
           int64_t{bytes[at + 3]};
  };
  return PictureSize{word(16), word(20)};
}

Status decode_png(std::span<const uint8_t> bytes, Picture& picture) {
  PngInput in;
  in.bytes = bytes;
  png_structp png =
      png_create_read_struct(PNG_LIBPNG_VER_STRING, &in, freshet_png_error, freshet_png_warning);
  if (png == nullptr) return resource_exhausted("no memory for the decoder");
  png_infop info = png_create_info_struct(png);
  PngRows rows;
  const bool done = info != nullptr && read_png(png, info, in, rows, picture);
  png_destroy_read_struct(&png, &info, nullptr);
  if (!done) return invalid_argument("the file is broken: {}", in.error);
  return {};
}

}  // namespace freshet::media
