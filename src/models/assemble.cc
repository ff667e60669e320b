#include "models/assemble.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "models/branch_loading.h"

namespace freshet::models {
namespace {

using loader::TensorSource;

Status assemble_table(WeightReader& reader, Role role, int64_t rows, int64_t cols,
                      ops::Weight& out) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor, reader.require(role, ".weight"));
  FRESHET_ASSIGN_OR_RETURN(const Rows source, reader.rows(*tensor, rows, cols));
  FRESHET_RETURN_IF_ERROR(reader.pack(out, tensor->name, source, {}, ops::Use::kTable));
  reader.release(*tensor);
  return {};
}

// A table of sines takes the place of learned positions.
Status assemble_sines(WeightReader& reader, const ModelSpec& spec, ops::Weight& out) {
  const int64_t hidden = spec.hidden_size, half = hidden / 2;
  std::vector<float> table(static_cast<size_t>(spec.learned_positions * hidden));
  for (int64_t p = 0; p < spec.learned_positions; ++p) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(p) * std::pow(10000.0, -static_cast<double>(i) / spec.sine_divisor);
      table[static_cast<size_t>(p * hidden + i)] = static_cast<float>(std::sin(angle));
      table[static_cast<size_t>(p * hidden + half + i)] = static_cast<float>(std::cos(angle));
    }
  }
  FRESHET_ASSIGN_OR_RETURN(const Rows rows, reader.encode(table, hidden, quant::Format::kF32));
  return reader.pack(out, "positions", rows, {}, ops::Use::kTable);
}

Status assemble_norms(WeightReader& reader, const BranchSpec& spec, int64_t hidden, int layer,
                      BranchNormWeights& out) {
  const BranchNorms& norms = spec.norms;
  const bool opens = spec.side == Side::kOpens;
  const NormRoles& roles = norm_roles_of(spec);
  struct Place {
    const std::optional<NormSpec>& norm;
    Role role;
    NormWeights& weights;
    int64_t size;
  };
  const Place places[] = {
      {norms.in, roles.in, out.in, opens ? 2 * hidden : hidden},
      {norms.out, roles.out, out.out, hidden},
      {norms.after, roles.after, out.after, hidden},
  };
  for (const Place& place : places) {
    if (!place.norm) continue;
    FRESHET_RETURN_IF_ERROR(reader.norm(place.weights, place.role, *place.norm, layer, place.size));
  }
  return {};
}

// A convolution of three taps: [out, in, 3], whose rows multiply columns in the order (in, tap).
Status assemble_convolution(WeightReader& reader, Role role, int64_t rows, int64_t inputs,
                            Linear& out) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* tensor, reader.require(role, ".weight"));
  if (tensor->shape != std::vector<int64_t>{rows, inputs, 3})
    return invalid_argument("tensor '{}' must be [{}, {}, 3]", tensor->name, rows, inputs);
  if (!tensor->format)
    return unsupported("tensor '{}' has the type {}", tensor->name, tensor->dtype);
  Rows source = Rows::shape(*tensor->format, rows, 3 * inputs);
  for (size_t r = 0; r < source.rows.size(); ++r)
    source.rows[r] = tensor->data + r * (tensor->bytes / source.rows.size());
  FRESHET_RETURN_IF_ERROR(reader.pack(out.weight, tensor->name, source));
  reader.release(*tensor);
  return reader.vector(out.bias, role, ".bias", -1, rows);
}

}  // namespace

Status assemble_ends(WeightReader& reader, const ModelSpec& spec, ModelWeights& out) {
  const int64_t width = spec.embedding_size;
  const int64_t hidden = spec.hidden_size;
  FRESHET_RETURN_IF_ERROR(assemble_embedding(reader, spec, out));
  if (width != hidden) {
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.embedding_out, Role::kEmbeddingOut, -1, width, hidden, false));
  }
  if (spec.final_norm) {
    FRESHET_RETURN_IF_ERROR(
        reader.norm(out.final_norm, Role::kFinalNorm, *spec.final_norm, -1, hidden));
  }
  if (spec.tied_embeddings && spec.generates && spec.logits_bias) {
    FRESHET_RETURN_IF_ERROR(reader.vector(out.head.bias, Role::kHeadBias, "", -1, spec.vocab_size));
  }
  if (spec.tied_embeddings || !spec.generates) return {};
  return reader.linear(out.head, Role::kHead, -1, spec.vocab_size, width, spec.logits_bias);
}

Status assemble_embedding(WeightReader& reader, const ModelSpec& spec, ModelWeights& out) {
  const int64_t width = spec.embedding_size;
  const int64_t hidden = spec.hidden_size;
  if (spec.stem) {
    FRESHET_RETURN_IF_ERROR(assemble_convolution(reader, Role::kConvolution1, hidden,
                                                 spec.stem->mel_bins, out.stem[0]));
    FRESHET_RETURN_IF_ERROR(
        assemble_convolution(reader, Role::kConvolution2, hidden, hidden, out.stem[1]));
  } else if (!spec.shared_embedding) {
    int64_t rows = spec.vocab_size;
    if (spec.vision != nullptr && spec.vision->image_token >= rows) {
      // The tokens of pictures lie behind the vocabulary, with some others that are not used.
      const TensorSource* const table = reader.find(Role::kEmbedding, ".weight");
      if (table != nullptr && !table->shape.empty())
        rows = std::max<int64_t>(table->shape[0], spec.vision->image_token + 1);
    }
    FRESHET_RETURN_IF_ERROR(assemble_table(reader, Role::kEmbedding, rows, width, out.embedding));
  }
  if (spec.sine_divisor > 0) {
    FRESHET_RETURN_IF_ERROR(assemble_sines(reader, spec, out.positions));
  } else if (spec.learned_positions > 0) {
    FRESHET_RETURN_IF_ERROR(
        assemble_table(reader, Role::kPositions, spec.learned_positions, hidden, out.positions));
  }
  if (spec.token_types > 0) {
    FRESHET_RETURN_IF_ERROR(
        assemble_table(reader, Role::kTokenTypes, spec.token_types, hidden, out.token_types));
  }
  if (spec.embedded_norm) {
    FRESHET_RETURN_IF_ERROR(
        reader.norm(out.embedded_norm, Role::kEmbeddedNorm, *spec.embedded_norm, -1, hidden));
  }
  if (width == hidden) return {};
  return reader.linear(out.embedding_in, Role::kEmbeddingIn, -1, hidden, width, false);
}

Status assemble_layer(WeightReader& reader, const LayerSpec& spec, int64_t hidden, int layer,
                      LayerWeights& out) {
  for (const BranchSpec& branch : spec.branches) {
    BranchWeights& w = out.branches.emplace_back();
    reader.set_shared(branch.sharers, branch.use);
    FRESHET_RETURN_IF_ERROR(assemble_norms(reader, branch, hidden, layer, w.norms));
    FRESHET_RETURN_IF_ERROR(loading_of(branch).assemble(reader, branch, hidden, layer, w));
    reader.set_shared({}, 0);
  }
  return {};
}

Result<ModelWeights> assemble(WeightReader& reader, const ModelSpec& spec) {
  ModelWeights out;
  FRESHET_RETURN_IF_ERROR(assemble_ends(reader, spec, out));
  out.layers.resize(spec.layers.size());
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    FRESHET_RETURN_IF_ERROR(assemble_layer(reader, spec.layers[i], spec.hidden_size,
                                           static_cast<int>(i), out.layers[i]));
  }
  return out;
}

}  // namespace freshet::models
