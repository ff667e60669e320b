// The matrix of a linear layer, prepared for a device.
//
// A Weight is [rows, cols] = [output features, input features] in a storage format, packed for one
// kernel row. Packing never changes a value, and on the CPU it keeps the number of bits: panels of
// 16 rows are interleaved so that one vector lane (or tile column) is one output row, and rows are
// padded to a multiple of 16. Immutable after packing; safe to read from many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "quant/format.h"
#include "tensor/buffer.h"

namespace freshet::ops {

struct MatmulKernel;

// The version of the packed layouts. Raise it when a row's pack_panel() starts to write other
// bytes, because packed weights are kept in files.
inline constexpr int kPackedVersion = 1;

// The use that a weight is packed for: a device may need a different byte order for each. Tables
// are used for lookups, and may be used in GEMMs too. kExact: GEMMs in F32 arithmetic, also where
// the usual kernel splits F32 weights.
enum class Use : uint8_t { kProducts, kExperts, kTable, kExact };

struct OutlierColumns;

struct Weight {
  quant::Format format = quant::Format::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  Use use = Use::kProducts;
  const MatmulKernel* kernel = nullptr;  // the row that packed it and multiplies with it
  Buffer packed;
  // Column c uses input inputs[c] (only on the CPU, and not with INT8); empty: in order.
  std::vector<int32_t> inputs;
  // Identity for projection hooks: the tensor that contains it (it may be a part of that), and its
  // index in Model::weights(). Not set if no model holds the weight.
  std::string name;
  int32_t id = -1;
  // Columns that are multiplied apart, in 16 bits; nullptr: none. Only Ops::matmul() and what is
  // composed of it take such a weight.
  std::shared_ptr<const OutlierColumns> outliers;

  bool empty() const { return rows == 0; }
};

// Columns whose inputs are too large to be rounded together with the others (LLM.int8,
// arXiv:2208.07339). A product with the weight has two parts: the whole matrix times the input with
// zeros in these columns, then `values` times these columns of the input, added to the first part.
// The columns are fixed when the weight is made, so that a row's result doesn't depend on others.
struct OutlierColumns {
  std::vector<int32_t> columns;  // ascending; at least one
  Buffer list;                   // the same in the device's memory; empty on the host
  Weight values;                 // [rows, columns]
};

}  // namespace freshet::ops
