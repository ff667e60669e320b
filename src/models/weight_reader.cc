#include "models/weight_reader.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "models/bitsandbytes_rows.h"
#include "models/finite.h"
#include "models/fp4_rows.h"
#include "models/integer_rows.h"
#include "models/quantization_config.h"
#include "models/scaled_rows.h"

namespace freshet::models {
namespace {

using loader::TensorSource;

std::string text_of(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Status wrong_shape(const TensorSource& source, std::span<const int64_t> wanted) {
  return invalid_argument("tensor '{}' has shape {}, but the model's configuration asks for {}",
                          source.name, text_of(source.shape), text_of(wanted));
}

// Checks that rows of `cols` numbers are whole blocks.
Status check_cols(const TensorSource& source, const quant::FormatInfo& info, int64_t cols) {
  if (cols % info.block_size == 0) return {};
  return invalid_argument("tensor '{}': rows of {} numbers are not whole blocks of {}", source.name,
                          cols, info.name);
}

// The same weight in the same memory, which from then on lives as long as either of the two.
ops::Weight alias(ops::Weight& w) {
  const auto owner = std::make_shared<const Buffer>(std::move(w.packed));
  const std::span<const uint8_t> bytes(owner->data(), owner->size());
  w.packed = Buffer::part_of(bytes, owner);
  return {w.format, w.rows, w.cols, w.use,     w.kernel, Buffer::part_of(bytes, owner),
          w.inputs, w.name, w.id,   w.outliers};
}

// The error for a matrix of a type that is not read, with the method that may have written it.
Status unknown_type(const TensorSource& source, const json::Value& config) {
  const json::Value* q = quantization_config(config);
  const std::string method = q != nullptr ? quantization_text(*q, "quant_method", "") : "";
  if (method.empty() || kQuantMethods.find(method) != std::string_view::npos) {
    return source.usable_format().status();
  }
  return unsupported("tensor '{}' has type {} and quant_method is '{}': {} are read", source.name,
                     source.dtype, method, kQuantMethods);
}

}  // namespace

WeightReader::WeightReader(const loader::Checkpoint& checkpoint, const Architecture& architecture,
                           ops::Ops& ops, const Progress& progress, WeightCache* packed,
                           WeightCacheWriter* copy)
    : checkpoint_(checkpoint),
      architecture_(architecture),
      ops_(ops),
      progress_(progress),
      packed_(packed),
      copy_(copy),
      is_gguf_(checkpoint.kind() == loader::Checkpoint::Kind::kGguf),
      names_(is_gguf_ ? WeightNames::gguf(architecture.gguf_names)
                      : WeightNames::safetensors(architecture.names)) {}

void Rows::decode(size_t r, float* out) const {
  std::vector<float> line;
  float* const to = inputs.empty() ? out : (line.resize(static_cast<size_t>(cols)), line.data());
  quant::info(format).decode(rows[r], to, cols);
  for (size_t c = 0; c < line.size(); ++c) out[inputs[c]] = line[c];
  if (outliers.columns.empty()) return;
  line.resize(outliers.columns.size());
  quant::info(outliers.format).decode(outliers.rows[r], line.data(), std::ssize(line));
  for (size_t i = 0; i < line.size(); ++i) out[outliers.columns[i]] = line[i];
}

const TensorSource* find_tensor(const loader::Checkpoint& checkpoint, const std::string& name) {
  if (const TensorSource* found = checkpoint.find(name)) return found;
  if (checkpoint.kind() == loader::Checkpoint::Kind::kGguf) return nullptr;
  // A base model is saved without the first part of its names, a multimodal one with more parts.
  for (const std::string_view base : {"model.", "transformer.", "gpt_neox.", "bert.", "roberta."}) {
    if (!name.starts_with(base)) continue;
    const std::string rest = name.substr(base.size());
    if (const TensorSource* found = checkpoint.find(rest)) return found;
    for (const std::string_view inner : {"model.language_model.", "model.text_model."}) {
      if (const TensorSource* found = checkpoint.find(std::string(inner) + rest)) return found;
    }
  }
  constexpr std::string_view kTower = "vision_tower.";
  if (name.starts_with(kTower)) {
    for (const std::string_view other : {"vision_tower.vision_model.", "model.vision_tower.",
                                         "model.vision_tower.vision_model."}) {
      const std::string full = std::string(other) + name.substr(kTower.size());
      if (const TensorSource* found = checkpoint.find(full)) return found;
    }
  }
  for (const std::string_view around : {"language_model.", "new.", "gte."}) {
    if (const TensorSource* found = checkpoint.find(std::string(around) + name)) return found;
  }
  return checkpoint.find("model." + name);  // saved from within a wrapper
}

const TensorSource* find_weight(const loader::Checkpoint& checkpoint, const std::string& stem) {
  if (const TensorSource* found = find_tensor(checkpoint, stem + ".weight")) return found;
  for (const std::string_view packed : kPackedSuffixes) {
    if (const TensorSource* found = find_tensor(checkpoint, stem + std::string(packed)))
      return found;
  }
  return find_tensor(checkpoint, stem);
}

const TensorSource* WeightReader::find_name(const std::string& name) const {
  return find_tensor(checkpoint_, name);
}

const TensorSource* WeightReader::find(Role role, std::string_view suffix, int layer,
                                       int expert) const {
  for (int choice = 0;; ++choice) {
    const std::string name = names_.stem(role, layer, expert, choice);
    if (name.empty()) break;
    if (const TensorSource* found = find_stem(name, suffix)) return found;
    for (const int other : shared_layers_) {
      const std::string alias = names_.stem(role, other, expert, choice);
      if (const TensorSource* found = find_stem(alias, suffix)) return found;
    }
  }
  // Tied weights may be saved under the other name alone.
  const bool tied = role == Role::kEmbedding && suffix == ".weight" && !is_gguf_;
  return tied ? find_weight(checkpoint_, stem(Role::kHead)) : nullptr;
}

const TensorSource* WeightReader::find_stem(const std::string& name,
                                            std::string_view suffix) const {
  if (suffix == ".weight") {
    const TensorSource* found = find_weight(checkpoint_, name);
    // Layer norms of old checkpoints have a gamma and a beta.
    return found == nullptr && !is_gguf_ ? find_name(name + ".gamma") : found;
  }
  if (const TensorSource* found = find_name(name + std::string(suffix))) return found;
  if (suffix == ".bias" && !is_gguf_) {
    if (const TensorSource* found = find_name(name + ".beta")) return found;
  }
  return suffix == ".bias" ? find_name(name + "_bias") : nullptr;
}

std::optional<std::vector<float>> WeightReader::metadata(const std::string& key) const {
  if (!is_gguf_) return std::nullopt;
  if (const auto one = checkpoint_.gguf()->get_f32(key)) return std::vector{*one};
  return checkpoint_.gguf()->get_floats(key);
}

Result<const TensorSource*> WeightReader::require(Role role, std::string_view suffix, int layer,
                                                  int expert) const {
  const TensorSource* found = find(role, suffix, layer, expert);
  if (found != nullptr) return found;
  return invalid_argument(
      "tensor '{}{}' is missing: the checkpoint is incomplete or not of type '{}'",
      stem(role, layer, expert), suffix, architecture_.type);
}

Result<Rows> WeightReader::rows(const TensorSource& source, int64_t rows, int64_t cols,
                                Layout layout, Inputs inputs) const {
  if (layout == Layout::kRows && !is_gguf_) {
    if (is_fp4(*this, source)) return fp4_rows(*this, source, rows, cols);
    if (is_packed(source)) return integer_rows(*this, source, rows, cols, inputs);
    if (is_bitsandbytes4(*this, source)) return bitsandbytes4_rows(*this, source, rows, cols);
  }
  if (!source.format && !has_scales(source.dtype)) return unknown_type(source, config());
  const std::vector<int64_t> wanted =
      layout == Layout::kRows ? std::vector{rows, cols} : std::vector{cols, rows};
  const bool flat = rows == 1 && source.shape == std::vector{cols};
  if (source.shape != wanted && !flat) return wrong_shape(source, wanted);
  return rows_of(source, 0, 1, rows, cols, layout, inputs);
}

Result<Rows> WeightReader::rows_of(const TensorSource& source, int64_t index, int64_t count,
                                   int64_t rows, int64_t cols, Layout layout, Inputs inputs) const {
  if (count > 1 || source.shape.size() == 3) {
    const std::vector<int64_t> wanted =
        layout == Layout::kRows ? std::vector{count, rows, cols} : std::vector{count, cols, rows};
    if (source.shape != wanted) return wrong_shape(source, wanted);
  }
  if (has_scales(source.dtype) && layout == Layout::kRows) {
    return scaled_rows(*this, source, index, count, rows, cols, inputs);
  }
  Rows out;
  if (!source.format) return unknown_type(source, config());
  out.format = *source.format;
  const quant::FormatInfo& info = quant::info(out.format);
  out.cols = cols;
  out.rows.resize(static_cast<size_t>(rows));
  if (layout == Layout::kRows) {
    FRESHET_RETURN_IF_ERROR(check_cols(source, info, cols));
    const size_t stride = quant::row_bytes(out.format, cols);
    const uint8_t* first = source.data + static_cast<size_t>(index * rows) * stride;
    for (size_t r = 0; r < out.rows.size(); ++r) out.rows[r] = first + r * stride;
    return out;
  }
  if (!info.plain()) {
    return unsupported("tensor '{}': type {} cannot be transposed", source.name, info.name);
  }
  const auto size = static_cast<size_t>(info.block_bytes);
  if (shapes_suffice()) return out;
  const uint8_t* first = source.data + static_cast<size_t>(index * rows * cols) * size;
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer,
                           Buffer::allocate(static_cast<size_t>(rows * cols) * size));
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = buffer.data() + static_cast<size_t>(r * cols) * size;
    out.rows[static_cast<size_t>(r)] = to;
    for (int64_t c = 0; c < cols; ++c) {
      std::memcpy(to + static_cast<size_t>(c) * size,
                  first + static_cast<size_t>(c * rows + r) * size, size);
    }
  }
  out.owned.push_back(std::move(buffer));
  return out;
}

Result<std::vector<float>> WeightReader::values(const TensorSource& source, int64_t count) const {
  FRESHET_ASSIGN_OR_RETURN(const quant::Format format, source.usable_format());
  const quant::FormatInfo& info = quant::info(format);
  if (source.elements() != count) return wrong_shape(source, std::vector{count});
  if (count % info.block_size != 0) return check_cols(source, info, count);
  std::vector<float> out(static_cast<size_t>(count));
  info.decode(source.data, out.data(), count);
  if (!all_finite(out))
    return invalid_argument("tensor '{}' holds a NaN or an infinity", source.name);
  return out;
}

Status WeightReader::pack_one(ops::Weight& out, const std::string& name, quant::Format format,
                              int64_t cols, std::span<const uint8_t* const> rows, ops::Use use) {
  if (shapes_suffice()) {
    FRESHET_ASSIGN_OR_RETURN(out, packed_->next(ops_, name, format, std::ssize(rows), cols));
    note(name, out);
    return {};
  }
  std::atomic<bool> finite = true;
  const auto check = [&](const uint8_t* row) {
    if (!all_finite(format, row, cols)) finite = false;
  };
  FRESHET_ASSIGN_OR_RETURN(out, ops_.pack(format, rows, cols, check, use));
  if (!finite) return invalid_argument("tensor '{}' holds a NaN or an infinity", name);
  note(name, out);
  if (copy_ != nullptr) {
    FRESHET_RETURN_IF_ERROR(copy_->add(name, out));
    out.packed = {};
  }
  return {};
}

Status WeightReader::pack(ops::Weight& out, const std::string& name, const Rows& rows,
                          std::span<const int64_t> order, ops::Use use) {
  const auto pick = [&](const std::vector<const uint8_t*>& all) {
    if (order.empty()) return all;
    std::vector<const uint8_t*> picked;
    for (const int64_t r : order) picked.push_back(all[static_cast<size_t>(r)]);
    return picked;
  };
  FRESHET_RETURN_IF_ERROR(pack_one(out, name, rows.format, rows.cols, pick(rows.rows), use));
  out.inputs = rows.inputs;
  const Rows::Outliers& outliers = rows.outliers;
  if (outliers.columns.empty()) return {};
  ops::Weight values;
  FRESHET_RETURN_IF_ERROR(pack_one(values, name + ", outlier columns", outliers.format,
                                   std::ssize(outliers.columns), pick(outliers.rows), use));
  return ops_.set_outliers(out, outliers.columns, std::move(values));
}

void WeightReader::note(const std::string& name, ops::Weight& w) {
  w.name = name;
  w.id = static_cast<int32_t>(infos_.size());
  infos_.push_back({name, w.format, w.rows, w.cols, w.packed.size(), ops_.kernel_names(w)});
  done_ += static_cast<size_t>(w.rows) * quant::row_bytes(w.format, w.cols);
  if (progress_) progress_(std::min(done_, checkpoint_.total_bytes()), checkpoint_.total_bytes());
}

Status WeightReader::store(Vector& out, std::span<const float> values) {
  FRESHET_ASSIGN_OR_RETURN(out.buffer, ops_.upload(values));
  out.size = static_cast<int64_t>(values.size());
  return {};
}

Result<Rows> WeightReader::encode(std::span<const float> values, int64_t cols,
                                  quant::Format format) const {
  const quant::FormatInfo& info = quant::info(format);
  FRESHET_CHECK(info.encode != nullptr && cols % info.block_size == 0, "cannot write {}",
                info.name);
  const int64_t rows = static_cast<int64_t>(values.size()) / cols;
  const size_t stride = quant::row_bytes(format, cols);
  Rows out;
  out.format = format;
  out.cols = cols;
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = buffer.data() + static_cast<size_t>(r) * stride;
    info.encode(values.data() + r * cols, to, cols, nullptr);
    out.rows.push_back(to);
  }
  out.owned.push_back(std::move(buffer));
  return out;
}

void WeightReader::set_shared(std::span<const int> layers, int use) {
  shared_layers_ = layers;
  shared_use_ = use;
}

Status WeightReader::linear(Linear& out, Role role, int layer, int64_t rows, int64_t cols,
                            bool bias, std::span<const int64_t> order, int expert) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* weight, require(role, ".weight", layer, expert));
  const bool transposed = architecture_.transposed && !is_gguf_ && layer >= 0;
  const Layout layout = transposed ? Layout::kTransposed : Layout::kRows;
  FRESHET_ASSIGN_OR_RETURN(const Rows source,
                           this->rows(*weight, rows, cols, layout, Inputs::kAnyOrder));
  const std::pair key{weight->name, order.empty() ? 0 : order.front()};
  if (const auto known = shared_.find(key); !shared_layers_.empty() && known != shared_.end()) {
    out.weight = alias(known->second);
  } else {
    FRESHET_RETURN_IF_ERROR(pack(out.weight, weight->name, source, order));
    release(*weight);
    if (!shared_layers_.empty()) shared_.emplace(key, alias(out.weight));
  }
  if (!bias) return {};
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor, require(role, ".bias", layer));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> all, values(*tensor, rows));
  if (order.empty()) return store(out.bias, all);
  std::vector<float> picked;
  for (const int64_t r : order) picked.push_back(all[static_cast<size_t>(r)]);
  return store(out.bias, picked);
}

Status WeightReader::joined(Linear& out, Role first, int64_t first_rows, Role second,
                            int64_t second_rows, int layer, int64_t cols) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* head, require(first, ".weight", layer));
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* tail, require(second, ".weight", layer));
  const auto kAny = Inputs::kAnyOrder;
  FRESHET_ASSIGN_OR_RETURN(Rows rows, this->rows(*head, first_rows, cols, Layout::kRows, kAny));
  FRESHET_ASSIGN_OR_RETURN(Rows more, this->rows(*tail, second_rows, cols, Layout::kRows, kAny));
  if (rows.inputs != more.inputs || rows.outliers.columns != more.outliers.columns ||
      rows.outliers.format != more.outliers.format) {
    FRESHET_ASSIGN_OR_RETURN(rows, this->rows(*head, first_rows, cols));
    FRESHET_ASSIGN_OR_RETURN(more, this->rows(*tail, second_rows, cols));
  }
  if (rows.format != more.format) {
    return unsupported("tensors '{}' and '{}' have different formats", head->name, tail->name);
  }
  rows.rows.insert(rows.rows.end(), more.rows.begin(), more.rows.end());
  std::vector<const uint8_t*>& outliers = rows.outliers.rows;
  outliers.insert(outliers.end(), more.outliers.rows.begin(), more.outliers.rows.end());
  for (Buffer& buffer : more.owned) rows.owned.push_back(std::move(buffer));
  FRESHET_RETURN_IF_ERROR(pack(out.weight, head->name, rows));
  release(*head);
  release(*tail);
  return {};
}

Status WeightReader::vector(Vector& out, Role role, std::string_view suffix, int layer,
                            int64_t size, float offset, float factor) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor, require(role, suffix, layer));
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> all, values(*tensor, size));
  for (float& v : all) v = (v + offset) * factor;
  return store(out, all);
}

Status WeightReader::norm(NormWeights& out, Role role, const NormSpec& spec, int layer,
                          int64_t size, float factor) {
  const float offset = architecture_.norms_less_one && !is_gguf_ ? 1.0f : 0.0f;
  if (spec.weight)
    FRESHET_RETURN_IF_ERROR(vector(out.weight, role, ".weight", layer, size, offset, factor));
  if (spec.bias) FRESHET_RETURN_IF_ERROR(vector(out.bias, role, ".bias", layer, size, 0, factor));
  return {};
}

void WeightReader::release(const TensorSource& source) {
  if (source.file != nullptr) source.file->release(source.file_offset, source.bytes);
}

}  // namespace freshet::models
