// A quantised linear layer between the methods that choose its codes and the containers that store
// them.
//
// A Scheme says what codes and scales mean; a CodedMatrix holds those of one matrix. A number is
//   integers:  scale * (code - zero)           (zero = 2^(bits-1) where `zeros` is empty)
//   others:    global_scale * scale * level(code)
// Scales are exactly the values that the container stores: a method rounds them to `Scheme::scale`
// before it chooses codes. Plain data; not synchronised.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace freshet::quantizer {

// What a code means: an integer, a float of 8 or 4 bits, or a place in a table.
enum class Levels { kInteger, kE4M3, kE2M1, kNF4, kFP4 /* bitsandbytes */ };

enum class ScaleType { kF16, kBF16, kF32, kE8M0, kE4M3 /* times one F32 for the tensor */ };

// What an engine does with the inputs of the layer.
enum class Activations {
  kNone,
  kInt8Token,
  kFp8Token,
  kFp8Tensor,
  kFp8Group128,
  kNvfp4,
  kMxfp4,
  kMxfp8,
  kInt8Tensor,
};

struct Scheme {
  std::string name;  // compressed-tensors' preset name where there is one: "W4A16"
  Levels levels = Levels::kInteger;
  int bits = 4;
  int64_t group = 128;     // columns that share a scale; 0: all of a row
  int64_t group_rows = 1;  // rows that share a scale; 128 for FP8_BLOCK, 0: all rows
  bool symmetric = true;
  ScaleType scale = ScaleType::kF16;
  Activations activations = Activations::kNone;
  bool double_quantised = false;  // NF4's absmax
  // Columns whose inputs reach this magnitude in calibration are outliers, kept in 16 bits; 0:
  // none.
  float outlier_threshold = 0.0f;
  ScaleType outlier_type = ScaleType::kBF16;  // or kF16
};

// Scales of 4-bit tables in bitsandbytes' second quantisation: scale i is
// map[codes[i]] * absmax[i / 256] + offset, with its map of 256 numbers (double_quantisation.h).
struct DoubleScales {
  std::vector<uint8_t> codes;
  std::vector<float> absmax;
  float offset = 0.0f;
};

// Columns of a matrix that are not quantised (Scheme::outlier_threshold).
struct OutlierNumbers {
  std::vector<int32_t> columns;  // ascending
  std::vector<float> values;     // [rows, columns], exactly those that are stored
};

struct CodedMatrix {  // one linear layer
  int64_t rows = 0, cols = 0;
  // [rows, cols]. Integers: q + 2^(bits-1) if symmetric, else the unsigned q. Floats and tables:
  // the code.
  std::vector<uint8_t> codes;
  // [row groups, column groups], exactly the values that are stored: value = scale * level.
  std::vector<float> scales;
  std::vector<uint8_t> zeros;  // [rows, column groups]; empty: symmetric
  float global_scale = 1.0f;   // NVFP4: the tensor's factor (value = global * scale * level)
  float input_scale = 0.0f;    // static activations: factor; 0: none
  // The group of each column, for an act-order that is not static; empty: column / group.
  std::vector<int32_t> group_of_column;
  // How `scales` are stored if Scheme::double_quantised; Container::settle sets it where the
  // method did not.
  DoubleScales double_scales;
  // What takes the place of some columns; their codes are for readers that do not know it. nullopt:
  // calibration knows no inputs of the matrix.
  std::optional<OutlierNumbers> outliers;
};

}  // namespace freshet::quantizer
