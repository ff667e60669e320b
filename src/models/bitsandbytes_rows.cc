#include "models/bitsandbytes_rows.h"

#include <algorithm>
#include <cstring>

#include "base/json.h"
#include "quant/nf4.h"

namespace freshet::models {
namespace {

using loader::TensorSource;
using quant::Format;

// What describes the blocks of a weight.
struct State {
  Format format;
  int64_t block;
  std::vector<float> scales;  // one for each block
};

Result<const TensorSource*> beside(const WeightReader& reader, const TensorSource& weight,
                                   std::string_view suffix) {
  const std::string name = weight.name + std::string(suffix);
  if (const TensorSource* found = reader.find_name(name)) return found;
  return invalid_argument("tensor '{}' is missing: '{}' has no meaning without it", name,
                          weight.name);
}

int64_t whole_number(const json::Value& object, std::string_view key) {
  const json::Value* v = object.find(key);
  return v != nullptr && v->is_number() ? v->as_int64().value_or(0) : 0;
}

int64_t blocks_of(int64_t n, int64_t block) {
  return (n + block - 1) / block;
}

// The F32 scales of doubly quantised ones.
Result<std::vector<float>> nested_scales(const WeightReader& reader, const TensorSource& weight,
                                         const TensorSource& absmax, const TensorSource& source,
                                         const json::Value& state) {
  const int64_t n = absmax.elements(), block = whole_number(state, "nested_blocksize");
  const json::Value* offset = state.find("nested_offset");
  if (block <= 0 || offset == nullptr || !offset->is_number()) {
    return invalid_argument("tensor '{}' lacks a nested_blocksize or a nested_offset", source.name);
  }
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* map, beside(reader, weight, ".nested_quant_map"));
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* most, beside(reader, weight, ".nested_absmax"));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> levels, reader.values(*map, 256));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> outer,
                           reader.values(*most, blocks_of(n, block)));
  const auto mean = static_cast<float>(offset->as_double());
  std::vector<float> scales(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const float inner = levels[absmax.data[i]] * outer[static_cast<size_t>(i / block)];
    scales[static_cast<size_t>(i)] = inner + mean;
  }
  return scales;
}

Result<State> state_of(const WeightReader& reader, const TensorSource& weight, int64_t rows,
                       int64_t cols) {
  const TensorSource* source = reader.find_name(weight.name + ".quant_state.bitsandbytes__nf4");
  if (source == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(source, beside(reader, weight, ".quant_state.bitsandbytes__fp4"));
  }
  auto parsed = json::parse({reinterpret_cast<const char*>(source->data), source->bytes});
  if (!parsed.ok() || !parsed->is_object()) {
    return invalid_argument("tensor '{}' is no JSON object", source->name);
  }
  const json::Value& text = *parsed;
  State state{source->name.ends_with("nf4") ? Format::kNF4 : Format::kFP4,
              whole_number(text, "blocksize"),
              {}};
  const json::Value* shape = text.find("shape");
  const auto side = [&](size_t i) {
    const json::Value& v = shape->as_array()[i];
    return v.is_number() ? v.as_int64().value_or(0) : 0;
  };
  if (shape == nullptr || !shape->is_array() || shape->as_array().size() != 2 || side(0) != rows ||
      side(1) != cols || weight.bytes * 2 != static_cast<size_t>(rows * cols)) {
    return invalid_argument("tensor '{}' and '{}' describe no matrix [{}, {}]", weight.name,
                            source->name, rows, cols);
  }
  if (state.block <= 0 || state.block % 2 != 0) {
    return invalid_argument("tensor '{}' has no blocksize that is even", source->name);
  }
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* map, beside(reader, weight, ".quant_map"));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> levels, reader.values(*map, 16));
  const auto& known = state.format == Format::kNF4 ? quant::kNf4Levels : quant::kFp4Levels;
  if (!std::equal(levels.begin(), levels.end(), known)) {
    return unsupported("tensor '{}' has other levels than those of {}", map->name,
                       quant::info(state.format).name);
  }
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* absmax, beside(reader, weight, ".absmax"));
  const int64_t blocks = blocks_of(rows * cols, state.block);
  if (absmax->elements() != blocks) {
    return invalid_argument("tensor '{}' has {} numbers, expected {}", absmax->name,
                            absmax->elements(), blocks);
  }
  if (absmax->dtype == "U8") {
    FRESHET_ASSIGN_OR_RETURN(state.scales, nested_scales(reader, weight, *absmax, *source, text));
  } else {
    FRESHET_ASSIGN_OR_RETURN(state.scales, reader.values(*absmax, blocks));
  }
  return state;
}

int code_at(const TensorSource& weight, int64_t i) {
  return weight.data[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15;
}

void put_plain(const TensorSource& weight, const State& s, int64_t first, int64_t cols,
               uint8_t* to) {
  const auto& levels = s.format == Format::kNF4 ? quant::kNf4Levels : quant::kFp4Levels;
  for (int64_t i = first; i < first + cols; ++i, to += sizeof(float)) {
    const float v = levels[code_at(weight, i)] * s.scales[static_cast<size_t>(i / s.block)];
    std::memcpy(to, &v, sizeof v);
  }
}

void put_blocks(const TensorSource& weight, const State& s, int64_t first, int64_t cols,
                uint8_t* to) {
  for (int64_t i = first; i < first + cols; i += 64, to += 36) {
    for (int64_t k = 0; k < 32; ++k) {  // the first of two goes to the low half
      const uint8_t two = weight.data[i / 2 + k];
      to[k] = static_cast<uint8_t>(two >> 4 | two << 4);
    }
    std::memcpy(to + 32, &s.scales[static_cast<size_t>(i / s.block)], sizeof(float));
  }
}

}  // namespace

bool is_bitsandbytes4(const WeightReader& reader, const TensorSource& source) {
  return source.name.ends_with(".weight") && reader.find_name(source.name + ".absmax") != nullptr;
}

Result<Rows> bitsandbytes4_rows(const WeightReader& reader, const TensorSource& weight,
                                int64_t rows, int64_t cols) {
  FRESHET_ASSIGN_OR_RETURN(const State state, state_of(reader, weight, rows, cols));
  const bool whole = cols % 64 == 0 && state.block % 64 == 0;
  Rows out;
  out.format = whole ? state.format : Format::kF32;
  if (reader.shapes_suffice()) return Rows::shape(out.format, rows, cols);
  out.cols = cols;
  const size_t stride = quant::row_bytes(out.format, cols);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = buffer.data() + static_cast<size_t>(r) * stride;
    out.rows.push_back(to);
    (whole ? put_blocks : put_plain)(weight, state, r * cols, cols, to);
  }
  out.owned.push_back(std::move(buffer));
  return out;
}

}  // namespace freshet::models
