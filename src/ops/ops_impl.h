// Shared by the sources of Ops; internal to this directory.
#pragma once

#include <array>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/device.h"
#include "ops/ops.h"

namespace freshet::ops {

inline constexpr int kPanelRows = 16;

// A GEMM in the form that kernels take. `act` is its input in the ActKind of the weight's kernel.
struct MatmulCall {
  MatmulArgs args;
  const uint8_t* act = nullptr;
  int64_t act_row_bytes = 0;
};

// A batch in which queries that select are sequences of their own: each of them, or with a fixed
// pattern those in one block together.
struct SelectedBatch {
  struct Part {
    int32_t sequence = 0;  // of the batch that was given
    int32_t token = 0;     // its last query
    int32_t blocks = 0;    // that it reads
    int32_t of = 0;        // the blocks up to its last query
    int32_t slots = 0;     // the slots up to its last query
    bool selects() const { return blocks < of; }
  };
  std::vector<Part> parts;
  std::vector<int32_t> query_start, context_len, tables;
  std::vector<float> scores;    // [workers, blocks]
  std::vector<int32_t> ranked;  // [workers, blocks]
  std::vector<float> queries;   // [workers, query heads of a KV head, key_dim]
  // By components: the tokens that parts read, in blocks of their own.
  Buffer gathered;
  KvShape gathered_shape;     // of the blocks that were there last
  std::vector<float> unread;  // [parts, query heads] the weight of what is not read

  void split(const AttentionBatch& batch, std::span<const BlockSelection> selections);
};

// Of ops_coarse.cc; grows to the largest step and the longest sequence.
struct CoarseRoom {
  std::vector<int32_t> context_len, tables;  // of attention over coarse tokens
  std::vector<KeyRange> ranges;
  std::vector<float> out, fine_sums, sums;
  std::vector<float> keys, values, rows;  // decoded
  Buffer blocks;                          // encoded
};

// Whether the products are in one part, or absent. A device's own operations take no others.
template <class... P>
bool undivided(const P&... products) {
  return ((products.weight == nullptr || products.weight->outliers == nullptr) && ...);
}

struct Ops::Impl {
  ThreadPool& pool;
  Capabilities capabilities;
  bool reference = false;
  std::vector<const MatmulKernel*> matmul;        // [formats] the planned row
  const MatmulKernel* exact_f32 = nullptr;        // of F32 weights for Use::kExact
  std::vector<const AttentionKernel*> attention;  // the rows that can run here, best first
  const VectorKernels* vector = nullptr;
  const ScoreKernel* scores = nullptr;
  std::vector<float> kv_scratch;    // of ops_kv.cc; grows to the longest sequence
  std::vector<int64_t> score_sums;  // of key_scores()
  SelectedBatch selected;           // of ops_select.cc; grows likewise
  CoarseRoom coarse;
  std::array<const ActEncoder*, 4> encoders{};  // [ActKind]; nullptr if no planned kernel needs one
  Arena arena;
  size_t scratch_bytes = 0;        // reserved in the arena, or on the device
  Pieces weights;                  // memory of the packed weights
  std::unique_ptr<Device> device;  // if set, everything else but the pool and the arena is empty
  ProjectionHooks* hooks = nullptr;
  Buffer hook_room;        // an output before it is added to a residual
  int64_t split_cols = 0;  // as in ShapeLimits

  Impl(ThreadPool& p, const Capabilities& c) : pool(p), capabilities(c) {}

  const AttentionKernel& attention_for(const KvShape& shape) const;

  // Calls body(first, last) for parts of [0, rows), in parallel if the work is worth a region.
  void for_rows(int64_t rows, int64_t cols, FunctionRef<void(int64_t first, int64_t last)> body);

  // Rows of x in the encoding `kind`; in the arena unless that is x itself.
  struct Encoded {
    const uint8_t* data = nullptr;
    int64_t row_bytes = 0;
  };
  // `inputs`: the index in x of each encoded value; empty: all in order.
  Encoded encode(const Matrix& x, ActKind kind, bool fine, std::span<const int32_t> inputs = {});
  Encoded encode(const Matrix& x, const Weight& reader) {
    return encode(x, reader.kernel->act, reads_fine(reader));
  }
  // Whether a GEMM with this weight reads the fine part of its encoded input.
  bool reads_fine(const Weight& w) const;
  size_t encoded_bytes(ActKind kind, int64_t rows, int64_t cols) const;
  // Calls body(hooks) with hooks switched off: projections that hooks run themselves are not
  // hooked.
  template <class Body>
  void with_hooks(const Body& body) {
    ProjectionHooks* const all = std::exchange(hooks, nullptr);
    body(*all);
    hooks = all;
  }
  // Runs all GEMMs as one parallel region.
  void run_calls(std::span<const MatmulCall> calls);
};

}  // namespace freshet::ops
