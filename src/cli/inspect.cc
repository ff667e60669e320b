#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/units.h"
#include "cli/command.h"
#include "cli/model_path.h"
#include "cli/options.h"
#include "layers/branch_kinds.h"
#include "layers/model.h"
#include "loader/checkpoint.h"
#include "models/nearest.h"
#include "models/quantization_config.h"
#include "models/registry.h"
#include "runtime/loaded_model.h"

namespace freshet::cli {
namespace inspect_command {

using loader::Checkpoint;
using loader::TensorSource;

struct Options {
  std::string model;
  bool json = false;
  bool kernels = false;
  bool tensors = false;
  bool metadata = false;
  bool architectures = false;
  RunOptions run;
  KvTypes kv_types;  // parsed from run.kv_cache_dtype
};

struct FormatTotal {
  int64_t tensors = 0;
  int64_t numbers = 0;
  size_t bytes = 0;
};

// The number of `bits`-bit values packed in a GPTQ, AWQ or pack-quantized tensor; 0 for other
// tensors.
int64_t packed_numbers(const TensorSource& t, int bits) {
  const bool packed = t.name.ends_with(".qweight") || t.name.ends_with(".weight_packed");
  return packed && t.dtype == "I32" ? t.elements() * 32 / bits : 0;
}

std::map<std::string, FormatTotal> formats_of(const Checkpoint& checkpoint) {
  std::map<std::string, FormatTotal> totals;
  const int bits = models::quantization_bits(checkpoint.config());
  for (const TensorSource& t : checkpoint.tensors()) {
    const int64_t packed = packed_numbers(t, bits);
    FormatTotal& f = totals[packed > 0 ? fmt::format("INT{}", bits) : t.dtype];
    ++f.tensors;
    f.numbers += packed > 0 ? packed : t.elements();
    f.bytes += t.bytes;
  }
  return totals;
}

// The tower for pictures in a few words.
std::string tower_text(const VisionSpec& v) {
  const std::string input =
      v.side > 0
          ? fmt::format("{} of {} pixels",
                        v.tiles > 0 ? fmt::format("up to {} tiles", v.tiles) : "squares", v.side)
          : "any size";
  const size_t layers = v.blocks.layers.size() + (v.later ? v.later->layers.size() : 0);
  return fmt::format("tower of {}: {}, patches of {}{}, {} layers of {} features", v.family, input,
                     v.patch, v.merge > 1 ? fmt::format(" merged {0} x {0}", v.merge) : "", layers,
                     v.blocks.hidden_size);
}

json::Value tower_json(const VisionSpec& v) {
  json::Object to;
  to["family"] = v.family;
  to["side"] = v.side;
  to["patch"] = v.patch;
  to["merge"] = v.merge;
  to["hidden_size"] = v.blocks.hidden_size;
  to["layers"] = v.blocks.layers.size() + (v.later ? v.later->layers.size() : 0);
  to["image_token"] = v.image_token;
  return to;
}

// A short description of a layer; equal layers give equal text.
std::string describe(const LayerSpec& layer) {
  std::string text;
  for (const BranchSpec& branch : layer.branches) {
    text += fmt::format("{}{}", text.empty() ? "" : "; ", kind_of(branch).describe(branch));
  }
  if (layer.parallel) text += ", in parallel";
  if (layer.branches.front().side == Side::kOpens)
    text += "; the last of these reads the stream and the result of the others";
  return text;
}

// Layer numbers as ranges: "0-4", "7", "1, 3, 5".
std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", numbers[i]);
    if (j > i) text += fmt::format("-{}", numbers[j]);
    i = j + 1;
  }
  return text;
}

std::vector<std::pair<std::string, std::vector<int>>> layer_kinds(const ModelSpec& spec) {
  std::vector<std::pair<std::string, std::vector<int>>> kinds;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    const std::string text = describe(spec.layers[i]);
    auto kind =
        std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.first == text; });
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {text, {}});
    kind->second.push_back(static_cast<int>(i));
  }
  return kinds;
}

size_t kv_bytes_per_token(const ModelSpec& spec, const KvTypes& types) {
  return kv_cache_spec(spec, types).bytes_per_token();
}

int64_t numbers_of(const Checkpoint& checkpoint) {
  int64_t n = 0;
  for (const auto& [name, f] : formats_of(checkpoint)) n += f.numbers;
  return n;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t n : shape) text += fmt::format("{}{}", text.size() > 1 ? ", " : "", n);
  return text + "]";
}

// Weights that differ only in their layer: one line of --kernels.
struct KernelGroup {
  const Model::WeightInfo* first = nullptr;
  std::string before, after;  // of the layer's number in the name; `after` is empty if it has none
  std::vector<int> layers;
  size_t count = 0;
};

// Splits "blk.7.attn_q" at the first number between dots or at the end. Returns the number, or -1.
int split_layer(const std::string& name, KernelGroup& group) {
  for (size_t at = name.find('.'); at != std::string::npos; at = name.find('.', at + 1)) {
    const size_t end = std::min(name.find_first_not_of("0123456789", at + 1), name.size());
    if (end == at + 1 || end - at > 7 || (end < name.size() && name[end] != '.')) continue;
    group.before = name.substr(0, at + 1);
    group.after = name.substr(end);
    return std::stoi(name.substr(at + 1, end - at - 1));
  }
  group.before = name;
  return -1;
}

std::vector<KernelGroup> group_kernels(const std::vector<Model::WeightInfo>& weights) {
  std::vector<KernelGroup> groups;
  for (const Model::WeightInfo& w : weights) {
    KernelGroup one;
    one.first = &w;
    const int layer = split_layer(w.name, one);
    const auto same = [&](const KernelGroup& g) {
      return g.before == one.before && g.after == one.after && g.layers.empty() == (layer < 0) &&
             g.first->format == w.format && g.first->rows == w.rows && g.first->cols == w.cols &&
             g.first->bytes == w.bytes && g.first->kernel == w.kernel;
    };
    auto found = std::find_if(groups.begin(), groups.end(), same);
    if (found == groups.end()) found = groups.insert(groups.end(), one);
    ++found->count;
    if (layer >= 0 && (found->layers.empty() || found->layers.back() != layer))
      found->layers.push_back(layer);
  }
  return groups;
}

void print_kernels(const std::vector<Model::WeightInfo>& weights, Output& out) {
  out.print("kernels\n");
  for (const KernelGroup& g : group_kernels(weights)) {
    std::string name = g.before;
    if (!g.layers.empty()) name += ranges(g.layers) + g.after;
    const Model::WeightInfo& w = *g.first;
    out.print("  {:40} {:8} {:16} {:>9}  {}{}\n", name, quant::info(w.format).name,
              shape_text({w.rows, w.cols}), format_bytes(w.bytes), w.kernel,
              g.count > 1 ? fmt::format("  x {}", g.count) : "");
  }
}

// What the user calls the model.
std::string model_title(const Options& o, const Checkpoint& c) {
  return o.model.empty() || o.model == "default" ? "default (embedded)" : c.path();
}

void print_text(const Options& o, const Checkpoint& c, const ModelSpec& spec,
                const std::vector<Model::WeightInfo>& weights, Output& out) {
  const int64_t numbers = numbers_of(c);
  out.print("model         {}\n", model_title(o, c));
  out.print("container     {}\n",
            c.kind() == Checkpoint::Kind::kGguf ? "GGUF" : "Hugging Face folder, safetensors");
  out.print("architecture  {}\n", spec.architecture);
  out.print("parameters    {:.2f} M in {} ({:.2f} bits each)\n", static_cast<double>(numbers) / 1e6,
            format_bytes(c.total_bytes()),
            8.0 * static_cast<double>(c.total_bytes()) /
                static_cast<double>(std::max<int64_t>(1, numbers)));
  out.print("vocabulary    {}, hidden size {}, context {}{}\n", spec.vocab_size, spec.hidden_size,
            spec.max_context, spec.tied_embeddings ? ", tied embeddings" : "");
  out.print("cache         {} per token in {}\n",
            format_bytes(kv_bytes_per_token(spec, o.kv_types)), o.kv_types.describe());
  if (const size_t state = kv_cache_spec(spec, o.kv_types).state_bytes(); state > 0)
    out.print("state         {} per sequence\n", format_bytes(state));
  out.print("layers        {}\n", spec.layers.size());
  for (const auto& [text, layers] : layer_kinds(spec))
    out.print("  {:11} {}\n", ranges(layers), text);
  if (spec.vision != nullptr) out.print("pictures      {}\n", tower_text(*spec.vision));
  out.print("formats\n");
  for (const auto& [name, f] : formats_of(c))
    out.print("  {:11} {:5} tensors, {:10.2f} M numbers, {}\n", name, f.tensors,
              static_cast<double>(f.numbers) / 1e6, format_bytes(f.bytes));
  if (o.tensors) {
    out.print("tensors\n");
    for (const TensorSource& t : c.tensors())
      out.print("  {:48} {:8} {:20} {}\n", t.name, t.dtype, shape_text(t.shape),
                format_bytes(t.bytes));
  }
  if (o.kernels) print_kernels(weights, out);
}

// The fields of all branches; if two branches have the same field, the first one wins.
json::Value metadata_json(const Checkpoint& c);

// How the weights were quantised, as far as the files tell: what `freshet quantize` recorded, and
// the name of the published layout.
json::Object quantization_of(const Checkpoint& c) {
  json::Object out;
  if (c.kind() == Checkpoint::Kind::kGguf) {
    constexpr std::string_view kKey = "freshet.quantization.";
    const json::Value all = metadata_json(c);
    for (const auto& [key, value] : all.as_object()) {
      if (key.starts_with(kKey)) out[key.substr(kKey.size())] = value;
    }
    if (!out.empty()) out["format"] = "gguf";
    return out;
  }
  if (const json::Value* ours = c.config().find("freshet"); ours != nullptr && ours->is_object()) {
    for (const auto& [key, value] : ours->as_object()) out[key] = value;
  }
  const json::Value* published = models::quantization_config(c.config());
  const json::Value* name = published == nullptr ? nullptr : published->find("quant_method");
  if (name != nullptr && name->is_string()) out["format"] = *name;
  return out;
}

json::Object layer_json(const LayerSpec& layer) {
  json::Object j;
  json::Array branches;
  for (const BranchSpec& branch : layer.branches) {
    const BranchKind& kind = kind_of(branch);
    json::Object fields;
    kind.fields(branch, fields);
    for (const auto& [key, value] : fields) {
      if (j.find(key) == nullptr) j[key] = value;
    }
    branches.emplace_back(kind.name);
  }
  j["branches"] = std::move(branches);
  return j;
}

json::Value to_json(const Options& o, const Checkpoint& c, const ModelSpec& spec,
                    const std::vector<Model::WeightInfo>& weights) {
  json::Object j;
  j["model"] = o.model.empty() ? "default" : o.model;
  j["container"] = c.kind() == Checkpoint::Kind::kGguf ? "gguf" : "safetensors";
  j["architecture"] = spec.architecture;
  j["parameters"] = numbers_of(c);
  j["bytes"] = c.total_bytes();
  j["vocab_size"] = spec.vocab_size;
  j["hidden_size"] = spec.hidden_size;
  j["max_context"] = spec.max_context;
  j["tied_embeddings"] = spec.tied_embeddings;
  if (json::Object made = quantization_of(c); !made.empty()) j["quantization"] = std::move(made);
  j["kv_bytes_per_token_f16"] = kv_bytes_per_token(spec, ops::KvType::kF16);
  j["kv_cache_dtype"] = ops::name_of(o.kv_types.type);
  j["kv_bytes_per_token"] = kv_bytes_per_token(spec, o.kv_types);
  j["state_bytes_per_sequence"] = kv_cache_spec(spec, o.kv_types).state_bytes();
  json::Array layers, formats, tensors, kernels;
  for (const LayerSpec& layer : spec.layers) layers.emplace_back(layer_json(layer));
  for (const auto& [name, f] : formats_of(c)) {
    json::Object e;
    e["format"] = name;
    e["tensors"] = f.tensors;
    e["numbers"] = f.numbers;
    e["bytes"] = f.bytes;
    formats.emplace_back(std::move(e));
  }
  for (const TensorSource& t : c.tensors()) {
    json::Object e;
    e["name"] = t.name;
    e["format"] = t.dtype;
    json::Array shape;
    for (const int64_t n : t.shape) shape.emplace_back(n);
    e["shape"] = std::move(shape);
    e["bytes"] = t.bytes;
    tensors.emplace_back(std::move(e));
  }
  for (const Model::WeightInfo& w : weights) {
    json::Object e;
    e["name"] = w.name;
    e["format"] = quant::info(w.format).name;
    e["rows"] = w.rows;
    e["cols"] = w.cols;
    e["bytes"] = w.bytes;
    e["kernel"] = w.kernel;
    kernels.emplace_back(std::move(e));
  }
  j["layers"] = std::move(layers);
  if (spec.vision != nullptr) j["vision"] = tower_json(*spec.vision);
  j["formats"] = std::move(formats);
  j["tensors"] = std::move(tensors);
  if (o.kernels) j["kernels"] = std::move(kernels);
  return j;
}

json::Value metadata_json(const Checkpoint& c) {
  if (c.gguf() == nullptr) return c.config();
  json::Object j;
  for (const auto& [key, v] : c.gguf()->metadata()) {
    if (v.is_array) {
      j[key] = fmt::format("{} x {}", v.count, loader::name_of(v.type));
    } else if (v.type == loader::GgufType::kString) {
      j[key] = v.strings.front();
    } else if (v.type == loader::GgufType::kBool) {
      j[key] = v.int_at(0).value_or(0) != 0;
    } else if (const auto i = v.int_at(0); i && v.type != loader::GgufType::kF32) {
      j[key] = *i;
    } else {
      j[key] = v.number_at(0).value_or(0.0);
    }
  }
  return j;
}

// Fails if the model cannot run on the device, as loading it for a request would.
Result<std::unique_ptr<runtime::LoadedModel>> load(const runtime::LoadOptions& options,
                                                   const KvTypes& types) {
  FRESHET_ASSIGN_OR_RETURN(auto compute, runtime::Compute::open(options));
  FRESHET_ASSIGN_OR_RETURN(auto loaded, runtime::LoadedModel::load(std::move(compute), options));
  FRESHET_RETURN_IF_ERROR(
      runtime::check_cache(loaded->compute(), kv_cache_spec(loaded->spec(), types)));
  FRESHET_RETURN_IF_ERROR(loaded->reserve({.tokens = 1, .logit_rows = 1, .context = 1}));
  return loaded;
}

void print_architectures(const Options& o, Output& out) {
  const std::vector<std::string> names = models::architecture_names();
  if (o.json) {
    json::Array list;
    for (const std::string& name : names) list.emplace_back(name);
    out.write(json::write(list) + "\n");
    return;
  }
  for (const std::string& name : names) out.write(name + "\n");
}

// The error for an unknown architecture says which known one is nearest.
Result<ModelSpec> spec_or_nearest(const Checkpoint& checkpoint) {
  Result<ModelSpec> spec = read_spec(checkpoint);
  if (spec.ok() || spec.status().code() != StatusCode::kUnsupported) return spec;
  FRESHET_ASSIGN_OR_RETURN(const json::Value config, models::config_of(checkpoint));
  if (models::find_architecture(config).ok()) return spec;
  const std::string nearest = models::nearest_architecture(checkpoint);
  if (nearest.empty()) return spec;
  return unsupported("{}; {}", spec.status().message(), nearest);
}

Status inspect(Options o, Output& out) {
  if (o.architectures) {
    print_architectures(o, out);
    return {};
  }
  if (o.run.kv_cache_dtype != "auto") {
    FRESHET_ASSIGN_OR_RETURN(o.kv_types, ops::kv_type_by_name(o.run.kv_cache_dtype));
  }
  FRESHET_ASSIGN_OR_RETURN(const std::string path, resolve_model(o.model));
  FRESHET_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(path, o.run.mmproj));
  if (o.metadata) {
    out.write(json::write(metadata_json(checkpoint), {.indent = 2}) + "\n");
    return {};
  }
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, spec_or_nearest(checkpoint));
  FRESHET_RETURN_IF_ERROR(models::check_weights_present(checkpoint).with_context(o.model));
  FRESHET_ASSIGN_OR_RETURN(o.kv_types, runtime::kv_types(o.kv_types.type, ops::KvType::kF16,
                                                         o.run.kv_cache_skip_layers, spec));
  std::vector<Model::WeightInfo> weights;
  if (o.kernels) {
    ProgressLine progress;
    runtime::LoadOptions s = session_options(o.run, path);
    s.on_progress = [&](const std::string& stage, double fraction) {
      progress.update(stage, fraction);
    };
    FRESHET_ASSIGN_OR_RETURN(const auto loaded,
                             open_on_device(o.run, progress, s, [&](const auto& settings) {
                               return load(settings, o.kv_types);
                             }));
    weights = loaded->model().weights();
  }
  if (o.json) {
    out.write(json::write(to_json(o, checkpoint, spec, weights), {.indent = 2}) + "\n");
  } else {
    print_text(o, checkpoint, spec, weights, out);
  }
  return {};
}

}  // namespace inspect_command

void add_inspect(CLI::App& program, Context& context, Action& action) {
  auto o = std::make_shared<inspect_command::Options>();
  CLI::App* c =
      program.add_subcommand("inspect", "Show the architecture, formats and tensors of a model");
  c->add_option("model", o->model,
                "Model folder, .gguf file or name (default: the embedded model)");
  c->add_flag("--json", o->json, "Print a JSON object");
  c->add_flag("--tensors", o->tensors, "List every tensor");
  c->add_flag("--metadata", o->metadata,
              "Print the configuration (GGUF metadata or config.json) as JSON");
  c->add_flag("--kernels", o->kernels, "Load the model and list the kernel chosen for each weight");
  c->add_flag("--architectures", o->architectures, "List the architectures that can be run");
  add_mmproj_option(*c, o->run);
  add_compute_options(*c, o->run);
  add_examples(*c,
               "  freshet inspect smollm2\n"
               "  freshet inspect --architectures\n"
               "  freshet inspect model.gguf --kernels --cpu-isa avx2\n"
               "  freshet inspect model/ --json | jq .formats");
  c->callback(
      [o, &context, &action] { action = [o, &context] { return inspect(*o, context.out); }; });
}

}  // namespace freshet::cli
