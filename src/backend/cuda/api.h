// What the CUDA plug-in offers: a table of functions over plain data.
//
// The program knows no CUDA: it loads the plug-in with dlopen, asks freshet_cuda() for this table
// and checks its version. Every function enqueues on one stream, in order, and returns 0 or an
// error that error_text() names. Pointers are to device memory except where `host` is said. Used by
// one thread. Plain types only, so that both sides may be built by different compilers.
//
// Two orders of numbers are the plug-in's own:
//   weights: tiles of 16 rows by `unit` columns, [row tile][column unit], see formats.cuh;
//   activations: BF16, columns padded to 64 with zeros. For few tokens in the order of lanes, so
//   that an operand of mma.m16n8k16 is one load of 16 bytes: [tile of 8 rows][32 columns][lane][8].
//   For many as core matrices, which ldmatrix and wgmma read from shared memory, so that tokens
//   that stand together are one copy: [64 columns][tile of 8 rows][8 columns][row][8].
//   FP8 weights on Hopper want them in E4M3, with an F32 scale for 128 columns of a row:
//   [128 columns][tile of 8 rows], a tile [16 columns][row][16], then [row] scales.
//   INT8 weights want them in INT8, with an F32 scale for a row: tiles of the same order without
//   scales, which stand behind all of them, [row].
#pragma once

#include <cstddef>
#include <cstdint>

namespace freshet::cuda {

inline constexpr int kApiVersion = 23;
inline constexpr int kTokenTile = 8;   // rows of a tile of activations
inline constexpr int kPadCols = 64;    // columns of activations are padded to it
inline constexpr int kE4M3Cols = 128;  // columns that share a scale
inline constexpr int kE4M3TileBytes = kTokenTile * (kE4M3Cols + 4);
inline constexpr int kInt8Cols = 128;  // columns of a tile of INT8
inline constexpr int kInt8TileBytes = kTokenTile * kInt8Cols;
inline constexpr int kNotes = 4;
inline constexpr int kMaxProducts = 16;
inline constexpr int kMaxExperts = 512;
inline constexpr int kMaxTopK = 32;
inline constexpr int kMaxRouterTokens = 512;

// clang-format off
enum class Code : int32_t {
  kF32, kF16, kBF16, kFP8, kQ8_0, kQ4_0, kQ4_K, kQ6_K, kMXFP4,
  kQ4_1, kQ5_0, kQ5_1, kIQ4_NL, kIQ4_XS, kQ2_K, kQ3_K, kQ5_K, kInt8, kInt4G128, kInt4G32, kCount,
  // How weights are packed that products alone take, or that look-ups do:
  kExactF32,  // F32 whose numbers BF16 holds, beside kF32
  kFP8Panels,  // FP8 in the order that products want; there it is kFP8
  kHeads = 64  // and a code: see heads_of()
};
// clang-format on

// Formats whose scales are packed as they are used keep those that are stored beside tables, for
// numbers that are looked up are not rounded: in which form, or the code itself.
constexpr Code heads_of(Code code) {
  switch (code) {
    case Code::kQ8_0:
    case Code::kQ4_0:
    case Code::kQ4_1:
    case Code::kQ5_0:
    case Code::kQ5_1:
    case Code::kQ3_K:
    case Code::kQ4_K:
    case Code::kQ5_K:
    case Code::kQ6_K:
    case Code::kIQ4_NL:
    case Code::kIQ4_XS:
      return static_cast<Code>(static_cast<int32_t>(Code::kHeads) + static_cast<int32_t>(code));
    default:
      return code;
  }
}

// Orders of activations.
enum class Order : int32_t { kLanes, kCores, kE4M3, kInt8 };

struct Rows {
  float* data;
  int64_t rows, cols, stride;
};

// Where a result goes as activations too; nullptr: nowhere.
struct Activations {
  uint8_t* data;
  int64_t core_tiles;  // of rows, if as core matrices (or of bytes); 0: in the order of lanes
  int32_t e4m3;
  // A row's scale is that of all its numbers: encode() knows it, and without `out` glu() and norm()
  // of RMS with weights alone.
  int32_t int8;
};

struct WeightView {
  const uint8_t* data;
  int64_t rows, cols;
  Code code;
};

struct ProductArgs {
  WeightView weight;
  const uint8_t* act;  // in the order that order_for() names
  int64_t act_chunks;  // in the order of lanes: of 32 columns, from one tile of rows to the next
  const float* x;      // the same numbers as they are, for weights in F32
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  const float* bias;
  float scale;
  int32_t add;
};

// The products that come behind others, of which two are told.
struct NextProducts {
  WeightView of[2];
  int32_t count;
};

struct NormArgs {
  const float *weight, *bias;
  float eps;
  int32_t layer;  // 1: layer norm, 0: RMS
};

struct GluArgs {
  int32_t activation;
  float limit, alpha;
};

// Blocks of 16 slots: keys [kv_heads][8 slots][features of 16 bytes][slot][feature], then values
// alike; of types of a byte a head's values follow its keys, so that a copy brings both. In INT8
// codes have 128 added; behind a head's come its scales in F16, one for 32 features: of keys (and
// values that are keys) [slot][32 features], of values [32 features][slot].
enum class CacheType : int32_t { kF16, kE4M3, kBF16, kInt8 };
struct CacheArgs {
  uint8_t* data;  // all numbers finite, also those that were never stored
  int64_t block_bytes;
  int32_t kv_heads, key_dim, value_dim, shared;  // shared: values are the first features of keys
  CacheType type;
};

struct BatchArgs {
  const int32_t *query_start, *context_len, *tables;
  int64_t table_stride;
  int32_t sequences, tokens;
};

// Heads of queries, keys and values of the same tokens: each part is normalised, then rotated, in
// place, and put into the cache, as far as it says.
struct HeadsArgs {
  enum Store : int32_t { kNowhere, kKeys, kValues };
  struct Part {
    float* x;
    int64_t stride;
    int32_t heads, head_dim;
    NormArgs norm;
    int32_t normed, norm_per_head;            // per head: weights [heads, head_dim]
    int32_t offset, rotary_dim, interleaved;  // rotary_dim 0: not rotated
    Store store;
  } of[3];
  int32_t count;
  int64_t tokens;
  const float* cos_sin;  // [tokens, rotary_dim] of all parts
  CacheArgs cache;
  BatchArgs batch;
};

struct AttentionArgs {
  float* out;
  int64_t out_stride;
  const float* q;
  int64_t q_stride;
  CacheArgs cache;
  BatchArgs batch;
  const float* sinks;
  float scale, softcap;
  int32_t heads, window;
  int32_t max_context;  // of the batch, or more
  int32_t max_queries;  // of a sequence
  int32_t single;       // so many sequences in front have one query each
  float* partial;       // room for partial results of these, or nullptr: a block walks a context
  Activations act;
  int32_t only_act;  // the result is wanted as activations alone: `out` may stay as it is
  // nullptr, or (host) what heads() is to do first, with parts q, the keys and the values: their
  // rows may stay as they are.
  const HeadsArgs* before;
};

struct RoutingArgs {
  int32_t score, experts, top_k, groups, top_groups, group_score_top, renormalize;
  const float* correction;
  float renormalize_eps, scale;
};

// Tokens by expert. A slot is a tile of `slot_tokens` places of one expert; slots ascend by expert.
struct GroupArgs {
  const int32_t* ids;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  int32_t tokens, top_k, experts, slot_tokens, slots;
  int32_t *token, *place;  // [slots * slot_tokens] (-1: none), [tokens, top_k]
  int32_t* slot_expert;    // [slots]; -1: none
  int32_t* used;           // [1]: how many slots have an expert
  float* place_weight;     // [slots * slot_tokens]
  int32_t whole;           // 1: every slot has a place for every token, in their order
};

struct ExpertArgs {
  const uint8_t* const* weights;  // [experts], device
  int64_t rows, cols;
  Code code;
  const uint8_t* act;  // in the order of lanes, one tile after the other as slots have them
  float* out;          // [slots * slot_tokens, rows]
  const float* bias;   // [experts, rows] or nullptr
  const int32_t* slot_expert;
  int32_t slots, slot_tokens;
};

// The norm of a few tokens, a router's product with what it gives, and the routes.
struct RouteOneArgs {
  Rows x, normed;
  NormArgs norm;
  Activations act;
  ProductArgs product;  // of `normed`
  RoutingArgs routing;
  int32_t* ids;    // [tokens, top_k]
  float* weights;  // [tokens, top_k]
};

// Gate, up and down of all experts.
struct ExpertsArgs {
  Code gate_up_code, down_code;
  const uint8_t *const *gate_up, *const *down;  // [experts], device
  const float *gate_up_bias, *down_bias;        // [experts, 2 * ff], [experts, hidden] or nullptr
  int64_t hidden, ff;
  GluArgs glu;
  GroupArgs groups;
  Rows x;
  int32_t weight_before;  // 1: x by a token's weight
  Activations in;         // as core matrices: if groups.whole, x; or else room for x by place
  Activations act;        // room for the gated, by place
  void* y;                // [slots * slot_tokens, hidden]: see given_bf16() in moe.h
};

// The same of few tokens, from the router's logits to the sums.
struct FewExpertsArgs {
  Code gate_up_code, down_code;
  const uint8_t *const *gate_up, *const *down;  // [experts], device
  const float *gate_up_bias, *down_bias;        // [experts, 2 * ff], [experts, hidden] or nullptr
  int64_t hidden, ff;
  GluArgs glu;
  const float* logits;  // nullptr: ids and weights are given, or else they are written
  int64_t logits_stride;
  RoutingArgs routing;
  int32_t* ids;    // [tokens, top_k]
  float* weights;  // [tokens, top_k]
  int32_t tokens;
  const uint8_t* in;  // x in the order of lanes
  uint8_t* act;       // room for the gated: a tile of tokens for each expert in use
  Rows out;
  int32_t add;
};

struct Api {
  int32_t version;
  const char* (*error_text)(int error);
  // Opens device 0. `name` gets its name (host), `memory` free and total bytes (host).
  int (*open)(char* name, int name_bytes, int* compute_capability, int64_t memory[2]);
  int (*allocate)(void** to, int64_t bytes);
  int (*release)(void* memory);
  int (*allocate_host)(void** to, int64_t bytes);  // pinned
  int (*release_host)(void* memory);
  int (*upload)(void* to, const void* host, int64_t bytes);
  int (*download)(void* host, const void* from, int64_t bytes);
  int (*copy)(void* to, const void* from, int64_t bytes);
  int (*clear)(void* to, int64_t bytes);
  int (*sync)();
  // Notes of what was enqueued so far, kNotes of them, and waiting for that alone.
  int (*note)(int which);
  int (*await)(int which);
  // Everything enqueued between begin and end becomes a graph that can be played again.
  int (*graph_begin)();
  int (*graph_end)(void** graph);
  int (*graph_play)(void* graph);
  int (*graph_release)(void* graph);
  // Marks of time on the stream, for measuring: elapsed milliseconds between the last two.
  int (*mark)(int which);
  int (*elapsed)(float* milliseconds);

  int64_t (*packed_bytes)(Code code, int64_t rows, int64_t cols);  // 0: no such format
  // Row tiles [first, first + count / 16) from `raw`: rows as they are stored, one after the other.
  int (*pack)(Code code, uint8_t* packed, const uint8_t* raw, int64_t first, int64_t count,
              int64_t rows, int64_t cols);
  int (*embed)(const Rows* out, const WeightView* table, const int32_t* ids, int32_t offset,
               float scale);
  int64_t (*fragment_bytes)(int64_t rows, int64_t cols);
  // index: nullptr, or the row of x for each row (-1: zeros); weights: nullptr, or a factor each.
  // The order in which products of so many tokens want activations.
  Order (*order_for)(Code code, int64_t tokens);
  int (*encode)(const Activations* act, const Rows* x, const int32_t* index, const float* weights,
                int64_t rows);
  // next: nullptr, or what is likely to come next, whose weights may be brought near.
  int (*products)(const ProductArgs* products, int count, int64_t tokens, const NextProducts* next);
  // Whether gated_products() takes weights of this format and so many rows with so many tokens.
  int (*gated_fits)(Code code, int64_t rows, int64_t cols, int64_t tokens);
  // Products of gate and up (in this order, of one format and size, add 0) that end in the gated
  // unit: `act`, in the order for weights of their format, gets what glu() makes of their results
  // with SiLU and no limit; they themselves are written nowhere (of INT8 their memory is used).
  int (*gated_products)(const ProductArgs* gate_and_up, int64_t tokens, const Activations* act);
  int (*expert_products)(const ExpertArgs* args);
  // The least places that a slot may have for experts(), of which formats, sizes, the gated unit
  // and how many tokens and experts there are is looked at; 0: expert_products() is to be taken.
  int (*experts_fused)(const ExpertsArgs* args);
  int (*experts)(const ExpertsArgs* args);
  // Whether few_experts() takes these (of which codes, sizes, tokens and routing are looked at).
  int (*few_experts_fit)(const FewExpertsArgs* args);
  int (*few_experts)(const FewExpertsArgs* args);
  int (*norm)(const Rows* out, const Rows* x, const NormArgs* norm, const Activations* act);
  int (*rope_table)(float* cos_sin, const int32_t* positions, const float* inv_freq, int64_t tokens,
                    int64_t half, float scale);
  int (*heads)(const HeadsArgs* args);
  int64_t (*attention_partial_bytes)(int sequences, int heads, int value_dim, int64_t context);
  int (*attention)(const AttentionArgs* args);
  int (*glu)(const Rows* out, const Rows* gate, const Rows* up, const GluArgs* glu,
             const Activations* act);
  int (*activation)(const Rows* x, int activation);
  int (*add)(const Rows* out, const Rows* x, float scale);
  int (*scale)(const Rows* x, float scale);
  int (*softcap)(const Rows* x, float cap);
  int (*gather)(const Rows* out, const Rows* x, const int32_t* rows);
  int (*sigmoid_gate)(const Rows* x, const Rows* gate);
  int (*argmax)(const Rows* x, int32_t* ids);
  // Whether sample() can take rows of so many logits; `words` as in ops/sample.h.
  int (*samples)(int64_t cols);
  int (*sample)(const Rows* logits, const int32_t* words, const int32_t* tokens, int32_t* ids);
  // ids[i] = named[from[i]] where from[i] >= 0.
  int (*take_ids)(int32_t* ids, const int32_t* from, int64_t count, const int32_t* named);
  int (*route)(const Rows* logits, const RoutingArgs* routing, int32_t* ids, float* weights);
  int (*group)(const GroupArgs* args);
  // A product in F32 of at most kMaxRouterTokens tokens, rows of whole fours at multiples of 16
  // bytes; then route and group.
  int (*router)(const ProductArgs* product, int64_t tokens, const RoutingArgs* routing,
                int32_t* ids, float* weights, const GroupArgs* groups);
  // Whether route_one() takes these.
  int (*route_one_fits)(const RouteOneArgs* args);
  int (*route_one)(const RouteOneArgs* args);
  // out[t] = [out[t] +] sum over k of weight * y[place[t, k]], in order of place.
  int (*combine)(const Rows* out, const void* y, int bf16, const GroupArgs* args, int weighted,
                 int add);
  // Reads `bytes` once, for the ceiling of memory.
  int (*read)(const void* memory, int64_t bytes, float* sink);
};

using ApiFunction = const Api* (*)();

}  // namespace freshet::cuda
