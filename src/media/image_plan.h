// The sizes that a family chooses for a picture: the arithmetic of transformers' processors, in
// double precision and with their roundings. Pure.
#pragma once

#include <array>

#include "base/status.h"
#include "media/image_settings.h"

namespace freshet::media {

struct Size {
  int height = 0;
  int width = 0;
  bool operator==(const Size&) const = default;
};

// kSingle: what the picture is resized to, before it is cropped.
Result<Size> single_size(Size picture, const ImageSettings& settings);
// Qwen: multiples of `factor` within the bounds of pixels.
Result<Size> qwen_size(Size picture, const ImageSettings& settings);

// Idefics3: the picture is resized twice, to `first` and then to `second`, and cut into a grid of
// squares; grid 0 x 0: it is one square.
struct IdeficsPlan {
  Size first;
  Size second;
  Size grid;
};
Result<IdeficsPlan> idefics_plan(Size picture, const ImageSettings& settings);

// Mllama and LLaVA-NeXT: the picture is resized to `resized` and lies on a canvas of whole squares.
struct CanvasPlan {
  Size canvas;
  Size resized;
};
CanvasPlan mllama_plan(Size picture, const ImageSettings& settings);
int64_t mllama_aspect_ratio_id(Size grid, int max_tiles);

int llava_next_square(const ImageSettings& settings);
Result<CanvasPlan> llava_next_plan(Size picture, const ImageSettings& settings);
// Rows and columns of the canvas' patches without its padding.
std::array<int64_t, 2> llava_next_kept(Size picture, Size canvas, const ImageSettings& settings);

// Pixtral: multiples of merged patches, the next ones to a size within the longest edge.
Result<Size> pixtral_size(Size picture, const ImageSettings& settings);

}  // namespace freshet::media
