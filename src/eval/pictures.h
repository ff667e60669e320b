// Pictures of an input: what the tower makes of them, and their places among the input's tokens.
//
// Functions of the model and the pictures alone. One thread drives the session.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "layers/vision_tower.h"
#include "media/image_input.h"
#include "runtime/picture_prompt.h"

namespace freshet::eval {

// What an image processor made of all pictures of an input, under the names of transformers.
struct PixelValues {
  std::vector<int64_t> shape;
  std::vector<float> values;
  std::vector<int64_t> grid_thw;                             // [pictures, 3]
  std::vector<int64_t> aspect_ratio_ids, aspect_ratio_mask;  // [pictures], [pictures, tiles]
};

// One by one. Squares become pictures of their own: only their order counts. Errors name what is
// missing or has another size than the tower reads.
Result<std::vector<media::ImageInput>> split_pixels(const PixelValues& pixels,
                                                    const VisionSpec& spec);

// What a processor with these settings makes of pictures, checked against the tower.
Result<std::vector<media::ImageInput>> process_pictures(std::span<const media::Picture> pictures,
                                                        const media::ImageSettings& settings,
                                                        const VisionSpec& spec);

struct SeenPictures {
  runtime::PicturePrompt prompt;
  std::vector<VisionRows> rows;  // [pictures]
  std::vector<float> cross;      // of models that read them by cross-attention
  int64_t cross_rows = 0;
  std::vector<const VisionRows*> pointers() const;
};

// Where the pictures' rows go among `ids`, without running the tower.
Result<runtime::PicturePrompt> place(const ModelSpec& spec, std::span<const int32_t> ids,
                                     std::span<const media::ImageInput> pictures);

// The tower's memory for all of these, before the first step.
Status reserve_tower(Model& model, std::span<const std::vector<media::ImageInput>> pictures);

// Runs the tower. REQUIRES: reserve_tower(). Errors: the model has no tower.
Result<SeenPictures> see_pictures(Model& model, std::span<const int32_t> ids,
                                  std::span<const media::ImageInput> pictures);

}  // namespace freshet::eval
