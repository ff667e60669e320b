// The matrix of a linear layer, prepared for a device.
//
// A Weight is [rows, cols] = [output features, input features] in a storage format, packed for one
// kernel row. Packing never changes a value, and on the CPU never the number of bits that it takes:
// there, panels of 16 rows lie interleaved so that one vector lane (or tile column) is one output
// row; rows are padded to a multiple of 16. Immutable after packing; safe to read from many
// threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quant/format.h"
#include "tensor/buffer.h"

namespace freshet::ops {

struct MatmulKernel;

// Of what rows make of weights. To be raised when a row's pack_panel() writes other bytes than it
// did: packed weights are kept in files.
inline constexpr int kPackedVersion = 1;

// What a weight is packed for: a device may want another order of bytes for each. Tables are looked
// up, and may take part in products too.
enum class Use : uint8_t { kProducts, kExperts, kTable };

struct Weight {
  quant::Format format = quant::Format::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  Use use = Use::kProducts;
  const MatmulKernel* kernel = nullptr;  // who packed it and multiplies with it
  Buffer packed;
  // Column c takes input inputs[c] (on the CPU alone, and not of INT8); empty: in order.
  std::vector<int32_t> inputs;
  // Who it is, for projection hooks: the tensor that it came from, of which it may be a part, and
  // its number in Model::weights(). Weights that no model holds have neither.
  std::string name;
  int32_t id = -1;

  bool empty() const { return rows == 0; }
};

}  // namespace freshet::ops
