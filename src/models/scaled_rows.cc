#include "models/scaled_rows.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "models/quantization_config.h"
#include "quant/fp8.h"
#include "quant/int8.h"
#include "quant/int_groups.h"
#include "quant/mxfp8.h"
#include "tensor/dtype.h"

namespace freshet::models {
namespace {

using loader::TensorSource;
using quant::Format;

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

// The scale of row r and column c has the index r / rows * stride + c / cols.
struct Picked {
  int64_t rows = 0, cols = 0, stride = 0;
  int64_t count = 0;  // of a matrix
  int64_t of(int64_t r, int64_t c) const { return stride == 0 ? 0 : r / rows * stride + c / cols; }
};

// Whether a tensor holds powers of two.
bool holds_powers(const TensorSource& t) {
  return t.dtype == "U8" || t.dtype == "F8_E8M0";
}

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
  if (block.rows > 0 && block.cols > 0) {
    const std::vector<int64_t> blocks = {(rows + block.rows - 1) / block.rows,
                                         (cols + block.cols - 1) / block.cols};
    if (shape == blocks) return Picked{block.rows, block.cols, blocks[1], n / count};
  }
  if (shape.size() == 2 && shape[0] == rows && shape[1] > 0 && cols % shape[1] == 0) {
    return Picked{1, cols / shape[1], shape[1], n / count};
  }
  return invalid_argument(
      "tensor '{}' has shape [{}], which is neither one scale, one a row, one a group of columns "
      "nor one for {} by {} numbers of '{}' [{}]",
      scales.name, fmt::join(scales.shape, ", "), block.rows, block.cols, weight.name,
      fmt::join(weight.shape, ", "));
}

// Codes and scales, block by block.
template <class F>
void put_fp8(const uint8_t* from, const float* scales, const Picked& p, int64_t r, int64_t cols,
             uint8_t* to) {
  for (int64_t c = 0; c < cols; c += F::kBlockSize, from += F::kBlockSize) {
    const float scale = scales[p.of(r, c)];
    std::memcpy(to, from, F::kBlockSize);
    std::memcpy(to + F::kBlockSize, &scale, sizeof scale);
    to += sizeof(typename F::Block);
  }
}
void put_mxfp8(const uint8_t* from, const uint8_t* powers, int64_t cols, uint8_t* to) {
  constexpr int64_t kBlock = quant::MXFP8::kBlockSize;
  for (int64_t c = 0; c < cols; c += kBlock, from += kBlock, to += sizeof(quant::MXFP8::Block)) {
    std::memcpy(to, from, kBlock);
    to[kBlock] = *powers++;
  }
}

void put_int8(const uint8_t* from, float scale, int64_t cols, uint8_t* to) {
  std::memcpy(to, &scale, sizeof scale);
  std::memcpy(to + sizeof scale, from, static_cast<size_t>(cols));
}
// Signed codes with zero points (nullptr: 0) as unsigned ones.
template <class F>
void put_int8_groups(const uint8_t* from, const float* scales, const uint8_t* zeros,
                     const Picked& p, int64_t r, int64_t cols, uint8_t* to) {
  for (int64_t c = 0; c < cols; c += F::kBlockSize, to += sizeof(typename F::Block)) {
    typename F::Block b;
    const int64_t at = p.of(r, c);
    F::set_scale(b, scales[at], zeros != nullptr ? zeros[at] ^ 0x80 : 0x80);
    for (int i = 0; i < F::kBlockSize; ++i) b.qs[i] = from[c + i] ^ 0x80;
    std::memcpy(to, &b, sizeof b);
  }
}

void put_q8_0(const uint8_t* from, const float* scales, const Picked& p, int64_t r, int64_t cols,
              uint8_t* to) {
  for (int64_t c = 0; c < cols; c += 32, to += 34) {
    const uint16_t d = f32_to_f16(scales[p.of(r, c)]);
    std::memcpy(to, &d, sizeof d);
    std::memcpy(to + 2, from + c, 32);
  }
}

Result<const TensorSource*> scales_of(const WeightReader& reader, const TensorSource& weight) {
  for (const char* suffix : {"_scale_inv", "_scale"}) {
    if (const TensorSource* found = reader.find_name(weight.name + suffix)) return found;
  }
  if (const TensorSource* found = reader.find_name(bitsandbytes_scale(weight.name))) return found;
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

// What a matrix of scaled numbers becomes.
struct Plan {
  Format format;
  Picked picked;
  const TensorSource* zeros = nullptr;
  std::optional<Rows::Outliers> outliers;
};

std::string sibling_name(std::string_view weight, std::string_view name) {
  return std::string(weight.substr(0, weight.rfind('.') + 1)) + std::string(name);
}

// The outlier columns that a file lists; nullopt: none are listed.
Result<std::optional<Rows::Outliers>> outliers_of(const WeightReader& reader,
                                                  const TensorSource& weight, int64_t rows,
                                                  int64_t cols) {
  const TensorSource* list = reader.find_name(outlier_columns_of(weight.name));
  if (list == nullptr) return std::optional<Rows::Outliers>();
  const auto wrong = [](const TensorSource& t, const std::string& wanted) {
    return invalid_argument("tensor '{}' is {} [{}]: outlier columns have {}", t.name, t.dtype,
                            fmt::join(t.shape, ", "), wanted);
  };
  const int64_t count = list->elements();
  if (list->dtype != "I32" || list->shape.size() != 1 || count > cols)
    return wrong(*list, fmt::format("an I32 [n], n at most {}", cols));
  Rows::Outliers out;
  out.columns.resize(static_cast<size_t>(count));
  if (count > 0) std::memcpy(out.columns.data(), list->data, list->bytes);
  for (size_t i = 0; i < out.columns.size(); ++i) {
    const int32_t c = out.columns[i];
    if (c < 0 || c >= cols || (i > 0 && c <= out.columns[i - 1]))
      return invalid_argument("tensor '{}' lists column {}: columns ascend from 0 to {}",
                              list->name, c, cols - 1);
  }
  if (count == 0) return std::optional(std::move(out));
  const TensorSource* values = reader.find_name(outlier_weight_of(weight.name));
  if (values == nullptr)
    return invalid_argument("tensor '{}' is missing, which '{}' belongs to",
                            outlier_weight_of(weight.name), list->name);
  const bool halves = values->format == Format::kBF16 || values->format == Format::kF16;
  if (!halves || values->shape != std::vector{rows, count})
    return wrong(*values, fmt::format("numbers in BF16 or F16, [{}, {}]", rows, count));
  out.format = *values->format;
  for (int64_t r = 0; r < rows; ++r) out.rows.push_back(values->data + r * count * 2);
  return std::optional(std::move(out));
}

Result<Plan> plan_fp8(const WeightReader& reader, const TensorSource& weight,
                      const TensorSource& scales, int64_t count, int64_t rows, int64_t cols) {
  const BlockShape block = block_shape(reader.config());
  FRESHET_ASSIGN_OR_RETURN(const Picked p, pick(weight, scales, block, count, rows, cols));
  if (cols % 128 == 0 && p.cols % 128 == 0) return Plan{Format::kFP8, p, nullptr, std::nullopt};
  if (cols % 32 == 0 && p.cols % 32 == 0) {
    const bool powers = holds_powers(scales) && p.rows == 1 && p.cols == 32;
    return Plan{powers ? Format::kMXFP8 : Format::kFP8G32, p, nullptr, std::nullopt};
  }
  return unsupported(
      "tensor '{}' has rows of {} numbers with a scale for {} columns: fp8 is read where both are "
      "multiples of 32",
      weight.name, cols, p.cols);
}

// The zero points that are not all 0; nullptr: none.
Result<const TensorSource*> zeros_of(const WeightReader& reader, const TensorSource& weight,
                                     const TensorSource& scales) {
  const TensorSource* zero = reader.find_name(weight.name + "_zero_point");
  if (zero == nullptr) return zero;
  if (std::all_of(zero->data, zero->data + zero->bytes, [](uint8_t b) { return b == 0; })) {
    return nullptr;
  }
  if (zero->dtype == "I8" && zero->elements() == scales.elements()) return zero;
  return invalid_argument("tensor '{}' is {} [{}]: zero points are read from I8 [{}]", zero->name,
                          zero->dtype, fmt::join(zero->shape, ", "), fmt::join(scales.shape, ", "));
}

// INT8 has one scale for each row, since integer sums run over a whole row, and rounds activations.
// Groups, zero points, and weights whose activations must stay as they are, become q8_0 or groups.
Result<Plan> plan_int8(const WeightReader& reader, const TensorSource& weight,
                       const TensorSource& scales, int64_t count, int64_t rows, int64_t cols) {
  FRESHET_ASSIGN_OR_RETURN(const Picked p, pick(weight, scales, {0, 0}, count, rows, cols));
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* zeros, zeros_of(reader, weight, scales));
  const bool bitsandbytes = scales.name == bitsandbytes_scale(weight.name);
  std::optional<Rows::Outliers> outliers;
  if (count == 1) {
    FRESHET_ASSIGN_OR_RETURN(outliers, outliers_of(reader, weight, rows, cols));
  }
  const bool keeps = !outliers && (bitsandbytes || leaves_activations(reader.config()));
  if (!keeps && zeros == nullptr && p.cols == cols) {
    if (cols <= quant::INT8::kMostCols) return Plan{Format::kINT8, p, nullptr, std::move(outliers)};
    return unsupported("tensor '{}': sums of {} products of int8 may not fit 32 bits: at most {}",
                       weight.name, cols, quant::INT8::kMostCols);
  }
  if (outliers) {
    return unsupported(
        "tensor '{}' has outlier columns, for which it needs one scale a row and no "
        "zero points",
        weight.name);
  }
  if (cols % 32 != 0 || p.cols % 32 != 0) {
    return unsupported(
        "tensor '{}' has rows of {} numbers with a scale for {} columns: int8 without rounded "
        "activations is read where both are multiples of 32",
        weight.name, cols, p.cols);
  }
  const bool wide = cols % 128 == 0 && p.cols % 128 == 0;
  return Plan{wide ? Format::kInt8G128 : Format::kInt8G32, p, zeros, std::nullopt};
}

Result<std::vector<float>> scale_values(const WeightReader& reader, const TensorSource& weight,
                                        const TensorSource& scales) {
  if (holds_powers(scales)) {
    std::vector<float> all(scales.bytes);
    for (size_t i = 0; i < all.size(); ++i) all[i] = quant::e8m0(scales.data[i]);
    return all;
  }
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> all, reader.values(scales, scales.elements()));
  if (scales.name == bitsandbytes_scale(weight.name)) {
    for (float& most : all) most /= 127.0f;
  }
  return all;
}

// The rows as F32, for what has no products in two parts.
Result<Rows> joined_rows(const Rows& apart) {
  Rows out;
  out.cols = apart.cols;
  const size_t stride = static_cast<size_t>(apart.cols) * sizeof(float);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(apart.rows.size() * stride));
  for (size_t r = 0; r < apart.rows.size(); ++r) {
    uint8_t* const to = buffer.data() + r * stride;
    apart.decode(r, reinterpret_cast<float*>(to));
    out.rows.push_back(to);
  }
  out.owned.push_back(std::move(buffer));
  return out;
}

}  // namespace

int64_t split_cols(const loader::Checkpoint& checkpoint) {
  constexpr std::string_view kList = ".outlier_columns";
  int64_t most = 0;
  for (const TensorSource& t : checkpoint.tensors()) {
    if (!t.name.ends_with(kList) || t.elements() == 0) continue;
    const std::string stem = t.name.substr(0, t.name.size() - kList.size());
    const TensorSource* weight = checkpoint.find(stem + ".weight");
    if (weight != nullptr && weight->shape.size() == 2)
      most = std::max(most, weight->shape[1] + t.elements());
  }
  return most;
}

std::string bitsandbytes_scale(std::string_view weight) {
  return sibling_name(weight, "SCB");
}
std::string outlier_columns_of(std::string_view weight) {
  return sibling_name(weight, "outlier_columns");
}
std::string outlier_weight_of(std::string_view weight) {
  return sibling_name(weight, "outlier_weight");
}

Result<Rows> scaled_rows(const WeightReader& reader, const TensorSource& weight, int64_t index,
                         int64_t count, int64_t rows, int64_t cols, Inputs inputs) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* scales, scales_of(reader, weight));
  FRESHET_ASSIGN_OR_RETURN(Plan plan, (weight.dtype == "I8" ? plan_int8 : plan_fp8)(
                                          reader, weight, *scales, count, rows, cols));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> all, scale_values(reader, weight, *scales));
  const Picked& p = plan.picked;
  // GPUs have no kernels of int8 groups, but of blocks with an F16.
  const bool groups = plan.format == Format::kInt8G128 || plan.format == Format::kInt8G32;
  const bool halves =
      std::ranges::all_of(all, [](float v) { return f16_to_f32(f32_to_f16(v)) == v; });
  if (groups && plan.zeros == nullptr && halves) plan.format = Format::kQ8_0;
  const bool joins = inputs == Inputs::kInOrder && plan.outliers && !plan.outliers->columns.empty();
  if (reader.shapes_suffice()) {
    Rows out = Rows::shape(joins ? Format::kF32 : plan.format, rows, cols);
    if (plan.outliers && !joins) out.outliers = std::move(*plan.outliers);
    return out;
  }
  const float* of_matrix = all.data() + index * p.count;
  Rows out;
  out.format = plan.format;
  out.cols = cols;
  const size_t stride = quant::row_bytes(out.format, cols);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  const uint8_t* zeros = plan.zeros != nullptr ? plan.zeros->data + index * p.count : nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* from = weight.data + (index * rows + r) * cols;
    uint8_t* to = buffer.data() + static_cast<size_t>(r) * stride;
    out.rows.push_back(to);
    switch (plan.format) {
      case Format::kINT8:
        put_int8(from, of_matrix[p.of(r, 0)], cols, to);
        break;
      case Format::kInt8G128:
        put_int8_groups<quant::Int8G128>(from, of_matrix, zeros, p, r, cols, to);
        break;
      case Format::kInt8G32:
        put_int8_groups<quant::Int8G32>(from, of_matrix, zeros, p, r, cols, to);
        break;
      case Format::kQ8_0:
        put_q8_0(from, of_matrix, p, r, cols, to);
        break;
      case Format::kMXFP8:
        put_mxfp8(from, scales->data + index * p.count + r * p.stride, cols, to);
        break;
      case Format::kFP8:
        put_fp8<quant::FP8>(from, of_matrix, p, r, cols, to);
        break;
      default:
        put_fp8<quant::FP8G32>(from, of_matrix, p, r, cols, to);
    }
  }
  out.owned.push_back(std::move(buffer));
  if (plan.outliers) out.outliers = std::move(*plan.outliers);
  if (joins) return joined_rows(out);
  return out;
}

}  // namespace freshet::models
