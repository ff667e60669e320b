#include "quantizer/working_model.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

namespace freshet::quantizer {
namespace {

using loader::TensorSource;

// Writes numbers of a plain format to `to`, rounded to nearest.
void store_plain(quant::Format format, std::span<const float> values, uint8_t* to) {
  const quant::FormatInfo& info = quant::info(format);
  info.encode(values.data(), to, std::ssize(values), nullptr);
}

}  // namespace

WorkingModel::WorkingModel(loader::Checkpoint checkpoint, models::Description model,
                           std::shared_ptr<runtime::Compute> compute)
    : checkpoint_(std::move(checkpoint)),
      model_(std::move(model)),
      compute_(std::move(compute)),
      reader_(std::make_unique<models::WeightReader>(checkpoint_, *model_.architecture,
                                                     compute_->ops(), no_progress_)) {}

Result<std::unique_ptr<WorkingModel>> WorkingModel::open(
    const std::string& path, std::shared_ptr<runtime::Compute> compute) {
  FRESHET_ASSIGN_OR_RETURN(loader::Checkpoint checkpoint, loader::Checkpoint::open(path));
  if (checkpoint.kind() != loader::Checkpoint::Kind::kHuggingFace)
    return unsupported("{} is not a Hugging Face folder; only those can be quantised", path);
  FRESHET_RETURN_IF_ERROR(models::check_weights_present(checkpoint).with_context(path));
  FRESHET_ASSIGN_OR_RETURN(models::Description model, models::describe(checkpoint));
  if (model.spec.encoder != nullptr)
    return unsupported("{} is an encoder-decoder: only decoders can be quantised",
                       model.spec.architecture);
  if (model.spec.vision != nullptr && model.spec.vision->cross)
    return unsupported("{} attends to pictures: models with such layers cannot be quantised",
                       model.spec.architecture);
  if (!model.spec.generates)
    return unsupported(
        "{} is an encoder or a classifier; only models that write text can be quantised", path);
  std::unique_ptr<WorkingModel> working(
      new WorkingModel(std::move(checkpoint), std::move(model), std::move(compute)));
  for (const models::Part& part : working->parts()) {
    FRESHET_ASSIGN_OR_RETURN(const auto linears, working->linears(part));
    if (part.shared) FRESHET_RETURN_IF_ERROR(working->check_shared(part, linears));
    for (const models::LinearTensor& t : linears) {
      const bool plain = t.source->format && quant::info(*t.source->format).plain();
      if (!plain)
        return unsupported("tensor '{}' is {} already: quantise the original in 16 or 32 bits",
                           t.source->name, t.source->dtype);
    }
  }
  return working;
}

std::vector<models::Part> WorkingModel::parts() const {
  std::vector<models::Part> out = models::shared_parts_of(model_.spec);
  for (const models::Part& part : models::parts_of(model_.spec)) out.push_back(part);
  return out;
}

// Some tools write a tensor that layers share once for each of them.
Status WorkingModel::check_shared(const models::Part& part,
                                  const std::vector<models::LinearTensor>& linears) const {
  for (const models::LinearTensor& t : linears) {
    for (const int layer : models::sharers_of(model_.spec, part)) {
      const TensorSource* other = reader_->find(t.role, ".weight", layer);
      if (other == nullptr || other == t.source) continue;
      return unsupported(
          "tensors '{}' and '{}' are one matrix that layers share: save the model with each of "
          "them once (transformers' save_pretrained does)",
          t.source->name, other->name);
    }
  }
  return {};
}

std::string WorkingModel::dtype() const {
  const json::Value& config = checkpoint_.config();
  return config.get_string("dtype", config.get_string("torch_dtype", "float32"));
}

Result<std::vector<models::LinearTensor>> WorkingModel::linears(const models::Part& part) const {
  return models::linear_tensors(*reader_, model_.spec, part);
}

Result<std::vector<float>> WorkingModel::read(const models::LinearTensor& t) const {
  FRESHET_ASSIGN_OR_RETURN(const models::Rows rows,
                           reader_->rows_of(*t.source, t.index, t.count, t.rows, t.cols, t.layout));
  std::vector<float> values = decode_rows(rows, compute_->pool());
  std::atomic<bool> finite = true;
  compute_->pool().parallel_for(t.rows, [&](int64_t r, int) {
    for (int64_t c = 0; c < t.cols; ++c) {
      if (!std::isfinite(values[static_cast<size_t>(r * t.cols + c)])) finite = false;
    }
  });
  if (!finite) return invalid_argument("tensor '{}' holds a NaN or an infinity", t.source->name);
  if (t.source->file != nullptr) t.source->file->release(t.source->file_offset, t.source->bytes);
  return values;
}

Result<WorkingModel::Changed*> WorkingModel::change(const std::string& name) {
  const TensorSource* source = checkpoint_.find(name);
  FRESHET_CHECK(source != nullptr, "no tensor '{}'", name);
  FRESHET_RETURN_IF_ERROR(source->usable_format().status());
  if (const auto found = changed_.find(name); found != changed_.end()) return &found->second;
  Changed changed{*source, {}};
  FRESHET_ASSIGN_OR_RETURN(changed.values, Buffer::allocate(source->bytes));
  std::memcpy(changed.values.data(), source->data, source->bytes);
  if (source->file != nullptr) source->file->release(source->file_offset, source->bytes);
  TensorSource now = *source;
  now.data = changed.values.data();
  now.file = nullptr;
  checkpoint_.replace(now);
  return &changed_.emplace(name, std::move(changed)).first->second;
}

Status WorkingModel::write(const models::LinearTensor& t, std::span<const float> values) {
  FRESHET_ASSIGN_OR_RETURN(Changed * changed, change(t.source->name));
  const quant::Format format = *changed->original.format;
  const auto size = static_cast<size_t>(quant::info(format).block_bytes);
  uint8_t* to = changed->values.data() + static_cast<size_t>(t.index * t.rows * t.cols) * size;
  if (t.layout == models::Layout::kRows) {
    compute_->pool().parallel_for(t.rows, [&](int64_t r, int) {
      const auto at = static_cast<size_t>(r * t.cols);
      store_plain(format, values.subspan(at, static_cast<size_t>(t.cols)), to + at * size);
    });
    return {};
  }
  compute_->pool().parallel_for(t.cols, [&](int64_t c, int) {
    std::vector<float> column(static_cast<size_t>(t.rows));
    for (size_t r = 0; r < column.size(); ++r)
      column[r] = values[r * static_cast<size_t>(t.cols) + static_cast<size_t>(c)];
    store_plain(format, column, to + static_cast<size_t>(c * t.rows) * size);
  });
  return {};
}

Result<std::vector<float>> WorkingModel::read_all(const std::string& name) const {
  const TensorSource* source = checkpoint_.find(name);
  FRESHET_CHECK(source != nullptr, "no tensor '{}'", name);
  FRESHET_ASSIGN_OR_RETURN(const quant::Format format, source->usable_format());
  std::vector<float> values(static_cast<size_t>(source->elements()));
  quant::info(format).decode(source->data, values.data(), std::ssize(values));
  return values;
}

Status WorkingModel::write_all(const std::string& name, std::span<const float> values) {
  FRESHET_ASSIGN_OR_RETURN(Changed * changed, change(name));
  FRESHET_CHECK(std::ssize(values) == changed->original.elements());
  store_plain(*changed->original.format, values, changed->values.data());
  return {};
}

void WorkingModel::restore(const std::string& name) {
  const auto found = changed_.find(name);
  if (found == changed_.end()) return;
  checkpoint_.replace(found->second.original);
  changed_.erase(found);
}

std::vector<float> decode_rows(const models::Rows& rows, ThreadPool& pool) {
  std::vector<float> out(rows.rows.size() * static_cast<size_t>(rows.cols));
  pool.parallel_for(std::ssize(rows.rows), [&](int64_t r, int) {
    rows.decode(static_cast<size_t>(r), out.data() + r * rows.cols);
  });
  return out;
}

}  // namespace freshet::quantizer
