#include "models/fp4_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/mxfp4.h"
#include "quant/nvfp4.h"

namespace freshet::models {
namespace {

using loader::TensorSource;
using quant::Format;

std::string scale_name(const TensorSource& packed) {
  if (packed.name.ends_with(".weight")) return packed.name + "_scale";
  return packed.name.substr(0, packed.name.rfind('.')) + ".weight_scale";
}

Status check_shape(const TensorSource& t, int64_t rows, int64_t across) {
  if (t.shape == std::vector{rows, across}) return {};
  return invalid_argument(
      "tensor '{}' has shape [{}], but the model's configuration asks for [{}, {}]", t.name,
      fmt::join(t.shape, ", "), rows, across);
}

// The F32 by which a tensor's block scales are multiplied.
Result<float> whole_scale(const WeightReader& reader, const std::string& scales) {
  const std::string factor = scales + "_2";
  const std::string divisor = scales.substr(0, scales.rfind("_scale")) + "_global_scale";
  const TensorSource* found = reader.find_name(factor);
  const bool divides = found == nullptr;
  if (divides) found = reader.find_name(divisor);
  if (found == nullptr) {
    return invalid_argument("tensors '{}' and '{}' are missing: '{}' has no meaning without one",
                            factor, divisor, scales);
  }
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> value, reader.values(*found, 1));
  const float scale = divides ? 1.0f / value[0] : value[0];
  if (std::isfinite(scale) && scale != 0.0f) return scale;
  return invalid_argument("tensor '{}' is {}: a scale must be a number other than 0", found->name,
                          value[0]);
}

// Packs codes of a block, two neighbours in each byte, so that the first half of them are low.
void put_codes(const uint8_t* from, int block, uint8_t* to) {
  for (int i = 0; i < block / 2; ++i) {
    const int low = from[i / 2] >> (i % 2 * 4) & 15;
    const int high = from[block / 4 + i / 2] >> (i % 2 * 4) & 15;
    to[i] = static_cast<uint8_t>(low | high << 4);
  }
}

}  // namespace

bool is_fp4(const WeightReader& reader, const TensorSource& source) {
  if (source.dtype != "U8") return false;
  return source.name.ends_with(".weight_packed") || reader.find_name(scale_name(source)) != nullptr;
}

Result<Rows> fp4_rows(const WeightReader& reader, const TensorSource& packed, int64_t rows,
                      int64_t cols) {
  const TensorSource* scales = reader.find_name(scale_name(packed));
  if (scales == nullptr) {
    return invalid_argument("tensor '{}' is missing: '{}' has no meaning without it",
                            scale_name(packed), packed.name);
  }
  const bool powers = scales->dtype == "U8" || scales->dtype == "F8_E8M0";
  if (!powers && scales->dtype != "F8_E4M3") {
    return unsupported("tensor '{}' is {}: scales of FP4 are F8_E4M3 (NVFP4) or U8 (MXFP4)",
                       scales->name, scales->dtype);
  }
  const int block = powers ? quant::MXFP4::kBlockSize : quant::NVFP4::kBlockSize;
  if (cols % block != 0) {
    return unsupported("tensor '{}': rows of {} numbers are not whole blocks of {}", packed.name,
                       cols, block);
  }
  FRESHET_RETURN_IF_ERROR(check_shape(packed, rows, cols / 2));
  FRESHET_RETURN_IF_ERROR(check_shape(*scales, rows, cols / block));
  const Format format = powers ? Format::kMXFP4 : Format::kNVFP4;
  float whole = 0.0f;
  if (!powers) {
    FRESHET_ASSIGN_OR_RETURN(whole, whole_scale(reader, scales->name));
  }
  if (powers &&
      std::find(scales->data, scales->data + scales->bytes, 255) != scales->data + scales->bytes) {
    return invalid_argument("tensor '{}' holds a NaN", scales->name);
  }
  if (reader.shapes_suffice()) return Rows::shape(format, rows, cols);
  Rows out;
  out.format = format;
  out.cols = cols;
  const size_t stride = quant::row_bytes(format, cols);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = buffer.data() + static_cast<size_t>(r) * stride;
    out.rows.push_back(to);
    if (!powers) {
      std::memcpy(to, &whole, sizeof whole);
      to += sizeof whole;
    }
    for (int64_t b = 0; b < cols / block; ++b, to += 1 + block / 2) {
      const int64_t at = r * (cols / block) + b;
      to[0] = scales->data[at];
      put_codes(packed.data + at * (block / 2), block, to + 1);
    }
  }
  out.owned.push_back(std::move(buffer));
  return out;
}

}  // namespace freshet::models
