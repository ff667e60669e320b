#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {
namespace {

Status assemble_cross(WeightReader& reader, const CrossAttentionSpec& a, int64_t hidden, int layer,
                      CrossAttentionWeights& out) {
  const int64_t width = int64_t{a.heads} * a.head_dim;
  const int64_t stored = a.kv_heads > 0 ? int64_t{a.kv_heads} * a.head_dim : width;
  if (a.tanh_gate) {
    FRESHET_ASSIGN_OR_RETURN(out.scale, read_tanh_gate(reader, Role::kCrossGate, layer));
  }
  if (a.qk_norm) {
    FRESHET_RETURN_IF_ERROR(
        reader.norm(out.q_norm, Role::kCrossQueryNorm, *a.qk_norm, layer, a.head_dim));
    FRESHET_RETURN_IF_ERROR(
        reader.norm(out.k_norm, Role::kCrossKeyNorm, *a.qk_norm, layer, a.head_dim));
  }
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.q, Role::kCrossQuery, layer, width, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(reader.linear(out.k, Role::kCrossKey, layer, stored, a.encoder_size,
                                        a.qkv_bias && a.key_bias));
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.v, Role::kCrossValue, layer, stored, a.encoder_size, a.qkv_bias));
  return reader.linear(out.out, Role::kCrossOutput, layer, hidden, width, a.out_bias);
}

Status make_cross(DummyMaker& maker, const CrossAttentionSpec& a, int64_t hidden,
                  CrossAttentionWeights& out) {
  const int64_t width = int64_t{a.heads} * a.head_dim;
  const int64_t stored = a.kv_heads > 0 ? int64_t{a.kv_heads} * a.head_dim : width;
  FRESHET_RETURN_IF_ERROR(maker.norm(out.q_norm, a.qk_norm, a.head_dim));
  FRESHET_RETURN_IF_ERROR(maker.norm(out.k_norm, a.qk_norm, a.head_dim));
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.q, "cross.q", Role::kCrossQuery, width, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(maker.linear(out.k, "cross.k", Role::kCrossKey, stored, a.encoder_size,
                                       a.qkv_bias && a.key_bias));
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.v, "cross.v", Role::kCrossValue, stored, a.encoder_size, a.qkv_bias));
  return maker.linear(out.out, "cross.out", Role::kCrossOutput, hidden, width, a.out_bias);
}

}  // namespace

constinit const BranchLoading kCrossAttentionLoading =
    branch_loading<CrossAttentionSpec, CrossAttentionWeights, assemble_cross, make_cross>(
        kCrossNorms);

}  // namespace freshet::models
