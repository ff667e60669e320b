// Fused operations: groups of operations that a device may run as fewer kernels.
//
// Each struct lists everything that its group reads and writes, so no device has to guess from the
// order of calls what belongs together. Ops has the default composition of each group out of single
// operations (ops_fused.cc, ops_gated.cc, ops_moe.cc); a device implements the group (ops/device.h)
// or gets the composition. Both are bit-identical. While projection hooks are set (ops/hooks.h),
// groups with projections always run as their composition.
//
// Matrices that are called room are scratch: their content is undefined afterwards. A matrix
// without data, and a projection without a weight, are absent where a comment allows it.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ops/arguments.h"
#include "ops/attention.h"

namespace freshet::ops {

// The encoded forms in which a device's GEMMs read an input, kept for further operations of the
// same step that read the same unchanged values. Filled by devices only; empty at first.
struct EncodedForms {
  struct Form {
    const uint8_t* data = nullptr;
    uint64_t position = 0;  // in the device's scratch memory, ever growing
    int order = 0;
  };
  std::array<Form, 3> forms;
  int count = 0;
  bool alone = false;  // the matrix itself isn't written
};

// The input of a group of projections: x, or norm(x).
struct Input {
  Matrix x;
  const Norm* norm = nullptr;  // nullptr: projections read x as it is
  Matrix normed;               // with a norm: receives norm(x); may be x; room unless `shared`
  // Not nullptr: other operations of the step read the same values as x, and share the forms.
  EncodedForms* shared = nullptr;

  const Matrix& rows() const { return norm != nullptr ? normed : x; }  // what projections read
};

// Queries, keys and values between projections and attention: normalised per head, rotated, and
// keys and values stored in the cache. All are room; for exceptions see Ops::heads().
struct Heads {
  struct Part {
    Matrix x;  // [tokens, heads * head_dim]
    int heads = 0;
    int head_dim = 0;
    const Norm* norm = nullptr;   // over each head, or over all of them together
    bool norm_per_head = false;   // weights [heads, head_dim] instead of [head_dim]
    bool norm_all_heads = false;  // over a row, weights [heads * head_dim]
    int offset = 0;               // first rotated feature of a head
    int rotary_dim = 0;           // 0: no rotation
    bool interleaved = false;     // as in Ops::rope()
    bool norm_after = false;      // the norm follows the rotation
    // Not nullptr: [heads * head_dim], and each feature is multiplied by its own at last. Host
    // only.
    const float* factors = nullptr;
  };
  Part q;                          // may be absent: only keys and values are stored
  Part k;                          // may be absent together with v: they are in the cache already
  Matrix v;                        // [tokens, kv_heads * value_dim]
  const float* cos_sin = nullptr;  // of Ops::rope_table()
  KvView cache;
  AttentionBatch batch;
};

// Heads, attention over the cache, and the output projection.
struct Attend {
  Heads heads;
  Matrix out;  // [tokens, heads * value_dim]; room if there is an output projection
  AttentionParams params;
  Product o;                                   // may be absent
  std::span<const ScoredQueries> scored = {};  // Ops::key_scores() of the queries
  // Empty, or [sequences]: Ops::selected_attention(), on the host only.
  std::span<const BlockSelection> selections = {};
  CoarseTokens coarse = {};  // Ops::attend_both(), on the host only
};

// A layer's attention from its input to its output projection. Without q, it only stores keys and
// values (attend.out and attend.o absent); without k and v, they are stored already.
struct QkvAttention {
  Input in;
  Product q, k, v;  // to attend.heads
  Attend attend;
};

// Multi-head latent attention, absorbed (layers/mla.cc). Without `absorbed`, it only stores the
// latents; without kv_down, they are stored already.
struct LatentAttention {
  Input in;
  Product q_down;                 // may be absent: q reads the input
  const Norm* q_norm = nullptr;   // of q_down's output
  Product q;                      // to [tokens, heads * head_dim]
  Product kv_down;                // to [tokens, latent + rotated part]
  const Norm* kv_norm = nullptr;  // of the latent: the first columns
  int64_t kv_rank = 0;
  int head_dim = 0;
  int rope_offset = 0;  // first rotated feature of a query head
  int rotary_dim = 0;   // 0: no rotation
  bool interleaved = false;
  const float* cos_sin = nullptr;
  std::span<const Weight> q_absorb;  // [heads] of [latent + rotated part, head_dim]
  std::span<const Weight> v_up;      // [heads] of [value_dim, latent]
  Matrix absorbed;                   // room [tokens, heads * (latent + rotated part)]
  Matrix mixed;                      // room [tokens, heads * latent]
  Matrix values;                     // room [tokens, heads * value_dim]
  KvView cache;
  AttentionBatch batch;
  AttentionParams params;
  Product o;
  std::span<const ScoredQueries> scored = {};
};

// A gated MLP: down(glu(gate(x), up(x))). gate.out and up.out, [tokens, ff], are room.
struct GatedMlp {
  Input in;
  Product gate, up;
  Glu glu;
  Product down;
};

// A mixture of experts from its input on: router, routing, the sum of the experts, and a shared
// expert.
struct MoeBlock {
  Input in;
  Product router;  // out: room [tokens, experts]
  Routing routing;
  int32_t* ids = nullptr;    // room [tokens, top_k]
  float* weights = nullptr;  // room [tokens, top_k]
  Experts experts;
  Matrix out;           // [tokens, hidden]
  bool add = false;     // add to the content of out
  GatedMlp shared;      // down absent: no shared expert; its `in` is the block's
  Product shared_gate;  // may be absent: shared.down adds to `out` by itself
};

// The end of a branch: x = after(x + scale * norm(branch)).
struct ResidualAdd {
  Matrix x;
  Matrix branch;               // room
  const Norm* norm = nullptr;  // may be absent
  float scale = 1.0f;
  const Norm* after = nullptr;  // may be absent
};

}  // namespace freshet::ops
