#include "quantizer/recipe.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <map>
#include <utility>

#include "quantizer/recipe_rules.h"

namespace freshet::quantizer {
namespace {

using quant::Format;

std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

bool can_write(const quant::FormatInfo& i) {
  return i.encode != nullptr && i.ggml_type != quant::kNoGgmlType;
}

bool can_write(std::string_view format) {
  const auto f = quant::format_by_name(format);
  return f.has_value() && can_write(quant::info(*f));
}

// The first format of the row that this build cannot write; empty: it can write all.
std::string_view missing_format(const RecipeRow& row) {
  for (const std::string_view f : {row.base, row.output, row.embedding}) {
    if (!f.empty() && !can_write(f)) return f;
  }
  for (const RecipeRule& rule : row.rules) {
    if (rule.format.empty()) break;
    if (!can_write(rule.format)) return rule.format;
  }
  return {};
}

TensorKind kind_of(std::string_view name) {
  if (name == "output.weight") return TensorKind::kOutput;
  if (name == "token_embd.weight") return TensorKind::kEmbedding;
  static constexpr std::pair<std::string_view, TensorKind> kParts[] = {
      {"attn_qkv.weight", TensorKind::kValue},
      {"attn_kv_b.weight", TensorKind::kValue},
      {"attn_v.weight", TensorKind::kValue},
      {"attn_k.weight", TensorKind::kKey},
      {"attn_q.weight", TensorKind::kQuery},
      {"attn_output.weight", TensorKind::kAttentionOutput},
      {"ffn_up", TensorKind::kUp},
      {"ffn_gate", TensorKind::kGate},
      {"ffn_down", TensorKind::kDown},
  };
  for (const auto& [part, kind] : kParts) {
    if (name.find(part) != std::string_view::npos) return kind;
  }
  return TensorKind::kOther;
}

int layer_of(const std::string& name) {
  int layer = -1;
  return std::sscanf(name.c_str(), "blk.%d.", &layer) == 1 ? layer : -1;
}

// The place of each tensor among those of its kind, counted in llama.cpp's order: by layer, then by
// name.
std::vector<TensorPlace> places_of(const RecipeModel& model, std::span<const RecipeTensor> tensors,
                                   std::span<const TensorKind> kinds) {
  std::vector<TensorPlace> places(tensors.size());
  std::vector<size_t> order;
  for (size_t i = 0; i < tensors.size(); ++i) {
    places[i].layer = layer_of(tensors[i].name);
    places[i].stacked = tensors[i].shape.size() > 2;
    places[i].model = &model;
    if (is_quantised(tensors[i])) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(places[a].layer, std::string_view(tensors[a].name)) <
           std::pair(places[b].layer, std::string_view(tensors[b].name));
  });
  std::map<TensorKind, int> counts;
  for (const size_t i : order) places[i].index = counts[kinds[i]]++;
  for (const size_t i : order) places[i].count = counts[kinds[i]];
  return places;
}

std::string_view by_rules(const RecipeRow& row, TensorKind kind, const TensorPlace& place) {
  for (const RecipeRule& rule : row.rules) {
    if (rule.format.empty()) break;
    if (rule.kind == kind && rule.when(place)) return rule.format;
  }
  return row.base;
}

std::string_view chosen(const RecipeRow& row, TensorKind kind, const TensorPlace& place,
                        int64_t cols) {
  if (row.family == RecipeFamily::kPlain) return row.base;
  const RecipeModel& model = *place.model;
  if (kind == TensorKind::kOutput || (kind == TensorKind::kEmbedding && model.tied)) {
    const int64_t block = quant::info(*quant::format_by_name(row.base)).block_size;
    return cols % block != 0 ? "q8_0" : row.output;
  }
  if (row.family == RecipeFamily::kExperts) return place.stacked ? row.base : "q8_0";
  if (kind == TensorKind::kEmbedding) return row.embedding.empty() ? row.base : row.embedding;
  const std::string_view format = by_rules(row, kind, place);
  if (row.family == RecipeFamily::kLow) return format;
  const bool value = kind == TensorKind::kValue;
  // The models with 70 billion parameters have small value projections.
  const bool large = model.layers == 80 && model.heads_per_kv_head > 1;
  if ((value || kind == TensorKind::kKey) && place.experts(8)) return "q8_0";
  if (value && large && (format == "q3_k" || format == "q4_k")) return "q5_k";
  return format;
}

// The format for rows that do not fill the blocks of `f`.
Format narrower(Format f, int64_t cols) {
  static constexpr std::pair<std::string_view, std::string_view> kFallbacks[] = {
      {"iq1_s", "iq4_nl"}, {"iq1_m", "iq4_nl"},   {"iq2_xxs", "iq4_nl"}, {"iq2_xs", "iq4_nl"},
      {"iq2_s", "iq4_nl"}, {"iq3_xxs", "iq4_nl"}, {"iq3_s", "iq4_nl"},   {"iq4_xs", "iq4_nl"},
      {"q2_k", "q4_0"},    {"q3_k", "q4_0"},      {"tq1_0", "q4_0"},     {"tq2_0", "q4_0"},
      {"q4_k", "q5_0"},    {"q5_k", "q5_1"},      {"q6_k", "q8_0"},
  };
  for (const auto& [from, to] : kFallbacks) {
    if (quant::info(f).name != from) continue;
    const Format g = *quant::format_by_name(to);
    return cols % quant::info(g).block_size == 0 ? g : Format::kF16;
  }
  return Format::kF16;
}

// What does not fit its recipe, told in one line.
struct Fallbacks {
  int count = 0;
  std::string first;

  Format fit(Format f, const RecipeTensor& tensor) {
    const int64_t cols = tensor.shape.back();
    if (cols % quant::info(f).block_size == 0) return f;
    const Format g = narrower(f, cols);
    if (count++ == 0)
      first = fmt::format("'{}', rows of {} numbers, is written in {} instead of {}", tensor.name,
                          cols, quant::info(g).name, quant::info(f).name);
    return g;
  }
};

// Which tensor types were used, and the first that applies to a name.
class TensorTypes {
 public:
  explicit TensorTypes(const RecipeOverrides& overrides)
      : types_(overrides.tensor_types), used_(types_.size()) {}

  const RecipeOverrides::TensorType* find(const std::string& name) {
    for (size_t i = 0; i < types_.size(); ++i) {
      bool found = false;
      types_[i].regex->for_each_match(name, [&](size_t, size_t) { found = true; });
      if (!found) continue;
      used_[i] = true;
      return &types_[i];
    }
    return nullptr;
  }

  Status all_used() const {
    for (size_t i = 0; i < types_.size(); ++i) {
      if (!used_[i])
        return invalid_argument(
            "--tensor-type {}={}: applies to no quantised tensor of this model (a tensor has the "
            "type of the first pattern that is found in its name)",
            types_[i].pattern, quant::info(types_[i].format).name);
    }
    return {};
  }

 private:
  const std::vector<RecipeOverrides::TensorType>& types_;
  std::vector<bool> used_;
};

Status must_fit(Format f, const RecipeTensor& tensor) {
  const int64_t cols = tensor.shape.back();
  const quant::FormatInfo& i = quant::info(f);
  if (cols % i.block_size == 0) return {};
  return invalid_argument("tensor '{}': its rows of {} numbers do not fill {}'s blocks of {}",
                          tensor.name, cols, i.name, i.block_size);
}

bool has_part(std::string_view name, const std::vector<std::string>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const std::string& p) { return name.find(p) != std::string_view::npos; });
}

}  // namespace

bool is_quantised(const RecipeTensor& tensor) {
  static constexpr std::string_view kSmall[] = {
      "_norm.weight",    "ffn_gate_inp", "position_embd", "token_types", "ssm_conv1d",
      "shortconv.conv.", "altup",        "laurel",        "attn_rel_b.", "per_layer_model_proj",
      ".rel_pos",        ".patch_embd",  ".patch_merger", "indexer.",
  };
  if (tensor.shape.size() < 2 || !tensor.name.ends_with("weight")) return false;
  return std::none_of(std::begin(kSmall), std::end(kSmall), [&](std::string_view part) {
    return tensor.name.find(part) != std::string::npos;
  });
}

std::vector<Format> writable_types() {
  std::vector<Format> out;
  for (const quant::FormatInfo& i : quant::all_formats()) {
    if (can_write(i)) out.push_back(i.format);
  }
  return out;
}

Result<Format> writable_type(std::string_view name) {
  std::string types;
  for (const Format f : writable_types()) {
    if (quant::info(f).name == lower_case(name)) return f;
    types += fmt::format("{}{}", types.empty() ? "" : ", ", quant::info(f).name);
  }
  return invalid_argument("unknown type '{}'; the types are {}", name, types);
}

Status RecipeOverrides::add_tensor_type(std::string_view text) {
  const size_t equals = text.rfind('=');
  if (equals == 0 || equals == std::string_view::npos)
    return invalid_argument("--tensor-type {}: write PATTERN=TYPE, e.g. attn_v=q6_k", text);
  TensorType t;
  t.pattern = text.substr(0, equals);
  const auto format = writable_type(text.substr(equals + 1));
  if (!format.ok())
    return invalid_argument("--tensor-type {}: {}", text, format.status().message());
  t.format = *format;
  const auto regex = tokenizer::Regex::compile(t.pattern, tokenizer::RegexDialect::kOniguruma);
  if (!regex.ok()) return invalid_argument("--tensor-type {}: {}", text, regex.status().message());
  t.regex = *regex;
  tensor_types.push_back(std::move(t));
  return {};
}

bool RecipeOverrides::fixes(const std::string& name, bool tied) const {
  const TensorKind kind = kind_of(name);
  const bool is_embedding = kind == TensorKind::kEmbedding;
  if (is_embedding && embedding) return true;
  if ((kind == TensorKind::kOutput || (is_embedding && tied)) && output) return true;
  return TensorTypes(*this).find(name) != nullptr;
}

bool RecipeOverrides::uses_importance(std::string_view name) const {
  if (has_part(name, exclude_weights)) return false;
  return include_weights.empty() || has_part(name, include_weights);
}

Recipe::Recipe() : row_(&recipe_rows()[1]) {}

Result<Recipe> Recipe::by_name(std::string_view name) {
  const std::string lower = lower_case(name);
  for (const RecipeRow& row : recipe_rows()) {
    if (row.name != lower && (row.alias.empty() || row.alias != lower)) continue;
    if (const std::string_view missing = missing_format(row); !missing.empty())
      return unsupported(
          "type '{}' needs the format {}, which this build cannot write; the types "
          "are {}",
          name, missing, names());
    return Recipe(&row);
  }
  return invalid_argument("unknown type '{}'; the types are {}", name, names());
}

std::vector<Recipe> Recipe::all() {
  std::vector<Recipe> out;
  for (const RecipeRow& row : recipe_rows()) {
    if (missing_format(row).empty()) out.push_back(Recipe(&row));
  }
  return out;
}

std::string Recipe::names() {
  std::string text;
  for (const Recipe& r : all()) {
    text += fmt::format("{}{}", text.empty() ? "" : ", ", r.name());
    if (!r.row_->alias.empty()) text += fmt::format(" (or {})", r.row_->alias);
  }
  return text;
}

std::string_view Recipe::name() const {
  return row_->name;
}

uint32_t Recipe::file_type() const {
  return row_->file_type;
}

Result<std::vector<Format>> Recipe::formats(
    const RecipeModel& model, std::span<const RecipeTensor> tensors,
    const RecipeOverrides& overrides, const std::function<void(const std::string&)>& warn) const {
  std::vector<TensorKind> kinds;
  for (const RecipeTensor& t : tensors) kinds.push_back(kind_of(t.name));
  const std::vector<TensorPlace> places = places_of(model, tensors, kinds);
  std::vector<Format> out(tensors.size(), Format::kF32);
  TensorTypes types(overrides);
  Fallbacks fallbacks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const RecipeTensor& t = tensors[i];
    if (!is_quantised(t)) continue;
    const bool embedding = kinds[i] == TensorKind::kEmbedding;
    const bool output = kinds[i] == TensorKind::kOutput || (embedding && model.tied);
    const RecipeOverrides::TensorType* type = nullptr;
    if (embedding && overrides.embedding) {
      out[i] = *overrides.embedding;
      FRESHET_RETURN_IF_ERROR(must_fit(out[i], t));
    } else if (output && overrides.output) {
      out[i] = *overrides.output;
      FRESHET_RETURN_IF_ERROR(must_fit(out[i], t));
    } else if ((type = types.find(t.name)) != nullptr) {
      out[i] = fallbacks.fit(type->format, t);
    } else {
      const std::string_view name =
          overrides.pure ? row_->base : chosen(*row_, kinds[i], places[i], t.shape.back());
      out[i] = fallbacks.fit(*quant::format_by_name(name), t);
    }
  }
  FRESHET_RETURN_IF_ERROR(types.all_used());
  if (fallbacks.count > 0 && warn)
    warn(fmt::format(
        "{}{}", fallbacks.first,
        fallbacks.count > 1 ? fmt::format("; {} more tensors like it", fallbacks.count - 1) : ""));
  return out;
}

bool Recipe::needs_importance(std::string_view tensor, Format format) const {
  if (tensor == "token_embd.weight" || tensor == "output.weight") return false;
  static constexpr std::string_view kNeed[] = {"iq1_s",  "iq1_m", "iq2_xxs",
                                               "iq2_xs", "iq2_s", "iq3_xxs"};
  const std::string_view name = quant::info(format).name;
  if (name == "q2_k") return row_->name == "q2_k_s";
  return std::find(std::begin(kNeed), std::end(kNeed), name) != std::end(kNeed);
}

}  // namespace freshet::quantizer
