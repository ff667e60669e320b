#include "runtime/picture_prompt.h"

#include <algorithm>

#include <fmt/ranges.h>

namespace freshet::runtime {
namespace {

// Consecutive image tokens.
struct Run {
  int32_t token = 0;
  int32_t count = 0;
};

std::vector<Run> runs_of(std::span<const int32_t> ids, int32_t image_token) {
  std::vector<Run> runs;
  for (int32_t t = 0; t < std::ssize(ids); ++t) {
    if (ids[static_cast<size_t>(t)] != image_token) continue;
    if (runs.empty() || runs.back().token + runs.back().count != t) runs.push_back({t, 0});
    ++runs.back().count;
  }
  return runs;
}

// The runs take the rows of the pictures in order. A run may hold several pictures, and a picture
// several runs.
std::vector<PicturePlace> fill_runs(std::span<const Run> runs,
                                    std::span<const PictureLayout> pictures) {
  std::vector<PicturePlace> places;
  size_t picture = 0;
  int64_t row = 0;
  for (const Run& run : runs) {
    for (int32_t done = 0; done < run.count;) {
      for (; row == pictures[picture].rows; row = 0) ++picture;
      const auto count =
          static_cast<int32_t>(std::min<int64_t>(run.count - done, pictures[picture].rows - row));
      places.push_back(
          {run.token + done, count, static_cast<int32_t>(picture), static_cast<int32_t>(row)});
      done += count;
      row += count;
    }
  }
  return places;
}

// Text counts on all axes alike. A picture that begins at p has p on the first axis and p plus its
// row and its column on the others; the text behind it goes on at p plus the picture's longer side.
void place_on_axes(std::span<const PictureLayout> pictures, int32_t tokens, PicturePrompt& prompt) {
  int32_t next = 0, token = 0;
  const auto text_until = [&](int32_t end) {
    for (; token < end; ++token, ++next)
      prompt.axis_positions.insert(prompt.axis_positions.end(), 3, next);
  };
  for (const PicturePlace& place : prompt.places) {
    const std::array<int64_t, 2>& grid = pictures[static_cast<size_t>(place.picture)].grid;
    text_until(place.token);
    for (int32_t i = 0; i < place.count; ++i, ++token) {
      const auto row = static_cast<int32_t>((place.row + i) / grid[1]);
      const auto column = static_cast<int32_t>((place.row + i) % grid[1]);
      prompt.axis_positions.insert(prompt.axis_positions.end(), {next, next + row, next + column});
    }
    if (place.row + place.count == grid[0] * grid[1])
      next += static_cast<int32_t>(std::max(grid[0], grid[1]));
  }
  text_until(tokens);
  prompt.shift = next - tokens;
}

// A token sees the pictures of the last run at or before it, as far as they stand at or before it.
void find_picture_views(std::span<const Run> runs, std::span<const PictureLayout> pictures,
                        size_t tokens, PicturePrompt& prompt) {
  prompt.views.resize(tokens);
  int32_t before = 0;  // rows of the pictures in front of the run
  size_t picture = 0;
  for (size_t r = 0; r < runs.size(); ++r) {
    const auto end = static_cast<int32_t>(r + 1 < runs.size() ? runs[r + 1].token : tokens);
    int32_t seen = before;
    for (int32_t t = runs[r].token; t < end; ++t) {
      if (t < runs[r].token + runs[r].count)
        seen += static_cast<int32_t>(pictures[picture++].used_rows);
      prompt.views[static_cast<size_t>(t)] = {before, seen};
    }
    before = seen;
  }
}

}  // namespace

VisionInput vision_input(const media::ImageInput& picture, const VisionSpec& spec) {
  VisionInput input;
  input.values = picture.values;
  if (spec.side == 0) {
    input.grid = {picture.grid_thw[1], picture.grid_thw[2]};
    return input;
  }
  input.squares = spec.tiles > 0 ? spec.tiles : picture.shape[0];
  input.used_tiles = int64_t{picture.grid_rows} * picture.grid_columns;
  input.tile_layout = picture.aspect_ratio_id;
  input.squares_grid = {picture.grid_rows, picture.grid_columns};
  input.kept = picture.kept_patches;
  return input;
}

PictureLayout picture_layout(const media::ImageInput& picture, const VisionSpec& spec) {
  const VisionInput input = vision_input(picture, spec);
  PictureLayout layout;
  layout.rows = VisionTower::rows(spec, input);
  layout.grid = {input.grid[0] / spec.merge, input.grid[1] / spec.merge};
  if (spec.tiles > 0) layout.used_rows = layout.rows / spec.tiles * input.used_tiles;
  return layout;
}

Status check_picture(const media::ImageInput& picture, const VisionSpec& spec) {
  const std::vector<int64_t>& shape = picture.shape;
  const auto wrong = [&](std::string_view reads) {
    return invalid_argument(
        "the image processor makes [{}] of a picture, and the tower reads {}: do "
        "preprocessor_config.json and config.json belong together?",
        fmt::join(shape, ", "), reads);
  };
  if (spec.side == 0) {
    const int64_t rows = picture.grid_thw[1], columns = picture.grid_thw[2];
    if (picture.grid_thw[0] != 1) return unsupported("a picture of {} times", picture.grid_thw[0]);
    const bool sane = rows > 0 && columns > 0 && rows <= INT16_MAX && columns <= INT16_MAX;
    if (!sane || rows % spec.merge != 0 || columns % spec.merge != 0) {
      return invalid_argument("a picture of {} x {} patches, which are merged by {}", rows, columns,
                              spec.merge);
    }
    if (shape == std::vector<int64_t>{rows * columns, spec.patch_values}) return {};
    return wrong(fmt::format("[{}, {}]", rows * columns, spec.patch_values));
  }
  std::vector<int64_t> wanted{1, 3, spec.side, spec.side};
  if (spec.tiles > 0) {
    wanted.insert(wanted.begin() + 1, spec.tiles);
    const int64_t used = int64_t{picture.grid_rows} * picture.grid_columns;
    const int64_t layout = picture.aspect_ratio_id;
    if (used < 1 || used > spec.tiles || layout < 0 || layout >= spec.tile_layouts)
      return invalid_argument("a picture of {} tiles with the layout {}", used, layout);
  } else if (!shape.empty() && shape[0] > 0) {
    wanted[0] = shape[0];
  }
  const int64_t in_row = spec.side / spec.patch;
  const auto& kept = picture.kept_patches;
  if (spec.newline_row && (wanted[0] != 1 + int64_t{picture.grid_rows} * picture.grid_columns ||
                           kept[0] < 0 || kept[0] > in_row * picture.grid_rows || kept[1] < 0 ||
                           kept[1] > in_row * picture.grid_columns)) {
    return invalid_argument("a picture of {} x {} squares with {} x {} patches", picture.grid_rows,
                            picture.grid_columns, kept[0], kept[1]);
  }
  return shape == wanted ? Status() : wrong(fmt::format("[{}]", fmt::join(wanted, ", ")));
}

Result<PicturePrompt> place_pictures(const ModelSpec& spec, std::span<const int32_t> ids,
                                     std::span<const PictureLayout> pictures) {
  FRESHET_CHECK(spec.vision != nullptr, "pictures for a model without a tower");
  const VisionSpec& vision = *spec.vision;
  PicturePrompt prompt;
  const std::vector<Run> runs = runs_of(ids, vision.image_token);
  int64_t found = 0, needed = 0;
  for (const Run& run : runs) found += run.count;
  for (const PictureLayout& picture : pictures) needed += vision.cross ? 1 : picture.rows;
  if (found != needed) {
    return invalid_argument(
        "the prompt has {} image tokens (id {}), its {} picture{} {}", found, vision.image_token,
        pictures.size(), pictures.size() == 1 ? "" : "s",
        pictures.size() == 1 ? fmt::format("needs {}", needed) : fmt::format("need {}", needed));
  }
  if (pictures.empty()) return prompt;
  if (vision.cross) {
    find_picture_views(runs, pictures, ids.size(), prompt);
    return prompt;
  }
  prompt.places = fill_runs(runs, pictures);
  if (position_axes(spec) > 1) place_on_axes(pictures, static_cast<int32_t>(ids.size()), prompt);
  if (!sees_whole_pictures(spec)) return prompt;
  prompt.spans.resize(ids.size());
  for (const Run& run : runs) {
    const auto first = prompt.spans.begin() + run.token;
    std::fill_n(first, run.count, ops::KeyRange{run.token, run.token + run.count});
  }
  return prompt;
}

std::vector<float> cross_rows(std::span<const VisionRows* const> pictures) {
  std::vector<float> out;
  for (const bool used : {true, false}) {
    for (const VisionRows* picture : pictures) {
      const auto middle = picture->values.begin() + picture->used_rows * picture->width;
      out.insert(out.end(), used ? picture->values.begin() : middle,
                 used ? middle : picture->values.end());
    }
  }
  return out;
}

void clear_picture_tokens(ForwardBatch& batch) {
  batch.embedding_rows.clear();
  batch.axis_positions.clear();
  batch.spans.clear();
  batch.views.clear();
}

void complete_picture_tokens(int64_t axes, ForwardBatch& batch) {
  const auto tokens = static_cast<size_t>(batch.tokens());
  if (!batch.axis_positions.empty()) {
    for (size_t t = batch.axis_positions.size() / static_cast<size_t>(axes); t < tokens; ++t)
      batch.axis_positions.insert(batch.axis_positions.end(), static_cast<size_t>(axes),
                                  batch.positions[t]);
  }
  if (!batch.spans.empty()) batch.spans.resize(tokens);
  if (!batch.views.empty()) batch.views.resize(tokens);
}

void add_picture_tokens(const PicturePrompt& prompt, std::span<const VisionRows* const> rows,
                        int64_t axes, int32_t first, int32_t count, ForwardBatch& batch) {
  const auto start = static_cast<int32_t>(batch.tokens());
  const int32_t end = first + count;
  for (const PicturePlace& place : prompt.places) {
    const int32_t from = std::max(place.token, first);
    const int32_t to = std::min(place.token + place.count, end);
    if (from >= to) continue;
    const VisionRows& given = *rows[static_cast<size_t>(place.picture)];
    EmbeddingRows put;
    put.token = start + from - first;
    put.count = to - from;
    put.rows = given.values.data() + (place.row + from - place.token) * given.width;
    put.levels = given.levels;
    put.level_stride = given.rows * given.width;
    batch.embedding_rows.push_back(put);
  }
  if (!prompt.axis_positions.empty()) {
    // Sequences in front, which have no pictures.
    for (auto t = static_cast<int32_t>(std::ssize(batch.axis_positions) / axes); t < start; ++t)
      batch.axis_positions.insert(batch.axis_positions.end(), static_cast<size_t>(axes),
                                  batch.positions[static_cast<size_t>(t)]);
    for (int32_t p = first; p < end; ++p) {
      for (int64_t axis = 0; axis < axes; ++axis) {
        const auto at = static_cast<size_t>(p * axes + axis);
        const bool known = at < prompt.axis_positions.size();
        batch.axis_positions.push_back(known ? prompt.axis_positions[at] : p + prompt.shift);
      }
    }
  }
  const auto add = [&](const std::vector<ops::KeyRange>& own, bool goes_on,
                       std::vector<ops::KeyRange>& all) {
    if (own.empty()) return;
    all.resize(static_cast<size_t>(start));
    for (int32_t p = first; p < end; ++p) {
      const bool known = p < std::ssize(own);
      all.push_back(known ? own[static_cast<size_t>(p)] : goes_on ? own.back() : ops::KeyRange{});
    }
  };
  add(prompt.spans, false, batch.spans);
  add(prompt.views, true, batch.views);
}

}  // namespace freshet::runtime
