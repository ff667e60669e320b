// How the results of a quantisation become a checkpoint.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "quantizer/containers/checkpoint_writer.h"
#include "quantizer/kv_scale_file.h"
#include "quantizer/quantize_job.h"

namespace freshet::quantizer {
namespace {

// A tensor was read: its pages leave the resident set.
void release_pages(const loader::TensorSource& t) {
  if (t.file != nullptr) t.file->release(t.file_offset, t.bytes);
}

void release_pages(const loader::Checkpoint& checkpoint) {
  for (const MappedFile* file : checkpoint.files()) file->release(0, file->bytes().size());
}

// Rows that the parts' files hold, in the order that a GGUF tensor wants.
class FinishedRows final : public RowSource {
 public:
  // The files of a part must outlive this.
  void add(const PartResults::Part& part) {
    for (const loader::TensorSource& t : part.file.tensors()) {
      rows_[t.name] = &t;
      quantised_.insert(t.name.substr(0, t.name.find('|')));
    }
  }

  Result<bool> encode(const Planned& p, const Numbers& /*numbers*/,
                      std::span<uint8_t> rows) override {
    if (quant::info(p.format).plain()) return false;
    const size_t stride = quant::row_bytes(p.format, p.cols());
    uint8_t* to = rows.data();
    for (const Planned::Part& part : p.parts) {
      for (int64_t r = 0; r < part.rows; ++r, to += stride) {
        const uint8_t* row = find(*part.source, p.format, part.source_row(r), stride);
        if (row == nullptr && !quantised_.contains(part.source->name)) return false;
        if (row == nullptr)
          return internal_error("tensor '{}': the finished parts lack row {} of '{}'", p.name, r,
                                part.source->name);
        std::memcpy(to, row, stride);
      }
    }
    for (const loader::TensorSource* t : read_) release_pages(*t);
    read_.clear();
    return true;
  }

 private:
  // Row `row` of a source, all of whose matrices count.
  const uint8_t* find(const loader::TensorSource& source, quant::Format format, int64_t row,
                      size_t stride) {
    std::string name = source.name;
    if (source.shape.size() == 3) {
      const int64_t per_matrix = source.shape[1];
      name += fmt::format("|{}", row / per_matrix);
      row %= per_matrix;
    }
    const auto found = rows_.find(fmt::format("{}|{}|rows", name, quant::info(format).name));
    if (found == rows_.end()) return nullptr;
    read_.insert(found->second);
    const auto at = static_cast<size_t>(row) * stride;
    return at + stride <= found->second->bytes ? found->second->data + at : nullptr;
  }

  std::map<std::string, const loader::TensorSource*> rows_;
  std::set<std::string> quantised_;             // source tensors
  std::set<const loader::TensorSource*> read_;  // since pages were released last
};

}  // namespace

ExportOptions QuantizeJob::export_options() const {
  ExportOptions e;
  e.output = options_.output;
  e.recipe = *options_.recipe;
  e.name = options_.name;
  e.overrides = *options_.overrides;
  e.target = options_.target;
  e.plan = plan_ ? &*plan_ : nullptr;
  e.losses = losses_ ? &*losses_ : nullptr;
  e.feedback = options_.method.gptq;
  e.importance = options_.method.needs_text();
  e.imatrix = measured_ ? &*measured_ : options_.imatrix;
  e.metadata = options_.metadata;
  for (const auto& [key, value] : provenance())
    e.metadata.emplace_back("freshet.quantization." + key, json::write(value));
  e.warn = options_.note;
  return e;
}

json::Object QuantizeJob::provenance() const {
  json::Object o;
  o["producer"] = options_.producer;
  o["method"] = options_.method.name();
  o["scheme"] =
      options_.recipe != nullptr ? std::string(options_.recipe->name()) : options_.scheme.name;
  if (reads_text()) {
    o["calibration_text"] = options_.calibration.name;
    o["calibration_hash"] = options_.calibration.hash;
    int64_t tokens = 0;
    for (const auto& w : options_.calibration.windows) tokens += std::ssize(w);
    o["calibration_tokens"] = tokens;
    o["calibration_windows"] = options_.calibration.windows.size();
  }
  if (options_.kv_scales) o["kv_cache_scheme"] = "fp8";
  if (options_.container != nullptr && options_.scheme.outlier_threshold > 0.0f) {
    int64_t columns = 0;
    for (const QuantizedLinear& l : report_.linears) columns += l.outlier_columns;
    o["outlier_threshold"] = static_cast<double>(options_.scheme.outlier_threshold);
    o["outlier_columns"] = columns;
  }
  o["mean_relative_error"] = report_.mean_relative_error;
  return o;
}

Status QuantizeJob::read_parts() {
  finished_.clear();
  for (size_t i = 0; i < parts_.size(); ++i) {
    FRESHET_ASSIGN_OR_RETURN(PartResults::Part part, results_->read(static_cast<int>(i)));
    finished_.push_back(std::move(part));
  }
  return {};
}

Status QuantizeJob::write_gguf() {
  ExportOptions e = export_options();
  FinishedRows rows;
  for (const PartResults::Part& part : finished_) {
    rows.add(part);
    FRESHET_RETURN_IF_ERROR(apply_changes(part));
  }
  e.rows = &rows;
  e.progress = [this](double fraction) {
    return !options_.progress || options_.progress("writing", fraction);
  };
  return export_gguf(working_.checkpoint(), working_.compute()->pool(), e);
}

// The linear layers that stay as they were, for readers that would expect them to be quantised.
std::vector<std::string> QuantizeJob::unquantised() const {
  std::vector<std::string> out = {"lm_head"};
  const auto* embedding = working_.reader().find(models::Role::kEmbedding, ".weight");
  for (const loader::TensorSource& t : working_.checkpoint().tensors()) {
    if (t.shape.size() != 2 || !t.name.ends_with(".weight") || &t == embedding) continue;
    const std::string module = module_name(t.name);
    if (!places_.contains(t.name) && std::ranges::count(out, module) == 0) out.push_back(module);
  }
  return out;
}

// The factors of keys and values under the names that the container gives them.
std::vector<StoredTensor> QuantizeJob::kv_scale_tensors() const {
  std::vector<StoredTensor> out;
  for (size_t i = 0; i < parts_.size() && options_.kv_scales; ++i) {
    const loader::TensorSource* scales = finished_[i].file.find(kKvScales);
    if (scales == nullptr) continue;
    const KvScaleNameSet names =
        kv_scale_names(working_.reader(), parts_[i].layer, options_.container->kv_scales);
    const uint8_t* const from = scales->data;
    out.push_back({names.key, "F32", {1}, {from, from + sizeof(float)}});
    out.push_back({names.value, "F32", {1}, {from + sizeof(float), from + 2 * sizeof(float)}});
  }
  return out;
}

Status QuantizeJob::write_container() {
  CheckpointOptions o;
  o.output = options_.output;
  o.source = working_.checkpoint().path();
  o.force = options_.force;
  FRESHET_ASSIGN_OR_RETURN(const auto writer, CheckpointWriter::create(o));
  for (const PartResults::Part& part : finished_) FRESHET_RETURN_IF_ERROR(apply_changes(part));
  const ModelFacts own = facts();
  const std::vector<StoredTensor> kv_scales = kv_scale_tensors();
  const auto measured = [&](const std::string& name) {
    return std::ranges::any_of(kv_scales, [&](const StoredTensor& s) { return s.name == name; });
  };
  bool has_kv_scales = !kv_scales.empty();
  const auto& tensors = working_.checkpoint().tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const loader::TensorSource& t = tensors[i];
    if (options_.progress &&
        !options_.progress("writing", static_cast<double>(i) / static_cast<double>(tensors.size())))
      return cancelled("interrupted");
    // Other engines refuse tensors that they don't know.
    if (measured(t.name) || t.name.ends_with(".k_channel_scale")) continue;
    has_kv_scales |= t.name.ends_with(".k_scale");
    const auto place = places_.find(t.name);
    if (place == places_.end()) {
      FRESHET_RETURN_IF_ERROR(writer->add(t.name, t.dtype, t.shape, {t.data, t.bytes}));
      release_pages(t);
      continue;
    }
    const auto& [part, linear] = place->second;
    FRESHET_ASSIGN_OR_RETURN(
        const QuantisedMatrix matrix,
        load_matrix(t.name, linear, options_.scheme, finished_[static_cast<size_t>(part)].file));
    FRESHET_ASSIGN_OR_RETURN(
        const auto stored,
        options_.container->pack(module_name(t.name), std::get<CodedMatrix>(matrix),
                                 options_.scheme, own));
    for (const StoredTensor& s : stored) FRESHET_RETURN_IF_ERROR(writer->add(s));
  }
  for (const StoredTensor& s : kv_scales) FRESHET_RETURN_IF_ERROR(writer->add(s));
  ConfigRequest request;
  request.kv_cache_fp8 = has_kv_scales;
  request.groups = {{options_.scheme, {}}};
  request.ignore = unquantised();
  request.dtype = own.dtype;
  request.producer = options_.producer;
  if (options_.method.gptq) request.settings["damp_percent"] = 0.01;
  FRESHET_ASSIGN_OR_RETURN(const json::Value config,
                           options_.container->quantization_config(request));
  return writer->finish(
      config_with(working_.checkpoint().config(), config, json::Value(provenance())),
      options_.container->side_files(config));
}

// Reads the output as an engine does, and compares.
Status QuantizeJob::verify() {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(options_.output));
  return options_.recipe != nullptr ? verify_gguf(checkpoint) : verify_container(checkpoint);
}

Status QuantizeJob::verify_gguf(const loader::Checkpoint& checkpoint) {
  FinishedRows rows;
  for (const PartResults::Part& part : finished_) rows.add(part);
  std::vector<uint8_t> expected;
  for (const Planned& p : plan_->tensors) {
    const loader::TensorSource* t = checkpoint.find(p.name);
    if (t == nullptr) return internal_error("{} lacks '{}'", options_.output, p.name);
    expected.resize(t->bytes);
    FRESHET_ASSIGN_OR_RETURN(const bool known, rows.encode(p, {}, expected));
    if (known && std::memcmp(expected.data(), t->data, t->bytes) != 0)
      return internal_error("{}: tensor '{}' is not what was written", options_.output, p.name);
    release_pages(*t);
  }
  return {};
}

Status QuantizeJob::verify_container(const loader::Checkpoint& checkpoint) {
  FRESHET_ASSIGN_OR_RETURN(const models::Description model, models::describe(checkpoint));
  const Progress no_progress;
  const models::WeightReader reader(checkpoint, *model.architecture, working_.compute()->ops(),
                                    no_progress);
  for (const StoredTensor& s : kv_scale_tensors()) {
    const loader::TensorSource* t = checkpoint.find(s.name);
    if (t == nullptr || !std::ranges::equal(std::span(t->data, t->bytes), s.bytes))
      return internal_error("{}: '{}' is not what was written", options_.output, s.name);
  }
  for (const auto& [name, place] : places_) {
    const auto& [part, t] = place;
    FRESHET_ASSIGN_OR_RETURN(
        const QuantisedMatrix matrix,
        load_matrix(name, t, options_.scheme, finished_[static_cast<size_t>(part)].file));
    FRESHET_ASSIGN_OR_RETURN(const auto* source,
                             reader.require(t.role, ".weight", t.layer, t.which()));
    FRESHET_ASSIGN_OR_RETURN(
        const models::Rows rows,
        reader.rows(*source, t.rows, t.cols, models::Layout::kRows, models::Inputs::kAnyOrder));
    const std::vector<float> got = decode_rows(rows, working_.compute()->pool());
    if (got != dequantise(matrix, &options_.scheme))
      return internal_error("{}: '{}' reads back as other numbers than were written",
                            options_.output, name);
    release_pages(checkpoint);
  }
  return {};
}

}  // namespace freshet::quantizer
