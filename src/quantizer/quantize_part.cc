// What happens to the matrices of one part of a model that is quantised.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "quantizer/containers/scheme.h"
#include "quantizer/kv_scale_file.h"
#include "quantizer/methods/scales.h"
#include "quantizer/quantize_job.h"
#include "quantizer/stored_file.h"

namespace freshet::quantizer {
namespace {

using models::InputOf;
using models::LinearTensor;

template <class T>
std::vector<T> array_of(const loader::SafetensorsFile& file, const std::string& name) {
  std::vector<T> out;
  const loader::TensorSource* t = file.find(name);
  if (t == nullptr) return out;
  out.resize(t->bytes / sizeof(T));
  std::memcpy(out.data(), t->data, out.size() * sizeof(T));
  if (t->file != nullptr) t->file->release(t->file_offset, t->bytes);  // the part may be large
  return out;
}

// The factor of activations that covers all that calibration saw.
float input_scale(const Scheme& scheme, float most) {
  const float range = scheme.activations == Activations::kNvfp4        ? 448.0f * 6.0f
                      : scheme.activations == Activations::kInt8Tensor ? 127.0f
                                                                       : 448.0f;
  return most > 0.0f ? most / range : 1.0f;
}

// The columns whose inputs are outliers; nullopt: the inputs are not known.
std::optional<std::vector<int32_t>> outlier_columns(const Scheme& scheme, const InputStats* stats,
                                                    int expert) {
  // Experts' products have one part.
  if (scheme.outlier_threshold <= 0.0f || stats == nullptr || stats->max_abs.empty() || expert >= 0)
    return std::nullopt;
  std::vector<int32_t> out;
  for (size_t c = 0; c < stats->max_abs.size(); ++c) {
    if (stats->max_abs[c] >= scheme.outlier_threshold) out.push_back(static_cast<int32_t>(c));
  }
  return out;
}

using Order = std::vector<int64_t>;

template <class T>
void put_in_order(T* values, const Order& order) {
  const std::vector<T> own(values, values + order.size());
  for (size_t i = 0; i < order.size(); ++i) values[i] = own[static_cast<size_t>(order[i])];
}

// From a source's numbers to those that a GGUF file has, and back.
void to_file(std::vector<float>& numbers, size_t cols, const std::vector<float>& factors,
             const Order& columns) {
  for (size_t r = 0; r < factors.size(); ++r) {
    for (size_t c = 0; c < cols; ++c) numbers[r * cols + c] *= factors[r];
  }
  for (size_t at = 0; !columns.empty() && at < numbers.size(); at += cols)
    put_in_order(numbers.data() + at, columns);
}

void from_file(std::vector<float>& numbers, size_t cols, const std::vector<float>& factors,
               const Order& columns) {
  Order back(columns.size());
  for (size_t i = 0; i < columns.size(); ++i)
    back[static_cast<size_t>(columns[i])] = static_cast<int64_t>(i);
  for (size_t at = 0; !back.empty() && at < numbers.size(); at += cols)
    put_in_order(numbers.data() + at, back);
  for (size_t r = 0; r < factors.size(); ++r) {
    for (size_t c = 0; c < cols && factors[r] != 0.0f; ++c) numbers[r * cols + c] /= factors[r];
  }
}

InputStats ordered_stats(InputStats stats, const Order& columns) {
  for (auto* of : {&stats.mean_abs, &stats.max_abs, &stats.mean_square}) {
    if (!of->empty()) put_in_order(of->data(), columns);
  }
  const std::vector<float> gram = std::move(stats.gram);
  stats.gram.resize(gram.size());
  const size_t cols = columns.size();
  for (size_t r = 0; r < cols && !gram.empty(); ++r) {
    const float* const row = gram.data() + static_cast<size_t>(columns[r]) * cols;
    for (size_t c = 0; c < cols; ++c)
      stats.gram[r * cols + c] = row[static_cast<size_t>(columns[c])];
  }
  return stats;
}

int64_t count_outliers(const QuantisedMatrix& matrix) {
  const auto* coded = std::get_if<CodedMatrix>(&matrix);
  return coded == nullptr || !coded->outliers ? 0 : std::ssize(coded->outliers->columns);
}

}  // namespace

std::string stored_name(const LinearTensor& t, const Target& target) {
  std::string name = t.source->name;
  if (t.count > 1) name += fmt::format("|{}", t.index);
  if (const auto* format = std::get_if<quant::Format>(&target))
    name += fmt::format("|{}", quant::info(*format).name);
  return name;
}

void store_matrix(const std::string& name, const QuantisedMatrix& matrix,
                  std::vector<StoredTensor>& out) {
  if (const auto* rows = std::get_if<EncodedRows>(&matrix)) {
    const int64_t stride = rows->rows == 0 ? 0 : std::ssize(rows->bytes) / rows->rows;
    out.push_back({name + "|rows", "U8", {rows->rows, stride}, rows->bytes});
    return;
  }
  const auto& m = std::get<CodedMatrix>(matrix);
  const std::vector<float> numbers = {m.global_scale, m.input_scale};
  out.push_back({name + "|codes", "U8", {m.rows, m.cols}, m.codes});
  out.push_back(stored_array(name + "|scales", "F32", {std::ssize(m.scales)}, m.scales));
  out.push_back(stored_array(name + "|numbers", "F32", {2}, numbers));
  if (!m.zeros.empty()) out.push_back({name + "|zeros", "U8", {std::ssize(m.zeros)}, m.zeros});
  if (const DoubleScales& d = m.double_scales; !d.codes.empty()) {
    out.push_back({name + "|scale_codes", "U8", {std::ssize(d.codes)}, d.codes});
    std::vector<float> rest = d.absmax;
    rest.push_back(d.offset);
    out.push_back(stored_array(name + "|scale_numbers", "F32", {std::ssize(rest)}, rest));
  }
  if (m.outliers) {
    const auto& [columns, values] = *m.outliers;
    out.push_back(stored_array(name + "|outlier_columns", "I32", {std::ssize(columns)}, columns));
    out.push_back(stored_array(name + "|outliers", "F32", {std::ssize(values)}, values));
  }
  if (!m.group_of_column.empty()) {
    out.push_back(
        stored_array(name + "|groups", "I32", {std::ssize(m.group_of_column)}, m.group_of_column));
  }
}

Result<QuantisedMatrix> load_matrix(const std::string& name, const LinearTensor& t,
                                    const Target& target, const loader::SafetensorsFile& file) {
  if (const auto* format = std::get_if<quant::Format>(&target)) {
    EncodedRows rows{*format, t.rows, t.cols, array_of<uint8_t>(file, name + "|rows")};
    if (rows.bytes.size() != static_cast<size_t>(t.rows) * quant::row_bytes(*format, t.cols))
      return invalid_argument("the finished part lacks '{}'", name);
    return QuantisedMatrix(std::move(rows));
  }
  CodedMatrix m;
  m.rows = t.rows;
  m.cols = t.cols;
  m.codes = array_of<uint8_t>(file, name + "|codes");
  m.scales = array_of<float>(file, name + "|scales");
  m.zeros = array_of<uint8_t>(file, name + "|zeros");
  m.group_of_column = array_of<int32_t>(file, name + "|groups");
  if (file.find(name + "|outlier_columns") != nullptr) {
    m.outliers = {array_of<int32_t>(file, name + "|outlier_columns"),
                  array_of<float>(file, name + "|outliers")};
  }
  const auto numbers = array_of<float>(file, name + "|numbers");
  m.double_scales.codes = array_of<uint8_t>(file, name + "|scale_codes");
  m.double_scales.absmax = array_of<float>(file, name + "|scale_numbers");
  if (!m.double_scales.absmax.empty()) {
    m.double_scales.offset = m.double_scales.absmax.back();
    m.double_scales.absmax.pop_back();
  }
  if (std::ssize(m.codes) != t.rows * t.cols || m.scales.empty() || numbers.size() != 2)
    return invalid_argument("the finished part lacks '{}'", name);
  m.global_scale = numbers[0];
  m.input_scale = numbers[1];
  return QuantisedMatrix(std::move(m));
}

// Mean squares from an importance matrix, where calibration found nothing.
void QuantizeJob::add_given_statistics(std::vector<Work>& work) {
  given_stats_.clear();
  if (!given_) return;
  given_stats_.reserve(work.size());
  for (Work& w : work) {
    const auto name = gguf_names_.find(w.tensor.source->name);
    if (w.stats != nullptr || name == gguf_names_.end() ||
        !options_.overrides->uses_importance(name->second))
      continue;
    const auto means = given_->of(name->second, std::max(w.tensor.expert, 0), w.tensor.cols);
    if (means.empty()) continue;
    InputStats& stats = given_stats_.emplace_back();
    stats.cols = w.tensor.cols;
    stats.mean_square.assign(means.begin(), means.end());
    const std::vector<int64_t>& columns = form_of(w.tensor).columns;
    for (size_t c = 0; c < columns.size(); ++c)
      stats.mean_square[static_cast<size_t>(columns[c])] = means[c];
    w.stats = &stats;
  }
}

const QuantizeJob::FileForm& QuantizeJob::form_of(const LinearTensor& t) const {
  static const FileForm kAsItIs;
  const auto found = forms_.find(t.source->name);
  return found == forms_.end() ? kAsItIs : found->second;
}

// The largest key or value becomes E4M3's largest number.
void store_kv_scales(const InputCollector& seen, std::vector<StoredTensor>& out) {
  if (seen.key_max() == 0.0f && seen.value_max() == 0.0f) return;
  const std::vector<float> scales = {kv_scale_for(seen.key_max()), kv_scale_for(seen.value_max())};
  out.push_back(stored_array(kKvScales, "F32", {2}, scales));
}

Status QuantizeJob::quantise_part(int index, const models::Part& part,
                                  const std::vector<LinearTensor>& linears) {
  std::vector<Work> work;
  for (const LinearTensor& t : linears) {
    std::vector<Target> to = targets(t);
    if (!to.empty()) work.push_back({t, std::move(to), nullptr, {}});
  }
  in_passes_ = runner_ != nullptr && takes_passes(work);
  std::vector<StoredTensor> stored;
  PartRunner::Collected collected;
  const bool kv_scales = has_kv_scales(part) && runner_ != nullptr;
  if (kv_scales || (!work.empty() && runner_ != nullptr)) {
    const bool products = (options_.method.gptq || options_.method.awq) && !in_passes_;
    // Some hundred inputs are enough to choose the scales of SmoothQuant.
    const int64_t every =
        options_.method.smoothquant ? std::max<int64_t>(runner_->tokens() / 512, 1) : 0;
    const InputCollector::Wants wants{.gram = products, .sample_every = every};
    if (part.shared) {
      FRESHET_ASSIGN_OR_RETURN(const auto whole, new_runner());
      FRESHET_ASSIGN_OR_RETURN(collected, whole->collect_uses(part, wants, working_.reader()));
    } else {
      FRESHET_ASSIGN_OR_RETURN(collected, runner_->collect(part, wants));
    }
    for (Work& w : work) {
      w.stats = collected.of(w.tensor, working_.reader());
      w.own = w.stats;
    }
    share_experts(work);
    FRESHET_RETURN_IF_ERROR(scale_channels(part, linears, work, collected, stored));
  }
  if (kv_scales) store_kv_scales(*collected.collector, stored);
  input_max_.clear();
  for (const Work& w : work) {
    if (w.stats == nullptr) continue;
    float& most = input_max_[w.tensor.role];
    most = std::max(most, std::ranges::max(w.stats->max_abs));
  }
  add_given_statistics(work);
  FRESHET_RETURN_IF_ERROR(share_tensor_scales(work));
  if (in_passes_) {
    FRESHET_RETURN_IF_ERROR(quantise_in_passes(part, work, *collected.collector, stored));
  } else {
    std::vector<bool> done(work.size(), false);
    FRESHET_RETURN_IF_ERROR(quantise_work(work, done, stored));
  }
  json::Array records;
  for (const Work& w : work) {
    for (const QuantizedLinear& line : w.lines) {
      records.push_back(record_of(line));
      report_.linears.push_back(line);
    }
  }
  json::Object record;
  record["linears"] = json::Value(std::move(records));
  return results_->write(index, stored, json::Value(std::move(record)));
}

// Engines fuse queries, keys and values, and gate and up: such matrices share the factor of a
// format that has one for the tensor.
Status QuantizeJob::share_tensor_scales(std::vector<Work>& work) {
  if (options_.container == nullptr || options_.scheme.scale != ScaleType::kE4M3) return {};
  for (Work& w : work) {
    if (w.tensor.input != InputOf::kNorm || w.tensor_max > 0.0f) continue;
    std::vector<Work*> fused;
    for (Work& other : work) {
      if (other.tensor.input == InputOf::kNorm && other.tensor.expert == w.tensor.expert &&
          other.stats == w.stats)
        fused.push_back(&other);
    }
    float most = 0.0f;
    for (const Work* one : fused) {
      FRESHET_ASSIGN_OR_RETURN(const std::vector<float> numbers, working_.read(one->tensor));
      const auto cols = static_cast<size_t>(one->tensor.cols);
      for (size_t i = 0; i < numbers.size(); ++i) {
        float v = std::fabs(numbers[i]);
        if (!one->scales.columns.empty()) v *= one->scales.columns[i % cols];
        if (!one->scales.rows.empty()) v /= one->scales.rows[i / cols];
        most = std::max(most, v);
      }
    }
    for (Work* one : fused) one->tensor_max = most;
  }
  return {};
}

// The statistics of matrices [index, ...) that share them, scaled, in the order of the file's
// columns. The gram matrix is moved out of where it was if no other matrix needs it.
InputStats QuantizeJob::stats_for(size_t index, std::vector<Work>& work,
                                  const std::vector<bool>& done) const {
  Work& w = work[index];
  bool last = true;
  const std::vector<int64_t>& columns = form_of(w.tensor).columns;
  for (size_t j = 0; j < work.size(); ++j) {
    const bool same =
        work[j].scales.columns == w.scales.columns && form_of(work[j].tensor).columns == columns;
    if (!done[j] && work[j].stats == w.stats && !same) last = false;
  }
  std::vector<float> gram = last ? std::move(w.stats->gram) : w.stats->gram;
  if (last) w.stats->gram = {};
  InputStats stats = *w.stats;
  stats.gram = std::move(gram);
  if (!w.scales.columns.empty()) stats = scaled_stats(std::move(stats), w.scales.columns);
  return columns.empty() ? std::move(stats) : ordered_stats(std::move(stats), columns);
}

// Matrices that read the same inputs come one after the other, so that their moments are prepared
// once.
Status QuantizeJob::quantise_work(std::vector<Work>& work, std::vector<bool>& done,
                                  std::vector<StoredTensor>& stored) {
  ThreadPool& pool = working_.compute()->pool();
  for (size_t i = 0; i < work.size(); ++i) {
    if (done[i]) continue;
    Inputs inputs;
    InputStats stats;
    const bool known = work[i].stats != nullptr;
    if (known) {
      stats = stats_for(i, work, done);
      std::vector<float> gram = std::move(stats.gram);
      inputs = prepare_inputs(stats, std::move(gram), options_.method.gptq, {}, pool);
    }
    for (size_t j = i; j < work.size(); ++j) {
      const bool same = work[j].stats == work[i].stats &&
                        work[j].scales.columns == work[i].scales.columns &&
                        form_of(work[j].tensor).columns == form_of(work[i].tensor).columns;
      if (done[j] || !same) continue;
      done[j] = true;
      if (stopped(fraction_)) return cancelled("interrupted");
      FRESHET_RETURN_IF_ERROR(quantise_matrix(work[j], inputs, known ? &stats : nullptr, stored));
      if (!known) break;  // the next one has its own columns
    }
  }
  return {};
}

Status QuantizeJob::quantise_matrix(Work& w, const Inputs& inputs, const InputStats* stats,
                                    std::vector<StoredTensor>& stored) {
  ThreadPool& pool = working_.compute()->pool();
  FRESHET_ASSIGN_OR_RETURN(std::vector<float> numbers, working_.read(w.tensor));
  const auto cols = static_cast<size_t>(w.tensor.cols);
  MethodOptions method;
  method.rounding = options_.method.gptq ? Rounding::kFeedback : Rounding::kNearest;
  // Weighing the search of ranges by the inputs is also what AWQ clips by.
  method.weighted = options_.method.imatrix || options_.method.gptq || options_.method.awq;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (!w.scales.columns.empty()) numbers[i] *= w.scales.columns[i % cols];
    if (!w.scales.rows.empty()) numbers[i] /= w.scales.rows[i / cols];
  }
  const FileForm& form = form_of(w.tensor);
  to_file(numbers, cols, form.factors, form.columns);
  method.tensor_max = w.tensor_max;
  for (const Target& target : w.targets) {
    const auto* scheme = std::get_if<Scheme>(&target);
    auto columns =
        scheme == nullptr ? std::nullopt : outlier_columns(*scheme, stats, w.tensor.expert);
    std::optional<OutlierNumbers> outliers;
    if (columns) {
      outliers = take_columns(numbers.data(), w.tensor.rows, w.tensor.cols, std::move(*columns),
                              scheme->outlier_type);
    }
    auto quantised =
        quantise_linear(numbers.data(), w.tensor.rows, w.tensor.cols, target, inputs, method, pool);
    if (!quantised.ok()) return quantised.status().with_context(w.tensor.source->name);
    Quantised& q = *quantised;
    if (scheme != nullptr) {
      auto& matrix = std::get<CodedMatrix>(q.matrix);
      if (needs_input_scale(*scheme)) {
        const bool seen = stats != nullptr && !stats->max_abs.empty();
        // An expert that no token reached expects what the others read.
        const float most = seen ? std::ranges::max(stats->max_abs) : input_max_[w.tensor.role];
        matrix.input_scale = input_scale(*scheme, most);
      }
      FRESHET_RETURN_IF_ERROR(options_.container->settle(matrix, *scheme));
      if (outliers) give_columns(matrix, *scheme, std::move(*outliers));
    }
    QuantizedLinear line;
    line.outlier_columns = count_outliers(q.matrix);
    line.tensor = w.tensor.source->name;
    line.expert = w.tensor.expert;
    line.format = scheme != nullptr
                      ? scheme->name
                      : std::string(quant::info(std::get<quant::Format>(target)).name);
    line.rows = w.tensor.rows;
    line.cols = w.tensor.cols;
    line.tokens = w.stats == nullptr ? 0 : w.stats->tokens;
    line.report = q.report;
    if (line.report.note.empty()) line.report.note = w.note;
    w.lines.push_back(std::move(line));
    store_matrix(stored_name(w.tensor, target), q.matrix, stored);
  }
  return {};
}

// The tensors besides its matrices that a part has changed.
Status QuantizeJob::apply_changes(const PartResults::Part& part) {
  constexpr std::string_view kChanged = "changed|";
  for (const loader::TensorSource& t : part.file.tensors()) {
    if (!t.name.starts_with(kChanged)) continue;
    const std::string name = t.name.substr(kChanged.size());
    std::vector<float> values(static_cast<size_t>(t.elements()));
    FRESHET_ASSIGN_OR_RETURN(const quant::Format format, t.usable_format());
    quant::info(format).decode(t.data, values.data(), std::ssize(values));
    FRESHET_RETURN_IF_ERROR(working_.write_all(name, values));
    changed_.push_back(name);
  }
  return {};
}

// The working model gets the numbers of a part that is finished.
Status QuantizeJob::apply_part(const PartResults::Part& part,
                               const std::vector<LinearTensor>& linears) {
  FRESHET_RETURN_IF_ERROR(apply_changes(part));
  for (const LinearTensor& t : linears) {
    const std::vector<Target> to = targets(t);
    if (to.empty()) continue;
    FRESHET_ASSIGN_OR_RETURN(const QuantisedMatrix matrix,
                             load_matrix(stored_name(t, to.back()), t, to.back(), part.file));
    std::vector<float> numbers = dequantise(matrix, std::get_if<Scheme>(&to.back()));
    const FileForm& form = form_of(t);
    from_file(numbers, static_cast<size_t>(t.cols), form.factors, form.columns);
    FRESHET_RETURN_IF_ERROR(working_.write(t, numbers));
  }
  return {};
}

}  // namespace freshet::quantizer
