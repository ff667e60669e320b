// Linear attention: gated delta nets and lightning attention.
#include <cmath>

#include "models/branch_loading.h"
#include "models/dummy_maker.h"
#include "models/state_rows.h"

namespace freshet::models {
namespace {

// The rows of two roles, in `out`; those of the second in `apart`, if a GGUF file has them in
// another format.
Status assemble_pair(WeightReader& reader, Role first, int64_t first_rows, Role second,
                     int64_t second_rows, int64_t hidden, int layer, Linear& out, Linear& apart) {
  const loader::TensorSource* const one = reader.find(first, ".weight", layer);
  const loader::TensorSource* const other = reader.find(second, ".weight", layer);
  if (!reader.is_gguf() || one == nullptr || other == nullptr || one->format == other->format)
    return reader.joined(out, first, first_rows, second, second_rows, layer, hidden);
  FRESHET_RETURN_IF_ERROR(reader.linear(out, first, layer, first_rows, hidden, false));
  return reader.linear(apart, second, layer, second_rows, hidden, false);
}

// Queries, keys, values and gates, then the two factors of a step: fused key head by key head, or
// in two matrices each.
Status assemble_delta_in(WeightReader& reader, const DeltaNetSpec& s, int64_t hidden, int layer,
                         DeltaNetWeights& out) {
  const int64_t ratio = s.value_heads / s.key_heads, values = ratio * s.value_dim;
  const int64_t conv = 2 * int64_t{s.keys()} + s.values(), heads = s.value_heads;
  if (reader.find(Role::kStateZ, ".weight", layer) != nullptr) {
    FRESHET_RETURN_IF_ERROR(assemble_pair(reader, Role::kStateIn, conv, Role::kStateZ, s.values(),
                                          hidden, layer, out.qkvz, out.z));
  } else {
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.qkvz, Role::kStateIn, layer, conv + s.values(), hidden, false,
                      rows_by_part(s.key_heads, {s.key_dim, s.key_dim, values, values})));
  }
  if (reader.find(Role::kStateDt, ".weight", layer) != nullptr) {
    return assemble_pair(reader, Role::kStateGates, heads, Role::kStateDt, heads, hidden, layer,
                         out.ba, out.alpha);
  }
  return reader.linear(out.ba, Role::kStateGates, layer, 2 * heads, hidden, false,
                       rows_by_part(s.key_heads, {ratio, ratio}));
}

Status assemble_delta_net(WeightReader& reader, const DeltaNetSpec& s, int64_t hidden, int layer,
                          DeltaNetWeights& out) {
  const int64_t conv = 2 * int64_t{s.keys()} + s.values();
  FRESHET_RETURN_IF_ERROR(assemble_delta_in(reader, s, hidden, layer, out));
  FRESHET_RETURN_IF_ERROR(assemble_conv(reader, layer, conv, s.taps, false, out.conv));
  FRESHET_RETURN_IF_ERROR(assemble_decay(reader, layer, s.value_heads, 1, out.a));
  FRESHET_RETURN_IF_ERROR(assemble_dt_bias(reader, layer, s.value_heads, out.dt_bias));
  // This norm's weight is stored as it is, whatever the others are.
  FRESHET_RETURN_IF_ERROR(
      reader.vector(out.norm.weight, Role::kStateNorm, ".weight", layer, s.value_dim));
  return reader.linear(out.out, Role::kStateOut, layer, hidden, s.values(), false);
}

Status make_delta_net(DummyMaker& maker, const DeltaNetSpec& s, int64_t hidden,
                      DeltaNetWeights& out) {
  const int64_t conv = 2 * int64_t{s.keys()} + s.values();
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.qkvz, "delta_net.qkvz", Role::kStateIn, conv + s.values(), hidden, false));
  FRESHET_RETURN_IF_ERROR(maker.linear(out.ba, "delta_net.ba", Role::kStateGates,
                                       2 * int64_t{s.value_heads}, hidden, false));
  FRESHET_RETURN_IF_ERROR(make_conv(maker, conv, s.taps, false, out.conv));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.a, s.value_heads, -1.0f));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.dt_bias, s.value_heads, 0.0f));
  FRESHET_RETURN_IF_ERROR(maker.norm(out.norm, s.norm, s.value_dim));
  return maker.linear(out.out, "delta_net.out", Role::kStateOut, hidden, s.values(), false);
}

std::vector<float> decays(const LightningSpec& s) {
  std::vector<float> out;
  for (int h = 0; h < s.heads; ++h)
    out.push_back(-s.slope_scale *
                  std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(s.heads)));
  return out;
}

Status assemble_lightning(WeightReader& reader, const LightningSpec& s, int64_t hidden, int layer,
                          LightningWeights& out) {
  const int64_t inner = int64_t{s.heads} * s.head_dim, dim = s.head_dim;
  FRESHET_RETURN_IF_ERROR(reader.linear(out.qkv, Role::kStateIn, layer, 3 * inner, hidden, false,
                                        rows_by_part(s.heads, {dim, dim, dim})));
  FRESHET_RETURN_IF_ERROR(reader.linear(out.gate, Role::kStateGates, layer, inner, hidden, false));
  FRESHET_RETURN_IF_ERROR(reader.store(out.decay, decays(s)));
  FRESHET_RETURN_IF_ERROR(reader.norm(out.norm, Role::kStateNorm, s.norm, layer, inner));
  return reader.linear(out.out, Role::kStateOut, layer, hidden, inner, false);
}

Status make_lightning(DummyMaker& maker, const LightningSpec& s, int64_t hidden,
                      LightningWeights& out) {
  const int64_t inner = int64_t{s.heads} * s.head_dim;
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.qkv, "lightning.qkv", Role::kStateIn, 3 * inner, hidden, false));
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.gate, "lightning.gate", Role::kStateGates, inner, hidden, false));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.decay, s.heads, -0.1f));
  FRESHET_RETURN_IF_ERROR(maker.norm(out.norm, s.norm, inner));
  return maker.linear(out.out, "lightning.out", Role::kStateOut, hidden, inner, false);
}

}  // namespace

constinit const BranchLoading kDeltaNetLoading =
    branch_loading<DeltaNetSpec, DeltaNetWeights, assemble_delta_net, make_delta_net>(
        kAttentionNorms);
constinit const BranchLoading kLightningLoading =
    branch_loading<LightningSpec, LightningWeights, assemble_lightning, make_lightning>(
        kAttentionNorms);

}  // namespace freshet::models
