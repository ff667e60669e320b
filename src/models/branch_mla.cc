#include "base/log.h"
#include "models/branch_loading.h"

namespace freshet::models {
namespace {

using loader::TensorSource;

// The absorbed form has a plain type: the file's, or F16 if that is quantised, because quantised
// rows cannot be transposed.
quant::Format plain_format(quant::Format stored) {
  return quant::info(stored).plain() ? stored : quant::Format::kF16;
}

std::vector<float> decode(const Rows& rows) {
  std::vector<float> out(rows.rows.size() * static_cast<size_t>(rows.cols));
  for (size_t r = 0; r < rows.rows.size(); ++r) {
    quant::info(rows.format)
        .decode(rows.rows[r], out.data() + r * static_cast<size_t>(rows.cols), rows.cols);
  }
  return out;
}

// diag(W_k^T, I) of one head. up: W_k^T [kv_rank, nope_dim] if `transposed`, else W_k.
std::vector<float> absorb(const MlaSpec& a, const std::vector<float>& up, bool transposed) {
  const auto rank = static_cast<size_t>(a.kv_rank);
  const auto nope = static_cast<size_t>(a.nope_dim);
  const auto cols = static_cast<size_t>(a.head_dim());
  std::vector<float> out((rank + static_cast<size_t>(a.rope_dim)) * cols, 0.0f);
  for (size_t r = 0; r < rank; ++r) {
    for (size_t n = 0; n < nope; ++n) {
      out[r * cols + n] = transposed ? up[r * nope + n] : up[n * rank + r];
    }
  }
  for (size_t i = 0; i < static_cast<size_t>(a.rope_dim); ++i)
    out[(rank + i) * cols + nope + i] = 1.0f;
  return out;
}

Status pack_absorbed(WeightReader& reader, const MlaSpec& a, const std::string& name,
                     const Rows& up, bool transposed, MlaWeights& out) {
  if (reader.shapes_suffice()) {
    const int64_t made = int64_t{a.kv_rank} + a.rope_dim;
    return reader.pack(out.q_absorb.emplace_back(), name,
                       Rows::shape(plain_format(up.format), made, a.head_dim()));
  }
  const std::vector<float> matrix = absorb(a, decode(up), transposed);
  FRESHET_ASSIGN_OR_RETURN(const Rows rows,
                           reader.encode(matrix, a.head_dim(), plain_format(up.format)));
  return reader.pack(out.q_absorb.emplace_back(), name, rows);
}

// Keys and values of a head from one matrix [heads * (nope_dim + value_dim), kv_rank].
Status split_kv_up(WeightReader& reader, const MlaSpec& a, const TensorSource& tensor,
                   MlaWeights& out) {
  const int64_t per_head = int64_t{a.nope_dim} + a.value_dim;
  FRESHET_ASSIGN_OR_RETURN(const Rows all, reader.rows(tensor, a.heads * per_head, a.kv_rank));
  for (int64_t h = 0; h < a.heads; ++h) {
    const auto first = all.rows.begin() + h * per_head;
    Rows keys, values;
    keys.format = values.format = all.format;
    keys.cols = values.cols = all.cols;
    keys.rows.assign(first, first + a.nope_dim);
    values.rows.assign(first + a.nope_dim, first + per_head);
    FRESHET_RETURN_IF_ERROR(pack_absorbed(reader, a, tensor.name, keys, false, out));
    FRESHET_RETURN_IF_ERROR(reader.pack(out.v_up.emplace_back(), tensor.name, values));
  }
  reader.release(tensor);
  return {};
}

// The same from files that store the two separately, keys transposed.
Status read_kv_up(WeightReader& reader, const MlaSpec& a, int layer, MlaWeights& out) {
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* keys,
                           reader.require(Role::kKeyUpTransposed, ".weight", layer));
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* values,
                           reader.require(Role::kValueUp, ".weight", layer));
  for (int64_t h = 0; h < a.heads; ++h) {
    FRESHET_ASSIGN_OR_RETURN(
        const Rows k, reader.rows_of(*keys, h, a.heads, a.kv_rank, a.nope_dim, Layout::kRows));
    FRESHET_ASSIGN_OR_RETURN(
        const Rows v, reader.rows_of(*values, h, a.heads, a.value_dim, a.kv_rank, Layout::kRows));
    FRESHET_RETURN_IF_ERROR(pack_absorbed(reader, a, keys->name, k, true, out));
    FRESHET_RETURN_IF_ERROR(reader.pack(out.v_up.emplace_back(), values->name, v));
  }
  reader.release(*keys);
  reader.release(*values);
  return {};
}

Status assemble_projections(WeightReader& reader, const MlaSpec& a, int64_t hidden, int layer,
                            MlaWeights& out) {
  const int64_t q = int64_t{a.heads} * a.head_dim();
  if (a.q_rank > 0) {
    FRESHET_RETURN_IF_ERROR(
        reader.linear(out.q_down, Role::kQueryDown, layer, a.q_rank, hidden, a.qkv_bias));
    FRESHET_RETURN_IF_ERROR(
        reader.norm(out.q_latent_norm, Role::kQueryLatentNorm, a.latent_norm, layer, a.q_rank));
    FRESHET_RETURN_IF_ERROR(reader.linear(out.q_up, Role::kQueryUp, layer, q, a.q_rank, false));
  } else {
    FRESHET_RETURN_IF_ERROR(reader.linear(out.q, Role::kQuery, layer, q, hidden, false));
  }
  FRESHET_RETURN_IF_ERROR(reader.linear(out.kv_down, Role::kKvDown, layer,
                                        int64_t{a.kv_rank} + a.rope_dim, hidden, a.qkv_bias));
  FRESHET_RETURN_IF_ERROR(
      reader.norm(out.kv_latent_norm, Role::kKvLatentNorm, a.latent_norm, layer, a.kv_rank));
  const TensorSource* kv_up = reader.find(Role::kKvUp, ".weight", layer);
  const bool apart = reader.find(Role::kKeyUpTransposed, ".weight", layer) != nullptr;
  if (kv_up == nullptr && apart) return read_kv_up(reader, a, layer, out);
  FRESHET_ASSIGN_OR_RETURN(kv_up, reader.require(Role::kKvUp, ".weight", layer));
  return split_kv_up(reader, a, *kv_up, out);
}

Status assemble(WeightReader& reader, const MlaSpec& a, int64_t hidden, int layer,
                MlaWeights& out) {
  FRESHET_RETURN_IF_ERROR(assemble_projections(reader, a, hidden, layer, out));
  if (const TensorSource* t = find_kv_scale(reader, Role::kKvDown, layer, ".k_scale"))
    log_warning("tensor '{}' is not used: an FP8 cache of latents has no factor", t->name);
  return assemble_attention_out(reader, a, hidden, layer, out);
}

Status make(DummyMaker&, const MlaSpec&, int64_t, MlaWeights&) {
  return unsupported("random weights for latent attention");
}

}  // namespace

constinit const BranchLoading kMlaLoading =
    branch_loading<MlaSpec, MlaWeights, assemble, make>(kAttentionNorms);

}  // namespace freshet::models
