// Pictures in a prompt: what their processor and their tower make of them, and where the rows go.
//
// A prompt holds a run of image tokens for each piece of a picture (media::PromptPiece); the
// rows of the pictures go there in order. place_pictures() also says the positions that tokens have
// on the axes of M-RoPE, which tokens see one another, and what tokens see by cross-attention: all
// that ForwardBatch takes, for whole prompts. Pure functions of plain values; thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "layers/batch.h"
#include "layers/vision_tower.h"
#include "media/image_input.h"

namespace freshet::runtime {

// What place_pictures() has to know of a picture.
struct PictureLayout {
  int64_t rows = 0;               // of the tower's output
  int64_t used_rows = 0;          // of towers with tiles: those that tokens behind the picture see
  std::array<int64_t, 2> grid{};  // rows and columns of `rows`, for M-RoPE
};

// `picture` needs no `values`, so that media::image_layout() suffices.
PictureLayout picture_layout(const media::ImageInput& picture, const VisionSpec& spec);
// Refers to the picture's values.
VisionInput vision_input(const media::ImageInput& picture, const VisionSpec& spec);

// That the tower reads what the processor makes of a picture. Errors name both sizes.
Status check_picture(const media::ImageInput& picture, const VisionSpec& spec);

// Tokens [token, token + count) of the prompt stand for rows [row, row + count) of a picture.
struct PicturePlace {
  int32_t token = 0;
  int32_t count = 0;
  int32_t picture = 0;
  int32_t row = 0;
};

struct PicturePrompt {
  std::vector<PicturePlace> places;  // ascending; empty for models that read by cross-attention
  // Empty, or [tokens, 3]: ForwardBatch::axis_positions.
  std::vector<int32_t> axis_positions;
  // Token p behind the prompt has the position p + shift on every axis.
  int32_t shift = 0;
  std::vector<ops::KeyRange> spans;  // empty, or [tokens]: ForwardBatch::spans
  // Empty, or [tokens]: ForwardBatch::views. Tokens behind the prompt see what its last one sees.
  std::vector<ops::KeyRange> views;
};

// Errors say how many image tokens there are and how many are needed.
Result<PicturePrompt> place_pictures(const ModelSpec& spec, std::span<const int32_t> ids,
                                     std::span<const PictureLayout> pictures);

// What cross-attention reads of several pictures, [rows, width]: first the rows that tokens behind
// them see, picture by picture, then the others. `views` counts in this order.
std::vector<float> cross_rows(std::span<const VisionRows* const> pictures);

// Adds to `batch` what tokens [first, first + count) of a sequence have from its pictures, before
// they are appended themselves. Sequences in front of it are complete but for such things. `rows`:
// [pictures], valid until the batch has run; may be empty for tokens behind the prompt.
void add_picture_tokens(const PicturePrompt& prompt, std::span<const VisionRows* const> rows,
                        int64_t axes, int32_t first, int32_t count, ForwardBatch& batch);
// When all sequences are there: completes the lists of a batch, some of whose sequences have
// pictures. axes: position_axes() of the model.
void complete_picture_tokens(int64_t axes, ForwardBatch& batch);
// Before the first sequence of a batch.
void clear_picture_tokens(ForwardBatch& batch);

}  // namespace freshet::runtime
