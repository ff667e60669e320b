#include "models/rope_config.h"

#include <cmath>
#include <string>

#include "layers/rope.h"

namespace freshet::models {
namespace {

const json::Value& empty_object() {
  static const json::Value empty{json::Object()};
  return empty;
}

// The dictionary with the parameters of the scaling, under its old or its new name.
const json::Value& parameters(const Config& config, std::string_view layer_type) {
  const json::Value* old = config.find({"rope_scaling"});
  const json::Value* now = config.find({"rope_parameters"});
  if (!layer_type.empty()) {
    const json::Value* part = now != nullptr ? now->find(layer_type) : nullptr;
    if (part != nullptr && part->is_object()) return *part;
  }
  if (old != nullptr && old->is_object() && !old->as_object().empty()) return *old;
  if (now != nullptr && now->is_object()) return *now;
  return empty_object();
}

RopeSpec::Scaling scaling_by_name(Config& config, const std::string& name) {
  using S = RopeSpec::Scaling;
  if (name == "default" || name == "mrope") return S::kNone;
  if (name == "linear") return S::kLinear;
  if (name == "dynamic") return S::kDynamic;
  if (name == "yarn") return S::kYarn;
  if (name == "llama3") return S::kLlama3;
  if (name == "longrope" || name == "su") return S::kLongRope;
  if (name == "factors") return S::kFactors;
  config.fail(unsupported("unsupported kind of rotary embedding '{}'", name));
  return S::kNone;
}

void read_yarn(Config& p, RopeSpec& rope) {
  rope.beta_fast = p.number({"beta_fast"}, 32);
  rope.beta_slow = p.number({"beta_slow"}, 1);
  const double mscale = p.number({"mscale"}, 0);
  const double all = p.number({"mscale_all_dim"}, 0);
  double factor = yarn_mscale(rope.factor, 1.0);
  if (mscale != 0 && all != 0) {
    factor = yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, all);
  }
  rope.attention_factor = static_cast<float>(p.number({"attention_factor"}, factor));
}

void read_longrope(Config& p, RopeSpec& rope, double max_context) {
  rope.short_factors = p.floats({"short_factor"});
  rope.long_factors = p.floats({"long_factor"});
  const double stretch = p.number({"factor"}, max_context / rope.original_context);
  const double factor =
      stretch <= 1 ? 1.0 : std::sqrt(1 + std::log(stretch) / std::log(rope.original_context));
  rope.attention_factor = static_cast<float>(p.number({"attention_factor"}, factor));
}

}  // namespace

RopeSpec read_rope(Config& config, int head_dim, const RopeDefaults& defaults) {
  using S = RopeSpec::Scaling;
  Config p(parameters(config, defaults.layer_type), "rope_scaling.");
  RopeSpec rope;
  rope.interleaved = defaults.interleaved;
  rope.theta = p.number({"rope_theta"}, config.number({"rope_theta"}, defaults.theta));
  const double partial = p.number({"partial_rotary_factor"},
                                  config.number({"partial_rotary_factor"}, defaults.partial));
  rope.rotary_dim = config.size({"rotary_dim"}, static_cast<int>(head_dim * partial));
  rope.scaling = scaling_by_name(p, p.text({"rope_type", "type"}, "default"));
  if (rope.scaling != S::kNone) {
    // A length beside the dictionary takes precedence over one inside it.
    const auto max_context = static_cast<double>(defaults.max_context);
    double original = p.number({"original_max_position_embeddings"}, max_context);
    if (rope.scaling != S::kDynamic) {
      original = config.number({"original_max_position_embeddings"}, original);
    } else {
      original = max_context;
    }
    rope.original_context = original;
    rope.factor = p.number({"factor"}, original > 0 ? max_context / original : 1.0);
    rope.truncate = p.flag({"truncate"}, defaults.truncate);
    if (rope.scaling == S::kYarn) read_yarn(p, rope);
    if (rope.scaling == S::kLongRope) read_longrope(p, rope, max_context);
    if (rope.scaling == S::kFactors) rope.short_factors = p.floats({"short_factor"});
    rope.low_freq_factor = p.number({"low_freq_factor"}, 1);
    rope.high_freq_factor = p.number({"high_freq_factor"}, 4);
  }
  config.fail(p.status());
  return rope;
}

double yarn_score_scale(const Config& config) {
  Config p(parameters(config, {}), "rope_scaling.");
  const double all = p.number({"mscale_all_dim"}, 0);
  if (p.text({"rope_type", "type"}, "default") == "default" || all == 0) return 1.0;
  const double mscale = yarn_mscale(p.number({"factor"}, 1), all);
  return mscale * mscale;
}

void set_rope_axes(Config& c, ModelSpec& s, std::vector<float> sections, bool in_turns) {
  RopeSpec& rope = s.ropes.front();
  for (const std::string_view key : {"rope_parameters", "rope_scaling"}) {
    const json::Value* const parameters = c.find({key});
    if (parameters == nullptr || !parameters->is_object()) continue;
    Config p(*parameters, std::string(key) + ".");
    if (p.has("mrope_section")) sections = p.floats({"mrope_section"});
    in_turns = p.flag({"mrope_interleaved"}, in_turns);
    c.fail(p.status());
  }
  const auto pairs = static_cast<size_t>(rope.rotary_dim / 2);
  size_t sum = 0;
  for (const float section : sections) sum += static_cast<size_t>(section);
  if (sections.size() != 3 || sum != pairs) {
    return c.fail(
        invalid_argument("the configuration's 'mrope_section' must be three numbers with "
                         "the sum {}",
                         pairs));
  }
  rope.axes.assign(pairs, 0);
  for (size_t i = 0; i < pairs && in_turns; ++i) {
    const size_t axis = i % 3;
    if (static_cast<float>(i / 3) < sections[axis]) rope.axes[i] = static_cast<int>(axis);
  }
  if (in_turns) return;
  auto next = rope.axes.begin();
  for (int axis = 0; axis < 3; ++axis)
    next = std::fill_n(next, static_cast<int>(sections[static_cast<size_t>(axis)]), axis);
}

}  // namespace freshet::models
