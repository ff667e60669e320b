#include "eval/model_size.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>
#include <string>
#include <string_view>

#include "layers/model.h"

namespace freshet::eval {
namespace {

using loader::TensorSource;

// Weights of one branch of each kind.
struct BranchWeightCount {
  int64_t hidden;

  int64_t operator()(const AttentionSpec& a) const {
    const int64_t in = a.input_size > 0 ? a.input_size : hidden;
    const int64_t queries = int64_t{a.heads} * a.head_dim;
    const int64_t keys = int64_t{a.kv_heads} * a.head_dim;
    const int64_t values = int64_t{a.kv_heads} * a.value_dim;
    return in * (queries + keys + values + (a.output_gate ? queries : 0)) +
           hidden * a.heads * a.value_dim;
  }
  int64_t operator()(const MlaSpec& a) const {
    const int64_t queries = int64_t{a.heads} * a.head_dim();
    const int64_t q = a.q_rank > 0 ? a.q_rank * (hidden + queries) : hidden * queries;
    const int64_t kv_down = hidden * (int64_t{a.kv_rank} + a.rope_dim);
    const int64_t kv_up = int64_t{a.heads} * (a.nope_dim + a.value_dim) * a.kv_rank;
    return q + kv_down + kv_up + hidden * a.heads * a.value_dim;
  }
  int64_t operator()(const CrossAttentionSpec& a) const {
    const int64_t kv_heads = a.kv_heads > 0 ? a.kv_heads : a.heads;
    return 2 * a.head_dim * (a.heads * hidden + kv_heads * a.encoder_size);
  }
  int64_t operator()(const LinearSpec&) const { return hidden * hidden; }
  int64_t operator()(const MlpSpec& m) const { return (m.gated ? 3 : 2) * hidden * m.ff; }
  int64_t operator()(const MoeSpec& m) const {
    return hidden * m.routing.experts + 3 * hidden * m.expert_ff * m.routing.experts +
           3 * hidden * m.shared_ff + (m.shared_gate ? hidden : 0);
  }
  int64_t operator()(const ShortConvSpec& s) const { return 4 * hidden * s.channels; }
  int64_t operator()(const MambaSpec& s) const {
    return int64_t{s.inner} * (3 * hidden + 2 * int64_t{s.dt_rank} + 2 * int64_t{s.state});
  }
  int64_t operator()(const Mamba2Spec& s) const {
    return hidden * (2 * int64_t{s.inner()} + s.conv_channels() + s.heads);
  }
  int64_t operator()(const DeltaNetSpec& s) const {
    return hidden * (2 * int64_t{s.keys()} + 3 * int64_t{s.values()} + 2 * int64_t{s.value_heads});
  }
  int64_t operator()(const LightningSpec& s) const { return 5 * hidden * s.heads * s.head_dim; }
};

int64_t adapter_weights(const BranchSpec& branch, int64_t hidden) {
  if (const auto* const a = std::get_if<AttentionSpec>(&branch.body)) {
    const int64_t in = a->input_size > 0 ? a->input_size : hidden;
    const int64_t out = int64_t{a->heads} * a->head_dim +
                        int64_t{a->kv_heads} * (int64_t{a->head_dim} + a->value_dim);
    return a->adapter_rank * (3 * in + out);
  }
  const auto* const m = std::get_if<MlpSpec>(&branch.body);
  return m == nullptr ? 0 : m->adapter_rank * (hidden + 2 * int64_t{m->ff});
}

// The layer of the decoder that a tensor belongs to; -1: none.
int decoder_layer_of(std::string_view name) {
  for (const std::string_view other : {"vision", "visual", "audio"}) {
    if (name.find(other) != std::string_view::npos) return -1;
  }
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string_view part = name.substr(at, end - at);
    int layer = -1;
    const auto [rest, error] = std::from_chars(part.data(), part.data() + part.size(), layer);
    if (error == std::errc() && rest == part.data() + part.size() && layer >= 0) return layer;
    at = end + 1;
  }
  return -1;
}

bool is_matrix(const TensorSource& t) {
  return t.shape.size() >= 2 && !t.name.ends_with("bias") &&
         t.name.find("norm") == std::string::npos;
}

// "x.q_proj" for the tensor that holds the weights of a matrix; "" for others.
std::string_view stem_of_matrix(const TensorSource& t) {
  if (!is_matrix(t)) return {};
  for (const std::string_view end : {".weight", ".qweight", ".weight_packed"}) {
    if (t.name.ends_with(end))
      return std::string_view(t.name).substr(0, t.name.size() - end.size());
  }
  return {};
}

// Whether a g_idx tensor lists the groups in order.
bool in_order(const TensorSource& t) {
  int32_t before = 0;
  for (size_t at = 0; at + sizeof(int32_t) <= t.bytes; at += sizeof(int32_t)) {
    int32_t group = 0;
    std::memcpy(&group, t.data + at, sizeof group);
    if (group < before) return false;
    before = group;
  }
  return t.dtype == "I32";
}

// Whether a matrix outside the blocks is stored as packed codes, whose number its shape hides.
bool packed(const TensorSource& t) {
  return t.dtype == "I32" || t.dtype == "U8" || t.name.ends_with(".qweight");
}

}  // namespace

double ModelSize::bits_per_weight() const {
  return static_cast<double>(linear_bytes) * 8.0 /
         static_cast<double>(std::max<int64_t>(1, linear_weights));
}

double ModelSize::bits_per_weight_total() const {
  return static_cast<double>(bytes) * 8.0 / static_cast<double>(std::max<int64_t>(1, weights));
}

int64_t linear_weights(const ModelSpec& spec) {
  int64_t count = 0;
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    for (const BranchSpec& branch : spec.layers[i].branches) {
      const bool counted =
          !branch.sharers.empty() && static_cast<size_t>(branch.sharers.front()) != i;
      if (!counted) count += std::visit(BranchWeightCount{spec.hidden_size}, branch.body);
      count += adapter_weights(branch, spec.hidden_size);
    }
  }
  return count;
}

ModelSize model_size(const loader::Checkpoint& checkpoint, const ModelSpec& spec) {
  std::set<std::string_view> stems;
  for (const TensorSource& t : checkpoint.tensors()) stems.insert(stem_of_matrix(t));
  stems.erase(std::string_view());
  ModelSize size;
  size.linear_weights = size.weights = linear_weights(spec);
  for (const TensorSource& t : checkpoint.tensors()) {
    if (t.name.ends_with("g_idx") && in_order(t)) continue;
    size.bytes += t.bytes;
    // The matrix that the tensor is a part of: its weights, or scales and the like beside them.
    bool part = false;
    const std::string_view name = t.name;
    for (size_t dot = name.rfind('.'); dot != std::string_view::npos && dot > 0 && !part;
         dot = name.rfind('.', dot - 1))
      part = stems.contains(name.substr(0, dot));
    part = part && !name.ends_with("bias");
    const int layer = decoder_layer_of(name);
    if (layer >= 0 && layer < std::ssize(spec.layers) && (part || is_matrix(t))) {
      size.linear_bytes += t.bytes;
    } else if (!part || !stem_of_matrix(t).empty()) {
      size.weights +=
          part && packed(t) ? int64_t{spec.vocab_size} * spec.embedding_size : t.elements();
    }
  }
  return size;
}

Result<ModelSize> model_size(const std::string& model) {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(model));
  FRESHET_ASSIGN_OR_RETURN(const ModelSpec spec, read_spec(checkpoint));
  return model_size(checkpoint, spec);
}

}  // namespace freshet::eval
