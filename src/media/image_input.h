// One picture, made ready for a vision tower: the values that the tower reads, and what the
// language model has to know about them. Equal to what transformers' PIL processors make, bit for
// bit.
//
// A tower's input for several pictures is the concatenation of `values` along the first dimension.
// `shape` by family:
//   single      [1, 3, height, width]
//   LLaVA-NeXT  [squares, 3, height, width]: the whole picture, then the grid row by row
//   Qwen        [patches, 3 * temporal * patch * patch]: the merge x merge patches that become one
//               token follow one another; a patch has its channels outermost, then time
//   Pixtral     as Qwen's, of one time; transformers leaves the picture as it is, [3, height,
//   width] Idefics3    [squares, 3, side, side]: the grid row by row, then the whole picture; [1,
//   ...] if
//               it is not split
//   Mllama      [1, max_tiles, 3, side, side]: the grid row by row, then zeros
// Plain values; image_input() is pure and safe to call from many threads.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/status.h"
#include "media/image_settings.h"
#include "media/picture.h"

namespace freshet::media {

// A part of what replaces the marker of a picture in a prompt: text, which the tokeniser turns into
// special and other tokens, or `rows` image tokens, which get rows of the tower's output.
struct PromptPiece {
  std::string text;
  int64_t rows = 0;
  bool operator==(const PromptPiece&) const = default;
};

// SHA-256 of the pixels, their size and the settings: equal for what the tower sees as equal.
using ContentHash = std::array<uint8_t, 32>;

struct ImageInput {
  std::vector<int64_t> shape;
  std::vector<float> values;

  int width = 0;  // of the picture as decoded; LLaVA-NeXT cuts its padding off by these
  int height = 0;
  // Patches: time, rows, columns, before merging (Qwen, Pixtral). Zeros elsewhere.
  std::array<int64_t, 3> grid_thw{};
  // Squares: 0 x 0 if the picture is not split (Idefics3, LLaVA-NeXT, Mllama).
  int grid_rows = 0;
  int grid_columns = 0;
  int64_t aspect_ratio_id =
      0;  // Mllama, from 1: the position of (rows, columns) in the model's list
  // LLaVA-NeXT: rows and columns of the grid's patches without those that are padding.
  std::array<int64_t, 2> kept_patches{};

  // Rows of the tower's output that stand in the text, the sum over `prompt`. 0 for Mllama, whose
  // text reads its pictures by cross-attention.
  int64_t text_rows = 0;
  std::vector<PromptPiece> prompt;  // neighbouring texts are one piece
  ContentHash hash{};
};

// Errors: sides in a ratio that the family refuses, or sizes that its settings do not allow.
Result<ImageInput> image_input(const Picture& picture, const ImageSettings& settings);

// The rows of image tokens and the prompt alone, from the size in a header: for admission.
Result<ImageInput> image_layout(int width, int height, const ImageSettings& settings);

ContentHash content_hash(const Picture& picture, const ImageSettings& settings);

}  // namespace freshet::media
