// Short convolutions, Mamba and Mamba-2; and what all layers with states share.
#include <cmath>

#include "models/branch_loading.h"
#include "models/dummy_maker.h"

namespace freshet::models {

Status assemble_conv(WeightReader& reader, int layer, int64_t channels, int taps, bool bias,
                     ConvWeights& out) {
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                           reader.require(Role::kStateConv, ".weight", layer));
  if (tensor->shape.empty() || tensor->shape.front() != channels) {
    return invalid_argument("tensor '{}': not a convolution of {} channels", tensor->name,
                            channels);
  }
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values,
                           reader.values(*tensor, channels * taps));
  std::vector<float> turned(values.size());
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t i = 0; i < taps; ++i) {
      turned[static_cast<size_t>(i * channels + c)] = values[static_cast<size_t>(c * taps + i)];
    }
  }
  FRESHET_RETURN_IF_ERROR(reader.store(out.weight, turned));
  return bias ? reader.vector(out.bias, Role::kStateConv, ".bias", layer, channels) : Status();
}

Status make_conv(DummyMaker& maker, int64_t channels, int taps, bool bias, ConvWeights& out) {
  FRESHET_RETURN_IF_ERROR(maker.vector(out.weight, channels * taps, 0.25f));
  return bias ? maker.vector(out.bias, channels, 0.0f) : Status();
}

Status assemble_decay(WeightReader& reader, int layer, int64_t rows, int64_t cols, Vector& out) {
  FRESHET_ASSIGN_OR_RETURN(const loader::TensorSource* tensor,
                           reader.require(Role::kStateA, ".weight", layer));
  FRESHET_ASSIGN_OR_RETURN(const std::vector<float> values, reader.values(*tensor, rows * cols));
  std::vector<float> rates(values.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const float v = values[static_cast<size_t>(r * cols + c)];
      rates[static_cast<size_t>(c * rows + r)] = reader.is_gguf() ? v : -std::exp(v);
    }
  }
  return reader.store(out, rates);
}

Status assemble_dt_bias(WeightReader& reader, int layer, int64_t size, Vector& out) {
  const char* const suffix = reader.is_gguf() ? ".bias" : ".weight";
  return reader.vector(out, Role::kStateDtBias, suffix, layer, size);
}

namespace {

Status assemble_short_conv(WeightReader& reader, const ShortConvSpec& s, int64_t hidden, int layer,
                           ShortConvWeights& out) {
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.in, Role::kStateIn, layer, 3 * int64_t{s.channels}, hidden, s.bias));
  FRESHET_RETURN_IF_ERROR(assemble_conv(reader, layer, s.channels, s.taps, s.bias, out.conv));
  return reader.linear(out.out, Role::kStateOut, layer, hidden, s.channels, s.bias);
}

Status make_short_conv(DummyMaker& maker, const ShortConvSpec& s, int64_t hidden,
                       ShortConvWeights& out) {
  FRESHET_RETURN_IF_ERROR(maker.linear(out.in, "short_conv.in", Role::kStateIn,
                                       3 * int64_t{s.channels}, hidden, s.bias));
  FRESHET_RETURN_IF_ERROR(make_conv(maker, s.channels, s.taps, s.bias, out.conv));
  return maker.linear(out.out, "short_conv.out", Role::kStateOut, hidden, s.channels, s.bias);
}

Status assemble_mamba(WeightReader& reader, const MambaSpec& s, int64_t hidden, int layer,
                      MambaWeights& out) {
  const int64_t inner = s.inner, n = s.state, rank = s.dt_rank;
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.in, Role::kStateIn, layer, 2 * inner, hidden, s.proj_bias));
  FRESHET_RETURN_IF_ERROR(assemble_conv(reader, layer, inner, s.taps, s.conv_bias, out.conv));
  FRESHET_RETURN_IF_ERROR(reader.linear(out.x, Role::kStateX, layer, rank + 2 * n, inner, false));
  FRESHET_RETURN_IF_ERROR(reader.linear(out.dt, Role::kStateDt, layer, inner, rank, true));
  FRESHET_RETURN_IF_ERROR(assemble_decay(reader, layer, inner, n, out.a));
  FRESHET_RETURN_IF_ERROR(reader.vector(out.d, Role::kStateD, ".weight", layer, inner));
  if (s.inner_norm) {
    const NormSpec& norm = *s.inner_norm;
    FRESHET_RETURN_IF_ERROR(reader.norm(out.dt_norm, Role::kStateDtNorm, norm, layer, rank));
    FRESHET_RETURN_IF_ERROR(reader.norm(out.b_norm, Role::kStateBNorm, norm, layer, n));
    FRESHET_RETURN_IF_ERROR(reader.norm(out.c_norm, Role::kStateCNorm, norm, layer, n));
  }
  return reader.linear(out.out, Role::kStateOut, layer, hidden, inner, s.proj_bias);
}

Status make_mamba(DummyMaker& maker, const MambaSpec& s, int64_t hidden, MambaWeights& out) {
  const int64_t inner = s.inner, n = s.state, rank = s.dt_rank;
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.in, "mamba.in", Role::kStateIn, 2 * inner, hidden, s.proj_bias));
  FRESHET_RETURN_IF_ERROR(make_conv(maker, inner, s.taps, s.conv_bias, out.conv));
  FRESHET_RETURN_IF_ERROR(
      maker.linear(out.x, "mamba.x", Role::kStateX, rank + 2 * n, inner, false));
  FRESHET_RETURN_IF_ERROR(maker.linear(out.dt, "mamba.dt", Role::kStateDt, inner, rank, true));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.a, n * inner, -1.0f));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.d, inner, 1.0f));
  FRESHET_RETURN_IF_ERROR(maker.norm(out.dt_norm, s.inner_norm, rank));
  FRESHET_RETURN_IF_ERROR(maker.norm(out.b_norm, s.inner_norm, n));
  FRESHET_RETURN_IF_ERROR(maker.norm(out.c_norm, s.inner_norm, n));
  return maker.linear(out.out, "mamba.out", Role::kStateOut, hidden, inner, s.proj_bias);
}

Status assemble_mamba2(WeightReader& reader, const Mamba2Spec& s, int64_t hidden, int layer,
                       Mamba2Weights& out) {
  const int64_t inner = s.inner(), conv = s.conv_channels();
  FRESHET_RETURN_IF_ERROR(
      reader.linear(out.in, Role::kStateIn, layer, inner + conv + s.heads, hidden, s.proj_bias));
  FRESHET_RETURN_IF_ERROR(assemble_conv(reader, layer, conv, s.taps, s.conv_bias, out.conv));
  FRESHET_RETURN_IF_ERROR(assemble_decay(reader, layer, s.heads, 1, out.a));
  FRESHET_RETURN_IF_ERROR(reader.vector(out.d, Role::kStateD, ".weight", layer, s.heads));
  FRESHET_RETURN_IF_ERROR(assemble_dt_bias(reader, layer, s.heads, out.dt_bias));
  if (s.norm) {
    FRESHET_RETURN_IF_ERROR(reader.norm(out.norm, Role::kStateNorm, *s.norm, layer, inner));
  }
  return reader.linear(out.out, Role::kStateOut, layer, hidden, inner, s.proj_bias);
}

Status make_mamba2(DummyMaker& maker, const Mamba2Spec& s, int64_t hidden, Mamba2Weights& out) {
  const int64_t inner = s.inner(), conv = s.conv_channels();
  FRESHET_RETURN_IF_ERROR(maker.linear(out.in, "mamba2.in", Role::kStateIn, inner + conv + s.heads,
                                       hidden, s.proj_bias));
  FRESHET_RETURN_IF_ERROR(make_conv(maker, conv, s.taps, s.conv_bias, out.conv));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.a, s.heads, -1.0f));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.d, s.heads, 1.0f));
  FRESHET_RETURN_IF_ERROR(maker.vector(out.dt_bias, s.heads, 0.0f));
  FRESHET_RETURN_IF_ERROR(maker.norm(out.norm, s.norm, inner));
  return maker.linear(out.out, "mamba2.out", Role::kStateOut, hidden, inner, s.proj_bias);
}

}  // namespace

constinit const BranchLoading kShortConvLoading =
    branch_loading<ShortConvSpec, ShortConvWeights, assemble_short_conv, make_short_conv>(
        kAttentionNorms);
constinit const BranchLoading kMambaLoading =
    branch_loading<MambaSpec, MambaWeights, assemble_mamba, make_mamba>(kAttentionNorms);
constinit const BranchLoading kMamba2Loading =
    branch_loading<Mamba2Spec, Mamba2Weights, assemble_mamba2, make_mamba2>(kAttentionNorms);

}  // namespace freshet::models
