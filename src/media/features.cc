#include "media/features.h"

#include <algorithm>

namespace freshet::media {

Result<MediaFeatures> features_of(std::span<const Picture> pictures,
                                  const ImageSettings& settings) {
  MediaFeatures out;
  for (size_t i = 0; i < pictures.size(); ++i) {
    auto input = image_input(pictures[i], settings);
    if (!input.ok()) return input.status().with_context(fmt::format("picture {}", i + 1));
    if (out.shape.empty()) {
      out.shape = input->shape;
      out.values = std::move(input->values);
    } else {
      if (!std::equal(out.shape.begin() + 1, out.shape.end(), input->shape.begin() + 1,
                      input->shape.end())) {
        return invalid_argument("picture {} becomes another size than the first", i + 1);
      }
      out.shape[0] += input->shape[0];
      out.values.insert(out.values.end(), input->values.begin(), input->values.end());
    }
    input->values = {};
    out.pictures.push_back(std::move(input).value());
  }
  return out;
}

MediaFeatures features_of(std::span<const float> samples, const LogMel& mel, ThreadPool* pool) {
  MediaFeatures out;
  out.shape = {mel.settings().mels, mel.settings().frames()};
  out.values = mel.features(samples, pool);
  return out;
}

}  // namespace freshet::media
