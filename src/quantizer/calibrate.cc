#include "quantizer/calibrate.h"

#include <map>
#include <utility>
#include <vector>

#include "quantizer/gguf_export.h"

namespace freshet::quantizer {
namespace {

// Where the matrices of a stored tensor are in the GGUF file: a tensor, and the expert of the first
// of them.
struct GgufPlace {
  std::string name;
  int64_t experts = 1;
  int64_t first_expert = 0;
  std::vector<int64_t> columns;  // as Planned's
};

Result<std::multimap<std::string, GgufPlace>> gguf_places(const WorkingModel& working) {
  ExportOptions e;
  FRESHET_ASSIGN_OR_RETURN(e.recipe, Recipe::by_name("f16"));
  e.warn = [](const std::string&) {};
  FRESHET_ASSIGN_OR_RETURN(const auto plan,
                           plan_gguf(working.checkpoint(), working.compute()->pool(), e));
  std::multimap<std::string, GgufPlace> places;
  for (const Planned& p : plan.tensors) {
    if (p.shape.size() < 2) continue;
    const int64_t experts = p.shape.size() > 2 ? p.shape[0] : 1;
    std::string last;
    for (size_t i = 0; i < p.parts.size(); ++i) {
      const std::string& source = p.parts[i].source->name;
      if (source == last) continue;  // further experts of one tensor
      places.emplace(source, GgufPlace{p.name, experts, static_cast<int64_t>(i), p.columns});
      last = source;
    }
  }
  return places;
}

void add_entry(Imatrix& out, const GgufPlace& place, const models::LinearTensor& t,
               const InputStats& stats) {
  Imatrix::Entry& entry = out.entries[place.name];
  const auto cols = static_cast<size_t>(t.cols);
  entry.sum2.resize(static_cast<size_t>(place.experts) * cols);
  entry.counts.resize(static_cast<size_t>(place.experts));
  const auto expert = static_cast<size_t>(place.first_expert + t.index);
  const auto tokens = static_cast<float>(stats.tokens);
  for (size_t c = 0; c < cols; ++c) {
    const size_t from = place.columns.empty() ? c : static_cast<size_t>(place.columns[c]);
    entry.sum2[expert * cols + c] = stats.mean_square[from] * tokens;
  }
  entry.counts[expert] = tokens;
}

void add_kv_scales(KvScaleFile& out, const WorkingModel& working, const models::Part& part,
                   const InputCollector& seen) {
  if (!keeps_keys_and_values(working.model().spec, part)) return;
  if (seen.key_max() == 0.0f && seen.value_max() == 0.0f) return;
  const auto names = kv_scale_names(working.reader(), part.layer, KvScaleNames::kAttention);
  out.scales[names.key] = {kv_scale_for(seen.key_max())};
  out.scales[names.value] = {kv_scale_for(seen.value_max())};
  if (seen.key_squares().empty()) return;
  const auto& layer = working.model().spec.layers[static_cast<size_t>(part.layer)];
  out.scales[names.key_channels] = key_channel_scales(seen.query_squares(), seen.key_squares(),
                                                      layer.find<AttentionSpec>()->head_dim);
}

}  // namespace

Result<Calibration> calibrate(const WorkingModel& working, const Windows& windows,
                              const CalibrateOptions& options) {
  std::multimap<std::string, GgufPlace> places;
  if (options.matrix) {
    FRESHET_ASSIGN_OR_RETURN(places, gguf_places(working));
  }
  double fraction = 0.0;
  PartRunner::Options o;
  o.memory = options.memory;
  o.folder = options.folder;
  o.stop = [&] { return options.progress && !options.progress(fraction); };
  FRESHET_ASSIGN_OR_RETURN(
      const auto runner,
      PartRunner::create(working.compute(), working.checkpoint(), working.model(), windows, o));
  Calibration result;
  Imatrix& out = result.imatrix;
  out.datasets = {options.dataset};
  out.chunk_count = static_cast<uint32_t>(windows.size());
  out.chunk_size = options.chunk_size;
  const std::vector<models::Part> parts = models::parts_of(working.model().spec);
  for (size_t i = 0; i < parts.size(); ++i) {
    fraction = static_cast<double>(i) / static_cast<double>(parts.size());
    FRESHET_ASSIGN_OR_RETURN(const auto collected, runner->collect(parts[i], {}, true));
    add_kv_scales(result.kv_scales, working, parts[i], *collected.collector);
    FRESHET_ASSIGN_OR_RETURN(const auto linears, working.linears(parts[i]));
    for (const models::LinearTensor& t : linears) {
      const InputStats* stats = collected.of(t, working.reader());
      if (stats == nullptr) continue;
      const auto [first, last] = places.equal_range(t.source->name);
      for (auto place = first; place != last; ++place) add_entry(out, place->second, t, *stats);
    }
  }
  return result;
}

}  // namespace freshet::quantizer
