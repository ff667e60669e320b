// Where the weights of each kind of branch come from, as a table with one row for each.
//
// A row reads a branch's weights from a checkpoint, or makes random ones. It lives in the kind's
// source file (branch_attention.cc, branch_mlp.cc ...).
// layers/branch_kinds.h has the table of what the kinds compute. Immutable; thread-safe.
#pragma once

#include <span>
#include <variant>

#include "layers/spec.h"
#include "layers/weights.h"
#include "models/weight_reader.h"

namespace freshet::models {

class DummyMaker;

// The norms of BranchNorms.
struct NormRoles {
  Role in, out, after;
};
constexpr NormRoles kAttentionNorms{Role::kAttentionIn, Role::kAttentionOut, Role::kAttentionAfter};
constexpr NormRoles kCrossNorms{Role::kCrossIn, Role::kCrossOut, Role::kCrossAfter};
constexpr NormRoles kSideNorms{Role::kSideIn, Role::kAttentionOut, Role::kAttentionAfter};
constexpr NormRoles kMlpNorms{Role::kMlpIn, Role::kMlpOut, Role::kMlpAfter};

struct BranchLoading {
  NormRoles norms;
  // Reads out.body. Errors name the tensor.
  Status (*assemble)(WeightReader& reader, const BranchSpec& spec, int64_t hidden, int layer,
                     BranchWeights& out);
  // Makes a random out.body (models/dummy.h).
  Status (*make)(DummyMaker& maker, const BranchSpec& spec, int64_t hidden, BranchWeights& out);
};

// A row of functions on the kind's own spec and weights.
template <class Spec, class Weights,
          Status (*assemble)(WeightReader&, const Spec&, int64_t hidden, int layer, Weights&),
          Status (*make)(DummyMaker&, const Spec&, int64_t hidden, Weights&)>
constexpr BranchLoading branch_loading(const NormRoles& norms) {
  return {norms,
          [](WeightReader& reader, const BranchSpec& spec, int64_t hidden, int layer,
             BranchWeights& out) {
            return assemble(reader, std::get<Spec>(spec.body), hidden, layer,
                            out.body.template emplace<Weights>());
          },
          [](DummyMaker& maker, const BranchSpec& spec, int64_t hidden, BranchWeights& out) {
            return make(maker, std::get<Spec>(spec.body), hidden,
                        out.body.template emplace<Weights>());
          }};
}

// The rows.
extern const BranchLoading kAttentionLoading;       // branch_attention.cc
extern const BranchLoading kMlaLoading;             // branch_mla.cc
extern const BranchLoading kMlpLoading;             // branch_mlp.cc
extern const BranchLoading kMoeLoading;             // branch_moe.cc
extern const BranchLoading kCrossAttentionLoading;  // branch_cross.cc
extern const BranchLoading kLinearLoading;          // branch_mlp.cc
extern const BranchLoading kShortConvLoading;       // branch_states.cc
extern const BranchLoading kMambaLoading;
extern const BranchLoading kMamba2Loading;
extern const BranchLoading kDeltaNetLoading;  // branch_linear.cc
extern const BranchLoading kLightningLoading;

// Parts of layers with states, which have matrices as they are and everything else in F32.
// A depthwise convolution: [channels, 1, taps] or [channels, taps] becomes [taps, channels].
Status assemble_conv(WeightReader& reader, int layer, int64_t channels, int taps, bool bias,
                     ConvWeights& out);
Status make_conv(DummyMaker& maker, int64_t channels, int taps, bool bias, ConvWeights& out);
// Rates of decay, negative: [rows, cols] becomes [cols, rows].
Status assemble_decay(WeightReader& reader, int layer, int64_t rows, int64_t cols, Vector& out);
// The bias of step sizes.
Status assemble_dt_bias(WeightReader& reader, int layer, int64_t size, Vector& out);

// The tanh of a weight that is one number.
Result<float> read_tanh_gate(WeightReader& reader, Role role, int layer = -1);

const BranchLoading& loading_of(const BranchSpec& branch);
const NormRoles& norm_roles_of(const BranchSpec& branch);

// What both kinds of attention end with: sinks, and the output projection.
template <class Spec, class Weights>
Status assemble_attention_out(WeightReader& reader, const Spec& a, int64_t hidden, int layer,
                              Weights& out) {
  if (a.sinks) {
    FRESHET_RETURN_IF_ERROR(reader.vector(out.sinks, Role::kSinks, ".weight", layer, a.heads));
  }
  return reader.linear(out.out, Role::kOutput, layer, hidden, int64_t{a.heads} * a.value_dim,
                       a.out_bias);
}

// The tensor `name` (".k_scale") of a projection, or of the attention that it belongs to.
const loader::TensorSource* find_kv_scale(const WeightReader& reader, Role projection, int layer,
                                          const std::string& name);

}  // namespace freshet::models
