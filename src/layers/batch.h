// One step's work, as the model sees it: a ragged batch over a paged cache.
//
// Prefill, chunked prefill, decode and verification all have this form. Token t of the flattened
// batch has an id and a position; sequence s owns tokens [query_start[s], query_start[s + 1]),
// which are the last of its context_len[s] tokens. Branches with the same attention window share a
// block table: a model has cache groups (kv_cache/kv_storage.h), and tables[g] belongs to group g.
// In a group of states, the first entry of a sequence is the slot of its state.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "kv_cache/kv_storage.h"
#include "kv_cache/retention/retention.h"
#include "layers/cross_weights.h"
#include "ops/attention.h"
#include "ops/sample.h"
#include "ops/state.h"

namespace freshet {

// The encoder's input for a sequence of the batch whose first tokens run.
struct EncoderInput {
  int sequence = 0;
  std::span<const int32_t> ids;     // a text ...
  const float* features = nullptr;  // ... or log-mel features [mel_bins, frames]
  int64_t frames = 0;
  // ... or the output itself, [state_rows, encoder_size], if a tower made it.
  const float* states = nullptr;
  int64_t state_rows = 0;
  // Positions of the encoder's output: a stem halves the frames.
  int64_t positions() const {
    return state_rows > 0 ? state_rows : frames > 0 ? (frames + 1) / 2 : std::ssize(ids);
  }
};

// Rows of a picture that replace the embeddings of `count` tokens.
struct EmbeddingRows {
  int32_t token = 0;  // the first one, as an index in the batch
  int32_t count = 0;
  const float* rows = nullptr;  // [count, hidden], in the host's memory
  // Further levels are added to the stream after layers 0, 1 ... (VisionSpec::deep). Level l is
  // level_stride * l floats after `rows`.
  int levels = 0;
  int64_t level_stride = 0;
};

// Strides of block tables are multiples of it, so that there are few different shapes.
constexpr int64_t kTablePiece = 64;

struct BlockTables {
  std::vector<int32_t> ids;  // [sequences, stride]; -1: no block (any more)
  int64_t stride = 0;
  // Empty, or [sequences]: how many slots each sequence has in this group after the step, if that
  // differs from its number of tokens.
  std::vector<int32_t> context_len;
  // What sequences keep in 4 bits, as in ops::CoarseTokens; no slots: none does.
  std::vector<int32_t> coarse_slots, coarse_ids;
  int64_t coarse_stride = 0;
  int32_t coarse_parts = 0;
};

// Key scoring: the attention weights of the last `queries` tokens of a sequence in the batch are
// added to the sums of every layer that has a buffer for them, together or, with as many
// KeyScores::queries, each to its own.
struct ScoredTokens {
  int32_t sequence = 0;
  int32_t queries = 0;
  kv_cache::KeyScores* scores = nullptr;
};

// What queries of a sequence read where they may select.
struct SparseRows {
  ops::BlockSelection rule;
  int32_t dense_layers = 0;  // the first layers of the cache, whose queries read everything
};

// Who gets the weights of cross-attention of a sequence's tokens.
struct CrossReader {
  int32_t sequence = 0;
  CrossWeights* weights = nullptr;
};

struct ForwardBatch {
  std::vector<int32_t> token_ids;  // [tokens]
  // Empty, or [tokens]: the logits row of the previous batch whose sampled token this is; -1: the
  // id is in token_ids.
  std::vector<int32_t> ids_from;
  std::vector<int32_t> positions;    // [tokens]
  std::vector<int32_t> query_start;  // [sequences + 1]
  std::vector<int32_t> context_len;  // [sequences], this step's tokens included
  std::vector<BlockTables> tables;   // [groups]
  std::vector<int32_t> logit_rows;   // tokens whose logits are needed, ascending
  std::vector<uint8_t> best_only;  // empty, or [logit_rows]; 1: only the argmax of the row is used
  // Empty, or the sampling descriptors of ops/sample.h: how to sample from each row of logits.
  std::vector<int32_t> samples;
  // For draft heads (FeatureSpec): [tokens, features], the target's features of each token, or
  // states that the head returned before. In host memory that a device can read
  // (Ops::host_memory()). With ids_from: on the device, the previous batch's StepResults::kept.
  const float* features = nullptr;
  bool own_states = false;
  // With ids_from: nullptr, or on the device, the ids that the previous batch's tokens stand for.
  const int32_t* id_map = nullptr;
  std::vector<ScoredTokens> scored;

  // Empty, or [tokens]: the slot that saves a copy of the state after this token (ops/state.h).
  std::vector<int32_t> state_saves;
  std::vector<int32_t> token_types;  // [tokens], or empty: all of type 0
  // Encoder-decoders: the inputs of sequences whose keys and values of the encoder's output aren't
  // in the cache yet, ascending.
  std::vector<EncoderInput> encoder_inputs;

  std::vector<EmbeddingRows> embedding_rows;  // ascending
  // Empty, or [tokens, position_axes()]: positions on the axes of RopeSpec::axes, if they differ
  // from the token's position.
  std::vector<int32_t> axis_positions;
  // Empty, or [tokens]: the slots of the span of its sequence that the token belongs to, such as a
  // picture; an empty range: none. See SpanUse.
  std::vector<ops::KeyRange> spans;
  // Empty, or [tokens]: the rows of pictures that the token sees by cross-attention. A token with
  // an empty range precedes all pictures; it attends to all rows, as in transformers.
  std::vector<ops::KeyRange> views;
  std::vector<SparseRows> sparse;          // empty, or [sequences]; on the host only
  std::vector<CrossReader> cross_readers;  // ascending sequences; on the host only

  int64_t tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int sequences() const { return static_cast<int>(context_len.size()); }
  // Whether a device that samples returns only this row's token and not its logits.
  bool names_token(size_t row) const {
    if (!samples.empty()) return samples[row * ops::kSampleRowWords] != ops::SampleRow::kNotHere;
    return !best_only.empty() && best_only[row] != 0;
  }
  ops::AttentionBatch attention(int group) const {
    const BlockTables& t = tables[static_cast<size_t>(group)];
    return {query_start, slots(group), t.ids.data(), t.stride};
  }
  ops::CoarseTokens coarse(int group) const {
    const BlockTables& t = tables[static_cast<size_t>(group)];
    return {t.coarse_slots, t.coarse_ids.data(), t.coarse_stride, t.coarse_parts};
  }
  const std::vector<int32_t>& slots(int group) const {
    const BlockTables& t = tables[static_cast<size_t>(group)];
    return t.context_len.empty() ? context_len : t.context_len;
  }
  ops::StateBatch states(int group) const {
    const BlockTables& t = tables[static_cast<size_t>(group)];
    return {query_start, context_len, t.ids.data(), t.stride, state_saves};
  }
};

// Which keys each token attends to in a group of the cache.
struct KeyView {
  // Empty: the token itself and the tokens before it, or those within the group's window.
  std::vector<ops::KeyRange> ranges;  // [tokens]
  // Cross-attention to pictures: the tokens that attend at all; the lists contain only these.
  std::vector<int32_t> tokens;
  // AttentionBatch requires that ranges don't decrease within a sequence. If they do, the sequences
  // are cut into parts: these are the parts, with their block tables. Empty if nothing is cut.
  std::vector<int32_t> query_start, context_len, tables;
  int64_t stride = 0;

  bool cut() const { return !query_start.empty(); }
  // `whole`: the batch for storing keys and values.
  ops::AttentionBatch batch(ops::AttentionBatch whole) const;
};
void find_key_ranges(const ForwardBatch& batch, int group, const KvGroup& kind, KeyView& view);

// Makes `to` a batch of the rows that need logits: queries at the ends of the same contexts, whose
// keys and values the whole batch stores. It has the block tables of `groups` only. Returns false,
// with `to` unspecified, if all rows need logits, or if one of them is followed in its sequence by
// a row that needs none.
bool take_logit_rows(const ForwardBatch& batch, std::span<const int> groups, ForwardBatch& to);

// Where a step's results are written, in host memory.
struct StepResults {
  static constexpr int32_t kSeeLogits = ops::SampleRow::kSeeLogits;

  float* logits = nullptr;  // [logit_rows, vocab], final scaling and soft cap applied
  float* hidden = nullptr;  // or [tokens, hidden]: the states after the final norm
  // Or [logit_rows]: the token that ops::Ops::argmax() or sample() returns; the row of logits is
  // not written then. kSeeLogits if the host samples, and always if the batch asks for the logits.
  int32_t* best = nullptr;
  // Empty, or [Model::capture()] of [tokens, hidden]: the residual stream at those boundaries.
  std::span<float* const> boundaries;
  // Or [logit_rows, hidden], in the device's memory: the states of these rows.
  float* kept = nullptr;
  // On hosts, if it is there: called between branches of layers. The caller may do other work then,
  // also with other models of the same Ops. False ends the pass: its results are undefined.
  const FunctionRef<bool()>* between = nullptr;
};

}  // namespace freshet
