// What a model's files say about its pictures: preprocessor_config.json (or "image_processor" in
// processor_config.json) and the parts of config.json that count image tokens.
//
// A plain value. Fields that a family does not use keep their defaults. Defaults of missing keys
// are those of the processor classes of transformers 5.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "media/resample.h"

namespace freshet::media {

enum class ImageFamily {
  kSingle,     // one square per picture: CLIP (LLaVA), SigLIP, Gemma 3
  kLlavaNext,  // a grid of squares that fits the picture, and the whole picture
  kQwen,       // any size in multiples of merged patches: Qwen2-VL, 2.5-VL and 3-VL
  kIdefics3,   // a grid of squares and the whole picture: Idefics3, SmolVLM
  kMllama,     // a padded grid of at most `max_tiles` squares: Llama 3.2 Vision
  kPixtral,    // any size in multiples of merged patches, within longest_edge: Pixtral, Mistral 3
};

struct ImageSettings {
  ImageFamily family = ImageFamily::kSingle;
  Filter filter = Filter::kBicubic;
  bool resize = true;
  bool center_crop = false;
  bool pad_to_square = false;  // LLaVA: with the mean colour, before resizing
  bool rescale = true;
  bool normalize = true;
  double rescale_factor = 1.0 / 255;
  std::array<double, 3> mean{0.5, 0.5, 0.5};
  std::array<double, 3> deviation{0.5, 0.5, 0.5};

  // Sides in pixels, 0 if not given: either height and width, or one of the edges.
  int height = 0;
  int width = 0;
  int shortest_edge = 0;
  int longest_edge = 0;
  int crop_height = 0;
  int crop_width = 0;

  // Qwen. min_pixels and max_pixels bound height * width after resizing.
  int64_t min_pixels = 56 * 56;
  int64_t max_pixels = 28 * 28 * 1280;
  int patch_size = 14;
  int temporal_patch_size = 2;
  int merge_size = 2;

  bool split = true;                      // Idefics3: into squares of tile_side
  int tile_side = 364;                    // Idefics3
  int max_tiles = 4;                      // Mllama
  std::vector<std::array<int, 2>> grids;  // LLaVA-NeXT: heights and widths to choose from

  // Image tokens: rows that a square becomes (not for Qwen, whose patches are counted), and, for
  // LLaVA-NeXT, the patches along a side of a square.
  int square_rows = 0;
  int square_patches = 0;
  // Special tokens around and between image tokens, as text.
  std::string marker;  // what the chat template writes for a picture
  std::string before;  // Gemma 3: "\n\n<start_of_image>"
  std::string after;

  // Everything that decides what a picture becomes, as one line: a part of the content hash.
  std::string fingerprint() const;
};

// `preprocessor` and `processor` may be null, if `config` alone says enough. Errors name the key.
Result<ImageSettings> image_settings(const json::Value& preprocessor, const json::Value& processor,
                                     const json::Value& config);
// Reads the three files of a model's folder.
Result<ImageSettings> load_image_settings(const std::string& folder);

}  // namespace freshet::media
