// All that a model's preprocessing makes of the pictures or the sound of one prompt, in the layout
// of transformers' `pixel_values` and `input_features`. Pure; safe to call from many threads.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "media/image_input.h"
#include "media/log_mel.h"

namespace freshet::media {

struct MediaFeatures {
  std::vector<int64_t> shape;
  std::vector<float> values;
  // Of pictures: their layouts, without values. The values of picture i are `shape[0]` rows of its
  // own shape, in order.
  std::vector<ImageInput> pictures;
};

// Joined along the first dimension. Errors name the picture by its position, from 1.
Result<MediaFeatures> features_of(std::span<const Picture> pictures, const ImageSettings& settings);

// [mels, frames] of one window.
MediaFeatures features_of(std::span<const float> samples, const LogMel& mel,
                          ThreadPool* pool = nullptr);

}  // namespace freshet::media
