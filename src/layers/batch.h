// One step's work, as the model sees it: a ragged batch over a paged cache.
//
// Prefill, chunked prefill, decode and verification are all this. Token t of the flattened batch
// has an id and a position; sequence s owns tokens [query_start[s], query_start[s + 1]), which are
// the last of its context_len[s] tokens. Branches with the same attention window share a block
// table: a model has cache groups (kv_cache/kv_storage.h), and tables[g] belongs to group g.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kv_cache/kv_storage.h"
#include "ops/attention.h"
#include "ops/sample.h"

namespace freshet {

constexpr int64_t kTablePiece = 64;  // strides of tables are multiples of it: few different shapes

struct BlockTables {
  std::vector<int32_t> ids;  // [sequences, stride]; -1 where there is no block (any more)
  int64_t stride = 0;
  // Empty, or [sequences]: how many slots each sequence has in this group after the step, if that
  // is not its number of tokens.
  std::vector<int32_t> context_len;
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
  // Empty, or [tokens]: positions up to this one, exclusively, are visible to the token although
  // they may lie behind it. The tokens of an image have the image's end here.
  std::vector<int32_t> visible_end;
  std::vector<int32_t> logit_rows;  // tokens whose logits are wanted, ascending
  std::vector<uint8_t> best_only;   // empty, or [logit_rows]; 1: only the argmax of the row is used
  // Empty, or the sampling descriptors of ops/sample.h: how to sample from each row of logits.
  std::vector<int32_t> samples;
  // For draft heads (FeatureSpec): [tokens, features], the target's features of each token, or
  // states that the head gave before. In host memory that a device reads (Ops::host_memory()).
  const float* features = nullptr;
  bool own_states = false;

  int64_t tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int sequences() const { return static_cast<int>(context_len.size()); }
  // Whether a device that samples returns the token alone and not the row of logits.
  bool names_token(size_t row) const {
    if (!samples.empty()) return samples[row * ops::kSampleRowWords] != ops::SampleRow::kNotHere;
    return !best_only.empty() && best_only[row] != 0;
  }
  ops::AttentionBatch attention(int group) const {
    const BlockTables& t = tables[static_cast<size_t>(group)];
    return {query_start, slots(group), t.ids.data(), t.stride};
  }
  const std::vector<int32_t>& slots(int group) const {
    const BlockTables& t = tables[static_cast<size_t>(group)];
    return t.context_len.empty() ? context_len : t.context_len;
  }
};

// What each token attends to in a group of the cache; empty if that is itself and the tokens before
// it, or those within the group's window.
void find_key_ranges(const ForwardBatch& batch, int group, const KvGroup& kind,
                     std::vector<ops::KeyRange>& ranges);

// Makes `to` a batch of the rows that need logits: queries at the ends of the same contexts, whose
// keys and values the whole batch stores. It has the block tables of `groups` only. Returns false,
// with `to` unspecified, if all rows need logits or one of them is followed, in its sequence, by a
// row that needs none.
bool take_logit_rows(const ForwardBatch& batch, std::span<const int> groups, ForwardBatch& to);

// Where a step's results go, in the host's memory.
struct StepResults {
  static constexpr int32_t kSeeLogits = ops::SampleRow::kSeeLogits;

  float* logits = nullptr;  // [logit_rows, vocab], final scaling and soft cap applied
  float* hidden = nullptr;  // or [tokens, hidden]: the states after the final norm
  // Or [logit_rows]: the token that ops::Ops::argmax() or sample() returns, in which case the row
  // of logits is not written; or kSeeLogits, always if the batch asks for the logits themselves.
  int32_t* best = nullptr;
  // Empty, or [Model::capture()] of [tokens, hidden]: the residual stream at those boundaries.
  std::span<float* const> boundaries;
};

}  // namespace freshet
