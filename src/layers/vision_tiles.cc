// Pictures of several tiles, whose patches see one another (Llama 3.2 Vision).
//
// A tile has a class row, its patches and some padding rows; tiles that a picture doesn't use are
// padding, too. As in the reference, padding takes part in attention: every row sees all others,
// except that padding rows don't see each other. So rows that aren't padding come first, followed
// by the padding rows.
#include <algorithm>

#include "layers/vision_tower.h"

namespace freshet {

// stream_ = the input of the layers, from the patches' projections in stream_.
void VisionTower::lay_tiles(const VisionInput& input, const Layout& layout) {
  const int64_t hidden = spec_->blocks.hidden_size, positions = layout.rows_of_sequence;
  const int64_t patches = layout.in_row * layout.in_row, rows = patches + 1;
  const int64_t padded = positions / spec_->tiles;
  tile_order_.clear();
  for (const bool padding : {false, true}) {
    for (int64_t i = 0; i < positions; ++i) {
      const bool used = i / padded < input.used_tiles && i % padded < rows;
      if (used != padding) tile_order_.push_back(static_cast<int32_t>(i));
    }
  }
  const auto real = static_cast<int32_t>(input.used_tiles * rows);
  batch_.spans.assign(static_cast<size_t>(positions), {0, static_cast<int32_t>(positions)});
  std::fill(batch_.spans.begin() + real, batch_.spans.end(), ops::KeyRange{0, real});

  const int64_t first_tile = input.tile_layout * spec_->tiles;
  const TileWeights& w = weights_->tiles;
  Matrix laid{room_.data(), positions, hidden, hidden};
  for (int64_t at = 0; at < positions; ++at) {
    const int64_t tile = tile_order_[static_cast<size_t>(at)] / padded;
    const int64_t row = tile_order_[static_cast<size_t>(at)] % padded;
    float* const to = laid.row(at);
    if (row >= rows) {
      std::fill_n(to, hidden, 0.0f);
      continue;
    }
    const float* const before = w.before.data() + (first_tile + tile) * hidden;
    const float* const own = w.positions.data() + row * hidden;
    const float* const of_tile =
        w.tile_positions.data() + ((first_tile + tile) * rows + row) * hidden;
    const float* const patch = stream_.data() + (tile * patches + row - 1) * hidden;
    for (int64_t i = 0; i < hidden; ++i) {
      const float x = row == 0 ? weights_->class_row[static_cast<size_t>(i)] : patch[i] + before[i];
      to[i] = x + own[i] + of_tile[i];
    }
  }
  // Padding of a tile stays zero.
  const Matrix stream{stream_.data(), positions, hidden, hidden};
  ops_.norm(stream, laid, norm_of(*spec_->stem_norm, weights_->stem_norm));
  for (int64_t at = 0; at < positions; ++at) {
    if (tile_order_[static_cast<size_t>(at)] % padded >= rows)
      std::fill_n(stream.row(at), hidden, 0.0f);
  }
}

// columns_ = the input of the connector, tile by tile: the states after all layers and, for each
// feature, those after the layers of VisionSpec::kept. states_ and inner_ are those of the blocks.
void VisionTower::finish_tiles(const VisionInput& input, const Layout& layout,
                               const FunctionRef<bool()>& between) {
  const int64_t hidden = spec_->blocks.hidden_size, positions = layout.rows_of_sequence;
  const int64_t rows = layout.in_row * layout.in_row + 1, padded = positions / spec_->tiles;
  const Matrix stream{stream_.data(), positions, hidden, hidden};
  for (int64_t at = 0; at < positions; ++at) {
    const int64_t tile = tile_order_[static_cast<size_t>(at)] / padded;
    const float* const after =
        weights_->tiles.after.data() + (input.tile_layout * spec_->tiles + tile) * hidden;
    const float* const state = states_.data() + at * hidden;
    for (int64_t i = 0; i < hidden; ++i) stream.row(at)[i] = state[i] + after[i];
  }
  StepResults results;
  results.hidden = states_.data();
  results.between = &between;
  later_->forward(batch_, cache_, results);
  const auto kept = static_cast<int64_t>(inner_.size()), width = int64_t{spec_->merged_width()};
  for (int64_t at = 0; at < positions; ++at) {
    const int64_t tile = tile_order_[static_cast<size_t>(at)] / padded;
    const int64_t row = tile_order_[static_cast<size_t>(at)] % padded;
    if (row >= rows) continue;
    float* const to = columns_.data() + (tile * rows + row) * width;
    std::copy_n(states_.data() + at * hidden, hidden, to);
    for (int64_t k = 0; k < kept; ++k) {
      const float* const from = inner_[static_cast<size_t>(k)].data() + at * hidden;
      for (int64_t i = 0; i < hidden; ++i) to[hidden + i * kept + k] = from[i];
    }
  }
}

}  // namespace freshet
