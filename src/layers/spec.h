// What a decoder-only transformer is, as data: everything that decides its forward pass except the
// weights themselves.
//
// models/ maps configurations to a ModelSpec, and layers/decoder.h runs any of them. A spec names
// no architecture beyond a label for people. Sizes are in features or tokens. Plain data: immutable
// after it is read, so safe to read from many threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
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

struct AttentionSpec {
  enum class Kind { kGqa, kMla };
  Kind kind = Kind::kGqa;
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
  NormSpec qk_norm_spec;  // the latents' too, for kMla
  // kMla (arXiv:2405.04434): head_dim = nope_dim + rope_dim, the rotated part last.
  int q_rank = 0;  // 0: queries are projected directly
  int kv_rank = 0;
  int nope_dim = 0;
  int rope_dim = 0;
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

struct LayerSpec {
  AttentionSpec attention;
  BranchNorms attention_norms;
  std::optional<MoeSpec> moe;  // in place of `mlp`
  MlpSpec mlp;
  BranchNorms mlp_norms;
  // Both branches start from the layer's input; without mlp_norms.in they share the attention's.
  bool parallel = false;
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

  float residual_scale = 1.0f;  // of each branch before it is added
  std::optional<NormSpec> final_norm;
  float logits_scale = 1.0f;
  float logits_softcap = 0.0f;
};

// Layers grouped by window, groups in the order of their first layers.
KvCacheSpec kv_cache_spec(const ModelSpec& spec, ops::KvType type);
// What a layer keeps of a token. MLA keeps its latent and the rotated part, shared by all heads.
ops::KvShape kv_shape(const AttentionSpec& attention, ops::KvType type);

// Whether the parts fit together (heads divide, sizes are positive ...): a spec that passes can be
// run without failed checks. The error names the odd part.
Status validate(const ModelSpec& spec);

}  // namespace freshet
