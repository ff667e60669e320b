// A decoder as data: everything that decides its forward pass except the weights themselves.
//
// A layer is a list of branches (attention, MLP ...), each of which adds to the residual stream.
// models/ maps configurations to a ModelSpec, and layers/decoder.h runs any of them. A spec names
// no architecture beyond a label for people. Sizes are in features or tokens. Plain data: immutable
// after it is read, so safe to read from many threads.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
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
    // No rotation: features are scaled by 1 + factor ln(1 + floor((position + 1) /
    // original_context)), which sharpens attention in long texts (arXiv:2501.19399).
    kTemperature,
  };
  double theta = 10000.0;
  int rotary_dim = 0;        // features of a head that rotate; even
  bool interleaved = false;  // pairs (2i, 2i + 1) rather than (i, i + rotary_dim / 2)
  Scaling scaling = Scaling::kNone;
  double factor = 1.0;
  double original_context = 0;           // context length in training, before stretching
  float attention_factor = 1.0f;         // cos and sin are multiplied by it
  double beta_fast = 32, beta_slow = 1;  // YaRN's ramp, in rotations
  bool truncate = true;                  // ... with its ends rounded to whole dimensions
  double low_freq_factor = 1, high_freq_factor = 4;  // Llama 3
  std::vector<float> short_factors, long_factors;  // [rotary_dim / 2]; kFactors uses the short ones
  // Empty, or [rotary_dim / 2]: tokens have positions on several axes (M-RoPE, arXiv:2409.12191),
  // and frequency i is multiplied by the position on axis axes[i].
  std::vector<int> axes;
  // Frequencies start anew on each axis, for that axis' share of the features (towers).
  bool axial = false;
  // With `axial`: the axes take the frequencies of all features in turns instead.
  bool axial_turns = false;

  int axis_count() const;  // 1 without `axes`

  bool operator==(const RopeSpec&) const = default;
};

struct NormSpec {
  ops::NormKind kind = ops::NormKind::kRms;
  float eps = 1e-6f;
  bool weight = true;
  bool bias = false;
};

// Where queries and keys are normalised: before the rotation, or after it (norm_after_rope).
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
  bool rotates_keys = true;  // false: only queries are rotated
  float scale = 1.0f;
  float softcap = 0.0f;
  bool sinks = false;
  bool qkv_bias = false;
  bool out_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  NormSpec qk_norm_spec;
  bool norm_after_rope = false;
  int input_size = 0;  // features that queries, keys and values are projected from; 0: hidden_size
  int chunk = 0;       // > 0: a query sees the tokens of its own chunk of this many positions only
  // A query also sees the tokens after it: all, or the next window - 1.
  bool two_way = false;
  bool key_bias = true;  // keys have a bias if qkv_bias says so
  // > 0: scores get a learned bias per head and distance (T5, arXiv:1910.10683 section 2.1).
  // Distances are grouped into `bias_buckets` buckets; the last one has all distances from
  // bias_distance on.
  int bias_buckets = 0;
  int bias_distance = 0;
  // The result is multiplied by the sigmoid of a projection of the input, before `out`. In the
  // checkpoint, its rows follow each head's queries.
  bool output_gate = false;
  SpanUse spans = SpanUse::kNone;
  // [heads], or empty: how much a score decreases per position of distance between query and key
  // (ALiBi, arXiv:2108.12409).
  std::vector<float> slopes;

  // > 0: q, k and v each have a product of two narrow matrices of this rank added (Zamba2).
  int adapter_rank = 0;

  bool biased() const { return bias_buckets > 0 || !slopes.empty(); }
};

// Attention of a decoder's tokens to all of an encoder's output, whose keys and values are written
// to the cache once per sequence.
struct CrossAttentionSpec {
  int heads = 0;
  int head_dim = 0;
  float scale = 1.0f;
  int encoder_size = 0;    // features of the encoder's output
  int encoder_length = 0;  // upper bound of its positions
  bool qkv_bias = false;
  bool key_bias = true;  // as in AttentionSpec
  bool out_bias = false;
  int kv_heads = 0;                 // 0: the same as heads
  std::optional<NormSpec> qk_norm;  // of each query and key head
  // The encoder is a tower for pictures: a token sees the rows that ForwardBatch::views gives it.
  // In sequences without pictures the branch does nothing.
  bool pictures = false;
  bool tanh_gate = false;  // the output is scaled by the tanh of a weight
};

// Multi-head latent attention (MLA, arXiv:2405.04434).
struct MlaSpec {
  int heads = 0;
  int q_rank = 0;  // 0: queries are projected directly
  int kv_rank = 0;
  int nope_dim = 0;  // features of a query or key head that don't rotate, ...
  int rope_dim = 0;  // ... followed by those that do
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
  bool xielu = false;  // in place of `activation`; not gated
  bool bias = false;
  bool down_bias = false;   // of the down projection alone
  float gate_scale = 1.0f;  // factor of gate(x), before the activation
  bool sighted = false;     // runs only for tokens that see a picture
  bool tanh_gate = false;   // as in CrossAttentionSpec
  int adapter_rank = 0;     // as in AttentionSpec, of gate and up
};

// One matrix.
struct LinearSpec {
  bool bias = false;
};

struct MoeSpec {
  ops::Routing routing;  // `correction` points to weights and is set when a layer runs
  int expert_ff = 0;
  ops::Glu glu;
  bool router_bias = false;
  bool router_correction = false;
  bool expert_bias = false;
  bool weight_before = false;  // an expert's input is scaled by its weight rather than its output
  int shared_ff = 0;           // 0: no shared expert
  bool shared_gate = false;    // the shared expert is scaled by a sigmoid gate
};

// Layers that keep a state of constant size per sequence (ops/state.h). In all of them `taps` is
// the number of tokens that a depthwise causal convolution reads, including the current one.

// out(C * conv(B * u)), with B, C and u projected from the input (LFM2).
struct ShortConvSpec {
  int channels = 0;
  int taps = 3;
  bool bias = false;  // of the convolution and of both projections
};

// A selective state space with a decay for each channel and state (Mamba, arXiv:2312.00752).
struct MambaSpec {
  int inner = 0;  // channels
  int state = 16;
  int taps = 4;
  int dt_rank = 0;
  bool conv_bias = true;
  bool proj_bias = false;
  std::optional<NormSpec> inner_norm;  // of the step size's low-rank projection, of B and of C
};

// The same with a decay per head (Mamba-2, arXiv:2405.21060).
struct Mamba2Spec {
  int heads = 0;
  int head_dim = 0;
  int groups = 1;  // heads of a group share B and C
  int state = 128;
  int taps = 4;
  bool conv_bias = true;
  bool proj_bias = false;
  float dt_min = 0.0f, dt_max = 0.0f;  // limits of step sizes; dt_max 0: none
  std::optional<NormSpec> norm;  // of the result, in `norm_groups` parts; absent: only the gate
  int norm_groups = 1;
  bool norm_before_gate = false;
  // Multipliers of the parts of the input projection: gate, x, B, C, step sizes (Falcon-H1).
  std::array<float, 5> part_scale = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

  int inner() const { return heads * head_dim; }
  int conv_channels() const { return inner() + 2 * groups * state; }
};

// Linear attention by the gated delta rule (arXiv:2412.06464; Qwen3-Next).
struct DeltaNetSpec {
  int key_heads = 0;
  int value_heads = 0;  // a multiple of key_heads
  int key_dim = 0;
  int value_dim = 0;
  int taps = 4;
  NormSpec norm;  // of each head's result, before the gate
  // Value head h uses key head h % key_heads, as in llama.cpp's files of Qwen3.5; otherwise
  // value_heads / key_heads neighbours use one.
  bool tiled = false;

  int keys() const { return key_heads * key_dim; }
  int values() const { return value_heads * value_dim; }
};

// Linear attention with a fixed decay for each head (lightning attention, arXiv:2401.04658).
struct LightningSpec {
  int heads = 0;
  int head_dim = 0;
  ops::Activation activation = ops::Activation::kSilu;  // of queries, keys and values
  NormSpec norm;                                        // of all heads together
  float slope_scale = 1.0f;  // head h of H decays by exp(-slope_scale * 2^(-8 (h + 1) / H))
};

// The norms around one branch: x = after(x + out(branch(in(x)))).
struct BranchNorms {
  std::optional<NormSpec> in, out, after;
};

// Every kind of branch. layers/branch_kinds.h has a row for each, in this order.
using BranchBody =
    std::variant<AttentionSpec, MlaSpec, MlpSpec, MoeSpec, ShortConvSpec, MambaSpec, Mamba2Spec,
                 DeltaNetSpec, LightningSpec, CrossAttentionSpec, LinearSpec>;

// A layer may have a side stream, which ends in the layer: its last branch reads the sum of the
// residual stream and the side stream. The residual stream itself does not change before that
// (Zamba2, arXiv:2411.15242).
enum class Side {
  kNone,
  kOpens,      // reads [x; e], where e are the model's embeddings; the result is the side stream
  kContinues,  // reads the side stream, and its result replaces it
  kCloses,     // reads x + the side stream; x = x + branch, as without one
};

struct BranchSpec {
  BranchNorms norms;
  BranchBody body;
  float scale = 1.0f;  // of the branch's output
  // x = stream_scale * x + ..., where x is in(x) itself with `normed_stream` (MiniMax-01).
  float stream_scale = 1.0f;
  bool normed_stream = false;
  Side side = Side::kNone;
  // Not empty: these layers have the same weights in this branch, except for adapters. A file may
  // name them after any of the layers.
  std::vector<int> sharers;
  int use = 0;  // which of the sharers' adapters is the branch's own, as files count them
};

struct LayerSpec {
  std::vector<BranchSpec> branches;  // in the order in which they add to the residual stream
  // All branches, or the first `together` ones (0: all), read the layer's input. Of these, a branch
  // without norms.in shares the normalised input of the branch before it.
  bool parallel = false;
  int together = 0;

  int parallel_branches() const {
    return !parallel ? 0 : together > 0 ? together : static_cast<int>(branches.size());
  }

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
// and the target's features f of the previous token; or how a part of a model (models/parts.h)
// continues the stream of the part before it.
struct FeatureSpec {
  int width = 0;  // of the target's features
  enum class Use {
    kJoined,  // x = W [e; f]: EAGLE-1 (arXiv:2401.15077), MTP (arXiv:2412.19437)
    kPaired,  // x = W f; the first branch reads [norm(e); norm(x)]: EAGLE-3 (arXiv:2503.01840)
    kStream,  // x = f, the residual stream itself; token ids are not read
    // A step with features stores the keys and values of norm(W f) in all layers and does nothing
    // else; one without runs the embeddings, whose attention reads them: DFlash (arXiv:2602.06036).
    kStored,
  };
  Use use = Use::kJoined;
  bool features_first = false;  // kJoined: [f; e]
  bool bias = false;
  std::optional<NormSpec> input_norm;  // kPaired: on the target's features, before W
  std::optional<NormSpec> embedding_norm, feature_norm;
  bool normed_residual = false;  // kPaired, kStored: x itself is normalised
  // The states that the head returns for its own next step are taken before the final norm.
  bool raw_states = false;
};

// How an audio encoder makes its residual stream from log-mel features: two convolutions of three
// taps over time, each followed by a GELU, the second with a stride of 2, then learned positions
// (Whisper, arXiv:2212.04356).
struct AudioStemSpec {
  int mel_bins = 0;
};

struct VisionSpec;

struct ModelSpec {
  std::string architecture;  // for display
  int vocab_size = 0;
  int hidden_size = 0;
  std::vector<LayerSpec> layers;
  std::vector<RopeSpec> ropes;
  int64_t max_context = 0;  // positions that the model supports according to its configuration

  float embedding_scale = 1.0f;
  int embedding_size = 0;  // width of the table; differs from hidden_size only with projections
  int64_t learned_positions = 0;          // rows of the position table, 0: none
  int position_offset = 0;                // added to a position before it is looked up
  int token_types = 0;                    // rows of the table of token types (segments), 0: none
  std::optional<NormSpec> embedded_norm;  // of the sum of a token's embeddings
  bool tied_embeddings = false;
  bool logits_bias = false;
  bool generates = true;  // has a head over the vocabulary; encoders have none

  std::optional<FeatureSpec> features;  // of a draft head
  std::optional<AudioStemSpec> stem;    // of an audio encoder
  bool shared_embedding = false;        // an encoder uses the decoder's embedding

  // The encoder whose output the layers' CrossAttentionSpecs read. It ends with its final norm.
  std::shared_ptr<const ModelSpec> encoder;

  // The tower for pictures; nullptr: the model only reads text.
  std::shared_ptr<const VisionSpec> vision;
  // > 0: the position table isn't learned: position p has sines and then cosines of p * 10000^(-i /
  // sine_divisor), i = 0 .. hidden_size / 2 - 1.
  int sine_divisor = 0;

  float residual_scale = 1.0f;  // of each branch before it is added
  std::optional<NormSpec> final_norm;
  float logits_scale = 1.0f;
  float logits_softcap = 0.0f;
  // The widest input of a product in two parts, with its outlier columns (ops::Weight::outliers);
  // 0: the checkpoint has no such weights.
  int64_t split_cols = 0;
};

// A tower for pictures: patches are projected to a stream, layers run on it, and a connector turns
// the states into rows of the language model's width.
struct VisionSpec {
  std::string family;  // for display

  // Input: squares of `side` pixels, or, if that is 0, the patches of pictures of any size. Patches
  // that are merged into one row are adjacent.
  int side = 0;
  int patch = 14;        // side in pixels
  int patch_values = 0;  // values per patch: 3 * patch * patch * times
  bool patch_bias = false;
  bool class_row = false;  // a learned row before the patches of each square
  // Learned positions: one per row of a square; or those of a square grid, which is stretched to
  // the picture's grid.
  int64_t positions = 0;
  bool stretched_positions = false;
  std::optional<NormSpec> stem_norm;  // before the layers

  ModelSpec blocks;  // reads a stream, and ends with its final norm
  int window = 0;    // side of a window in rows of the result, for layers with SpanUse::kOnly

  // Pictures of several squares whose patches see one another (Llama 3.2 Vision).
  int tiles = 0;                   // most squares per picture; 0: squares are independent
  int tile_layouts = 0;            // rows of the tables of positions, by layout of tiles
  std::optional<ModelSpec> later;  // further layers after the final norm of `blocks`
  std::vector<int> kept;  // states after these layers of `blocks` are concatenated to the result

  // Connector.
  int width = 0;             // of the rows: the language model's
  bool drops_first = false;  // the first row of each square: the class
  int merge = 1;             // merge x merge patches become one row
  bool mean = false;         // by averaging; otherwise features are concatenated
  std::optional<NormSpec> merge_norm;
  bool norm_merged = false;  // the norm is of the merged row; otherwise of each patch
  int inner = 0;             // hidden features; 0: a single projection
  bool connector_bias = false;
  bool connector_transposed = false;  // the checkpoint stores it as [in, out]
  ops::Activation activation = ops::Activation::kGelu;
  // States after these layers of `blocks`, in ascending order, become rows by connectors of their
  // own, which are added to the stream after the first layers of the language model (DeepStack,
  // arXiv:2406.04334).
  std::vector<int> deep;

  int32_t image_token = -1;  // the id of the tokens that rows replace
  bool cross = false;        // rows are read by cross-attention, and one token stands for a picture
  // The first square is the whole picture, and the others are a grid (LLaVA-NeXT): their rows
  // follow those of the picture row by row, without the grid's padding, each with a learned row at
  // its end.
  bool newline_row = false;
  bool merge_linear = false;  // a projection of the merged row to one patch's features comes first

  int merged_width() const {
    const int features = blocks.hidden_size * (1 + static_cast<int>(kept.size()));
    return mean ? features : features * merge * merge;
  }
};

// Positions per token: 3 with M-RoPE, otherwise 1.
int position_axes(const ModelSpec& spec);
// Whether the tokens of a picture see one another: then they are computed in one step.
bool sees_whole_pictures(const ModelSpec& spec);

// One cache layer for each branch that stores tokens or states, in the order of the branches. Cache
// layers with the same kind, window, chunk and direction share a group; groups are in the order of
// their first layers.
KvCacheSpec kv_cache_spec(const ModelSpec& spec, const KvTypes& types);

// Whether layers have side streams, which read the embeddings.
bool has_side_streams(const ModelSpec& spec);

// Whether tokens see the tokens after them: then a sequence is computed whole, in one step.
bool reads_both_ways(const ModelSpec& spec);

// The last branch that stores tokens or states: rows that need no logits end there. -1, -1 if no
// branch does.
struct BranchPlace {
  int layer = -1;
  int branch = -1;
};
BranchPlace last_stored(const ModelSpec& spec);

// Whether the parts fit together (heads divide, sizes are positive ...): a valid spec runs without
// failed checks. The error names the part that doesn't fit.
Status validate(const ModelSpec& spec);

}  // namespace freshet
