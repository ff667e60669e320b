#include "quantizer/containers/packing.h"

#include <algorithm>
#include <cmath>

#include "quant/fp8.h"
#include "quantizer/containers/scheme.h"
#include "tensor/dtype.h"

namespace freshet::quantizer {
namespace {

Status check_sizes(const std::string& stem, const CodedMatrix& m, const Scheme& s) {
  const auto count = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b); };
  if (m.rows <= 0 || m.cols <= 0) {
    return internal_error("matrix '{}' is [{}, {}]", stem, m.rows, m.cols);
  }
  const int64_t groups = column_groups(m, s);
  if (m.codes.size() != count(m.rows, m.cols) ||
      m.scales.size() != count(row_groups(m, s), groups)) {
    return internal_error("matrix '{}' [{}, {}] has {} codes and {} scales", stem, m.rows, m.cols,
                          m.codes.size(), m.scales.size());
  }
  const size_t zeros = s.symmetric ? 0 : count(m.rows, groups);
  if (m.zeros.size() != zeros) {
    return internal_error("matrix '{}' has {} zero points instead of {}", stem, m.zeros.size(),
                          zeros);
  }
  const size_t ordered = m.group_of_column.size();
  if (ordered != 0 && ordered != static_cast<size_t>(m.cols)) {
    return internal_error("matrix '{}' has groups of {} columns instead of {}", stem, ordered,
                          m.cols);
  }
  const bool in_range =
      std::ranges::all_of(m.group_of_column, [&](int32_t g) { return g >= 0 && g < groups; });
  return in_range ? Status() : internal_error("matrix '{}' has a column in no group", stem);
}

// The bytes of a scale, or false if the type does not hold it.
bool put_scale(float v, ScaleType type, std::vector<uint8_t>& bytes) {
  const auto put = [&](auto bits) {
    const auto* from = reinterpret_cast<const uint8_t*>(&bits);
    bytes.insert(bytes.end(), from, from + sizeof bits);
  };
  switch (type) {
    case ScaleType::kF16:
      put(f32_to_f16(v));
      return f16_to_f32(f32_to_f16(v)) == v;
    case ScaleType::kBF16:
      put(f32_to_bf16(v));
      return bf16_to_f32(f32_to_bf16(v)) == v;
    case ScaleType::kF32:
      put(v);
      return true;
    case ScaleType::kE4M3:
      put(quant::f32_to_e4m3(v));
      return quant::e4m3_to_f32(quant::f32_to_e4m3(v)) == v;
    case ScaleType::kE8M0: {
      int exponent = 0;
      const bool power = std::frexp(v, &exponent) == 0.5f;  // v = 2^(exponent - 1)
      put(static_cast<uint8_t>(std::clamp(exponent - 1 + 127, 0, 254)));
      return power && exponent >= -126 && exponent <= 128;
    }
  }
  return false;
}

const char* safetensors_name(ScaleType type) {
  switch (type) {
    case ScaleType::kF16:
      return "F16";
    case ScaleType::kBF16:
      return "BF16";
    case ScaleType::kF32:
      return "F32";
    case ScaleType::kE8M0:
      return "U8";
    case ScaleType::kE4M3:
      return "F8_E4M3";
  }
  return "";
}

}  // namespace

Status check_matrix(const std::string& stem, const CodedMatrix& m, const Scheme& s) {
  FRESHET_RETURN_IF_ERROR(check_sizes(stem, m, s));
  if (s.group_rows == 1 && s.group > 0 && m.cols % s.group != 0) {
    return unsupported(
        "matrix '{}' has rows of {} numbers, which are not whole groups of {}: choose a group that "
        "divides them, or leave this matrix as it is",
        stem, m.cols, s.group);
  }
  const bool low = std::ranges::all_of(m.codes, [&](uint8_t c) { return c >> s.bits == 0; });
  const bool low_zeros = std::ranges::all_of(m.zeros, [&](uint8_t z) { return z >> s.bits == 0; });
  if (!low || !low_zeros) {
    return internal_error("matrix '{}' has a code of more than {} bits", stem, s.bits);
  }
  const bool finite = std::ranges::all_of(m.scales, [](float v) { return std::isfinite(v); });
  if (!finite || !std::isfinite(m.global_scale) || !std::isfinite(m.input_scale)) {
    return internal_error("matrix '{}' has a scale that is not finite", stem);
  }
  if (needs_input_scale(s) && !(m.input_scale > 0)) {
    return invalid_argument(
        "matrix '{}': scheme {} needs the range of its inputs: give a calibration text, or take a "
        "scheme without static activations",
        stem, s.name);
  }
  return {};
}

StoredTensor i32_tensor(std::string name, std::vector<int64_t> shape,
                        const std::vector<uint32_t>& words) {
  return {std::move(name), "I32", std::move(shape), bytes_of(words)};
}

StoredTensor f32_tensor(std::string name, std::vector<int64_t> shape,
                        std::span<const float> values) {
  return {std::move(name), "F32", std::move(shape), bytes_of(values)};
}

Result<StoredTensor> scale_tensor(std::string name, std::vector<int64_t> shape,
                                  std::span<const float> values, ScaleType type) {
  StoredTensor t{std::move(name), safetensors_name(type), std::move(shape), {}};
  for (const float v : values) {
    if (put_scale(v, type, t.bytes)) continue;
    return internal_error("tensor '{}': {} is no number of type {}", t.name, v, t.dtype);
  }
  return t;
}

Result<StoredTensor> turned_scales(std::string name, const CodedMatrix& m, const Scheme& s) {
  const int64_t groups = column_groups(m, s);
  std::vector<float> scales(m.scales.size());
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t g = 0; g < groups; ++g)
      scales[static_cast<size_t>(g * m.rows + r)] = m.scales[static_cast<size_t>(r * groups + g)];
  }
  return scale_tensor(std::move(name), {groups, m.rows}, scales, s.scale);
}

StoredTensor nibble_tensor(std::string name, const CodedMatrix& m) {
  StoredTensor t{std::move(name), "U8", {m.rows, m.cols / 2}, {}};
  t.bytes.resize(m.codes.size() / 2);
  for (size_t i = 0; i < t.bytes.size(); ++i) {
    t.bytes[i] = static_cast<uint8_t>(m.codes[2 * i] | m.codes[2 * i + 1] << 4);
  }
  return t;
}

StoredTensor byte_tensor(std::string name, const CodedMatrix& m, const Scheme& s) {
  const bool whole = s.levels == Levels::kInteger;
  StoredTensor t{std::move(name), whole ? "I8" : "F8_E4M3", {m.rows, m.cols}, m.codes};
  const int offset = whole ? 1 << (s.bits - 1) : 0;
  for (uint8_t& b : t.bytes) b = static_cast<uint8_t>(b - offset);
  return t;
}

float divisor_for(float factor) {
  const float near = 1.0f / factor;
  float d = std::nextafterf(std::nextafterf(near, 0.0f), 0.0f);
  for (int i = 0; i < 5; ++i, d = std::nextafterf(d, INFINITY)) {
    if (1.0f / d == factor) return d;
  }
  return near;
}

Result<Scheme> only_scheme(const ConfigRequest& request, std::string_view container) {
  FRESHET_CHECK(!request.groups.empty(), "a request has a scheme");
  if (request.groups.size() == 1) return request.groups.front().scheme;
  return unsupported(
      "format {} has one scheme for all layers, and {} were chosen: take compressed-tensors",
      container, request.groups.size());
}

std::string layer_off(const ModelFacts& facts, int64_t rows, int64_t cols) {
  for (const LayerShape& l : facts.layers) {
    if (l.rows % rows != 0 || l.cols % cols != 0) {
      return fmt::format("{} [{}, {}]", l.name, l.rows, l.cols);
    }
  }
  return {};
}

json::Array ignored_names(const ConfigRequest& request) {
  json::Array names;
  for (const std::string& name : request.ignore) names.emplace_back(name);
  return names;
}

std::vector<std::pair<std::string, json::Value>> no_side_files(const json::Value&) {
  return {};
}

Scheme as_it_is(Scheme scheme, std::string_view) {
  return scheme;
}

Status nothing_to_settle(CodedMatrix&, const Scheme&) {
  return {};
}

}  // namespace freshet::quantizer
