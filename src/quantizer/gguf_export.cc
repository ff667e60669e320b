#include "quantizer/gguf_export.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "layers/model.h"
#include "loader/gguf_writer.h"
#include "models/registry.h"
#include "models/weight_reader.h"
#include "quantizer/export_plan.h"
#include "quantizer/gguf_hyperparameters.h"
#include "quantizer/gguf_vocabulary.h"

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

// The numbers of a source as F32, `cols` of them from the start of row `row`.
void read_row(const loader::TensorSource& t, int64_t row, int64_t cols, float* out) {
  const quant::FormatInfo& info = quant::info(*t.format);
  info.decode(t.data + static_cast<size_t>(row) * quant::row_bytes(*t.format, cols), out, cols);
}

// Writes planned tensors one after another.
class TensorWriter {
 public:
  TensorWriter(ThreadPool& pool, GgufWriter& out, RowSource* source)
      : pool_(pool), out_(out), source_(source) {}

  Status write(const Planned& p) {
    encoded_.resize(static_cast<size_t>(p.rows()) * quant::row_bytes(p.format, p.cols()));
    bool done = false;
    if (source_ != nullptr) {
      const auto numbers = [&]() -> Result<std::span<const float>> {
        FRESHET_RETURN_IF_ERROR(read(p));
        return std::span<const float>(numbers_);
      };
      FRESHET_ASSIGN_OR_RETURN(done, source_->encode(p, numbers, encoded_));
    }
    if (!done) {
      FRESHET_RETURN_IF_ERROR(read(p));
      encode(p);
    }
    return out_.write(encoded_);
  }

 private:
  // Fills numbers_, and refuses numbers that no format can hold.
  Status read(const Planned& p) {
    FRESHET_RETURN_IF_ERROR(gather(p));
    const int64_t cols = p.cols();
    std::atomic<bool> finite = true;
    pool_.parallel_for(p.rows(), [&](int64_t r, int) {
      float* row = numbers_.data() + r * cols;
      for (int64_t i = 0; i < cols; ++i) {
        row[i] += p.offset;
        if (!std::isfinite(row[i])) finite = false;
      }
    });
    if (!finite) return invalid_argument("tensor '{}' holds a NaN or an infinity", p.name);
    return {};
  }

  void encode(const Planned& p) {
    const quant::FormatInfo& to = quant::info(p.format);
    const int64_t cols = p.cols();
    const size_t stride = quant::row_bytes(p.format, cols);
    pool_.parallel_for(p.rows(), [&](int64_t r, int) {
      to.encode(numbers_.data() + r * cols, encoded_.data() + static_cast<size_t>(r) * stride, cols,
                nullptr);
    });
  }

  // All numbers of the tensor, in the order in which they are written.
  Status gather(const Planned& p) {
    const int64_t cols = p.cols();
    if (!p.values.empty()) {
      numbers_ = p.values;
      return {};
    }
    numbers_.resize(static_cast<size_t>(p.rows() * cols));
    float* to = numbers_.data();
    for (const Planned::Part& part : p.parts) {
      FRESHET_RETURN_IF_ERROR(part.source->usable_format().status());
      if (p.shape.size() == 1 && part.rows > 1) {
        gather_vector(part, to);
      } else if (p.transposed) {
        gather_columns(part, cols, to);
      } else {
        pool_.parallel_for(part.rows, [&](int64_t r, int) {
          const int64_t from = part.order.empty() ? r : part.order[static_cast<size_t>(r)];
          read_row(*part.source, part.first_row + from, cols, to + r * cols);
        });
      }
      to += part.rows * (p.shape.size() == 1 && part.rows > 1 ? 1 : cols);
      if (part.source->file != nullptr)
        part.source->file->release(part.source->file_offset, part.source->bytes);
    }
    return {};
  }

  static void gather_vector(const Planned::Part& part, float* to) {
    std::vector<float> all(static_cast<size_t>(part.rows));
    read_row(*part.source, 0, part.rows, all.data());
    for (size_t i = 0; i < all.size(); ++i) to[i] = all[static_cast<size_t>(part.order[i])];
  }

  // Transposes from [cols, rows].
  static void gather_columns(const Planned::Part& part, int64_t cols, float* to) {
    std::vector<float> line(static_cast<size_t>(part.rows));
    for (int64_t c = 0; c < cols; ++c) {
      read_row(*part.source, c, part.rows, line.data());
      for (int64_t r = 0; r < part.rows; ++r) to[r * cols + c] = line[static_cast<size_t>(r)];
    }
  }

  ThreadPool& pool_;
  GgufWriter& out_;
  RowSource* source_;
  std::vector<float> numbers_;
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

}  // namespace

Status export_gguf(const loader::Checkpoint& checkpoint, ThreadPool& pool,
                   const ExportOptions& options) {
  if (checkpoint.kind() != loader::Checkpoint::Kind::kHuggingFace)
    return unsupported("{} is not a Hugging Face folder; only those can be converted",
                       checkpoint.path());
  const json::Value& config = text_config(checkpoint.config());
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(checkpoint));
  FRESHET_ASSIGN_OR_RETURN(const models::Architecture* architecture,
                           models::find_architecture(config));
  FRESHET_ASSIGN_OR_RETURN(const std::string name, gguf_architecture(architecture->type));
  FRESHET_ASSIGN_OR_RETURN(const auto ops,
                           ops::Ops::create(pool, ops::reference_kernels(), {}, {}));
  const Progress no_progress;
  const models::WeightReader reader(checkpoint, *architecture, *ops, no_progress);
  FRESHET_ASSIGN_OR_RETURN(const auto plan,
                           ExportPlanner(reader, checkpoint, spec, options.recipe).plan());
  GgufWriter out;
  out.add_string("general.architecture", name);
  out.add_string("general.name", options.name);
  out.add_u32("general.file_type", options.recipe.file_type());
  out.add_u32("general.quantization_version", 2);
  add_sampling(checkpoint.generation_config(), out);
  FRESHET_RETURN_IF_ERROR(add_hyperparameters(config, spec, name, out));
  FRESHET_RETURN_IF_ERROR(add_vocabulary(checkpoint.path(), spec.vocab_size, out, options.warn));
  for (const auto& [key, value] : options.metadata)
    FRESHET_RETURN_IF_ERROR(set_metadata(out, key, value));
  for (const Planned& p : plan) FRESHET_RETURN_IF_ERROR(out.add_tensor(p.name, p.format, p.shape));
  FRESHET_RETURN_IF_ERROR(out.open(options.output));
  TensorWriter writer(pool, out, options.rows);
  for (size_t i = 0; i < plan.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(writer.write(plan[i]));
    if (options.progress &&
        !options.progress(static_cast<double>(i + 1) / static_cast<double>(plan.size())))
      return cancelled("interrupted");
  }
  return out.close();
}

}  // namespace freshet::quantizer
