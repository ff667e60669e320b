// Rotary embeddings from configurations, in every spelling: `rope_theta` with `rope_scaling`, and
// the newer `rope_parameters`, for all layers or by layer type.
#pragma once

#include <string_view>
#include <vector>

#include "layers/spec.h"
#include "models/config.h"

namespace freshet::models {

struct RopeDefaults {
  double theta = 10000.0;
  double partial = 1.0;  // share of a head's features that rotate
  bool interleaved = false;
  bool truncate = true;
  std::string_view layer_type;  // the member of rope_parameters to read; empty: it has no members
  int64_t max_context = 0;
};

RopeSpec read_rope(Config& config, int head_dim, const RopeDefaults& defaults);

// Which axis (time, row, column) each frequency of the first rope has (M-RoPE): by sections one
// after the other, or in turns (time, row, column, time ...) while a section lasts, the rest being
// time's. The configuration's mrope_section and mrope_interleaved win over the arguments.
void set_rope_axes(Config& config, ModelSpec& spec, std::vector<float> sections, bool in_turns);

// A factor of latent attention's scores besides 1 / sqrt(dim): YaRN's temperature squared, if
// `mscale_all_dim` asks for it.
double yarn_score_scale(const Config& config);

}  // namespace freshet::models
