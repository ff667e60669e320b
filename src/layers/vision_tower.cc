#include "layers/vision_tower.h"

#include <algorithm>
#include <numeric>

#include "ops/device.h"

namespace freshet {
namespace {

Matrix matrix_of(std::vector<float>& values, int64_t rows, int64_t cols) {
  FRESHET_CHECK(rows * cols <= std::ssize(values), "a tower's matrix of {} rows", rows);
  return {values.data(), rows, cols, cols};
}

// Rows of a tile including the padding that the model was trained with.
int64_t padded_rows(const VisionSpec& spec) {
  constexpr int64_t kMultiple = 8;
  const int64_t in_row = spec.side / spec.patch, rows = in_row * in_row + 1;
  return (rows + kMultiple - 1) / kMultiple * kMultiple;
}

// The features of merged patches, next to one another instead of patch by patch.
void interleave_patches(const Matrix& from, int64_t patches, const Matrix& to) {
  const int64_t features = from.cols / patches;
  for (int64_t r = 0; r < from.rows; ++r) {
    for (int64_t p = 0; p < patches; ++p) {
      for (int64_t i = 0; i < features; ++i)
        to.row(r)[i * patches + p] = from.row(r)[p * features + i];
    }
  }
}

// Puts the rows of a picture and of a grid of squares together: VisionSpec::newline_row.
void pack_grid(const VisionSpec& spec, const VisionInput& input, std::span<const float> newline,
               std::span<const float> rows, float* out) {
  const int64_t side = spec.side / spec.patch, width = spec.width, columns = input.squares_grid[1];
  const int64_t top = (side * input.squares_grid[0] - input.kept[0]) / 2;
  const int64_t left = (side * columns - input.kept[1]) / 2;
  out = std::copy_n(rows.begin(), side * side * width, out);
  for (int64_t y = top; y < top + input.kept[0]; ++y) {
    for (int64_t x = left; x < left + input.kept[1]; ++x) {
      const int64_t square = 1 + y / side * columns + x / side;
      const int64_t row = (square * side + y % side) * side + x % side;
      out = std::copy_n(rows.begin() + row * width, width, out);
    }
    out = std::copy_n(newline.begin(), width, out);
  }
}

}  // namespace

VisionTower::VisionTower(std::shared_ptr<const VisionSpec> spec,
                         std::shared_ptr<const VisionWeights> weights, ops::Ops& host,
                         ops::Ops& ops)
    : spec_(std::move(spec)),
      weights_(std::move(weights)),
      ops_(host),
      layers_(ops),
      kv_(ops.device() == nullptr ? ops::KvType::kF32 : ops::KvType::kF16),
      blocks_(spec_->blocks, weights_ != nullptr ? weights_->blocks : nullptr, nullptr, {}, ops) {
  const std::vector<int>& captured = spec_->tiles > 0 ? spec_->kept : spec_->deep;
  const Status status = blocks_.capture(captured);
  FRESHET_CHECK(status.ok(), "{}", status.message());
  inner_.resize(captured.size());
  if (!spec_->later) return;
  later_ = std::make_unique<Decoder>(*spec_->later, weights_ != nullptr ? weights_->later : nullptr,
                                     nullptr, std::vector<Model::WeightInfo>(), ops);
}

VisionTower::Layout VisionTower::layout_of(const VisionInput& input) const {
  Layout layout;
  if (spec_->tiles > 0) {
    layout.in_row = spec_->side / spec_->patch;
    layout.in_column = layout.in_row * spec_->tiles;
    layout.rows_of_sequence = padded_rows(*spec_) * spec_->tiles;
    return layout;
  }
  if (spec_->side > 0) {
    layout.sequences = input.squares;
    layout.in_row = layout.in_column = spec_->side / spec_->patch;
    layout.rows_of_sequence = layout.in_row * layout.in_row + (spec_->class_row ? 1 : 0);
    return layout;
  }
  layout.in_column = input.grid[0];
  layout.in_row = input.grid[1];
  layout.rows_of_sequence = layout.in_row * layout.in_column;
  if (spec_->window == 0) return layout;
  const int64_t rows = layout.in_column / spec_->merge, columns = layout.in_row / spec_->merge;
  const int64_t side = spec_->window;
  for (int64_t top = 0; top < rows; top += side) {
    for (int64_t left = 0; left < columns; left += side) {
      for (int64_t y = top; y < std::min(rows, top + side); ++y) {
        for (int64_t x = left; x < std::min(columns, left + side); ++x)
          layout.order.push_back(static_cast<int32_t>(y * columns + x));
      }
      layout.window_ends.push_back(std::ssize(layout.order));
    }
  }
  return layout;
}

int64_t VisionTower::positions(const VisionSpec& spec, const VisionInput& input) {
  if (spec.side == 0) return input.grid[0] * input.grid[1];
  if (spec.tiles > 0) return padded_rows(spec) * spec.tiles;
  const int64_t in_row = spec.side / spec.patch;
  return input.squares * (in_row * in_row + (spec.class_row ? 1 : 0));
}

int64_t VisionTower::rows(const VisionSpec& spec, const VisionInput& input) {
  if (spec.tiles > 0) {
    const int64_t in_row = spec.side / spec.patch;
    return spec.tiles * (in_row * in_row + 1);
  }
  const int64_t patches = positions(spec, input) - (spec.drops_first ? input.squares : 0);
  if (spec.newline_row) {
    const int64_t of_square = patches / std::max<int64_t>(1, input.squares);
    return of_square + input.kept[0] * (input.kept[1] + 1);
  }
  return patches / (spec.merge * spec.merge);
}

ops::Ops::ShapeLimits VisionTower::limits(int64_t positions) const {
  ops::Ops::ShapeLimits l;
  l.tokens = positions;
  l.max_cols = std::max({spec_->patch_values, spec_->merged_width(), spec_->inner});
  l.max_rows = std::max({spec_->blocks.hidden_size, spec_->inner, spec_->width});
  return l;
}

// Size of each of the buffers for patches and merged rows.
size_t VisionTower::buffer_floats(int64_t positions) const {
  const int64_t widest = std::max({spec_->patch_values, spec_->merged_width(), spec_->inner});
  return static_cast<size_t>(positions * widest);
}

Decoder::Workspace VisionTower::workspace(int64_t positions) const {
  Decoder::Workspace w = blocks_.workspace(positions, 1, positions);
  if (later_ != nullptr) {
    const Decoder::Workspace later = later_->workspace(positions, 1, positions);
    w.own += later.own;
    w.scratch = std::max(w.scratch, later.scratch);
  }
  const KvCacheSpec cache = kv_cache_spec(spec_->blocks, kv_);
  size_t layer = 0;
  for (const KvLayer& l : cache.layers) layer = std::max(layer, l.block_bytes());
  w.own += layer * static_cast<size_t>(positions / ops::kBlockTokens + 1 + kMostSquares);
  return w;
}

size_t VisionTower::host_bytes(int64_t positions) const {
  const size_t states = static_cast<size_t>(positions * spec_->blocks.hidden_size);
  const size_t kept = 3 + inner_.size() + (layers_.device() != nullptr ? 1 : 0);
  return ops_.scratch_bytes(limits(positions)) +
         (buffer_floats(positions) + states * kept) * sizeof(float);
}

Status VisionTower::reserve(int64_t positions) {
  if (positions <= reserved_) return {};
  if (layers_.device() != nullptr && reserved_ > 0) {
    return resource_exhausted("a picture of {} patches: there is room for {}; send a smaller one",
                              positions, reserved_);
  }
  FRESHET_RETURN_IF_ERROR(blocks_.reserve(positions, 1, positions));
  if (later_ != nullptr) FRESHET_RETURN_IF_ERROR(later_->reserve(positions, 1, positions));
  FRESHET_RETURN_IF_ERROR(ops_.set_scratch(ops_.scratch_bytes(limits(positions))));
  // Layers of `later` have the same shape, and share the cache in turn, too.
  KvCacheSpec cache = kv_cache_spec(spec_->blocks, kv_);
  cache.takes_turns = true;
  const auto blocks = static_cast<int32_t>(positions / ops::kBlockTokens + 1 + kMostSquares);
  FRESHET_ASSIGN_OR_RETURN(
      cache_, KvStorage::allocate(cache, std::vector<int32_t>(cache.groups.size(), blocks),
                                  layers_.memory()));
  batch_.tables.resize(cache.groups.size());
  columns_.resize(buffer_floats(positions));
  const auto states = static_cast<size_t>(positions * spec_->blocks.hidden_size);
  for (std::vector<float>* buffer : {&stream_, &states_, &room_}) buffer->resize(states);
  for (std::vector<float>& buffer : inner_) buffer.resize(states);
  if (layers_.device() != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(sent_,
                             Buffer::allocate(states * sizeof(float), layers_.host_memory()));
  }
  reserved_ = positions;
  return {};
}

// Fills the positions of the rows: sequences with their blocks, rows and columns for the rotation,
// windows.
void VisionTower::fill_batch(const Layout& layout) {
  ForwardBatch& b = batch_;
  const int64_t length = layout.rows_of_sequence;
  const auto tokens = static_cast<size_t>(layout.sequences * length);
  b.token_ids.assign(tokens, 0);
  b.positions.resize(tokens);
  b.query_start.assign(1, 0);
  b.context_len.assign(static_cast<size_t>(layout.sequences), static_cast<int32_t>(length));
  b.axis_positions.clear();
  b.spans.clear();
  for (int64_t s = 0; s < layout.sequences; ++s) {
    const auto first = b.positions.begin() + s * length;
    std::iota(first, first + length, 0);
    b.query_start.push_back(static_cast<int32_t>((s + 1) * length));
  }
  const int64_t stride = (length + ops::kBlockTokens - 1) / ops::kBlockTokens;
  for (BlockTables& table : b.tables) {
    table.stride = stride;
    table.ids.resize(static_cast<size_t>(stride * layout.sequences));
    std::iota(table.ids.begin(), table.ids.end(), 0);
  }
  if (spec_->side > 0) return;
  const int merge = spec_->merge, unit = merge * merge;
  const int64_t columns = layout.in_row / merge;
  int64_t start = 0;
  auto window = layout.window_ends.begin();
  for (int64_t m = 0; m < length / unit; ++m) {
    const int64_t square = layout.order.empty() ? m : layout.order[static_cast<size_t>(m)];
    if (window != layout.window_ends.end() && m == *window) start = *window++;
    for (int patch = 0; patch < unit; ++patch) {
      b.axis_positions.push_back(static_cast<int32_t>(square / columns * merge + patch / merge));
      b.axis_positions.push_back(static_cast<int32_t>(square % columns * merge + patch % merge));
      if (layout.order.empty()) continue;
      b.spans.push_back({static_cast<int32_t>(start * unit), static_cast<int32_t>(*window * unit)});
    }
  }
}

// stream_ = the patches' projections, in the order of the batch, with class rows.
void VisionTower::project_patches(const VisionInput& input, const Layout& layout) {
  const int64_t values = spec_->patch_values, hidden = spec_->blocks.hidden_size;
  const int64_t patches = layout.patches(), patch = spec_->patch;
  const int merge = spec_->merge, unit = merge * merge;
  FRESHET_CHECK(std::ssize(input.values) == patches * values, "{} numbers for {} patches of {}",
                input.values.size(), patches, values);
  float* to = columns_.data();
  const float* const from = input.values.data();
  for (const int32_t square : layout.order)
    to = std::copy_n(from + square * unit * values, unit * values, to);
  if (spec_->side == 0 && layout.order.empty()) std::copy_n(from, patches * values, to);
  const int64_t side = spec_->side, merged = layout.in_row / merge;
  for (int64_t i = 0; side > 0 && i < patches; ++i, to += values) {
    const int64_t in_square = i % (layout.in_row * layout.in_row), m = in_square / unit;
    const int64_t y = (m / merged * merge + in_square % unit / merge) * patch;
    const int64_t x = (m % merged * merge + in_square % merge) * patch;
    const float* const square = from + i / (layout.in_row * layout.in_row) * 3 * side * side;
    float* out = to;
    for (int64_t c = 0; c < 3; ++c) {
      for (int64_t row = y; row < y + patch; ++row)
        out = std::copy_n(square + (c * side + row) * side + x, patch, out);
    }
  }
  const bool classes = spec_->class_row && spec_->tiles == 0;
  const Matrix projected = matrix_of(classes ? room_ : stream_, patches, hidden);
  const ops::Product products[] = {product_of(weights_->patches, projected)};
  ops_.matmul(matrix_of(columns_, patches, values), products);
  if (!classes) return;
  const int64_t of_square = layout.rows_of_sequence - 1;
  float* row = stream_.data();
  for (int64_t s = 0; s < layout.sequences; ++s) {
    row = std::copy_n(weights_->class_row.data(), hidden, row);
    row = std::copy_n(projected.row(s * of_square), of_square * hidden, row);
  }
}

// Learned positions, one for each row of a square in its own order.
void VisionTower::add_positions(const Layout& layout, const Matrix& stream) {
  std::vector<int32_t> ids;
  const int merge = spec_->merge, unit = merge * merge;
  const int64_t merged = layout.in_row / merge;
  for (int64_t s = 0; s < layout.sequences; ++s) {
    if (spec_->class_row) ids.push_back(0);
    for (int64_t i = 0; i < layout.in_row * layout.in_column; ++i) {
      const int64_t y = i / unit / merged * merge + i % unit / merge;
      const int64_t x = i / unit % merged * merge + i % merge;
      ids.push_back(static_cast<int32_t>(y * layout.in_row + x) + (spec_->class_row ? 1 : 0));
    }
  }
  const Matrix places = matrix_of(room_, stream.rows, stream.cols);
  ops_.embed(places, weights_->positions, ids, 1.0f);
  ops_.add(stream, places, 1.0f);
}

// Learned positions of a square grid, stretched to the picture: interpolated between the four that
// surround a patch; the corners coincide.
void VisionTower::stretch_positions(const Layout& layout, const Matrix& stream) {
  int64_t side = 1;
  while (side * side < spec_->positions) ++side;
  const auto place = [side](int32_t i, int64_t count) {
    return count > 1 ? static_cast<float>(i) * static_cast<float>(side - 1) /
                           static_cast<float>(count - 1)
                     : 0.0f;
  };
  const Matrix corner = matrix_of(room_, stream.rows, stream.cols);
  std::vector<float> sum(static_cast<size_t>(stream.rows * stream.cols), 0.0f);
  std::vector<int32_t> ids(static_cast<size_t>(stream.rows));
  std::vector<float> weights(ids.size());
  for (int tap = 0; tap < 4; ++tap) {
    for (size_t t = 0; t < ids.size(); ++t) {
      const float y = place(batch_.axis_positions[2 * t], layout.in_column);
      const float x = place(batch_.axis_positions[2 * t + 1], layout.in_row);
      const auto top = static_cast<int64_t>(y), left = static_cast<int64_t>(x);
      const float below = y - static_cast<float>(top), right = x - static_cast<float>(left);
      const int64_t row = std::min(side - 1, top + tap / 2);
      const int64_t column = std::min(side - 1, left + tap % 2);
      ids[t] = static_cast<int32_t>(row * side + column);
      weights[t] = (tap / 2 == 0 ? 1 - below : below) * (tap % 2 == 0 ? 1 - right : right);
    }
    ops_.embed(corner, weights_->positions, ids, 1.0f);
    for (int64_t t = 0; t < corner.rows; ++t) {
      for (int64_t i = 0; i < corner.cols; ++i)
        sum[static_cast<size_t>(t * corner.cols + i)] +=
            corner.row(t)[i] * weights[static_cast<size_t>(t)];
    }
  }
  ops_.add(stream, matrix_of(sum, stream.rows, stream.cols), 1.0f);
}

// Rows of the result from states: [rows, width] to `out`, in the picture's own order.
void VisionTower::connect(const ConnectorWeights& weights, bool norm_merged, const Layout& layout,
                          const Matrix& states, float* out) {
  const int64_t hidden = states.cols, unit = int64_t{spec_->merge} * spec_->merge;
  const int64_t width = spec_->merged_width();
  Matrix x = states;
  if (spec_->drops_first) {
    std::vector<int32_t> kept;
    for (int32_t row = 0; row < states.rows; ++row) {
      if (row % layout.rows_of_sequence != 0) kept.push_back(row);
    }
    x = matrix_of(stream_, std::ssize(kept), hidden);
    ops_.gather_rows(x, states, kept);
  }
  const bool norms = spec_->merge_norm.has_value();
  const ops::Norm norm = norms ? norm_of(*spec_->merge_norm, weights.norm) : ops::Norm{};
  if (norms && !norm_merged) {
    const Matrix normed = matrix_of(stream_, x.rows, hidden);
    ops_.norm(normed, x, norm);
    x = normed;
  }
  Matrix merged{x.data, x.rows / unit, width, width};  // patches of a row are adjacent
  if (spec_->mean) {
    merged.data = room_.data();
    for (int64_t r = 0; r < merged.rows; ++r) {
      for (int64_t i = 0; i < hidden; ++i) {
        float sum = 0.0f;
        for (int64_t p = 0; p < unit; ++p) sum += x.row(r * unit + p)[i];
        merged.row(r)[i] = sum / static_cast<float>(unit);
      }
    }
  }
  if (norms && norm_merged) {
    const Matrix normed = matrix_of(stream_, merged.rows, width);
    ops_.norm(normed, merged, norm);
    merged = normed;
  }
  if (spec_->merge_linear) {
    const Matrix turned = matrix_of(columns_, merged.rows, width);
    interleave_patches(merged, unit, turned);
    const Matrix projected = matrix_of(room_, merged.rows, hidden);
    const ops::Product products[] = {product_of(weights.merge, projected)};
    ops_.matmul(turned, products);
    merged = projected;
  }
  if (spec_->inner > 0) {
    const Matrix inner = matrix_of(columns_, merged.rows, spec_->inner);
    const ops::Product products[] = {product_of(weights.inner, inner)};
    ops_.matmul(merged, products);
    ops_.activation(inner, spec_->activation);
    merged = inner;
  }
  std::vector<float> ordered;
  float* to = out;
  if (!layout.order.empty()) {
    ordered.resize(static_cast<size_t>(merged.rows * spec_->width));
    to = ordered.data();
  }
  const ops::Product products[] = {
      product_of(weights.out, Matrix{to, merged.rows, spec_->width, spec_->width})};
  ops_.matmul(merged, products);
  for (size_t i = 0; i < layout.order.size(); ++i)
    std::copy_n(to + static_cast<int64_t>(i) * spec_->width, spec_->width,
                out + layout.order[i] * spec_->width);
}

VisionRows VisionTower::run(const VisionInput& input) {
  return *run(input, [] { return true; });
}

std::optional<VisionRows> VisionTower::run(const VisionInput& input, FunctionRef<bool()> between) {
  const uint64_t own = ++runs_;
  bool ended = false;
  const auto goes_on = [&] { return !(ended = ended || !between() || runs_ != own); };
  const FunctionRef<bool()> asks = goes_on;
  const Layout layout = layout_of(input);
  const int64_t tokens = layout.sequences * layout.rows_of_sequence;
  const int64_t hidden = spec_->blocks.hidden_size;
  FRESHET_CHECK(tokens > 0 && tokens <= reserved_ && layout.sequences <= kMostSquares,
                "a picture of {} positions, planned for {}", tokens, reserved_);
  fill_batch(layout);
  project_patches(input, layout);
  const Matrix stream = matrix_of(stream_, tokens, hidden);
  if (spec_->tiles > 0) {
    lay_tiles(input, layout);
  } else if (spec_->stretched_positions) {
    stretch_positions(layout, stream);
  } else if (spec_->positions > 0) {
    add_positions(layout, stream);
  }
  if (spec_->stem_norm && spec_->tiles == 0)
    ops_.norm(stream, stream, norm_of(*spec_->stem_norm, weights_->stem_norm));
  batch_.features = stream_.data();
  if (layers_.device() != nullptr) {
    std::copy_n(stream_.data(), tokens * hidden, sent_.as<float>());
    batch_.features = sent_.as<float>();
  }
  StepResults results;
  results.hidden = states_.data();
  std::vector<float*> boundaries;
  for (std::vector<float>& states : inner_) boundaries.push_back(states.data());
  results.boundaries = boundaries;
  results.between = &asks;
  blocks_.forward(batch_, cache_, results);
  if (ended) return std::nullopt;
  if (layers_.device() != nullptr) layers_.wait();

  VisionRows rows;
  rows.rows = VisionTower::rows(*spec_, input);
  rows.width = spec_->width;
  rows.levels = static_cast<int>(spec_->deep.size());
  const auto level = static_cast<size_t>(rows.rows * rows.width);
  rows.values.resize(level * (1 + spec_->deep.size()));
  if (spec_->tiles > 0) {
    finish_tiles(input, layout, asks);
    if (ended) return std::nullopt;
    rows.used_rows = rows.rows / spec_->tiles * input.used_tiles;
    const Matrix out{rows.values.data(), rows.rows, rows.width, rows.width};
    const ops::Product products[] = {product_of(weights_->connector.out, out)};
    ops_.matmul(matrix_of(columns_, rows.rows, spec_->merged_width()), products);
    return rows;
  }
  const Matrix states = matrix_of(states_, tokens, hidden);
  if (spec_->newline_row) {
    std::vector<float> squares(static_cast<size_t>(layout.patches() * spec_->width));
    connect(weights_->connector, spec_->norm_merged, layout, states, squares.data());
    pack_grid(*spec_, input, weights_->newline, squares, rows.values.data());
    return rows;
  }
  connect(weights_->connector, spec_->norm_merged, layout, states, rows.values.data());
  for (size_t i = 0; i < spec_->deep.size(); ++i) {
    connect(weights_->deep[i], true, layout, matrix_of(inner_[i], tokens, hidden),
            rows.values.data() + level * (i + 1));
  }
  return rows;
}

}  // namespace freshet
