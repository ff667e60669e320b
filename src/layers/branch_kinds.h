// The kinds of branches that a layer may have, as a table with one row for each.
//
// A row is everything that the decoder, the memory plan, `inspect` and `bench` need to know of a
// kind. It is defined in the kind's source file (attention_layer.cc, mlp.cc, mamba2.cc ...) by
// branch_kind(), from a struct of static functions on the kind's own spec and weights.
// models/branch_loading.h has the table of how their weights are read. Immutable; thread-safe.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "base/json.h"
#include "layers/step.h"
#include "ops/device.h"

namespace freshet {

constexpr size_t kMaxBranches = 8;  // per layer

// What a branch stores: keys and values per token, or a state per sequence.
struct BranchCache {
  ops::KvShape shape;
  int window = 0;  // 0: all tokens of the sequence; otherwise the last `window` ones
  int chunk = 0;   // as in KvGroup
  bool two_way = false;
  int cross = 0;  // > 0: stores at most this many positions of an encoder's output, not the tokens
  size_t state_bytes = 0;  // 0: keys and values
  SpanUse spans = SpanUse::kNone;
};

struct BranchKind {
  std::string_view name;
  // Whether run() supports any Into::scale rather than only 1.
  bool scales = true;

  // out = [out +] scale * branch(in), where `in` says how the residual stream is normalised.
  // `cache_layer`: the layer of the cache where the branch stores; -1 for kinds that store nothing.
  void (*run)(Step& step, const BranchSpec& spec, const BranchWeights& w, int cache_layer,
              const ops::Input& in, const Into& into) = nullptr;
  // Workspace of run() and of store().
  size_t (*bytes)(const BranchSpec& spec, int64_t hidden, int64_t tokens) = nullptr;
  // Raises the limits to what the branch needs from Ops.
  void (*limits)(const BranchSpec& spec, int64_t hidden, ops::Ops::ShapeLimits& l) = nullptr;
  // Errors name the layer and the part.
  Status (*validate)(const BranchSpec& spec, const ModelSpec& model, size_t layer) = nullptr;
  // A short text for display, and the fields of `inspect --json`.
  std::string (*describe)(const BranchSpec& spec) = nullptr;
  void (*fields)(const BranchSpec& spec, json::Object& to) = nullptr;
  // A weight whose GEMM reads the branch's input, for Ops::prepare().
  const ops::Weight& (*input_weight)(const BranchSpec& spec, const BranchWeights& w) = nullptr;

  // For kinds that store keys and values or a state; nullptr for others.
  BranchCache (*cache)(const BranchSpec& spec, ops::KvType type) = nullptr;
  // For kinds that store keys and values. Kinds with states don't have these: a state advances when
  // the branch runs.
  // Writes the keys and values of the input to the cache, and nothing else.
  void (*store)(Step& step, const BranchSpec& spec, const BranchWeights& w, int cache_layer,
                const ops::Input& in) = nullptr;
  // The number of output features of the projections that store() computes.
  int64_t (*stored_outputs)(const BranchSpec& spec) = nullptr;

  // For kinds that read an encoder's output: writes its keys and values to the cache. `batch` has
  // the outputs as its tokens, and the sequences' blocks of the group.
  void (*write_cross)(Step& step, const BranchSpec& spec, const BranchWeights& w, int cache_layer,
                      const Matrix& states, const ops::AttentionBatch& batch) = nullptr;

  // Optional.
  // One line that says why a device cannot run the branch, or ok.
  Status (*supported)(const BranchSpec& spec, const ops::Device& device) = nullptr;
  // Weights that the branch before this one may prefetch with its last GEMM.
  ops::PrefetchNext (*prefetch)(const BranchSpec& spec, const BranchWeights& w) = nullptr;
  // The fraction of the experts' weights that a token is multiplied with.
  double (*expert_share)(const BranchSpec& spec) = nullptr;
};

// Makes a row from a struct K with K::Spec, K::Weights, K::kName and static functions that have the
// names of the row's fields, on K::Spec and K::Weights. Missing functions stay nullptr.
template <class K>
constexpr BranchKind branch_kind() {
  using S = typename K::Spec;
  using W = typename K::Weights;
  BranchKind kind;
  kind.name = K::kName;
  if constexpr (requires { K::kScales; }) kind.scales = K::kScales;
  kind.run = [](Step& step, const BranchSpec& s, const BranchWeights& w, int cache_layer,
                const ops::Input& in, const Into& into) {
    K::run(step, std::get<S>(s.body), std::get<W>(w.body), cache_layer, in, into);
  };
  kind.bytes = [](const BranchSpec& s, int64_t hidden, int64_t tokens) {
    return K::bytes(std::get<S>(s.body), hidden, tokens);
  };
  kind.limits = [](const BranchSpec& s, int64_t hidden, ops::Ops::ShapeLimits& l) {
    K::limits(std::get<S>(s.body), hidden, l);
  };
  kind.validate = [](const BranchSpec& s, const ModelSpec& model, size_t layer) {
    return K::validate(std::get<S>(s.body), model, layer);
  };
  kind.describe = [](const BranchSpec& s) { return K::describe(std::get<S>(s.body)); };
  kind.fields = [](const BranchSpec& s, json::Object& to) { K::fields(std::get<S>(s.body), to); };
  kind.input_weight = [](const BranchSpec& s, const BranchWeights& w) -> const ops::Weight& {
    return K::input_weight(std::get<S>(s.body), std::get<W>(w.body));
  };
  if constexpr (requires { &K::cache; }) {
    kind.cache = [](const BranchSpec& s, ops::KvType type) {
      return K::cache(std::get<S>(s.body), type);
    };
  }
  if constexpr (requires { &K::write_cross; }) {
    kind.write_cross = [](Step& step, const BranchSpec& s, const BranchWeights& w, int cache_layer,
                          const Matrix& states, const ops::AttentionBatch& batch) {
      K::write_cross(step, std::get<S>(s.body), std::get<W>(w.body), cache_layer, states, batch);
    };
  }
  if constexpr (requires { &K::store; }) {
    kind.store = [](Step& step, const BranchSpec& s, const BranchWeights& w, int cache_layer,
                    const ops::Input& in) {
      K::store(step, std::get<S>(s.body), std::get<W>(w.body), cache_layer, in);
    };
    kind.stored_outputs = [](const BranchSpec& s) {
      return K::stored_outputs(std::get<S>(s.body));
    };
  }
  if constexpr (requires { &K::supported; }) {
    kind.supported = [](const BranchSpec& s, const ops::Device& device) {
      return K::supported(std::get<S>(s.body), device);
    };
  }
  if constexpr (requires { &K::prefetch; }) {
    kind.prefetch = [](const BranchSpec& s, const BranchWeights& w) {
      return K::prefetch(std::get<S>(s.body), std::get<W>(w.body));
    };
  }
  if constexpr (requires { &K::expert_share; }) {
    kind.expert_share = [](const BranchSpec& s) { return K::expert_share(std::get<S>(s.body)); };
  }
  return kind;
}

// The rows.
extern const BranchKind kAttentionKind;       // attention_layer.cc
extern const BranchKind kMlaKind;             // mla.cc
extern const BranchKind kMlpKind;             // mlp.cc
extern const BranchKind kMoeKind;             // moe.cc
extern const BranchKind kShortConvKind;       // short_conv.cc
extern const BranchKind kMambaKind;           // mamba.cc
extern const BranchKind kMamba2Kind;          // mamba2.cc
extern const BranchKind kDeltaNetKind;        // delta_net.cc
extern const BranchKind kLightningKind;       // lightning.cc
extern const BranchKind kCrossAttentionKind;  // cross_attention.cc
extern const BranchKind kLinearKind;          // linear.cc

// In the order of BranchBody's alternatives.
std::span<const BranchKind* const> branch_kinds();
inline const BranchKind& kind_of(const BranchSpec& branch) {
  return *branch_kinds()[branch.body.index()];
}

// The fraction of the experts' weights that a token is multiplied with, for the last branch with
// experts; 1 for models without experts.
double expert_share(const ModelSpec& spec);

// For validate(). Far above any published model, and low enough that products of three sizes fit in
// int64.
constexpr int kMaxSize = 1 << 20;
constexpr bool sane(int size) {
  return size > 0 && size <= kMaxSize;
}
// Checks that the rope with index `rope` (-1: none) rotates an even number of a head's `features`.
Status validate_rotation(const ModelSpec& model, int rope, int features, size_t layer);

// For cache() of kinds with states: `floats` floats, rounded up to whole cache lines.
BranchCache state_of(int64_t floats);

// For describe() of attention kinds.
std::string describe_attention_options(int window, bool sinks, int rope);
// For limits() of attention kinds. key, value, query: features of a head's keys and values in the
// cache, and of its queries.
void raise_attention_limits(int heads, int64_t key, int64_t value, int64_t query,
                            ops::Ops::ShapeLimits& l);

}  // namespace freshet
