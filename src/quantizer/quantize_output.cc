// How the results of a quantisation become a checkpoint.
#include <filesystem>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "quantizer/quantize_job.h"

namespace freshet::quantizer {
namespace {

// Rows that the parts' files hold, in the order that a GGUF tensor wants.
class FinishedRows final : public RowSource {
 public:
  // The files of a part must outlive this.
  Status add(const PartResults::Part& part) {
    for (const loader::TensorSource& t : part.file.tensors()) rows_[t.name] = &t;
    return {};
  }

  Result<bool> encode(const Planned& p, const Numbers& /*numbers*/,
                      std::span<uint8_t> rows) override {
    if (quant::info(p.format).plain()) return false;
    const size_t stride = quant::row_bytes(p.format, p.cols());
    uint8_t* to = rows.data();
    for (const Planned::Part& part : p.parts) {
      for (int64_t r = 0; r < part.rows; ++r, to += stride) {
        const int64_t from =
            part.first_row + (part.order.empty() ? r : part.order[static_cast<size_t>(r)]);
        const uint8_t* row = find(*part.source, p.format, from, stride);
        if (row == nullptr) return false;
        std::memcpy(to, row, stride);
      }
    }
    return true;
  }

 private:
  // Row `row` of a source, all of whose matrices count.
  const uint8_t* find(const loader::TensorSource& source, quant::Format format, int64_t row,
                      size_t stride) const {
    std::string name = source.name;
    if (source.shape.size() == 3) {
      const int64_t per_matrix = source.shape[1];
      name += fmt::format("|{}", row / per_matrix);
      row %= per_matrix;
    }
    const auto found = rows_.find(fmt::format("{}|{}|rows", name, quant::info(format).name));
    if (found == rows_.end()) return nullptr;
    const auto at = static_cast<size_t>(row) * stride;
    return at + stride <= found->second->bytes ? found->second->data + at : nullptr;
  }

  std::map<std::string, const loader::TensorSource*> rows_;
};

}  // namespace

ExportOptions QuantizeJob::export_options() const {
  ExportOptions e;
  e.output = options_.output;
  e.recipe = *options_.recipe;
  e.name = options_.name;
  e.warn = options_.note;
  return e;
}

json::Object QuantizeJob::provenance() const {
  json::Object o;
  o["producer"] = options_.producer;
  o["method"] = options_.method.name();
  o["scheme"] = options_.recipe != nullptr ? std::string(options_.recipe->name())
                                           : options_.scheme.name;
  if (!options_.calibration.windows.empty() && options_.method.needs_text()) {
    o["calibration_text"] = options_.calibration.name;
    o["calibration_hash"] = options_.calibration.hash;
    int64_t tokens = 0;
    for (const auto& w : options_.calibration.windows) tokens += std::ssize(w);
    o["calibration_tokens"] = tokens;
    o["calibration_windows"] = options_.calibration.windows.size();
  }
  o["mean_relative_error"] = report_.mean_relative_error;
  return o;
}

Status QuantizeJob::write_gguf() {
  ExportOptions e = export_options();
  for (const auto& [key, value] : provenance())
    e.metadata.emplace_back("freshet.quantization." + key, json::write(value));
  std::vector<PartResults::Part> files;
  FinishedRows rows;
  for (size_t i = 0; i < parts_.size(); ++i) {
    FRESHET_ASSIGN_OR_RETURN(files.emplace_back(), results_->read(static_cast<int>(i)));
  }
  for (const PartResults::Part& part : files) FRESHET_RETURN_IF_ERROR(rows.add(part));
  e.rows = &rows;
  e.progress = [this](double fraction) {
    return !options_.progress || options_.progress("writing", fraction);
  };
  return export_gguf(working_.checkpoint(), working_.compute()->pool(), e);
}

}  // namespace freshet::quantizer
