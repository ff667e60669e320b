// A decoder as data: everything that decides its forward pass except the weights themselves.
//
// A layer is a list of branches (attention, MLP ...), each of which adds to the residual stream.
// models/ maps configurations to a ModelSpec, and layers/decoder.h runs any of them. A spec names
// no architecture beyond a label for people. Sizes are in features or tokens. Plain data: immutable
// after it is read, so safe to read from many threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kv_cache/kv_storage.h"
#include "ops/ops.h"

namespace freshet {

// Rotary position embedding (arXiv:2104.09864) and the ways to stretch it.
struct RopeSpec {
  enum class Scaling {
    kNone,
    kLinear,    // frequencies / factor
    kDynamic,   // NTK-aware: the base grows with the context (beyond original_context)
    kYarn,      // arXiv:2309.00071
    kLlama3,    // interpolation by wavelength
    kLongRope,  // arXiv:2402.13753: a divisor for each frequency, one list below original_context
    kFactors,   // a divisor for each frequency, whatever the context (GGUF's rope_freqs)
  };
  double theta = 10000.0;
  int rotary_dim = 0;        // features of a head that rotate; even
  bool interleaved = false;  // pairs (2i, 2i + 1) rather than (i, i + rotary_dim / 2)
  Scaling scaling = Scaling::kNone;
  double factor = 1.0;
  double original_context = 0;           // that the model was trained with, before stretching
  float attention_factor = 1.0f;         // cos and sin are multiplied by it
  double beta_fast = 32, beta_slow = 1;  // YaRN's ramp, in rotations
  bool truncate = true;                  // ... with its ends rounded to whole dimensions
  double low_freq_factor = 1, high_freq_factor = 4;  // Llama 3
  std::vector<float> short_factors, long_factors;  // [rotary_dim / 2]; kFactors uses the short ones

  bool operator==(const RopeSpec&) const = default;
};

struct NormSpec {
  ops::NormKind kind = ops::NormKind::kRms;
  float eps = 1e-6f;
  bool weight = true;
  bool bias = false;
};

// Where queries and keys are normalised before they rotate.
enum class QkNorm {
  kNone,
  kHead,          // each head by itself, one weight [head_dim] for all
  kHeadDistinct,  // each head by itself, with weights of its own [heads, head_dim]
  kFull,          // over all heads together [heads * head_dim]
};

// Multi-head attention whose query heads share key and value heads (GQA, arXiv:2305.13245).
struct AttentionSpec {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;   // of queries and keys
  int value_dim = 0;  // of values
  int window = 0;     // 0: full; otherwise a query sees itself and window - 1 tokens before it
  int rope = -1;      // index in ModelSpec::ropes; -1: no rotation
  float scale = 1.0f;
  float softcap = 0.0f;
  bool sinks = false;
  bool qkv_bias = false;
  bool out_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  NormSpec qk_norm_spec;
  int input_size = 0;  // features that queries, keys and values are projected from; 0: hidden_size
  int chunk = 0;       // > 0: a query sees the tokens of its own chunk of this many positions only
  // A query also sees the tokens behind it: all, or window - 1 of them.
  bool two_way = false;
};

// Multi-head latent attention (MLA, arXiv:2405.04434).
struct MlaSpec {
  int heads = 0;
  int q_rank = 0;  // 0: queries are projected directly
  int kv_rank = 0;
  int nope_dim = 0;  // features of a query or key head that do not rotate, in front ...
  int rope_dim = 0;  // ... of those that do
  int value_dim = 0;
  int window = 0;  // as in AttentionSpec
  int rope = -1;   // as in AttentionSpec
  float scale = 1.0f;
  float softcap = 0.0f;
  bool sinks = false;
  bool qkv_bias = false;
  bool out_bias = false;
  NormSpec latent_norm;

  int head_dim() const { return nope_dim + rope_dim; }
};

struct MlpSpec {
  bool gated = true;  // down(act(gate(x)) * up(x)) rather than down(act(up(x)))
  int ff = 0;
  ops::Activation activation = ops::Activation::kSilu;
  bool bias = false;
};

struct MoeSpec {
  ops::Routing routing;  // `correction` points to weights and is set when a layer runs
  int expert_ff = 0;
  ops::Glu glu;
  bool router_bias = false;
  bool router_correction = false;
  bool expert_bias = false;
  int shared_ff = 0;         // 0: no shared expert
  bool shared_gate = false;  // the shared expert is scaled by a sigmoid gate
};

// The norms around one branch: x = after(x + out(branch(in(x)))).
struct BranchNorms {
  std::optional<NormSpec> in, out, after;
};

// Every kind of branch. layers/branch_kinds.h has a row for each, in this order.
using BranchBody = std::variant<AttentionSpec, MlaSpec, MlpSpec, MoeSpec>;

struct BranchSpec {
  BranchNorms norms;
  BranchBody body;
};

struct LayerSpec {
  std::vector<BranchSpec> branches;  // in the order in which they add to the residual stream
  // All branches read the layer's input. A branch without norms.in shares the normalised input of
  // the branch before it.
  bool parallel = false;

  // The first branch of a kind; nullptr if the layer has none.
  template <class Spec>
  const Spec* find() const {
    for (const BranchSpec& branch : branches) {
      if (const Spec* spec = std::get_if<Spec>(&branch.body)) return spec;
    }
    return nullptr;
  }
  template <class Spec>
  Spec* find() {
    return const_cast<Spec*>(std::as_const(*this).find<Spec>());
  }
  // REQUIRES: the layer has such a branch.
  AttentionSpec& attention() { return require<AttentionSpec>(*this); }
  const AttentionSpec& attention() const { return require<const AttentionSpec>(*this); }
  MlpSpec& mlp() { return require<MlpSpec>(*this); }
  const MlpSpec& mlp() const { return require<const MlpSpec>(*this); }

 private:
  template <class Spec, class Layer>
  static Spec& require(Layer& layer) {
    Spec* spec = layer.template find<std::remove_const_t<Spec>>();
    FRESHET_CHECK(spec != nullptr, "the layer has no such branch");
    return *spec;
  }
};

// How a draft head (EAGLE, an MTP layer) makes its residual stream from the embedding e of a token
// and the target's features f of the token before it; or that a part of a model (models/parts.h)
// continues the stream of the part before it.
struct FeatureSpec {
  int width = 0;  // of the target's features
  enum class Use {
    kJoined,  // x = W [e; f]: EAGLE-1 (arXiv:2401.15077), MTP (arXiv:2412.19437)
    kPaired,  // x = W f; the first branch reads [norm(e); norm(x)]: EAGLE-3 (arXiv:2503.01840)
    kStream,  // x = f, the residual stream itself; token ids are not read
  };
  Use use = Use::kJoined;
  bool features_first = false;  // kJoined: [f; e]
  bool bias = false;
  std::optional<NormSpec> input_norm;  // kPaired: on the target's features, before W
  std::optional<NormSpec> embedding_norm, feature_norm;
  bool normed_residual = false;  // kPaired: x itself is normalised
  // The states that the head gives for its own next step are those before the final norm.
  bool raw_states = false;
};

struct ModelSpec {
  std::string architecture;  // for people
  int vocab_size = 0;
  int hidden_size = 0;
  std::vector<LayerSpec> layers;
  std::vector<RopeSpec> ropes;
  int64_t max_context = 0;  // positions that the model is said to handle

  float embedding_scale = 1.0f;
  int embedding_size = 0;  // width of the table; differs from hidden_size only with projections
  int64_t learned_positions = 0;  // rows of the position table, 0: none
  int position_offset = 0;        // added to a position before it is looked up
  bool tied_embeddings = false;
  bool logits_bias = false;

  std::optional<FeatureSpec> features;  // of a draft head

  float residual_scale = 1.0f;  // of each branch before it is added
  std::optional<NormSpec> final_norm;
  float logits_scale = 1.0f;
  float logits_softcap = 0.0f;
};

// One layer of cache for each branch that stores keys and values, in the order of the branches.
// Cache layers with the same window, chunk and direction share a group; groups are in the order of
// their first layers.
KvCacheSpec kv_cache_spec(const ModelSpec& spec, ops::KvType type);

// The last branch that stores keys and values: tokens that need no logits stop behind it. -1, -1 if
// no branch stores any.
struct BranchPlace {
  int layer = -1;
  int branch = -1;
};
BranchPlace last_stored(const ModelSpec& spec);

// Whether the parts fit together (heads divide, sizes are positive ...): a spec that passes can be
// run without failed checks. The error names the part that does not fit.
Status validate(const ModelSpec& spec);

}  // namespace freshet
