// The tower of a model that reads pictures: runs a VisionSpec on one picture at a time.
//
// The result for a picture depends on that picture alone, bit for bit, so callers may cache it by
// the picture's content. Squares of a picture are sequences of one batch. Keys and values exist for
// one layer at a time, in the tower's own cache, which all layers share. Memory is allocated in
// reserve(); each result is a vector of its own, on the host. On a device the layers run there;
// patches and connectors, a few percent of the work, stay on the host. Used by one thread, that of
// the model's steps.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "layers/decoder.h"

namespace freshet {

constexpr int64_t kMostSquares = 64;  // of a picture

// A picture as its processor made it (media/image_input.h).
struct VisionInput {
  std::span<const float> values;
  int64_t squares = 0;            // towers that read squares: [squares, 3, side, side]
  std::array<int64_t, 2> grid{};  // other towers: rows and columns of patches
  // Towers with tiles: the tiles that aren't padding come first.
  int64_t used_tiles = 0;
  int64_t tile_layout = 0;
  // VisionSpec::newline_row: rows and columns of the grid of squares, and of its patches without
  // the padding.
  std::array<int64_t, 2> squares_grid{};
  std::array<int64_t, 2> kept{};
};

struct VisionRows {
  int64_t rows = 0;
  int64_t width = 0;
  int levels = 0;             // beyond the first (VisionSpec::deep)
  std::vector<float> values;  // [1 + levels, rows, width]
  // Towers with tiles: rows of the used tiles, which come first.
  int64_t used_rows = 0;
};

class VisionTower {
 public:
  // `weights` may be nullptr for plans. `host` runs the ends of the tower and `ops` its layers, for
  // which VisionWeights::blocks are packed; they may be the same.
  VisionTower(std::shared_ptr<const VisionSpec> spec, std::shared_ptr<const VisionWeights> weights,
              ops::Ops& host, ops::Ops& ops);

  const VisionSpec& spec() const { return *spec_; }
  // The positions of a picture in the tower, and the number of result rows.
  static int64_t positions(const VisionSpec& spec, const VisionInput& input);
  static int64_t rows(const VisionSpec& spec, const VisionInput& input);

  // For pictures of at most `positions`: where the layers run, and on the host beside them.
  Decoder::Workspace workspace(int64_t positions) const;
  size_t host_bytes(int64_t positions) const;
  // On a device the first call fixes the memory, before any step: recorded steps hold addresses.
  // Later ones are errors if they ask for more.
  Status reserve(int64_t positions);
  int64_t reserved() const { return reserved_; }

  // REQUIRES: reserve() for the picture's positions; `values` of the size that the input says.
  VisionRows run(const VisionInput& input);
  // On hosts, `between` is called between branches of layers. nullopt: it returned false, or ran
  // the tower on another picture meanwhile. `values` are read before its first call only.
  std::optional<VisionRows> run(const VisionInput& input, FunctionRef<bool()> between);

 private:
  // The order of a picture's patches in its rows.
  struct Layout {
    int64_t sequences = 1;
    int64_t rows_of_sequence = 0;  // positions, including a class row
    int64_t in_row = 0;            // patches in a row of a square or of the picture
    int64_t in_column = 0;
    // The order of the merged squares of patches, by windows; empty: as they are given.
    std::vector<int32_t> order;
    std::vector<int64_t> window_ends;  // in merged squares

    int64_t patches() const { return sequences * in_row * in_column; }
  };
  Layout layout_of(const VisionInput& input) const;
  void fill_batch(const Layout& layout);
  void project_patches(const VisionInput& input, const Layout& layout);
  void add_positions(const Layout& layout, const Matrix& stream);
  void stretch_positions(const Layout& layout, const Matrix& stream);
  // Towers with tiles (vision_tiles.cc).
  void lay_tiles(const VisionInput& input, const Layout& layout);
  void finish_tiles(const VisionInput& input, const Layout& layout,
                    const FunctionRef<bool()>& between);
  void connect(const ConnectorWeights& weights, bool norm_merged, const Layout& layout,
               const Matrix& states, float* out);
  ops::Ops::ShapeLimits limits(int64_t positions) const;
  size_t buffer_floats(int64_t positions) const;

  std::shared_ptr<const VisionSpec> spec_;
  std::shared_ptr<const VisionWeights> weights_;
  ops::Ops& ops_;     // of the ends
  ops::Ops& layers_;  // of the layers
  ops::KvType kv_;    // of the layers' keys and values
  Decoder blocks_;
  std::unique_ptr<Decoder> later_;  // nullptr without VisionSpec::later
  KvStorage cache_;
  ForwardBatch batch_;
  int64_t reserved_ = 0;
  uint64_t runs_ = 0;           // begun
  std::vector<float> columns_;  // [patches, patch_values]; later rows of the result in progress
  std::vector<float> stream_, states_, room_;  // [positions, hidden]
  Buffer sent_;  // [positions, hidden]: the stream where a device reads it
  // States after the layers of VisionSpec::deep or VisionSpec::kept.
  std::vector<std::vector<float>> inner_;
  std::vector<int32_t> tile_order_;  // [positions]: tile * rows + row of each
};

}  // namespace freshet
