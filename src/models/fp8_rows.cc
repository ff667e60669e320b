#include "models/fp8_rows.h"

#include <array>
#include <cstring>

#include "models/quantization_config.h"
#include "quant/fp8.h"

namespace freshet::models {
namespace {

using loader::TensorSource;
constexpr int64_t kBlock = quant::FP8::kBlockSize;

struct BlockShape {
  int64_t rows = 128, cols = 128;
};

// Of which rows and columns one scale is, if scales are of blocks.
BlockShape block_shape(const json::Value& config) {
  const json::Value* q = quantization_config(config);
  if (q == nullptr) return {};
  const json::Value* size = q->find("weight_block_size");
  const json::Value* groups = q->find("config_groups");
  if (size == nullptr && groups != nullptr && groups->is_object()) {
    for (const auto& [name, group] : groups->as_object()) {
      const json::Value* weights = group.find("weights");
      size = weights != nullptr ? weights->find("block_structure") : nullptr;
      if (size != nullptr && size->is_array()) break;
    }
  }
  if (size == nullptr || !size->is_array() || size->as_array().size() != 2) return {};
  const auto number = [&](size_t i) {
    const json::Value& v = size->as_array()[i];
    return v.is_number() ? v.as_int64().value_or(0) : 0;
  };
  return {number(0), number(1)};
}

// How scales are picked: that of row r and column block b is number r / rows * stride + b / cols.
struct Picked {
  int64_t rows = 0, cols = 0, stride = 0;  // of a scale, in rows and blocks of columns
  int64_t count = 0;                       // of a matrix
};

Result<Picked> pick(const TensorSource& weight, const TensorSource& scales, BlockShape block,
                    int64_t count, int64_t rows, int64_t cols) {
  const int64_t n = scales.elements();
  if (n == 1) return Picked{rows, cols, 0, 0};
  std::vector<int64_t> shape = scales.shape;
  if (count > 1) {
    if (shape.empty() || shape[0] != count) shape = {};
    if (!shape.empty()) shape.erase(shape.begin());
  }
  if (shape.size() == 2 && shape[1] == 1 && shape[0] == rows) shape.pop_back();
  if (shape == std::vector{rows}) return Picked{1, cols, 1, rows};
  if (block.rows > 0 && block.cols > 0 && block.cols % kBlock == 0) {
    const std::vector<int64_t> blocks = {(rows + block.rows - 1) / block.rows,
                                         (cols + block.cols - 1) / block.cols};
    if (shape == blocks) return Picked{block.rows, block.cols / kBlock, blocks[1], n / count};
  } else {
    return unsupported(
        "tensor '{}' has a scale for {} by {} numbers: columns must be multiples of {}",
        weight.name, block.rows, block.cols, kBlock);
  }
  return invalid_argument(
      "tensor '{}' has shape [{}], which is neither one scale, one a row nor one for {} by {} "
      "numbers of '{}' [{}]",
      scales.name, fmt::join(scales.shape, ", "), block.rows, block.cols, weight.name,
      fmt::join(weight.shape, ", "));
}

}  // namespace

Result<Rows> fp8_rows(const WeightReader& reader, const TensorSource& weight, int64_t index,
                      int64_t count, int64_t rows, int64_t cols) {
  if (cols % kBlock != 0) {
    return unsupported("tensor '{}': rows of {} numbers are not whole blocks of {} of fp8",
                       weight.name, cols, kBlock);
  }
  const TensorSource* scales = reader.find_name(weight.name + "_scale_inv");
  if (scales == nullptr) scales = reader.find_name(weight.name + "_scale");
  if (scales == nullptr) {
    return invalid_argument(
        "tensor '{}' of type {} has no scale: '{}_scale_inv' and '{}_scale' are "
        "missing",
        weight.name, weight.dtype, weight.name, weight.name);
  }
  FRESHET_ASSIGN_OR_RETURN(const Picked p,
                           pick(weight, *scales, block_shape(reader.config()), count, rows, cols));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> all,
                           reader.values(*scales, scales->elements()));
  const float* of_matrix = all.data() + index * p.count;
  Rows out;
  out.format = quant::Format::kFP8;
  out.cols = cols;
  const size_t stride = quant::row_bytes(out.format, cols);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  const uint8_t* from = weight.data + index * rows * cols;
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = buffer.data() + static_cast<size_t>(r) * stride;
    out.rows.push_back(to);
    for (int64_t b = 0; b < cols / kBlock; ++b, from += kBlock) {
      const float scale = of_matrix[p.stride == 0 ? 0 : r / p.rows * p.stride + b / p.cols];
      std::memcpy(to, from, kBlock);
      std::memcpy(to + kBlock, &scale, sizeof scale);
      to += sizeof(quant::FP8::Block);
    }
  }
  out.owned.push_back(std::move(buffer));
  return out;
}

}  // namespace freshet::models
