#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {
namespace {

Status assemble_cross(WeightReader& reader, const CrossAttentionSpec& a, int64_t hidden, int layer,
                      CrossAttentionWeights& out) {
  const int64_t width = int64_t{a.heads} * a.head_dim;
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.q, Role::kCrossQuery, layer, width, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(reader.linear(out.k, Role::kCrossKey, layer, width, a.encoder_size,
                                        a.qkv_bias && a.key_bias));
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.v, Role::kCrossValue, layer, width, a.encoder_size, a.qkv_bias));
  return reader.linear(out.out, Role::kCrossOutput, layer, hidden, width, a.out_bias);
}

Status make_cross(DummyMaker& maker, const CrossAttentionSpec& a, int64_t hidden,
                  CrossAttentionWeights& out) {
  const int64_t width = int64_t{a.heads} * a.head_dim;
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.q, "cross.q", Role::kCrossQuery, width, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(maker.linear(out.k, "cross.k", Role::kCrossKey, width, a.encoder_size,
                                       a.qkv_bias && a.key_bias));
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.v, "cross.v", Role::kCrossValue, width, a.encoder_size, a.qkv_bias));
  return maker.linear(out.out, "cross.out", Role::kCrossOutput, hidden, width, a.out_bias);
}

}  // namespace

constinit const BranchLoading kCrossAttentionLoading =
    branch_loading<CrossAttentionSpec, CrossAttentionWeights, assemble_cross, make_cross>(
        kCrossNorms);

}  // namespace freshet::models
