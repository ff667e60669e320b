#include "quantizer/quantize.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "base/hash.h"
#include "quantizer/calibrate.h"
#include "quantizer/containers/scheme.h"
#include "quantizer/kv_scale_file.h"
#include "quantizer/quantize_job.h"

namespace freshet::quantizer {
using models::LinearTensor;

json::Value record_of(const QuantizedLinear& l) {
  json::Object o;
  o["tensor"] = l.tensor;
  o["expert"] = l.expert;
  o["format"] = l.format;
  o["rows"] = l.rows;
  o["cols"] = l.cols;
  o["tokens"] = l.tokens;
  o["relative_error"] = l.report.relative_error;
  o["damping"] = static_cast<double>(l.report.damping);
  o["dead_columns"] = l.report.dead_columns;
  o["note"] = l.report.note;
  o["outlier_columns"] = l.outlier_columns;
  return json::Value(std::move(o));
}

namespace {

QuantizedLinear linear_of(const json::Value& v) {
  QuantizedLinear l;
  l.tensor = v.get_string("tensor", "");
  l.expert = static_cast<int>(v.get_int("expert", -1));
  l.format = v.get_string("format", "");
  l.rows = v.get_int("rows", 0);
  l.cols = v.get_int("cols", 0);
  l.tokens = v.get_int("tokens", 0);
  l.report.relative_error = v.get_double("relative_error", 0);
  l.report.damping = static_cast<float>(v.get_double("damping", 0));
  l.report.dead_columns = v.get_int("dead_columns", 0);
  l.report.note = v.get_string("note", "");
  l.outlier_columns = v.get_int("outlier_columns", 0);
  return l;
}

}  // namespace

std::string module_name(const std::string& tensor) {
  constexpr std::string_view kEnd = ".weight";
  return tensor.ends_with(kEnd) ? tensor.substr(0, tensor.size() - kEnd.size()) : tensor;
}

namespace {

// Advice for a scheme whose groups do not fit.
std::string other_group(const Scheme& scheme) {
  const std::string name = scheme.name.substr(0, scheme.name.find("_G")) + "_G32";
  if (scheme.group <= 32 || !scheme_by_name(name).ok()) return "take another scheme, or ";
  return fmt::format("choose another group (--scheme {}), or ", name);
}

}  // namespace

QuantizeJob::QuantizeJob(WorkingModel& working, const QuantizeOptions& options)
    : working_(working), options_(options) {}

// The given statistics that are used.
std::string QuantizeJob::hash_of(const Imatrix& imatrix) const {
  uint64_t hash = 0;
  for (const auto& [name, entry] : imatrix.entries) {
    if (!options_.overrides->uses_importance(name)) continue;
    const auto add = [&](const auto& values) {
      hash = hash_bytes(
          {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(values[0])},
          hash);
    };
    add(name);
    add(entry.sum2);
    add(entry.counts);
  }
  return fmt::format("{:016x}", hash);
}

// Everything that the result depends on.
std::string QuantizeJob::key() const {
  json::Object key;
  key["version"] = 2;
  key["producer"] = options_.producer;
  key["method"] = options_.method.name();
  key["scheme"] =
      options_.recipe != nullptr ? std::string(options_.recipe->name()) : options_.scheme.name;
  key["container"] = options_.container != nullptr ? options_.container->name : "gguf";
  key["group"] = options_.scheme.group;
  if (options_.scheme.outlier_threshold > 0.0f)
    key["outlier_threshold"] = static_cast<double>(options_.scheme.outlier_threshold);
  key["calibration"] = options_.calibration.hash;
  json::Array ignore;
  for (const std::string& pattern : options_.ignore) ignore.emplace_back(pattern);
  key["ignore"] = json::Value(std::move(ignore));
  json::Array formats;
  for (const auto& [name, of] : formats_) {
    for (const quant::Format f : of)
      formats.emplace_back(name + "|" + std::string(quant::info(f).name));
  }
  if (options_.kv_scales) key["kv_scales"] = true;
  key["formats"] = json::Value(std::move(formats));
  key["statistics"] = options_.imatrix == nullptr ? "" : hash_of(*options_.imatrix);
  json::Array files;
  for (const MappedFile* file : working_.checkpoint().files()) {
    files.emplace_back(file->path());
    files.emplace_back(static_cast<int64_t>(file->bytes().size()));
    files.emplace_back(file->changed_ns());
  }
  key["files"] = json::Value(std::move(files));
  return json::write(json::Value(std::move(key)));
}

// Formats for a size are chosen by what the inputs weigh and by what errors cost, so these are
// measured first.
Status QuantizeJob::weigh_target() {
  const CalibrationText& text = options_.calibration;
  if (!options_.target.given() || text.windows.empty()) return {};
  std::string folder = std::filesystem::path(options_.output).parent_path().string();
  if (folder.empty()) folder = ".";
  if (options_.imatrix == nullptr && options_.method.needs_text()) {
    CalibrateOptions c;
    c.memory = options_.memory;
    c.folder = folder;
    c.dataset = text.name;
    c.progress = [this](double fraction) { return !stopped(fraction); };
    FRESHET_ASSIGN_OR_RETURN(Calibration measured, calibrate(working_, text.windows, c));
    measured_ = std::move(measured.imatrix);
  }
  ExportOptions e = export_options();
  e.target = {};
  FRESHET_ASSIGN_OR_RETURN(const GgufPlan plan,
                           plan_gguf(working_.checkpoint(), working_.compute()->pool(), e));
  Importance importance;
  if (e.imatrix != nullptr) importance = Importance(*e.imatrix);
  TensorLossOptions o;
  o.importance = &importance;
  o.overrides = options_.overrides;
  o.memory = options_.memory;
  o.folder = folder;
  o.progress = [this](double fraction) {
    return !options_.progress || options_.progress("measuring losses", fraction);
  };
  FRESHET_ASSIGN_OR_RETURN(losses_, measure_losses(working_, plan.tensors, text.windows, o));
  return {};
}

Status QuantizeJob::prepare() {
  if (options_.recipe != nullptr) {
    FRESHET_RETURN_IF_ERROR(weigh_target());
    FRESHET_ASSIGN_OR_RETURN(
        plan_, plan_gguf(working_.checkpoint(), working_.compute()->pool(), export_options()));
    for (const Planned& p : plan_->tensors) {
      if (quant::info(p.format).plain() || p.shape.size() < 2) continue;
      for (const Planned::Part& part : p.parts) {
        auto& formats = formats_[part.source->name];
        if (std::ranges::count(formats, p.format) == 0) formats.push_back(p.format);
        gguf_names_[part.source->name] = p.name;
        if (p.has_own_rows()) continue;
        FileForm& form = forms_[part.source->name];
        form.columns = p.columns;
        form.factors.resize(static_cast<size_t>(part.source->shape.front()), 1.0f);
        for (int64_t r = 0; r < part.rows; ++r)
          form.factors[static_cast<size_t>(part.source_row(r))] = part.factor;
      }
    }
  } else {
    for (const std::string& pattern : options_.ignore) {
      auto regex = tokenizer::Regex::compile(pattern, tokenizer::RegexDialect::kRust);
      if (!regex.ok())
        return invalid_argument("--ignore {}: {}", pattern, regex.status().message());
      ignored_.push_back(std::move(*regex));
    }
  }
  if (options_.method.smoothquant) FRESHET_RETURN_IF_ERROR(check_norms());
  parts_ = working_.parts();
  if (options_.imatrix != nullptr) given_.emplace(*options_.imatrix);
  for (size_t i = 0; i < parts_.size() && options_.container != nullptr; ++i) {
    FRESHET_ASSIGN_OR_RETURN(const auto linears, working_.linears(parts_[i]));
    for (const LinearTensor& t : linears) {
      if (!targets(t).empty()) places_[t.source->name] = {static_cast<int>(i), t};
    }
  }
  return {};
}

// SmoothQuant scales channels in norms only.
Status QuantizeJob::check_norms() const {
  const ModelSpec& spec = working_.model().spec;
  for (const LayerSpec& layer : spec.layers) {
    if (std::ranges::any_of(layer.branches, takes_scales)) return {};
  }
  return unsupported(
      "--method smoothquant: no norm of {} can take scales, because what norms make is the "
      "residual stream itself, or they have no weights: use gptq or awq",
      spec.architecture);
}

// The formats of a matrix; none: it stays as it is.
std::vector<Target> QuantizeJob::targets(const LinearTensor& t) const {
  std::vector<Target> out;
  if (options_.recipe != nullptr) {
    const auto found = formats_.find(t.source->name);
    if (found == formats_.end()) return out;
    for (const quant::Format f : found->second) out.emplace_back(f);
    return out;
  }
  const std::string module = module_name(t.source->name);
  bool ignored = false;
  for (const auto& pattern : ignored_)
    pattern->for_each_match(module, [&](size_t, size_t) { ignored = true; });
  if (ignored) return out;
  out.emplace_back(options_.scheme);
  return out;
}

// Two tensors of a delta net are one matrix when the model runs.
Status QuantizeJob::check_joined(const std::vector<LinearTensor>& linears) const {
  for (const LinearTensor& t : linears) {
    if (t.role != models::Role::kStateZ) continue;
    for (const LinearTensor& other : linears) {
      if (other.role != models::Role::kStateIn || targets(t).empty() == targets(other).empty())
        continue;
      const bool first = targets(t).empty();
      return invalid_argument("--ignore names '{}' but not '{}': they run as one matrix, name both",
                              (first ? t : other).source->name, (first ? other : t).source->name);
    }
  }
  return {};
}

Status QuantizeJob::check_shapes() const {
  if (options_.container == nullptr) return {};
  if (options_.kv_scales && std::ranges::none_of(parts_, [this](const models::Part& part) {
        return has_kv_scales(part);
      })) {
    return unsupported(
        "--kv-cache-scheme: no layer of this model keeps keys and values that have factors");
  }
  int64_t count = 0;
  for (const models::Part& part : parts_) {
    FRESHET_ASSIGN_OR_RETURN(const auto linears, working_.linears(part));
    FRESHET_RETURN_IF_ERROR(check_joined(linears));
    for (const LinearTensor& t : linears) {
      if (targets(t).empty()) continue;
      ++count;
      if (t.count > 1 || t.layout != models::Layout::kRows)
        return unsupported(
            "tensor '{}' is {}, which no container describes: write a GGUF file (--scheme Q4_K_M) "
            "or name it with --ignore",
            t.source->name, t.count > 1 ? "a stack of experts" : "stored [in, out]");
      const int64_t group = options_.scheme.group;
      if (group > 0 && t.cols % group != 0)
        return unsupported("tensor '{}' has {} columns, not a multiple of {}: {}--ignore it",
                           t.source->name, t.cols, group, other_group(options_.scheme));
    }
  }
  if (count == 0) return invalid_argument("nothing to quantise: --ignore names every linear layer");
  return {};
}

ModelFacts QuantizeJob::facts() const {
  ModelFacts facts;
  facts.dtype = working_.dtype();
  for (const models::Part& part : parts_) {
    const auto linears = working_.linears(part);
    if (!linears.ok()) continue;
    for (const LinearTensor& t : *linears) {
      if (!targets(t).empty())
        facts.layers.push_back({module_name(t.source->name), t.rows, t.cols});
    }
  }
  return facts;
}

bool QuantizeJob::stopped(double fraction) const {
  return options_.progress && !options_.progress("quantising", fraction);
}

bool QuantizeJob::has_kv_scales(const models::Part& part) const {
  return options_.kv_scales && keeps_keys_and_values(working_.model().spec, part);
}

bool QuantizeJob::reads_text() const {
  const bool ranges = options_.container != nullptr && needs_inputs(options_.scheme);
  return (options_.method.needs_text() || ranges || options_.kv_scales) &&
         !options_.calibration.windows.empty();
}

Result<std::unique_ptr<PartRunner>> QuantizeJob::new_runner() {
  PartRunner::Options o;
  o.memory = options_.memory;
  o.folder = results_->folder();
  o.stop = [this] { return stopped(fraction_); };
  o.device = options_.device;
  return PartRunner::create(working_.compute(), working_.checkpoint(), working_.model(),
                            options_.calibration.windows, o);
}

Status QuantizeJob::run_parts() {
  FRESHET_ASSIGN_OR_RETURN(PartResults results,
                           PartResults::open(options_.output + ".partial", key()));
  results_.emplace(std::move(results));
  if (reads_text()) {
    FRESHET_ASSIGN_OR_RETURN(runner_, new_runner());
  }
  const auto count = static_cast<int>(parts_.size());
  int last_open = -1;  // behind the last part that is not finished, nothing needs streams
  for (int i = 0; i < count; ++i) {
    if (!results_->has(i)) last_open = i;
  }
  for (int i = 0; i < count; ++i) {
    fraction_ = static_cast<double>(i) / count;
    if (stopped(fraction_)) return cancelled("interrupted");
    FRESHET_RETURN_IF_ERROR(run_part(i, runner_ != nullptr && i < last_open));
  }
  return {};
}

Status QuantizeJob::run_part(int index, bool streams_needed) {
  const models::Part& part = parts_[static_cast<size_t>(index)];
  FRESHET_ASSIGN_OR_RETURN(const auto linears, working_.linears(part));
  if (results_->has(index)) {
    ++report_.resumed;
    FRESHET_RETURN_IF_ERROR(restore_part(index, linears, streams_needed));
  } else {
    FRESHET_RETURN_IF_ERROR(quantise_part(index, part, linears));
    // Only now, when second moments are gone, the numbers take memory in 16 bits.
    if (streams_needed) {
      FRESHET_ASSIGN_OR_RETURN(const PartResults::Part done, results_->read(index));
      FRESHET_RETURN_IF_ERROR(apply_part(done, linears));
    }
  }
  if (part.shared) {  // all its layers run with the new numbers
    changed_.clear();
    return {};
  }
  if (streams_needed) FRESHET_RETURN_IF_ERROR(runner_->advance(part));
  for (const LinearTensor& t : linears) working_.restore(t.source->name);
  for (const std::string& name : changed_) working_.restore(name);
  changed_.clear();
  return {};
}

// Makes the working model hold what an earlier run found.
Status QuantizeJob::restore_part(int index, const std::vector<LinearTensor>& linears,
                                 bool streams_needed) {
  FRESHET_ASSIGN_OR_RETURN(const PartResults::Part part, results_->read(index));
  const json::Value* kept = part.record.find("linears");
  if (kept == nullptr || !kept->is_array())
    return invalid_argument("{} is damaged: delete it", results_->folder());
  for (const json::Value& one : kept->as_array()) report_.linears.push_back(linear_of(one));
  if (!streams_needed) return {};
  return apply_part(part, linears);
}

Status QuantizeJob::write_output() {
  double sum = 0.0;
  for (const QuantizedLinear& l : report_.linears) sum += l.report.relative_error;
  if (!report_.linears.empty())
    report_.mean_relative_error = sum / static_cast<double>(report_.linears.size());
  FRESHET_RETURN_IF_ERROR(read_parts());
  return options_.recipe != nullptr ? write_gguf() : write_container();
}

QuantizeReport QuantizeJob::take_report() {
  std::error_code error;
  namespace fs = std::filesystem;
  if (fs::is_directory(options_.output, error)) {
    for (const auto& entry : fs::directory_iterator(options_.output, error))
      report_.bytes += static_cast<size_t>(entry.is_regular_file() ? entry.file_size(error) : 0);
  } else {
    report_.bytes = static_cast<size_t>(fs::file_size(options_.output, error));
  }
  return std::move(report_);
}

Result<QuantizeReport> quantize(WorkingModel& working, const QuantizeOptions& options) {
  QuantizeJob job(working, options);
  FRESHET_RETURN_IF_ERROR(job.prepare());
  FRESHET_RETURN_IF_ERROR(job.check_shapes());
  FRESHET_RETURN_IF_ERROR(job.run_parts());
  FRESHET_RETURN_IF_ERROR(job.write_output());
  if (const Status same = job.verify(); !same.ok()) {
    std::error_code error;
    std::filesystem::remove_all(options.output, error);
    return same;
  }
  job.remove_partial();
  return job.take_report();
}

Result<std::vector<std::string>> loaders_of(WorkingModel& working, const QuantizeOptions& options) {
  if (options.container == nullptr)
    return std::vector<std::string>{"llama.cpp: loads", "Freshet: loads"};
  QuantizeJob job(working, options);
  FRESHET_RETURN_IF_ERROR(job.prepare());
  FRESHET_RETURN_IF_ERROR(job.check_shapes());
  std::vector<std::string> lines;
  for (const Loader& l : options.container->loaders(options.scheme, job.facts()))
    lines.push_back(describe(l));
  return lines;
}

}  // namespace freshet::quantizer
