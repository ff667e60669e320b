// The interface of the CUDA plug-in: tables of functions over plain data, one per operation family.
//
// The program contains no CUDA: it loads the plug-in with dlopen, calls freshet_cuda() for this
// table and checks its version. open() creates a context for one device; every function takes a
// context. Functions enqueue work on the context's stream, in order, and return 0 or an error that
// error_text() explains. Pointers are device pointers unless marked `host`. A context is used by
// one thread at a time. Only plain types cross this boundary, so the two sides may be built by
// different compilers.
//
// Two layouts belong to the plug-in:
//   weights: tiles of 16 rows by `unit` columns, [row tile][column unit], see formats.cuh;
//   activations: BF16, columns padded to 64 with zeros. For few tokens in fragment order (kLanes),
//   so that an operand of mma.m16n8k16 is one 16-byte load: [tile of 8 rows][32 columns][lane][8].
//   For many tokens as core matrices (kCores), which ldmatrix and wgmma read from shared memory;
//   adjacent tokens are then one bulk copy: [64 columns][tile of 8 rows][8 columns][row][8].
//   FP8 weights on Hopper need E4M3 activations with an F32 scale per 128 columns of a row:
//   [128 columns][tile of 8 rows], where a tile is [16 columns][row][16], then [row] scales.
//   INT8 weights need INT8 activations with an F32 scale per row: the same tiles without scales;
//   the scales of all rows follow the last tile, [row].
#pragma once

#include <cstddef>
#include <cstdint>

namespace freshet::cuda {

inline constexpr int kApiVersion = 30;
inline constexpr int kTokenTile = 8;   // rows of an activation tile
inline constexpr int kPadCols = 64;    // activations are padded to a multiple of this many columns
inline constexpr int kE4M3Cols = 128;  // columns that share a scale
inline constexpr int kE4M3TileBytes = kTokenTile * (kE4M3Cols + 4);
inline constexpr int kInt8Cols = 128;  // columns of an INT8 tile
inline constexpr int kInt8TileBytes = kTokenTile * kInt8Cols;
inline constexpr int kNotes = 4;
inline constexpr int kUploadSlots = 2;  // staging buffers of upload_ahead()
inline constexpr int kMaxProducts = 16;
inline constexpr int kMaxScored = 64;  // parts of key_scores()
inline constexpr int kMaxExperts = 512;
inline constexpr int kMaxTopK = 32;
inline constexpr int kMaxRouterTokens = 512;
inline constexpr int kMostSelectiveStates = 64;  // states of a channel in selective_scan()

// clang-format off
enum class Code : int32_t {
  kF32, kF16, kBF16, kFP8, kQ8_0, kQ4_0, kQ4_K, kQ6_K, kMXFP4,
  kQ4_1, kQ5_0, kQ5_1, kIQ4_NL, kIQ4_XS, kQ2_K, kQ3_K, kQ5_K, kInt8, kInt4G128, kInt4G32, kCount,
  // Packings for GEMMs only, or for lookups only:
  kExactF32,  // F32 weights that are exact in BF16, packed in addition to kF32
  kFP8Panels,  // FP8 in the panel layout of Hopper's GEMMs; replaces kFP8 there
  kHeads = 64  // plus a code: see heads_of()
};
// clang-format on

// Formats whose scales are converted when they are packed also keep the stored scales of embedding
// tables, because lookups must be exact. Returns the code of that extra section, or `code` if there
// is none.
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

// Layouts of activations: fragments for mma, core matrices, and those of E4M3 and INT8.
enum class Order : int32_t { kLanes, kCores, kE4M3, kInt8 };

struct Rows {
  float* data;
  int64_t rows, cols, stride;
};

// An additional encoded form of a result; data is nullptr if there is none.
struct Activations {
  uint8_t* data;
  int64_t core_tiles;  // row tiles, for core matrices, E4M3 and INT8; 0: fragment order
  int32_t e4m3;
  // A row's scale covers the whole row. encode() can compute it; so can glu() and an RMS norm()
  // that has weights only, if they write no `out`.
  int32_t int8;
};

struct WeightView {
  const uint8_t* data;
  int64_t rows, cols;
  Code code;
};

struct ProductArgs {
  WeightView weight;
  const uint8_t* act;  // in the layout that order_for() returns
  int64_t act_chunks;  // fragment order: chunks of 32 columns from one row tile to the next
  const float* x;      // the same values in F32, for F32 weights
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  const float* bias;
  float scale;
  int32_t add;
};

// The GEMMs that follow a list; at most two are given.
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

// Blocks of 16 slots: keys [kv_heads][8 slots][16-byte group of features][slot][feature], then
// values in the same layout. In one-byte types a head's values follow its keys, so that one copy
// fetches both. INT8 codes are stored plus 128; a head's codes are followed by its F16 scales, one
// per 32 features: of keys (and of values that are keys) [slot][32 features], of values [32
// features][slot]. INT4 codes are stored plus 8; heads are padded to whole groups of 32 features,
// which are the 16-byte groups, in the order of quads (attention.cuh). Their scales have the layout
// of INT8. kK8V4: keys in INT8, values in INT4.
enum class CacheType : int32_t { kF16, kE4M3, kBF16, kInt8, kInt4, kK8V4 };
struct CacheArgs {
  uint8_t* data;  // all values are finite, even where nothing was stored yet
  int64_t block_bytes;
  int32_t kv_heads, key_dim, value_dim, shared;  // shared: values are the first features of keys
  CacheType type;
};

struct BatchArgs {
  const int32_t *query_start, *context_len, *tables;
  int64_t table_stride;
  int32_t sequences, tokens;
};

// Query, key and value heads of the same tokens. Each part is normalised, then rotated, in place,
// and stored in the cache, as its fields say.
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
  const float* cos_sin;  // [tokens, rotary_dim], shared by all parts
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
  int32_t max_context;  // an upper bound on the batch's context lengths
  int32_t max_queries;  // an upper bound on the queries of a sequence
  int32_t single;       // the first `single` sequences have one query each
  // Scratch for the KV splits of the first `partial_tokens` tokens; nullptr: one block processes
  // each context.
  float* partial;
  Activations act;
  int32_t only_act;  // only `act` is read: `out` may stay unwritten
  // nullptr, or (host) what heads() would do first, with the parts q, keys and values. The rows of
  // these parts may stay unwritten.
  const HeadsArgs* before;
  // nullptr, or [tokens][2]: the keys [first, end) of its sequence that each query attends to, in
  // place of itself and the keys before it. Within a sequence, neither bound decreases from one
  // query to the next.
  const int32_t* ranges;
  // nullptr, or [heads][2 bias_reach + 1]: the bias that a score gets by the distance between key
  // and query, which is clamped (ops::AttentionParams). Queries are the last tokens of their
  // context.
  const float* distance_bias;
  int32_t bias_reach;
  int32_t partial_tokens;
};

// Where an operation finds the states of the batch's sequences (ops/state.h). All arrays but the
// states have the length of the batch.
struct StateArgs {
  uint8_t* data;  // the part of the first slot
  int64_t slot_bytes;
  const int32_t *query_start, *context_len;
  const int32_t* slots;  // sequence s uses slot slots[s * slot_stride]
  int64_t slot_stride;
  const int32_t* saves;  // nullptr, or [tokens]
  int32_t sequences, tokens;
};

// The operations of ops/state.h.
struct CausalConvArgs {
  Rows x, out;
  const float *weight, *bias;
  int32_t taps, silu;
  StateArgs state;
};
struct SelectiveScanArgs {
  Rows x, dt, out, b, c;
  const float *dt_bias, *a, *d;
  StateArgs state;
};
struct LinearScanArgs {
  Rows x, out, b, c, dt;
  const float *dt_bias, *a, *d;
  float dt_min, dt_max;
  int32_t heads, head_dim, groups, n;
  StateArgs state;
};
struct DeltaScanArgs {
  Rows q, k, v, out, b, alpha;
  const float *a, *dt_bias;
  int32_t key_heads, value_heads, key_dim, value_dim;
  StateArgs state;
};

struct RoutingArgs {
  int32_t score, experts, top_k, groups, top_groups, group_score_top, renormalize;
  const float* correction;
  float renormalize_eps, scale;
};

// Tokens grouped by expert. A slot is a tile of `slot_tokens` places of one expert; slots are
// sorted by expert.
struct GroupArgs {
  const int32_t* ids;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  int32_t tokens, top_k, experts, slot_tokens, slots;
  int32_t *token, *place;  // [slots * slot_tokens] (-1: none), [tokens, top_k]
  int32_t* slot_expert;    // [slots]; -1: none
  int32_t* used;           // [1]: the number of slots that have an expert
  float* place_weight;     // [slots * slot_tokens]
  int32_t whole;           // 1: every slot has a place for every token, in token order
};

struct ExpertArgs {
  const uint8_t* const* weights;  // [experts], device
  int64_t rows, cols;
  Code code;
  const uint8_t* act;  // in fragment order, one tile after the other in slot order
  float* out;          // [slots * slot_tokens, rows]
  const float* bias;   // [experts, rows] or nullptr
  const int32_t* slot_expert;
  int32_t slots, slot_tokens;
};

// The norm of a few tokens, the router's GEMM on the result, and the routes.
struct RouteOneArgs {
  Rows x, normed;
  NormArgs norm;
  Activations act;
  ProductArgs product;  // its input is `normed`
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
  int32_t weight_before;  // 1: x is scaled by a token's weight
  Activations in;         // core matrices: x if groups.whole, otherwise scratch for x by place
  Activations act;        // scratch for the outputs of the GLU, by place
  void* y;                // [slots * slot_tokens, hidden]: see given_bf16() in moe.h
};

// The same for few tokens, from the router's logits to the weighted sums.
struct FewExpertsArgs {
  Code gate_up_code, down_code;
  const uint8_t *const *gate_up, *const *down;  // [experts], device
  const float *gate_up_bias, *down_bias;        // [experts, 2 * ff], [experts, hidden] or nullptr
  int64_t hidden, ff;
  GluArgs glu;
  const float* logits;  // nullptr: ids and weights are inputs; otherwise they are written
  int64_t logits_stride;
  RoutingArgs routing;
  int32_t* ids;    // [tokens, top_k]
  float* weights;  // [tokens, top_k]
  int32_t tokens;
  const uint8_t* in;  // x in fragment order
  uint8_t* act;       // scratch for the outputs of the GLU: a tile of tokens per expert in use
  Rows out;
  int32_t add;
};

// An open GPU, see runtime/context.cuh.
struct Context;

// No kernel supports a problem; Api::problem_text() describes it.
inline constexpr int kNoKernel = -1;
// Operations whose kernel can be forced (Api::force).
enum ForcedOp : int32_t { kForcedMatmul, kForcedSwiglu, kForcedAttention, kForcedMoe, kForcedOps };

// The properties of a device that kernel choice depends on.
struct DeviceLimits {
  int32_t capability = 0;  // 90 for compute capability 9.0
  int32_t multiprocessors = 0;
};

// Every function takes the context first, and returns 0 or an error unless its comment says
// otherwise.

struct MemoryApi {
  int (*allocate)(Context*, void** to, int64_t bytes);
  int (*release)(Context*, void* memory);
  int (*allocate_host)(Context*, void** to, int64_t bytes);  // pinned
  int (*release_host)(Context*, void* memory);
  int (*upload)(Context*, void* to, const void* host, int64_t bytes);
  int (*download)(Context*, void* host, const void* from, int64_t bytes);
  int (*copy)(Context*, void* to, const void* from, int64_t bytes);
  int (*clear)(Context*, void* to, int64_t bytes);
  // Uploads on a separate stream, through kUploadSlots staging buffers. upload_ahead() starts once
  // the work enqueued before the last upload_used() of its slot has ended; work enqueued after it
  // sees the bytes. upload_await() waits until the slot's host memory may be written again.
  int (*upload_ahead)(Context*, int slot, void* to, const void* host, int64_t bytes);
  int (*upload_used)(Context*, int slot);
  int (*upload_await)(Context*, int slot);
  // Reads `bytes` once, to measure memory bandwidth.
  int (*read)(Context*, const void* memory, int64_t bytes, float* sink);
};

// A layer's blocks, as ops::LaneLayer, and a block of all layers, as ops::LaneUnit.
struct LaneLayerView {
  uint8_t* data;
  int64_t bytes, offset;
};
struct LaneUnitView {
  uint8_t* host;
  int64_t block;
};
inline constexpr int kLaneUnits = 240;  // arguments of a kernel have 4 KiB
struct LaneUnits {
  int32_t count;
  LaneUnitView units[kLaneUnits];
};

// Copies beside the steps (ops/copy_lane.h). copy(), wait() and close() may be called by another
// thread than the one that uses the context.
struct CopyApi {
  int (*open)(Context*, void** lane, const LaneLayerView* layers, int32_t count);
  int (*close)(Context*, void* lane);
  int (*follow)(Context*, void* lane);
  int (*precede)(Context*, void* lane);
  // Layers [first, first + count), of which the longest block has `longest` bytes.
  int (*copy)(Context*, void* lane, int32_t first, int32_t count, const LaneUnits* units,
              int64_t longest, int32_t to_device);
  int (*wait)(Context*, void* lane);
};

struct StreamApi {
  int (*sync)(Context*);
  // note() records one of kNotes events after everything enqueued so far; await() waits for it.
  int (*note)(Context*, int which);
  int (*await)(Context*, int which);
  // Captures everything enqueued between begin and end as a graph that can be launched repeatedly.
  int (*graph_begin)(Context*);
  int (*graph_end)(Context*, void** graph);
  int (*graph_play)(Context*, void* graph);
  int (*graph_release)(Context*, void* graph);
  // Timing: elapsed milliseconds between the two marks.
  int (*mark)(Context*, int which);
  int (*elapsed)(Context*, float* milliseconds);
};

inline constexpr float kScoreUnits = 0x1p30f;  // of key_scores(), for a weight of 1
// Queries of one sequence whose softmax weights key_scores() adds to sums[at + head * slots +
// slot]. Their own scores go to scores[scores_at], [score_heads, rows, chunks * kScoreChunk], and
// the softmax of each chunk to chunks[chunks_at], [score_heads, rows, chunks, 2]; rows are queries
// with heads of a KV head, chunks kScoreChunk slots.
inline constexpr int kScoreChunk = 1024;
struct ScoredPart {
  int64_t at, scores_at, chunks_at;
  int32_t sequence;
  // Row r is query r / group with head r % group of its KV head. The part has rows first_row and
  // up; query 0 is row `token` of q and sees `seen` slots, each other one sees one more.
  int32_t token, seen, first_row, rows;
  int32_t slots;  // at least those that the last query sees
};
struct KeyScoreArgs {
  const float* q;  // as attention() reads it
  int64_t q_stride;
  CacheArgs cache;
  const int32_t* tables;
  int64_t table_stride;
  const float* sinks;
  float scale, softcap;
  int64_t* sums;  // in units of 1 / kScoreUnits
  float *scores, *chunks;
  int32_t heads;
  int32_t first_head, score_heads;  // the KV heads of this call
  int32_t count;
  ScoredPart of[kMaxScored];
};

// Copies slot kept[head * count + i] of the blocks `from` to slot i of the blocks `to`, for KV
// heads first_head + head; blocks may be in both lists.
struct MoveArgs {
  CacheArgs cache;
  const int32_t *from, *to, *kept;
  int32_t count;
  int32_t first_head, move_heads;
  void* room;  // at least 16 bytes for each slot
  int64_t room_bytes;
};

struct GemmApi {
  int64_t (*packed_bytes)(Context*, Code code, int64_t rows, int64_t cols);  // 0: unknown format
  // Packs row tiles [first, first + count / 16) from `raw`, which holds consecutive rows as stored.
  int (*pack)(Context*, Code code, uint8_t* packed, const uint8_t* raw, int64_t first,
              int64_t count, int64_t rows, int64_t cols);
  int64_t (*fragment_bytes)(Context*, int64_t rows, int64_t cols);
  // The layout in which GEMMs with this number of tokens read activations.
  Order (*order_for)(Context*, Code code, int64_t tokens);
  // index: nullptr, or for each row the row of x (-1: zeros); weights: nullptr, or a factor per
  // row.
  int (*encode)(Context*, const Activations* act, const Rows* x, const int32_t* index,
                const float* weights, int64_t rows);
  // next: nullptr, or the GEMMs that are likely to come next: their weights may be prefetched.
  int (*products)(Context*, const ProductArgs* products, int count, int64_t tokens,
                  const NextProducts* next);
  // Whether gated_products() supports a weight of this format and size with this number of tokens.
  int (*gated_fits)(Context*, Code code, int64_t rows, int64_t cols, int64_t tokens);
  // GEMMs of gate and up (in this order, of one format and size, add 0) with a SwiGLU epilogue:
  // `act`, in the layout for weights of their format, receives what glu() would compute from their
  // results with SiLU and no limit. The results themselves are not stored (INT8 uses their memory).
  int (*gated_products)(Context*, const ProductArgs* gate_and_up, int64_t tokens,
                        const Activations* act);
};

struct AttentionApi {
  // gain, interval: see ops::PositionScale.
  int (*rope_table)(Context*, float* cos_sin, const int32_t* positions, const float* inv_freq,
                    int64_t tokens, int64_t half, float scale, float gain, float interval);
  int (*heads)(Context*, const HeadsArgs* args);
  int64_t (*partial_bytes)(Context*, int tokens, int heads, int value_dim, int64_t context);
  int (*attention)(Context*, const AttentionArgs* args);
  // The Hadamard transform of each head's `dim` features (ops/kv_type.h); out may be x.
  int (*rotate_heads)(Context*, const Rows* out, const Rows* x, int heads, int dim);
  int (*key_scores)(Context*, const KeyScoreArgs* args);
  int (*move_slots)(Context*, const MoveArgs* args);
  // keys[slot * key_dim + feature]: a head's keys in the first slots of these blocks.
  int (*read_keys)(Context*, float* keys, const CacheArgs* cache, const int32_t* blocks, int head,
                   int slots);
};

struct StateApi {
  int (*causal_conv)(Context*, const CausalConvArgs* args);
  int (*selective_scan)(Context*, const SelectiveScanArgs* args);
  int (*linear_scan)(Context*, const LinearScanArgs* args);
  // q and k are normalised in place.
  int (*delta_scan)(Context*, const DeltaScanArgs* args);
};

struct MoeApi {
  int (*route)(Context*, const Rows* logits, const RoutingArgs* routing, int32_t* ids,
               float* weights);
  int (*group)(Context*, const GroupArgs* args);
  // An F32 GEMM of at most kMaxRouterTokens tokens whose rows are multiples of four floats, aligned
  // to 16 bytes; then route and group.
  int (*router)(Context*, const ProductArgs* product, int64_t tokens, const RoutingArgs* routing,
                int32_t* ids, float* weights, const GroupArgs* groups);
  // Whether route_one() supports these.
  int (*route_one_fits)(Context*, const RouteOneArgs* args);
  int (*route_one)(Context*, const RouteOneArgs* args);
  int (*expert_products)(Context*, const ExpertArgs* args);
  // The smallest slot that experts() supports; 0: use expert_products(). Reads only formats, sizes,
  // the GLU and the numbers of tokens and experts.
  int (*experts_fused)(Context*, const ExpertsArgs* args);
  int (*experts)(Context*, const ExpertsArgs* args);
  // Whether few_experts() supports these; reads only codes, sizes, tokens and routing.
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
  int (*sigmoid_product)(Context*, const Rows* x, const Rows* gate);
  int (*xielu)(Context*, const Rows* x, float positive, float negative, float beta, float eps);
  // kept = x with zeros in `columns`, of which there are apart->cols; apart = these columns of x.
  int (*split_columns)(Context*, const Rows* kept, const Rows* apart, const Rows* x,
                       const int32_t* columns);
};

// Statistics of calibration.
struct MomentApi {
  // sums[i, j] += the sum of x[t, i] * x[t, j] over the rows t, with the bits of the processor's
  // exact F32 GEMM: blocks of 32 rows, of each the even and the odd rows apart by FMA, then added.
  // sums: [x.cols, x.cols], symmetric; x.cols a multiple of four, rows of x aligned to 16 bytes.
  int (*add_moments)(Context*, float* sums, const Rows* x);
};

struct SamplingApi {
  int (*argmax)(Context*, const Rows* x, int32_t* ids);
  // Whether sample() supports rows of `cols` logits; `words` are sampling descriptors
  // (ops/sample.h).
  int (*samples)(Context*, int64_t cols);
  int (*sample)(Context*, const Rows* logits, const int32_t* words, const int32_t* tokens,
                int32_t* ids);
  // ids[i] = named[from[i]] (a sampled token) where from[i] >= 0.
  int (*take_ids)(Context*, int32_t* ids, const int32_t* from, int64_t count, const int32_t* named,
                  const int32_t* map);
};

// What open() reports about a device.
struct DeviceInfo {
  char name[256];
  DeviceLimits limits;
  int64_t free_bytes, total_bytes;
};

struct Api {
  int32_t version;
  const char* (*error_text)(int error);
  // The number of devices; 0 if there is none or the driver is missing.
  int (*devices)();
  int (*open)(int device, Context** context, DeviceInfo* info);
  // Forces a kernel, by its index in the operation's table, wherever it fits; -1: choose the best.
  int (*force)(Context* context, int op, int row);
  const char* (*problem_text)(const Context* context);
  // Frees the context. Memory allocated with it must be released first.
  int (*close)(Context* context);
  MemoryApi memory;
  StreamApi stream;
  GemmApi gemm;
  AttentionApi attention;
  MoeApi moe;
  RowApi rows;
  SamplingApi sampling;
  StateApi states;
  CopyApi copies;
  MomentApi moments;
};

using ApiFunction = const Api* (*)();

}  // namespace freshet::cuda
