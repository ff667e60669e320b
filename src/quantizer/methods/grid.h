// What numbers a row of weights can become: the common face of every format that methods quantise
// to.
//
// A row is cut into blocks, whose parameters are fitted together, and a block into units, which
// share a scale and an offset: a number of a unit is `scale * level(code) - offset`, where the
// codes and their levels are the same in the whole matrix (the Alphabet). For a group of integers
// block and unit are the group; a super-block of GGUF has 8 or 16 units, whose scales and offsets
// are small multiples of two F16s. Methods choose codes and may move parameters; a grid says which
// parameters can be stored, and stores the result.
//
// prepare() comes first, from one thread. Then all calls are safe from several threads, store() for
// different rows. Numbers are finite; weights are not negative.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "base/status.h"
#include "quant/format.h"
#include "quantizer/coded_matrix.h"
#include "quantizer/methods/alphabet.h"

namespace freshet::quantizer {

using Target = std::variant<Scheme, quant::Format>;

struct EncodedRows {  // GGUF's row layout
  quant::Format format = quant::Format::kF32;
  int64_t rows = 0, cols = 0;
  std::vector<uint8_t> bytes;  // rows of quant::row_bytes()
};
using QuantisedMatrix = std::variant<CodedMatrix, EncodedRows>;

// The parameters of one block: unit u has scale = d * scales[u] and offset = dmin * mins[u], up to
// a factor of the tensor.
struct BlockParameters {
  static constexpr int kUnits = 16;
  float d = 0.0f;
  float dmin = 0.0f;
  int16_t scales[kUnits] = {};
  int16_t mins[kUnits] = {};
};

struct Unit {  // number = scale * level - offset
  float scale = 0.0f;
  float offset = 0.0f;
};

class Grid {
 public:
  struct Shape {
    int64_t rows = 0, cols = 0;
    int64_t block = 0;  // columns; the last block of a row may be shorter
    int64_t unit = 0;
    bool offsets = false;       // the offset is free, not zero
    bool refits = false;        // set_unit() may be called
    bool super_blocks = false;  // set_block() may be called
  };

  virtual ~Grid() = default;
  const Shape& shape() const { return shape_; }
  const Alphabet& alphabet() const { return alphabet_; }

  // Fixes what the whole matrix shares. `weights`: nullptr, or the weight of each column's error.
  virtual void prepare(const float* /*w*/, const float* /*weights*/) {}
  // Fits a block to its n numbers; it begins at `column` of `row`.
  virtual void fit(int64_t row, int64_t column, const float* x, const float* weights, int64_t n,
                   BlockParameters& out) const = 0;
  virtual Unit unit(const BlockParameters& p, int u) const = 0;
  // Sets unit u to the nearest scale and offset that can be stored beside the block's others.
  virtual void set_unit(BlockParameters& p, int u, Unit wanted) const = 0;
  // Sets d and dmin to the nearest that can be stored.
  virtual void set_block(BlockParameters& /*p*/, float /*d*/, float /*dmin*/) const {}
  // Stores a row: its blocks' parameters and its codes.
  virtual void store(int64_t row, const BlockParameters* blocks, const uint8_t* codes) = 0;
  // The finished matrix; once, at the end.
  virtual QuantisedMatrix take() = 0;

 protected:
  Shape shape_;
  Alphabet alphabet_;
};

struct GridOptions {
  bool search_ranges = true;  // false: the range covers the extreme values
  // NVFP4: the largest magnitude that fixes the tensor's factor; 0: this matrix's own. Parts of a
  // fused product share it.
  float tensor_max = 0.0f;
};

// A grid for the target; nullptr for a GGUF type that has an encoder only.
Result<std::unique_ptr<Grid>> make_grid(const Target& target, int64_t rows, int64_t cols,
                                        const GridOptions& options);
// The two families; make_grid() calls them.
Result<std::unique_ptr<Grid>> make_coded_grid(const Scheme& scheme, int64_t rows, int64_t cols,
                                              const GridOptions& options);
Result<std::unique_ptr<Grid>> make_gguf_grid(quant::Format format, int64_t rows, int64_t cols);

}  // namespace freshet::quantizer
