#include "models/scaled_rows.h"

#include <algorithm>
#include <cstring>

#include "models/quantization_config.h"
#include "quant/fp8.h"
#include "quant/int8.h"

namespace freshet::models {
namespace {

using loader::TensorSource;
constexpr int64_t kBlock = quant::FP8::kBlockSize;

struct BlockShape {
  int64_t rows = 128, cols = 128;
};

// The rows and columns of a block that has a scale, if scales are for blocks.
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

// The scale of row r and column block b has the index r / rows * stride + b / cols.
struct Picked {
  int64_t rows = 0, cols = 0, stride = 0;  // of a scale, in rows and blocks of columns
  int64_t count = 0;                       // of a matrix
};

// The shape of one matrix's scales, without a last 1; empty if it is not that of `count` matrices.
std::vector<int64_t> shape_of(const TensorSource& scales, int64_t count, int64_t rows) {
  std::vector<int64_t> shape = scales.shape;
  if (count > 1) {
    if (shape.empty() || shape[0] != count) return {};
    shape.erase(shape.begin());
  }
  if (shape.size() == 2 && shape[1] == 1 && shape[0] == rows) shape.pop_back();
  return shape;
}

Result<Picked> pick(const TensorSource& weight, const TensorSource& scales, BlockShape block,
                    int64_t count, int64_t rows, int64_t cols) {
  const int64_t n = scales.elements();
  if (n == 1) return Picked{rows, cols, 0, 0};
  const std::vector<int64_t> shape = shape_of(scales, count, rows);
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

// FP8's codes and scales, block by block.
void put_fp8(const uint8_t* from, const float* scales, const Picked& p, int64_t r, int64_t cols,
             uint8_t* to) {
  for (int64_t b = 0; b < cols / kBlock; ++b, from += kBlock) {
    const float scale = scales[p.stride == 0 ? 0 : r / p.rows * p.stride + b / p.cols];
    std::memcpy(to, from, kBlock);
    std::memcpy(to + kBlock, &scale, sizeof scale);
    to += sizeof(quant::FP8::Block);
  }
}

void put_int8(const uint8_t* from, float scale, int64_t cols, uint8_t* to) {
  std::memcpy(to, &scale, sizeof scale);
  std::memcpy(to + sizeof scale, from, static_cast<size_t>(cols));
}

Result<const TensorSource*> scales_of(const WeightReader& reader, const TensorSource& weight) {
  const TensorSource* scales = reader.find_name(weight.name + "_scale_inv");
  if (scales == nullptr) scales = reader.find_name(weight.name + "_scale");
  if (scales != nullptr) return scales;
  return invalid_argument(
      "tensor '{}' of type {} has no scale: '{}_scale_inv' and '{}_scale' are "
      "missing",
      weight.name, weight.dtype, weight.name, weight.name);
}

// Whether a GEMM with integer weights takes activations that are not quantised: true if no group of
// quantization_config says that activations are quantised.
bool leaves_activations(const json::Value& config) {
  const json::Value* q = quantization_config(config);
  const json::Value* groups = q != nullptr ? q->find("config_groups") : nullptr;
  if (groups == nullptr || !groups->is_object()) return false;
  return std::ranges::any_of(groups->as_object(), [](const auto& group) {
    const json::Value* weights = group.second.find("weights");
    const json::Value* type = weights != nullptr ? weights->find("type") : nullptr;
    const json::Value* input = group.second.find("input_activations");
    if (weights == nullptr || !weights->is_object()) return false;
    const bool whole = type == nullptr || (type->is_string() && type->as_string() == "int");
    return whole && (input == nullptr || input->is_null());
  });
}

// FP8 has scales of any of the three kinds.
Result<Picked> pick_fp8(const WeightReader& reader, const TensorSource& weight,
                        const TensorSource& scales, int64_t count, int64_t rows, int64_t cols) {
  return pick(weight, scales, block_shape(reader.config()), count, rows, cols);
}

// INT8 has one scale for each row: integer sums run over a whole row.
Result<Picked> pick_int8(const WeightReader& reader, const TensorSource& weight,
                         const TensorSource& scales, int64_t count, int64_t rows, int64_t cols) {
  if (cols > quant::INT8::kMostCols) {
    return unsupported("tensor '{}': sums of {} products of int8 may not fit 32 bits: at most {}",
                       weight.name, cols, quant::INT8::kMostCols);
  }
  if (leaves_activations(reader.config())) {
    return unsupported(
        "tensor '{}': quantization_config leaves activations as they are (W8A16), and products of "
        "int8 round them: use a W8A8 checkpoint, or the unquantised one",
        weight.name);
  }
  const TensorSource* zero = reader.find_name(weight.name + "_zero_point");
  if (zero != nullptr &&
      std::any_of(zero->data, zero->data + zero->bytes, [](uint8_t b) { return b != 0; })) {
    return unsupported("tensor '{}' is not zero: int8 weights are read where they are symmetric",
                       zero->name);
  }
  if (scales.elements() == 1) return Picked{rows, cols, 0, 0};
  if (shape_of(scales, count, rows) == std::vector{rows}) return Picked{1, cols, 1, rows};
  return invalid_argument(
      "tensor '{}' has shape [{}], which is neither one scale nor one a row of '{}' [{}] (int8 "
      "groups of columns are not read)",
      scales.name, fmt::join(scales.shape, ", "), weight.name, fmt::join(weight.shape, ", "));
}

}  // namespace

Result<Rows> scaled_rows(const WeightReader& reader, const TensorSource& weight, int64_t index,
                         int64_t count, int64_t rows, int64_t cols) {
  const bool whole = weight.dtype == "I8";
  if (!whole && cols % kBlock != 0) {
    return unsupported("tensor '{}': rows of {} numbers are not whole blocks of {} of fp8",
                       weight.name, cols, kBlock);
  }
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* scales, scales_of(reader, weight));
  FRESHET_ASSIGN_OR_RETURN(
      const Picked p, (whole ? pick_int8 : pick_fp8)(reader, weight, *scales, count, rows, cols));
  const quant::Format format = whole ? quant::Format::kINT8 : quant::Format::kFP8;
  if (reader.shapes_suffice()) return Rows::shape(format, rows, cols);
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> all,
                           reader.values(*scales, scales->elements()));
  const float* of_matrix = all.data() + index * p.count;
  Rows out;
  out.format = format;
  out.cols = cols;
  const size_t stride = quant::row_bytes(out.format, cols);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* from = weight.data + (index * rows + r) * cols;
    uint8_t* to = buffer.data() + static_cast<size_t>(r) * stride;
    out.rows.push_back(to);
    if (whole) {
      put_int8(from, of_matrix[p.stride == 0 ? 0 : r], cols, to);
    } else {
      put_fp8(from, of_matrix, p, r, cols, to);
    }
  }
  out.owned.push_back(std::move(buffer));
  return out;
}

}  // namespace freshet::models
