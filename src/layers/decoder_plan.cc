// The memory that the forward pass needs, and its reservation.
#include <algorithm>
#include <numeric>

#include "layers/branch_kinds.h"
#include "layers/decoder.h"
#include "layers/encoder_pass.h"
#include "layers/rope.h"

namespace freshet {
namespace {

Status supported(const BranchSpec& branch, const ops::Device& device) {
  const BranchKind& kind = kind_of(branch);
  if (kind.store != nullptr) {
    FRESHET_RETURN_IF_ERROR(device.supports(kind.cache(branch, ops::KvType::kF16).shape));
  }
  return kind.supported != nullptr ? kind.supported(branch, device) : Status();
}

}  // namespace

size_t Decoder::arena_bytes(int64_t tokens, int64_t logit_rows) const {
  const int64_t hidden = spec_.hidden_size;
  // The residual stream, and the separate stream of the rows that need logits.
  size_t fixed = matrix_bytes(tokens, hidden) + matrix_bytes(logit_rows, hidden);
  for (const RopeSpec& rope : spec_.ropes) {
    fixed += matrix_bytes(tokens, rope.rotary_dim) + matrix_bytes(logit_rows, rope.rotary_dim);
  }
  if (spec_.features) {
    // A draft head: the stream beside the embeddings, and a pair as the first branch's input.
    const int64_t widest = std::max<int64_t>(spec_.features->width, hidden) + hidden;
    fixed += matrix_bytes(tokens, hidden) + matrix_bytes(tokens, std::max(widest, 2 * hidden));
  }
  // With side streams: the embeddings, two streams, and a pair as a branch's input.
  if (has_side_streams(spec_)) fixed += 5 * matrix_bytes(tokens, hidden);
  // The peak that the embedding, a layer or the head needs in addition.
  const int tables = (spec_.learned_positions > 0 ? 1 : 0) + (spec_.token_types > 0 ? 1 : 0);
  size_t peak = matrix_bytes(tokens, spec_.embedding_size) + matrix_bytes(tokens, 1) +
                static_cast<size_t>(std::max(tables, 1)) * matrix_bytes(tokens, hidden);
  peak = std::max(
      peak, 2 * matrix_bytes(logit_rows, hidden) + matrix_bytes(logit_rows, spec_.embedding_size));
  for (const LayerSpec& layer : spec_.layers) {
    size_t most = 0;
    for (const BranchSpec& branch : layer.branches) {
      most = std::max(most, kind_of(branch).bytes(branch, hidden, tokens));
    }
    // A branch's normalised input and its output; parallel branches have all inputs at once.
    const size_t inputs = layer.parallel ? layer.branches.size() : 1;
    peak = std::max(peak, (inputs + 1) * matrix_bytes(tokens, hidden) + most);
  }
  if (encoder_ != nullptr) {  // keys and values of its output, and scratch to compute them
    size_t most = 0;
    for (const LayerSpec& layer : spec_.layers) {
      for (const BranchSpec& branch : layer.branches) {
        const BranchKind& kind = kind_of(branch);
        if (kind.write_cross == nullptr) continue;
        most = std::max(most, kind.bytes(branch, hidden, encoder_->positions()));
      }
    }
    fixed += most;
  }
  if (ops_.device() != nullptr) {  // results wait there for the host
    fixed += matrix_bytes(logit_rows, spec_.vocab_size);
    fixed += (1 + captures_.size()) * matrix_bytes(tokens, hidden);
  }
  return fixed + peak;
}

ops::Ops::ShapeLimits Decoder::limits(int64_t tokens, int64_t context) const {
  ops::Ops::ShapeLimits l;
  l.tokens = encoder_ != nullptr ? std::max(tokens, encoder_->positions()) : tokens;
  l.max_context = context;
  l.split_cols = spec_.split_cols;
  l.max_cols = std::max(spec_.hidden_size, spec_.embedding_size);
  if (spec_.features) {
    l.max_cols = std::max<int64_t>(l.max_cols, spec_.features->width + spec_.hidden_size);
  }
  if (has_side_streams(spec_)) l.max_cols = std::max<int64_t>(l.max_cols, 2 * spec_.hidden_size);
  l.max_rows = std::max(spec_.vocab_size, spec_.hidden_size);
  for (const LayerSpec& layer : spec_.layers) {
    for (const BranchSpec& branch : layer.branches) {
      kind_of(branch).limits(branch, spec_.hidden_size, l);
    }
  }
  return l;
}

// What a device receives for a step: five arrays of tokens or rows, block tables and sampling
// descriptors; three arrays and block tables for the rows that need logits; and, depending on the
// model, token types, slots that save states, and ranges of keys. No step has more sequences than
// it may have rows of logits.
size_t Decoder::input_bytes(int64_t tokens, int64_t logit_rows, int64_t context) const {
  constexpr size_t kLists = size_t{5} << 20;  // lists of the sampling descriptors, and rounding
  const int64_t blocks =
      (context / ops::kBlockTokens + 2 * kTablePiece) / kTablePiece * kTablePiece;
  const KvCacheSpec cache = kv_cache_spec(spec_, ops::KvType::kF16);
  const auto tables = std::ssize(cache.groups) + std::ssize(last_cache_layers_);
  const int64_t row = blocks * tables + 4 + int64_t{ops::kSampleRowWords};
  int64_t each = 5 + (spec_.token_types > 0 ? 1 : 0) + (cache.state_group() >= 0 ? 1 : 0);
  for (const KvGroup& group : cache.groups) {
    if (group.two_way || group.chunk > 0 || group.cross > 0 || group.spans != SpanUse::kNone)
      each += 2 * 2;  // the rows that need logits have theirs, too
  }
  if (position_axes(spec_) > 1) each += 2;
  return kLists + sizeof(int32_t) * static_cast<size_t>(each * tokens + logit_rows * row);
}

Decoder::Workspace Decoder::workspace(int64_t tokens, int64_t logit_rows, int64_t context) const {
  Workspace w;
  w.own = arena_bytes(tokens, logit_rows);
  if (encoder_ != nullptr) {
    const Workspace encoder = encoder_->workspace();
    w.own += encoder.own;
    w.scratch = encoder.scratch;
  }
  w.scratch = std::max(w.scratch, ops_.scratch_bytes(limits(tokens, context)));
  if (ops_.device() != nullptr) w.inputs = input_bytes(tokens, logit_rows, context);
  return w;
}

Status Decoder::capture(const std::vector<int>& boundaries) {
  const auto layers = static_cast<int>(spec_.layers.size());
  for (size_t i = 0; i < boundaries.size(); ++i) {
    const int before = i == 0 ? -1 : boundaries[i - 1];
    if (boundaries[i] <= before || boundaries[i] > layers) {
      return invalid_argument("states behind layer {}: the model has {} layers", boundaries[i],
                              layers);
    }
  }
  captures_ = boundaries;
  return {};
}

Status Decoder::reserve(int64_t tokens, int64_t logit_rows, int64_t context) {
  FRESHET_CHECK(tokens > 0 && logit_rows > 0 && context > 0,
                "a plan for {} tokens, {} logits, {} positions", tokens, logit_rows, context);
  if (spec_.learned_positions > 0 && context > spec_.learned_positions - spec_.position_offset) {
    return invalid_argument("a context of {} tokens: the model has {} learned positions", context,
                            spec_.learned_positions - spec_.position_offset);
  }
  if (const ops::Device* device = ops_.device()) {
    for (const LayerSpec& layer : spec_.layers) {
      for (const BranchSpec& branch : layer.branches) {
        FRESHET_RETURN_IF_ERROR(supported(branch, *device));
      }
    }
  }
  if (encoder_ != nullptr) FRESHET_RETURN_IF_ERROR(encoder_->reserve());
  FRESHET_RETURN_IF_ERROR(ops_.set_scratch(ops_.scratch_bytes(limits(tokens, context))));
  FRESHET_RETURN_IF_ERROR(ops_.set_inputs(input_bytes(tokens, logit_rows, context)));
  arena_ = Arena();  // frees its memory before the new arena is allocated
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer,
                           Buffer::allocate(arena_bytes(tokens, logit_rows), ops_.memory()));
  arena_ = Arena(std::move(buffer));
  FRESHET_ASSIGN_OR_RETURN(
      named_, Buffer::allocate(static_cast<size_t>(logit_rows) * sizeof(int32_t), ops_.memory()));
  max_tokens_ = tokens;
  max_logit_rows_ = logit_rows;
  frequencies_.clear();
  host_frequencies_.clear();
  for (const RopeSpec& rope : spec_.ropes) {
    const std::vector<float> all = rope_frequencies(rope, context);
    Vector& on_device = frequencies_.emplace_back();
    FRESHET_ASSIGN_OR_RETURN(on_device.buffer, ops_.upload(all));
    on_device.size = std::ssize(all);
    host_frequencies_.push_back(rope.axes.empty() ? std::vector<float>() : all);
  }
  every_.resize(static_cast<size_t>(tokens));
  std::iota(every_.begin(), every_.end(), 0);
  if (spec_.token_types > 0) zeros_.assign(static_cast<size_t>(tokens), 0);
  return {};
}

}  // namespace freshet
