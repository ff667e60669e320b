#include "eval/pictures.h"

#include <algorithm>

#include "layers/model.h"

namespace freshet::eval {
namespace {

// Appends a picture with the next values of the list.
media::ImageInput& add_picture(const PixelValues& pixels, std::vector<int64_t> shape, size_t& used,
                               std::vector<media::ImageInput>& to) {
  size_t count = 1;
  for (const int64_t side : shape) count *= static_cast<size_t>(side);
  media::ImageInput& picture = to.emplace_back();
  picture.shape = std::move(shape);
  const auto first = pixels.values.begin() + static_cast<int64_t>(used);
  picture.values.assign(first, first + static_cast<int64_t>(count));
  used += count;
  return picture;
}

Result<std::vector<media::ImageInput>> split_patches(const PixelValues& p, const VisionSpec& spec) {
  if (p.grid_thw.empty() || p.grid_thw.size() % 3 != 0)
    return invalid_argument("pixel_values of patches need image_grid_thw [pictures, 3]");
  if (p.shape.size() != 2 || p.shape[1] != spec.patch_values)
    return invalid_argument("pixel_values must be [patches, {}]", spec.patch_values);
  std::vector<media::ImageInput> pictures;
  size_t used = 0;
  int64_t left = p.shape[0];
  for (size_t i = 0; i < p.grid_thw.size(); i += 3) {
    const std::array<int64_t, 3> grid{p.grid_thw[i], p.grid_thw[i + 1], p.grid_thw[i + 2]};
    constexpr int64_t kMost = INT16_MAX;
    const bool sane = std::ranges::all_of(grid, [](int64_t n) { return n > 0 && n <= kMost; });
    const int64_t patches = sane ? grid[0] * grid[1] * grid[2] : 0;
    if (!sane || patches > left) {
      return invalid_argument("image_grid_thw names other patches than the {} of pixel_values",
                              p.shape[0]);
    }
    left -= patches;
    add_picture(p, {patches, spec.patch_values}, used, pictures).grid_thw = grid;
  }
  if (left != 0)
    return invalid_argument("image_grid_thw leaves {} patches of pixel_values over", left);
  return pictures;
}

}  // namespace

Result<std::vector<media::ImageInput>> split_pixels(const PixelValues& p, const VisionSpec& spec) {
  std::vector<media::ImageInput> pictures;
  size_t used = 0;
  if (spec.side == 0) {
    FRESHET_ASSIGN_OR_RETURN(pictures, split_patches(p, spec));
  } else {
    std::vector<int64_t> shape{1, 3, spec.side, spec.side};
    if (spec.tiles > 0) shape.insert(shape.begin() + 1, spec.tiles);
    if (p.shape.size() != shape.size() ||
        !std::equal(p.shape.begin() + 1, p.shape.end(), shape.begin() + 1)) {
      return invalid_argument("pixel_values must be squares of {} pixels in {} dimensions",
                              spec.side, shape.size());
    }
    const auto count = static_cast<size_t>(p.shape[0]);
    const auto tiles = static_cast<size_t>(spec.tiles);
    if (tiles > 0 &&
        (p.aspect_ratio_ids.size() != count || p.aspect_ratio_mask.size() != count * tiles)) {
      return invalid_argument(
          "pixel_values of {} pictures need aspect_ratio_ids and aspect_ratio_mask [pictures, {}]",
          count, tiles);
    }
    for (size_t i = 0; i < count; ++i) {
      media::ImageInput& picture = add_picture(p, shape, used, pictures);
      if (tiles == 0) continue;
      const auto mask = p.aspect_ratio_mask.begin() + static_cast<int64_t>(i * tiles);
      picture.grid_rows = 1;
      picture.grid_columns = static_cast<int>(std::count(mask, mask + spec.tiles, 1));
      picture.aspect_ratio_id = p.aspect_ratio_ids[i];
    }
  }
  for (const media::ImageInput& picture : pictures)
    FRESHET_RETURN_IF_ERROR(runtime::check_picture(picture, spec));
  return pictures;
}

Result<std::vector<media::ImageInput>> process_pictures(std::span<const media::Picture> pictures,
                                                        const media::ImageSettings& settings,
                                                        const VisionSpec& spec) {
  std::vector<media::ImageInput> out;
  for (size_t i = 0; i < pictures.size(); ++i) {
    auto input = media::image_input(pictures[i], settings);
    if (!input.ok()) return input.status().with_context(fmt::format("picture {}", i));
    FRESHET_RETURN_IF_ERROR(runtime::check_picture(*input, spec));
    out.push_back(std::move(*input));
  }
  return out;
}

std::vector<const VisionRows*> SeenPictures::pointers() const {
  std::vector<const VisionRows*> out;
  for (const VisionRows& one : rows) out.push_back(&one);
  return out;
}

Result<runtime::PicturePrompt> place(const ModelSpec& spec, std::span<const int32_t> ids,
                                     std::span<const media::ImageInput> pictures) {
  std::vector<runtime::PictureLayout> layouts;
  for (const media::ImageInput& picture : pictures)
    layouts.push_back(runtime::picture_layout(picture, *spec.vision));
  return runtime::place_pictures(spec, ids, layouts);
}

Status reserve_tower(Model& model, std::span<const std::vector<media::ImageInput>> pictures) {
  VisionTower* const tower = model.vision();
  int64_t most = 0;
  for (const std::vector<media::ImageInput>& list : pictures) {
    for (const media::ImageInput& picture : list) {
      const auto& spec = *model.spec().vision;
      most = std::max(most, VisionTower::positions(spec, runtime::vision_input(picture, spec)));
    }
  }
  return tower != nullptr ? tower->reserve(most) : Status();
}

Result<SeenPictures> see_pictures(Model& model, std::span<const int32_t> ids,
                                  std::span<const media::ImageInput> pictures) {
  SeenPictures seen;
  if (pictures.empty()) return seen;
  VisionTower* const tower = model.vision();
  if (tower == nullptr) return unsupported("the model's files have no tower for pictures");
  FRESHET_ASSIGN_OR_RETURN(seen.prompt, place(model.spec(), ids, pictures));
  for (const media::ImageInput& picture : pictures)
    seen.rows.push_back(tower->run(runtime::vision_input(picture, tower->spec())));
  if (!tower->spec().cross) return seen;
  seen.cross = runtime::cross_rows(seen.pointers());
  seen.cross_rows = std::ssize(seen.cross) / tower->spec().width;
  return seen;
}

}  // namespace freshet::eval
