#include "runtime/picture_settings.h"

#include <algorithm>

#include "layers/vision_tower.h"
#include "models/mmproj.h"
#include "models/towers.h"

namespace freshet::runtime {

Result<media::ImageSettings> picture_settings(const loader::Checkpoint& checkpoint) {
  if (checkpoint.tower() == nullptr) return media::load_image_settings(checkpoint.path());
  FRESHET_ASSIGN_OR_RETURN(const json::Value processor, models::mmproj_preprocessor(checkpoint));
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, models::whole_config(checkpoint));
  auto settings = media::image_settings(processor, {}, config);
  if (!settings.ok()) return settings.status().with_context(checkpoint.tower()->file()->path());
  return settings;
}

Result<std::optional<media::ImageSettings>> tower_settings(const loader::Checkpoint& checkpoint,
                                                           const ModelSpec& spec) {
  if (spec.vision == nullptr) return std::optional<media::ImageSettings>();
  FRESHET_ASSIGN_OR_RETURN(const json::Value whole, models::whole_config(checkpoint));
  const models::TowerFamily* const family = models::tower_of(whole);
  if (family == nullptr || !models::has_tower(checkpoint, *family))
    return std::optional<media::ImageSettings>();
  FRESHET_ASSIGN_OR_RETURN(media::ImageSettings settings, picture_settings(checkpoint));
  return std::optional(std::move(settings));
}

int64_t planned_positions(const media::ImageSettings& settings, const VisionSpec& spec,
                          int64_t context) {
  VisionInput picture;
  if (spec.side == 0) {
    const int64_t unit = int64_t{spec.merge} * spec.merge;
    const int64_t patches = settings.max_pixels / (int64_t{spec.patch} * spec.patch);
    picture.grid = {1, std::max(unit, std::min(patches, unit * std::min(kPlannedRows, context)))};
    return VisionTower::positions(spec, picture);
  }
  picture.squares = 1;
  if (settings.family == media::ImageFamily::kIdefics3 && settings.split) {
    const int64_t side = (settings.longest_edge + settings.tile_side - 1) / settings.tile_side;
    picture.squares = side * side + 1;
  }
  for (const auto& [height, width] : settings.grids) {
    const int64_t cell = std::max(1, settings.crop_height);
    if (settings.family == media::ImageFamily::kLlavaNext)
      picture.squares = std::max(picture.squares, 1 + height / cell * (width / cell));
  }
  picture.squares = std::min(picture.squares, kMostSquares);
  return VisionTower::positions(spec, picture);
}

}  // namespace freshet::runtime
