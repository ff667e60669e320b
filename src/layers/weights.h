// The weights of a decoder in a device's form: models/ fills them and layers/ reads them.
//
// Optional parts are empty if the ModelSpec has none. Immutable after loading. Movable: buffers
// keep their addresses.
#pragma once

#include <memory>
#include <variant>
#include <vector>

#include "ops/arguments.h"
#include "ops/weight.h"
#include "tensor/buffer.h"

namespace freshet {

// F32 parameters: norms, biases, sinks.
struct Vector {
  Buffer buffer;
  int64_t size = 0;
  const float* data() const { return size == 0 ? nullptr : buffer.as<float>(); }
};

struct Linear {
  ops::Weight weight;  // [out, in]
  Vector bias;         // [out]
};

struct NormWeights {
  Vector weight;
  Vector bias;
};

struct BranchNormWeights {
  NormWeights in, out, after;
};

// For an FP8 cache, which has no scales: it holds keys divided by `k` and values divided by `v`.
// The operations before the cache divide and those after it multiply, so this costs no time.
struct KvScales {
  float k = 1.0f;
  float v = 1.0f;
  NormWeights k_norm;  // the norm of keys, divided by k, if there is one
  Vector out_bias;     // the bias of the output, divided by v, if there is one
};

// For a cache of integers: keys are divided by a factor for each channel, and queries multiplied,
// so that no channel takes the precision of others. Both empty: none.
struct KeyChannels {
  Vector keys;     // [kv_heads, head_dim]: 1 / factor
  Vector queries;  // [heads, head_dim]: the factor of the query's KV head
};

// up(down(x)), with a narrow result in between.
struct AdapterWeights {
  Linear down, up;
};

struct AttentionWeights {
  Linear q, k, v, out;
  NormWeights q_norm, k_norm;
  Vector sinks;          // [heads]
  Vector distance_bias;  // [heads, 2 * bias_distance + 1], by distance from -bias_distance on
  Linear gate;           // [heads * value_dim, hidden], with AttentionSpec::output_gate
  KvScales kv_scales;
  KeyChannels key_channels;
  AdapterWeights q_adapter, k_adapter, v_adapter;  // with AttentionSpec::adapter_rank
};

struct CrossAttentionWeights {
  Linear q, k, v, out;
  NormWeights q_norm, k_norm;
  float scale = 1.0f;  // of the output, with CrossAttentionSpec::tanh_gate
};

struct MlaWeights {
  // Queries come from q, or from q_down, its norm and q_up.
  Linear q, q_down, q_up, kv_down, out;
  NormWeights q_latent_norm, kv_latent_norm;
  Vector sinks;  // [heads]
  // [heads] of [kv_rank + rope_dim, nope_dim + rope_dim]: diag(W_k^T, I), which maps a query into
  // the space of the cache and leaves its rotated part unchanged.
  std::vector<ops::Weight> q_absorb;
  std::vector<ops::Weight> v_up;  // [heads] of [value_dim, kv_rank]
};

struct MlpWeights {
  Linear gate, up, down;
  ops::Xielu xielu;    // on the host
  float scale = 1.0f;  // of the output, with MlpSpec::tanh_gate
  // With MlpSpec::adapter_rank.
  Linear adapter_down, gate_adapter, up_adapter;
};

struct LinearWeights {
  Linear linear;
};

struct MoeWeights {
  Linear router;
  Vector correction;                 // [experts]
  std::vector<ops::Weight> gate_up;  // [experts] of [2 * ff, hidden]
  std::vector<ops::Weight> down;     // [experts] of [hidden, ff]
  Vector gate_up_bias, down_bias;    // [experts, 2 * ff], [experts, hidden]
  MlpWeights shared;
  Linear shared_gate;  // [1, hidden]
};

// A depthwise causal convolution.
struct ConvWeights {
  Vector weight;  // [taps, channels], oldest token first
  Vector bias;    // [channels]
};

struct ShortConvWeights {
  Linear in;  // [3 * channels, hidden]: B, C, u
  ConvWeights conv;
  Linear out;
};

struct MambaWeights {
  Linear in;  // [2 * inner, hidden]: u, gate
  ConvWeights conv;
  Linear x;   // [dt_rank + 2 * state, inner]: step sizes, B, C
  Linear dt;  // [inner, dt_rank]
  Vector a;   // [state, inner], negative
  Vector d;   // [inner]
  NormWeights dt_norm, b_norm, c_norm;
  Linear out;
};

struct Mamba2Weights {
  Linear in;  // [2 * inner + 2 * groups * state + heads, hidden]: gate, x, B, C, step sizes
  ConvWeights conv;
  Vector a;        // [heads], negative
  Vector d;        // [heads]
  Vector dt_bias;  // [heads]
  NormWeights norm;
  Linear out;
};

struct DeltaNetWeights {
  Linear qkvz;  // [2 * keys + 2 * values, hidden]: all queries, keys, values, gates
  Linear ba;    // [2 * value_heads, hidden]: write strengths, decays
  ConvWeights conv;
  Vector a;        // [value_heads], negative
  Vector dt_bias;  // [value_heads]
  NormWeights norm;
  Linear out;
  // Absent, or the gates and the decays, if a file has them in another format than the rows before.
  Linear z, alpha;
};

struct LightningWeights {
  Linear qkv;    // all queries, keys, values
  Linear gate;   // [heads * head_dim, hidden]
  Vector decay;  // [heads], negative: the logarithm
  NormWeights norm;
  Linear out;
};

struct BranchWeights {
  BranchNormWeights norms;
  // The alternatives are in the same order as those of BranchSpec::body.
  std::variant<AttentionWeights, MlaWeights, MlpWeights, MoeWeights, ShortConvWeights, MambaWeights,
               Mamba2Weights, DeltaNetWeights, LightningWeights, CrossAttentionWeights,
               LinearWeights>
      body;
};

struct LayerWeights {
  std::vector<BranchWeights> branches;  // as in LayerSpec
};

struct VisionWeights;

struct ModelWeights {
  ops::Weight embedding;    // [vocab, embedding_size]
  ops::Weight positions;    // [learned_positions, hidden]
  ops::Weight token_types;  // [token_types, hidden]
  NormWeights embedded_norm;
  Linear embedding_in;   // [hidden, embedding_size], if the two sizes differ
  Linear embedding_out;  // [embedding_size, hidden]
  Linear features;       // of a draft head: [hidden, joined width or the target's width]
  NormWeights input_norm, embedding_norm, feature_norm;
  std::vector<LayerWeights> layers;
  NormWeights final_norm;
  Linear stem[2];  // of an audio encoder: [hidden, 3 * mel_bins], [hidden, 3 * hidden]
  std::shared_ptr<const ModelWeights> encoder;
  std::shared_ptr<const VisionWeights> vision;  // nullptr: the tower was not loaded
  Linear head;  // [vocab, embedding_size]; empty weight: the embedding, or the model has no head
};

// Weights of the connector, which turns a tower's states into rows for the language model.
struct ConnectorWeights {
  NormWeights norm;
  Linear inner, out;
  Linear merge;  // VisionSpec::merge_linear: [hidden, merged width]
};

// Tables of Llama 3.2 Vision, on the host, with their gates applied.
struct TileWeights {
  // [layouts, tiles, hidden]: added after the patches, and after the blocks.
  std::vector<float> before, after;
  std::vector<float> positions;       // [rows of a tile, hidden]
  std::vector<float> tile_positions;  // [layouts, tiles, rows of a tile, hidden]
};

struct VisionWeights {
  Linear patches;                // [hidden, patch_values]
  std::vector<float> class_row;  // [hidden], on the host
  ops::Weight positions;
  NormWeights stem_norm;
  std::shared_ptr<const ModelWeights> blocks, later;
  TileWeights tiles;
  ConnectorWeights connector;
  std::vector<ConnectorWeights> deep;
  std::vector<float> newline;  // VisionSpec::newline_row: [width]
};

}  // namespace freshet
