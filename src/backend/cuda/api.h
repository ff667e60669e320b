// What the CUDA plug-in offers: tables of functions over plain data, one for each family.
//
// The program knows no CUDA: it loads the plug-in with dlopen, asks freshet_cuda() for this table
// and checks its version. open() gives a context for one device, which every function takes.
// Functions enqueue on the context's stream, in order, and return 0 or an error that error_text()
// names. Pointers are to device memory except where `host` is said. A context is used by one thread
// at a time. Plain types only, so that both sides may be built by different compilers.
//
// Two layouts are the plug-in's own:
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

inline constexpr int kApiVersion = 24;
inline constexpr int kTokenTile = 8;   // rows of a tile of activations
inline constexpr int kPadCols = 64;    // columns of activations are padded to it
inline constexpr int kE4M3Cols = 128;  // columns that share a scale
inline constexpr int kE4M3TileBytes = kTokenTile * (kE4M3Cols + 4);
inline constexpr int kInt8Cols = 128;  // columns of a tile of INT8
inline constexpr int kInt8TileBytes = kTokenTile * kInt8Cols;
inline constexpr int kNotes = 4;
inline constexpr int kUploadSlots = 2;  // staging buffers of upload_ahead()
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

// An open GPU, see runtime/context.cuh.
struct Context;

// No kernel runs a problem; Api::problem_text() says which.
inline constexpr int kNoKernel = -1;
// Operations whose kernel can be forced (Api::force).
enum ForcedOp : int32_t { kForcedMatmul, kForcedSwiglu, kForcedAttention, kForcedMoe, kForcedOps };

// What the choice of kernels knows of a device.
struct DeviceLimits {
  int32_t capability = 0;  // 90 for compute capability 9.0
  int32_t multiprocessors = 0;
};

// Every function takes the context first, and returns 0 or an error where nothing else is said.

struct MemoryApi {
  int (*allocate)(Context*, void** to, int64_t bytes);
  int (*release)(Context*, void* memory);
  int (*allocate_host)(Context*, void** to, int64_t bytes);  // pinned
  int (*release_host)(Context*, void* memory);
  int (*upload)(Context*, void* to, const void* host, int64_t bytes);
  int (*download)(Context*, void* host, const void* from, int64_t bytes);
  int (*copy)(Context*, void* to, const void* from, int64_t bytes);
  int (*clear)(Context*, void* to, int64_t bytes);
  // Uploads on a stream of their own, through kUploadSlots staging buffers. upload_ahead() starts
  // when the work before the last upload_used() of its slot has ended; what is enqueued after it
  // sees the bytes. upload_await() waits until the slot's host memory may be written again.
  int (*upload_ahead)(Context*, int slot, void* to, const void* host, int64_t bytes);
  int (*upload_used)(Context*, int slot);
  int (*upload_await)(Context*, int slot);
  // Reads `bytes` once, to measure the memory's bandwidth.
  int (*read)(Context*, const void* memory, int64_t bytes, float* sink);
};

struct StreamApi {
  int (*sync)(Context*);
  // note() records an event, one of kNotes, behind everything enqueued so far; await() waits for
  // it.
  int (*note)(Context*, int which);
  int (*await)(Context*, int which);
  // Everything enqueued between begin and end becomes a graph that can be launched again.
  int (*graph_begin)(Context*);
  int (*graph_end)(Context*, void** graph);
  int (*graph_play)(Context*, void* graph);
  int (*graph_release)(Context*, void* graph);
  // Timing: elapsed milliseconds between the two marks.
  int (*mark)(Context*, int which);
  int (*elapsed)(Context*, float* milliseconds);
};

struct GemmApi {
  int64_t (*packed_bytes)(Context*, Code code, int64_t rows, int64_t cols);  // 0: no such format
  // Packs row tiles [first, first + count / 16) from `raw`: rows as stored, one after the other.
  int (*pack)(Context*, Code code, uint8_t* packed, const uint8_t* raw, int64_t first,
              int64_t count, int64_t rows, int64_t cols);
  int64_t (*fragment_bytes)(Context*, int64_t rows, int64_t cols);
  // The layout in which GEMMs of so many tokens read activations.
  Order (*order_for)(Context*, Code code, int64_t tokens);
  // index: nullptr, or the row of x for each row (-1: zeros); weights: nullptr, or a factor each.
  int (*encode)(Context*, const Activations* act, const Rows* x, const int32_t* index,
                const float* weights, int64_t rows);
  // next: nullptr, or the GEMMs that are likely to come next: their weights may be prefetched.
  int (*products)(Context*, const ProductArgs* products, int count, int64_t tokens,
                  const NextProducts* next);
  // Whether gated_products() takes weights of this format and so many rows with so many tokens.
  int (*gated_fits)(Context*, Code code, int64_t rows, int64_t cols, int64_t tokens);
  // GEMMs of gate and up (in this order, of one format and size, add 0) with a SwiGLU epilogue:
  // `act`, in the layout for weights of their format, gets what glu() makes of their results with
  // SiLU and no limit; the results themselves are not stored (INT8 uses their memory).
  int (*gated_products)(Context*, const ProductArgs* gate_and_up, int64_t tokens,
                        const Activations* act);
};

struct AttentionApi {
  int (*rope_table)(Context*, float* cos_sin, const int32_t* positions, const float* inv_freq,
                    int64_t tokens, int64_t half, float scale);
  int (*heads)(Context*, const HeadsArgs* args);
  int64_t (*partial_bytes)(Context*, int sequences, int heads, int value_dim, int64_t context);
  int (*attention)(Context*, const AttentionArgs* args);
};

struct MoeApi {
  int (*route)(Context*, const Rows* logits, const RoutingArgs* routing, int32_t* ids,
               float* weights);
  int (*group)(Context*, const GroupArgs* args);
  // A GEMM in F32 of at most kMaxRouterTokens tokens, rows of whole fours at multiples of 16 bytes;
  // then route and group.
  int (*router)(Context*, const ProductArgs* product, int64_t tokens, const RoutingArgs* routing,
                int32_t* ids, float* weights, const GroupArgs* groups);
  // Whether route_one() takes these.
  int (*route_one_fits)(Context*, const RouteOneArgs* args);
  int (*route_one)(Context*, const RouteOneArgs* args);
  int (*expert_products)(Context*, const ExpertArgs* args);
  // The smallest slot that experts() takes, of which formats, sizes, the GLU and how many tokens
  // and experts there are is looked at; 0: expert_products() is to be used.
  int (*experts_fused)(Context*, const ExpertsArgs* args);
  int (*experts)(Context*, const ExpertsArgs* args);
  // Whether few_experts() takes these (of which codes, sizes, tokens and routing are looked at).
  int (*few_experts_fit)(Context*, const FewExpertsArgs* args);
  int (*few_experts)(Context*, const FewExpertsArgs* args);
  // out[t] = [out[t] +] sum over k of weight * y[place[t, k]], in order of place.
  int (*combine)(Context*, const Rows* out, const void* y, int bf16, const GroupArgs* args,
                 int weighted, int add);
};

// Norms and elementwise operations.
struct RowApi {
  int (*embed)(Context*, const Rows* out, const WeightView* table, const int32_t* ids,
               int32_t offset, float scale);
  int (*norm)(Context*, const Rows* out, const Rows* x, const NormArgs* norm,
              const Activations* act);
  int (*glu)(Context*, const Rows* out, const Rows* gate, const Rows* up, const GluArgs* glu,
             const Activations* act);
  int (*activation)(Context*, const Rows* x, int activation);
  int (*add)(Context*, const Rows* out, const Rows* x, float scale);
  int (*scale)(Context*, const Rows* x, float scale);
  int (*softcap)(Context*, const Rows* x, float cap);
  int (*gather)(Context*, const Rows* out, const Rows* x, const int32_t* rows);
  int (*sigmoid_gate)(Context*, const Rows* x, const Rows* gate);
};

struct SamplingApi {
  int (*argmax)(Context*, const Rows* x, int32_t* ids);
  // Whether sample() can take rows of so many logits; `words` as in ops/sample.h.
  int (*samples)(Context*, int64_t cols);
  int (*sample)(Context*, const Rows* logits, const int32_t* words, const int32_t* tokens,
                int32_t* ids);
  // ids[i] = named[from[i]] where from[i] >= 0.
  int (*take_ids)(Context*, int32_t* ids, const int32_t* from, int64_t count, const int32_t* named);
};

// What open() tells of a device.
struct DeviceInfo {
  char name[256];
  DeviceLimits limits;
  int64_t free_bytes, total_bytes;
};

struct Api {
  int32_t version;
  const char* (*error_text)(int error);
  // How many devices there are; 0 where there are none or the driver is missing.
  int (*devices)();
  int (*open)(int device, Context** context, DeviceInfo* info);
  // Takes a kernel, by its index in the operation's table, wherever it fits; -1: the best one.
  int (*force)(Context* context, int op, int row);
  const char* (*problem_text)(const Context* context);
  // Frees what the context holds; memory that was allocated with it is released before.
  int (*close)(Context* context);
  MemoryApi memory;
  StreamApi stream;
  GemmApi gemm;
  AttentionApi attention;
  MoeApi moe;
  RowApi rows;
  SamplingApi sampling;
};

using ApiFunction = const Api* (*)();

}  // namespace freshet::cuda
