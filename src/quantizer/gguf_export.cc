#include "quantizer/gguf_export.h"

#include <algorithm>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "layers/model.h"
#include "loader/gguf_writer.h"
#include "models/registry.h"
#include "models/weight_reader.h"
#include "quantizer/export_plan.h"
#include "quantizer/gguf_families.h"
#include "quantizer/gguf_hyperparameters.h"
#include "quantizer/gguf_vocabulary.h"
#include "quantizer/planned_reader.h"

namespace freshet::quantizer {
namespace {

using loader::GgufWriter;

Status set_metadata(GgufWriter& out, const std::string& key, const std::string& text) {
  const auto value = json::parse(text);
  if (!value.ok() || value->is_string() || value->is_array() || value->is_object()) {
    out.add_string(key, value.ok() && value->is_string() ? value->as_string() : text);
  } else if (value->is_bool()) {
    out.add_bool(key, value->as_bool());
  } else if (value->is_integer()) {
    out.add_u32(key, static_cast<uint32_t>(value->as_int64().value_or(0)));
  } else if (value->is_number()) {
    out.add_f32(key, static_cast<float>(value->as_double()));
  } else {
    return invalid_argument("metadata {}: cannot be null", key);
  }
  return {};
}

// Writes planned tensors one after another.
class TensorWriter {
 public:
  TensorWriter(ThreadPool& pool, GgufWriter& out, const ExportOptions& options)
      : pool_(pool), out_(out), options_(options), reader_(pool) {
    if (options.imatrix != nullptr) importance_ = Importance(*options.imatrix);
  }

  Status write(const Planned& p) {
    encoded_.resize(static_cast<size_t>(p.rows()) * quant::row_bytes(p.format, p.cols()));
    bool done = false;
    if (options_.rows != nullptr) {
      const RowSource::Numbers numbers = [&] { return reader_.read(p); };
      FRESHET_ASSIGN_OR_RETURN(done, options_.rows->encode(p, numbers, encoded_));
    }
    if (!done) {
      FRESHET_ASSIGN_OR_RETURN(const auto numbers, reader_.read(p));
      encode(p, numbers);
    }
    return out_.write(encoded_);
  }

 private:
  void encode(const Planned& p, std::span<const float> numbers) {
    const quant::FormatInfo& to = quant::info(p.format);
    const int64_t cols = p.cols();
    const size_t stride = quant::row_bytes(p.format, cols);
    const bool weighted = options_.overrides.uses_importance(p.name);
    pool_.parallel_for(p.rows(), [&](int64_t r, int) {
      std::span<const float> weights;
      if (weighted) weights = importance_.of(p.name, p.expert_of(r), cols);
      to.encode(numbers.data() + r * cols, encoded_.data() + static_cast<size_t>(r) * stride, cols,
                weights.empty() ? nullptr : weights.data());
    });
  }

  ThreadPool& pool_;
  GgufWriter& out_;
  const ExportOptions& options_;
  Importance importance_;
  PlannedReader reader_;
  std::vector<uint8_t> encoded_;
};

// The language model's part of a multimodal configuration.
const json::Value& text_config(const json::Value& config) {
  const json::Value* text = config.find("text_config");
  return text != nullptr && text->is_object() ? *text : config;
}

// The settings recommended by the model's authors, under the keys where llama.cpp and related tools
// look for them.
void add_sampling(const json::Value& recommended, GgufWriter& out) {
  const auto number = [&](const char* name) -> const json::Value* {
    const json::Value* v = recommended.is_object() ? recommended.find(name) : nullptr;
    return v != nullptr && v->is_number() ? v : nullptr;
  };
  if (const auto* v = number("top_k"); v != nullptr && v->as_int64())
    out.add_i32("general.sampling.top_k", static_cast<int32_t>(*v->as_int64()));
  for (const auto& [name, key] : {std::pair{"temperature", "temp"},
                                  {"top_p", "top_p"},
                                  {"min_p", "min_p"},
                                  {"repetition_penalty", "penalty_repeat"}}) {
    if (const auto* v = number(name))
      out.add_f32(fmt::format("general.sampling.{}", key), static_cast<float>(v->as_double()));
  }
  // GGUF has no key for it.
  if (const auto* v = number("typical_p"))
    out.add_f32("freshet.sampling.typical_p", static_cast<float>(v->as_double()));
}

// What the options say about the importance matrix must fit the tensors.
Status check_importance(const GgufPlan& plan, const ExportOptions& options) {
  std::vector<Imatrix::Tensor> tensors;
  for (const Planned& p : plan.tensors) {
    if (!is_quantised({p.name, p.shape}) || p.name == "token_embd.weight" ||
        p.name == "output.weight" || !options.overrides.uses_importance(p.name))
      continue;
    tensors.push_back({p.name, p.shape.size() > 2 ? p.shape[0] : 1, p.cols()});
  }
  std::set<std::string> missing;
  if (options.imatrix != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(const auto names, options.imatrix->missing(tensors));
    missing.insert(names.begin(), names.end());
    if (!names.empty())
      options.warn(fmt::format(
          "the importance matrix says nothing of {} of {} tensors ({}{}): they "
          "are encoded without it",
          names.size(), tensors.size(),
          fmt::join(names.begin(), names.begin() + std::min<std::ptrdiff_t>(3, std::ssize(names)),
                    ", "),
          names.size() > 3 ? " ..." : ""));
  }
  for (const Planned& p : plan.tensors) {
    const bool weighted = options.imatrix != nullptr && !missing.contains(p.name) &&
                          options.overrides.uses_importance(p.name);
    if (!weighted && plan.recipe.needs_importance(p.name, p.format))
      return invalid_argument(
          "tensor '{}' in {} needs an importance matrix{}; give one that covers "
          "it, or another type",
          p.name, quant::info(p.format).name,
          options.imatrix != nullptr ? ", and this one has no entry for it" : "");
  }
  return {};
}

// The keys of llama-quantize.
void add_provenance(const ExportOptions& options, GgufWriter& out) {
  if (options.imatrix == nullptr) return;
  const Imatrix& m = *options.imatrix;
  out.add_string("quantize.imatrix.file", options.imatrix_file);
  if (!m.datasets.empty()) out.add_string("quantize.imatrix.dataset", m.datasets.front());
  const auto used = std::count_if(m.entries.begin(), m.entries.end(), [&](const auto& e) {
    return options.overrides.uses_importance(e.first);
  });
  out.add_u32("quantize.imatrix.entries_count", static_cast<uint32_t>(used));
  if (m.chunk_count > 0) out.add_u32("quantize.imatrix.chunks_count", m.chunk_count);
}

// What a plan is made from.
struct Source {
  const models::Architecture* architecture = nullptr;
  std::string gguf_name;
  ModelSpec spec;
};

Result<Source> read_source(const loader::Checkpoint& checkpoint) {
  if (checkpoint.kind() != loader::Checkpoint::Kind::kHuggingFace)
    return unsupported("{} is not a Hugging Face folder; only those can be converted",
                       checkpoint.path());
  Source s;
  FRESHET_ASSIGN_OR_RETURN(s.spec, read_spec(checkpoint));
  if (!s.spec.generates)
    return unsupported(
        "{} is an encoder or a classifier; only models that write text can be converted",
        checkpoint.path());
  FRESHET_ASSIGN_OR_RETURN(s.architecture,
                           models::find_architecture(text_config(checkpoint.config())));
  FRESHET_ASSIGN_OR_RETURN(s.gguf_name, gguf_architecture(s.architecture->type, s.spec));
  return s;
}

Status add_slopes(const Source& source, const loader::Checkpoint& checkpoint, GgufWriter& out) {
  ThreadPool none(1, false);
  FRESHET_ASSIGN_OR_RETURN(const auto ops,
                           ops::Ops::create(none, ops::reference_kernels(), {}, {}));
  const Progress no_progress;
  return add_xielu({checkpoint, *source.architecture, *ops, no_progress}, source.spec, out);
}

Status add_metadata(const Source& source, const loader::Checkpoint& checkpoint,
                    const ExportOptions& options, const Recipe& recipe,
                    const std::function<void(const std::string&)>& warn, GgufWriter& out) {
  const ModelSpec& spec = source.spec;
  out.add_string("general.architecture", source.gguf_name);
  out.add_string("general.name", options.name);
  out.add_u32("general.file_type", recipe.file_type());
  out.add_u32("general.quantization_version", 2);
  add_sampling(checkpoint.generation_config(), out);
  FRESHET_RETURN_IF_ERROR(
      add_hyperparameters(text_config(checkpoint.config()), spec, source.gguf_name, out));
  if (const std::string missed = missed_by_readers(spec, source.gguf_name); !missed.empty())
    warn(missed);
  FRESHET_RETURN_IF_ERROR(add_slopes(source, checkpoint, out));
  FRESHET_RETURN_IF_ERROR(add_vocabulary(checkpoint.path(), spec.vocab_size, out, warn));
  if (spec.vision != nullptr)
    warn("the tower for pictures is left out: the file is the language model alone");
  add_provenance(options, out);
  for (const auto& [key, value] : options.metadata)
    FRESHET_RETURN_IF_ERROR(set_metadata(out, key, value));
  return {};
}

Status declare(const std::vector<Planned>& tensors, GgufWriter& out) {
  for (const Planned& p : tensors)
    FRESHET_RETURN_IF_ERROR(out.add_tensor(p.name, p.format, p.shape));
  return {};
}

// The formats for a size in place of the recipe's.
Status apply_target(const Source& source, const loader::Checkpoint& checkpoint, ThreadPool& pool,
                    const ExportOptions& options, const RecipeModel& model, GgufPlan& plan) {
  GgufWriter trial;  // only to know its size
  FRESHET_RETURN_IF_ERROR(
      add_metadata(source, checkpoint, options, plan.recipe, [](const std::string&) {}, trial));
  FRESHET_RETURN_IF_ERROR(declare(plan.tensors, trial));
  Importance importance;
  if (options.imatrix != nullptr) importance = Importance(*options.imatrix);
  SizeSearch search;
  search.model = model;
  search.overrides = &options.overrides;
  if (options.imatrix != nullptr) search.importance = &importance;
  search.losses = options.losses;
  search.feedback = options.feedback;
  search.budget =
      tensor_budget(options.target, plan.tensors, static_cast<int64_t>(trial.head_bytes()));
  if (options.progress) search.go_on = [&] { return options.progress(0.0); };
  FRESHET_ASSIGN_OR_RETURN(plan.recipe, choose_by_size(plan.tensors, search, pool));
  return {};
}

Result<GgufPlan> plan_from(const Source& source, const loader::Checkpoint& checkpoint,
                           ThreadPool& pool, const ExportOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const auto ops,
                           ops::Ops::create(pool, ops::reference_kernels(), {}, {}));
  const Progress no_progress;
  const models::WeightReader reader(checkpoint, *source.architecture, *ops, no_progress);
  ExportPlanner planner(reader, checkpoint, source.spec, options.recipe, &options.overrides,
                        options.importance || options.imatrix != nullptr);
  GgufPlan plan;
  plan.recipe = options.recipe;
  FRESHET_ASSIGN_OR_RETURN(plan.tensors, planner.plan(options.warn));
  const bool kv_scales = std::ranges::any_of(
      checkpoint.tensors(), [](const auto& t) { return loader::is_kv_factor(t.name); });
  if (kv_scales) options.warn("GGUF files have no factors of keys and values: they are left out");
  if (options.target.given())
    FRESHET_RETURN_IF_ERROR(
        apply_target(source, checkpoint, pool, options, planner.recipe_model(), plan));
  return plan;
}

}  // namespace

Result<GgufPlan> plan_gguf(const loader::Checkpoint& checkpoint, ThreadPool& pool,
                           const ExportOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const Source source, read_source(checkpoint));
  return plan_from(source, checkpoint, pool, options);
}

Status export_gguf(const loader::Checkpoint& checkpoint, ThreadPool& pool,
                   const ExportOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const Source source, read_source(checkpoint));
  GgufPlan own;
  if (options.plan == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(own, plan_from(source, checkpoint, pool, options));
  }
  const GgufPlan& plan = options.plan != nullptr ? *options.plan : own;
  if (options.rows == nullptr) FRESHET_RETURN_IF_ERROR(check_importance(plan, options));
  GgufWriter out;
  FRESHET_RETURN_IF_ERROR(
      add_metadata(source, checkpoint, options, plan.recipe, options.warn, out));
  FRESHET_RETURN_IF_ERROR(declare(plan.tensors, out));
  FRESHET_RETURN_IF_ERROR(out.open(options.output));
  TensorWriter writer(pool, out, options);
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(writer.write(plan.tensors[i]));
    if (options.progress &&
        !options.progress(static_cast<double>(i + 1) / static_cast<double>(plan.tensors.size())))
      return cancelled("interrupted");
  }
  return out.close();
}

}  // namespace freshet::quantizer
