#include "media/image_input.h"

#include <algorithm>
#include <cmath>

#include <openssl/evp.h>

#include "media/image_plan.h"

namespace freshet::media {
namespace {

// The float of each 8-bit value, by channel: scaled in double precision, then rounded, shifted and
// divided in single precision.
class ValueTable {
 public:
  explicit ValueTable(const ImageSettings& settings) {
    for (size_t c = 0; c < 3; ++c) {
      const auto mean = static_cast<float>(settings.mean[c]);
      const auto deviation = static_cast<float>(settings.deviation[c]);
      for (int v = 0; v < 256; ++v) {
        auto x = static_cast<float>(settings.rescale ? v * settings.rescale_factor : v);
        if (settings.normalize) x = (x - mean) / deviation;
        values_[c][static_cast<size_t>(v)] = x;
      }
    }
  }
  float operator()(size_t channel, uint8_t v) const { return values_[channel][v]; }

 private:
  std::array<std::array<float, 256>, 3> values_;
};

// Appends a part of the picture, one channel after the other.
void append_planes(const Picture& picture, int left, int top, int width, int height,
                   const ValueTable& table, std::vector<float>& out) {
  const size_t start = out.size();
  const size_t plane = static_cast<size_t>(width) * height;
  out.resize(start + 3 * plane);
  float* to = out.data() + start;
  for (int y = 0; y < height; ++y) {
    const uint8_t* pixel = picture.row(top + y) + static_cast<size_t>(left) * 3;
    for (int x = 0; x < width; ++x, pixel += 3, ++to) {
      for (size_t c = 0; c < 3; ++c) to[c * plane] = table(c, pixel[c]);
    }
  }
}

void append_squares(const Picture& picture, int side, const ValueTable& table,
                    std::vector<float>& out) {
  for (int top = 0; top < picture.height; top += side) {
    for (int left = 0; left < picture.width; left += side) {
      append_planes(picture, left, top, side, side, table, out);
    }
  }
}

Picture padded_to_square(const Picture& picture, const ImageSettings& settings) {
  if (picture.width == picture.height) return picture;
  std::array<uint8_t, 3> fill{};
  for (size_t c = 0; c < 3; ++c) {
    fill[c] = static_cast<uint8_t>(std::clamp(settings.mean[c] * 255, 0.0, 255.0));
  }
  const int side = std::max(picture.width, picture.height);
  Picture out =
      crop(picture, -(side - picture.width) / 2, -(side - picture.height) / 2, side, side);
  const int left = (side - picture.width) / 2;
  const int top = (side - picture.height) / 2;
  for (int y = 0; y < side; ++y) {
    for (int x = 0; x < side; ++x) {
      const bool inside =
          x >= left && x < left + picture.width && y >= top && y < top + picture.height;
      if (inside) continue;
      for (size_t c = 0; c < 3; ++c) {
        out.row(y)[static_cast<size_t>(x) * 3 + c] = fill[c];
      }
    }
  }
  return out;
}

// Halves are rounded down, also of negative numbers.
int half_down(int v) {
  return v >= 0 ? v / 2 : -((1 - v) / 2);
}

Result<Picture> single_picture(const Picture& picture, const ImageSettings& settings) {
  Picture out = settings.pad_to_square ? padded_to_square(picture, settings) : picture;
  FRESHET_ASSIGN_OR_RETURN(const Size size, single_size({out.height, out.width}, settings));
  out = resize(out, size.width, size.height, settings.filter);
  if (!settings.center_crop) return out;
  // A picture that is smaller is centred on black; the extra pixel goes before it.
  const int left = half_down(out.width - settings.crop_width);
  const int top = half_down(out.height - settings.crop_height);
  return crop(out, left, top, settings.crop_width, settings.crop_height);
}

void append_text(std::vector<PromptPiece>& prompt, std::string_view text) {
  if (text.empty()) return;
  if (prompt.empty() || prompt.back().rows > 0) prompt.emplace_back();
  prompt.back().text += text;
}

void append_rows(std::vector<PromptPiece>& prompt, int64_t rows) {
  prompt.push_back({{}, rows});
}

void idefics_prompt(const ImageSettings& settings, ImageInput& out) {
  constexpr std::string_view kFake = "<fake_token_around_image>";
  for (int row = 1; row <= out.grid_rows; ++row) {
    for (int column = 1; column <= out.grid_columns; ++column) {
      append_text(out.prompt, fmt::format("{}<row_{}_col_{}>", kFake, row, column));
      append_rows(out.prompt, settings.square_rows);
    }
    append_text(out.prompt, "\n");
  }
  if (out.grid_rows > 0) append_text(out.prompt, "\n");
  append_text(out.prompt, fmt::format("{}<global-img>", kFake));
  append_rows(out.prompt, settings.square_rows);
  append_text(out.prompt, kFake);
}

// One row of image tokens for each row of merged patches.
void pixtral_prompt(int64_t rows, int64_t columns, ImageInput& out) {
  for (int64_t row = 0; row < rows; ++row) {
    append_rows(out.prompt, columns);
    append_text(out.prompt, row + 1 < rows ? "[IMG_BREAK]" : "[IMG_END]");
  }
}

void set_patches(Size resized, const ImageSettings& settings, ImageInput& out) {
  const int patch = settings.patch_size;
  out.grid_thw = {1, resized.height / patch, resized.width / patch};
  out.shape = {out.grid_thw[1] * out.grid_thw[2],
               int64_t{3} * settings.temporal_patch_size * patch * patch};
}

// Fills all but `values` and the hash. `shape` is complete.
Result<ImageInput> layout(Size size, const ImageSettings& settings) {
  ImageInput out;
  out.width = size.width;
  out.height = size.height;
  append_text(out.prompt, settings.before);
  switch (settings.family) {
    case ImageFamily::kSingle: {
      const int side = std::max(size.width, size.height);
      const Size padded = settings.pad_to_square ? Size{side, side} : size;
      FRESHET_ASSIGN_OR_RETURN(Size result, single_size(padded, settings));
      if (settings.center_crop) result = {settings.crop_height, settings.crop_width};
      out.shape = {1, 3, result.height, result.width};
      append_rows(out.prompt, settings.square_rows);
      break;
    }
    case ImageFamily::kLlavaNext: {
      FRESHET_ASSIGN_OR_RETURN(const CanvasPlan plan, llava_next_plan(size, settings));
      const int square = llava_next_square(settings);
      out.grid_rows = plan.canvas.height / square;
      out.grid_columns = plan.canvas.width / square;
      out.shape = {1 + int64_t{out.grid_rows} * out.grid_columns, 3, square, square};
      out.kept_patches = llava_next_kept(size, plan.canvas, settings);
      const auto [rows, columns] = out.kept_patches;
      append_rows(out.prompt, settings.square_rows + rows * (columns + 1));
      break;
    }
    case ImageFamily::kQwen: {
      FRESHET_ASSIGN_OR_RETURN(const Size resized, qwen_size(size, settings));
      set_patches(resized, settings, out);
      append_rows(out.prompt, out.shape[0] / (settings.merge_size * settings.merge_size));
      break;
    }
    case ImageFamily::kPixtral: {
      FRESHET_ASSIGN_OR_RETURN(const Size resized, pixtral_size(size, settings));
      set_patches(resized, settings, out);
      pixtral_prompt(out.grid_thw[1] / settings.merge_size, out.grid_thw[2] / settings.merge_size,
                     out);
      break;
    }
    case ImageFamily::kIdefics3: {
      FRESHET_ASSIGN_OR_RETURN(const IdeficsPlan plan, idefics_plan(size, settings));
      out.grid_rows = plan.grid.height;
      out.grid_columns = plan.grid.width;
      out.shape = {1 + int64_t{out.grid_rows} * out.grid_columns, 3, settings.tile_side,
                   settings.tile_side};
      idefics_prompt(settings, out);
      break;
    }
    case ImageFamily::kMllama: {
      const CanvasPlan plan = mllama_plan(size, settings);
      const Size grid{plan.canvas.height / settings.height, plan.canvas.width / settings.height};
      out.grid_rows = grid.height;
      out.grid_columns = grid.width;
      out.aspect_ratio_id = mllama_aspect_ratio_id(grid, settings.max_tiles);
      out.shape = {1, settings.max_tiles, 3, settings.height, settings.height};
      append_text(out.prompt, settings.marker);
      break;
    }
  }
  append_text(out.prompt, settings.after);
  for (const PromptPiece& piece : out.prompt) out.text_rows += piece.rows;
  return out;
}

void append_qwen_patches(const Picture& picture, const ImageSettings& settings,
                         const ValueTable& table, std::vector<float>& out) {
  const int patch = settings.patch_size;
  const int merged = patch * settings.merge_size;
  const size_t plane = static_cast<size_t>(patch) * patch;
  const auto times = static_cast<size_t>(settings.temporal_patch_size);
  out.resize(picture.rgb.size() * times);
  float* to = out.data();
  for (int top = 0; top < picture.height; top += merged) {
    for (int left = 0; left < picture.width; left += merged) {
      for (int y0 = top; y0 < top + merged; y0 += patch) {
        for (int x0 = left; x0 < left + merged; x0 += patch, to += 3 * times * plane) {
          for (size_t c = 0; c < 3; ++c) {
            float* channel = to + c * times * plane;
            for (int y = 0; y < patch; ++y) {
              const uint8_t* pixel = picture.row(y0 + y) + static_cast<size_t>(x0) * 3 + c;
              for (int x = 0; x < patch; ++x) channel[y * patch + x] = table(c, pixel[3 * x]);
            }
            for (size_t t = 1; t < times; ++t) {
              std::copy_n(channel, plane, channel + t * plane);
            }
          }
        }
      }
    }
  }
}

Status append_llava_next(const Picture& picture, const ImageSettings& settings,
                         const ValueTable& table, std::vector<float>& out) {
  FRESHET_ASSIGN_OR_RETURN(const CanvasPlan plan,
                           llava_next_plan({picture.height, picture.width}, settings));
  const bool both = settings.height > 0 && settings.width > 0;
  const Size base = both ? Size{settings.height, settings.width}
                         : Size{settings.shortest_edge, settings.shortest_edge};
  const int square = llava_next_square(settings);
  const Picture resized = resize(picture, plan.resized.width, plan.resized.height, settings.filter);
  const Picture canvas =
      crop(resized, -((plan.canvas.width - resized.width) / 2),
           -((plan.canvas.height - resized.height) / 2), plan.canvas.width, plan.canvas.height);
  // Each square goes through the steps of a single picture, which mostly leave it as it is.
  std::vector<Picture> squares{resize(picture, base.width, base.height, settings.filter)};
  for (int top = 0; top < canvas.height; top += square) {
    for (int left = 0; left < canvas.width; left += square) {
      squares.push_back(crop(canvas, left, top, square, square));
    }
  }
  for (const Picture& each : squares) {
    FRESHET_ASSIGN_OR_RETURN(const Picture ready, single_picture(each, settings));
    if (ready.width != square || ready.height != square) {
      return invalid_argument("\"size\" and \"crop_size\" must give one square");
    }
    append_planes(ready, 0, 0, square, square, table, out);
  }
  return {};
}

Status append_values(const Picture& picture, const ImageSettings& settings, ImageInput& out) {
  const ValueTable table(settings);
  const Size size{picture.height, picture.width};
  switch (settings.family) {
    case ImageFamily::kSingle: {
      FRESHET_ASSIGN_OR_RETURN(const Picture ready, single_picture(picture, settings));
      append_planes(ready, 0, 0, ready.width, ready.height, table, out.values);
      break;
    }
    case ImageFamily::kLlavaNext:
      return append_llava_next(picture, settings, table, out.values);
    case ImageFamily::kQwen: {
      FRESHET_ASSIGN_OR_RETURN(const Size to, qwen_size(size, settings));
      append_qwen_patches(resize(picture, to.width, to.height, settings.filter), settings, table,
                          out.values);
      break;
    }
    case ImageFamily::kPixtral: {
      FRESHET_ASSIGN_OR_RETURN(const Size to, pixtral_size(size, settings));
      append_qwen_patches(resize(picture, to.width, to.height, settings.filter), settings, table,
                          out.values);
      break;
    }
    case ImageFamily::kIdefics3: {
      FRESHET_ASSIGN_OR_RETURN(const IdeficsPlan plan, idefics_plan(size, settings));
      Picture ready = resize(picture, plan.first.width, plan.first.height, settings.filter);
      ready = resize(ready, plan.second.width, plan.second.height, settings.filter);
      const int side = settings.tile_side;
      if (plan.grid.height > 0) append_squares(ready, side, table, out.values);
      append_squares(resize(ready, side, side, settings.filter), side, table, out.values);
      break;
    }
    case ImageFamily::kMllama: {
      const CanvasPlan plan = mllama_plan(size, settings);
      const Picture resized =
          resize(picture, plan.resized.width, plan.resized.height, settings.filter);
      append_squares(crop(resized, 0, 0, plan.canvas.width, plan.canvas.height), settings.height,
                     table, out.values);
      out.values.resize(static_cast<size_t>(settings.max_tiles) * 3 * settings.height *
                        settings.height);
      break;
    }
  }
  return {};
}

}  // namespace

Result<ImageInput> image_layout(int width, int height, const ImageSettings& settings) {
  FRESHET_CHECK(width > 0 && height > 0);
  return layout({height, width}, settings);
}

Result<ImageInput> image_input(const Picture& picture, const ImageSettings& settings) {
  FRESHET_ASSIGN_OR_RETURN(ImageInput out, image_layout(picture.width, picture.height, settings));
  FRESHET_RETURN_IF_ERROR(append_values(picture, settings, out));
  int64_t wanted = 1;
  for (const int64_t side : out.shape) wanted *= side;
  FRESHET_CHECK(wanted == static_cast<int64_t>(out.values.size()));
  out.hash = content_hash(picture, settings);
  return out;
}

ContentHash content_hash(const Picture& picture, const ImageSettings& settings) {
  const std::string head =
      fmt::format("{}\n{} {}\n", settings.fingerprint(), picture.width, picture.height);
  ContentHash hash;
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  const bool done = context != nullptr && EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1 &&
                    EVP_DigestUpdate(context, head.data(), head.size()) == 1 &&
                    EVP_DigestUpdate(context, picture.rgb.data(), picture.rgb.size()) == 1 &&
                    EVP_DigestFinal_ex(context, hash.data(), nullptr) == 1;
  EVP_MD_CTX_free(context);
  FRESHET_CHECK(done, "SHA-256 failed");
  return hash;
}

}  // namespace freshet::media
