// A step around the forward pass: the key by which a device may replay it, and the transfers of its
// inputs and results.
#include <algorithm>
#include <array>

#include "layers/decoder.h"
#include "ops/device.h"

namespace freshet {
namespace {

// Steps with several rows per sequence are replayed up to this size: only with few sequences do
// their shapes recur.
constexpr int64_t kMostReplayedRows = 64;
// Of a draft head that reads what one sequence's last step left: few shapes, which repeat.
constexpr int64_t kMostReplayedFeatures = 16;

// Whether steps of this shape come again: decode steps, those that verify drafts, and a head's.
// Sums of scores have other places in each step.
bool recurs(const ForwardBatch& batch, bool head) {
  if (!batch.scored.empty()) return false;
  const int64_t tokens = batch.tokens();
  if (head && batch.sequences() == 1 && tokens <= kMostReplayedFeatures) return true;
  return std::ssize(batch.logit_rows) == tokens &&
         (tokens == batch.sequences() || tokens <= kMostReplayedRows);
}

// How queries lie in sequences, as far as kernels are chosen by it: how many single ones come
// first, and the most of one sequence.
void add_shape(std::span<const int32_t> query_start, std::vector<int64_t>& key) {
  int64_t single = 0, most = 0;
  for (size_t s = 0; s + 1 < query_start.size(); ++s) {
    const int64_t queries = query_start[s + 1] - query_start[s];
    if (queries == 1 && single == static_cast<int64_t>(s)) ++single;
    most = std::max(most, queries);
  }
  key.push_back(single);
  key.push_back(most);
}

// Whether the host reads something of the step.
bool awaited(const ForwardBatch& batch, const StepResults& results) {
  return !batch.logit_rows.empty() || !batch.scored.empty() || results.hidden != nullptr ||
         !results.boundaries.empty();
}

}  // namespace

// Copies to the host: logits of rows without a sampled token, and all sampled tokens.
void Decoder::fetch(const ForwardBatch& batch, const Matrix& logits, const int32_t* best,
                    const StepResults& results) {
  const auto sampled = [&](int64_t row) {
    return best != nullptr && batch.names_token(static_cast<size_t>(row));
  };
  for (int64_t row = 0, end = 0; row < logits.rows; row = end + 1) {
    for (end = row; end < logits.rows && !sampled(end);) ++end;
    if (end == row) continue;
    const auto bytes = static_cast<size_t>((end - row) * logits.cols) * sizeof(float);
    ops_.fetch(results.logits + row * logits.cols, logits.row(row), bytes);
  }
  if (best != nullptr) {
    ops_.fetch(results.best, best, static_cast<size_t>(logits.rows) * sizeof(int32_t));
  }
}

void Decoder::fetch_all(const ForwardBatch& batch, const Matrix& logits, const Matrix& states,
                        const int32_t* best, const StepResults& results, int turn) {
  const auto bytes = static_cast<size_t>(batch.tokens() * spec_.hidden_size) * sizeof(float);
  if (results.hidden != nullptr) ops_.fetch(results.hidden, states.data, bytes);
  for (size_t i = 0; i < boundaries_.size(); ++i) {
    ops_.fetch(results.boundaries[i], boundaries_[i].data, bytes);
  }
  if (logits.rows > 0) fetch(batch, logits, best, results);
  if (awaited(batch, results)) ops_.note(turn);
}

void Decoder::finish(const ForwardBatch& batch, const StepResults& results, int turn) {
  const size_t rows = batch.logit_rows.size();
  if (ops_.device() == nullptr) {
    if (results.best != nullptr) std::fill_n(results.best, rows, StepResults::kSeeLogits);
    return;
  }
  if (awaited(batch, results)) ops_.await(turn);
  if (!batch.scored.empty()) ops_.take_scores();
  for (size_t row = 0; results.best != nullptr && row < rows; ++row) {
    if (!batch.names_token(row)) results.best[row] = StepResults::kSeeLogits;
  }
}

void Decoder::forward(const ForwardBatch& batch, const KvStorage& cache,
                      const StepResults& results) {
  start(batch, cache, results, 0);
  finish(batch, results, 0);
}

// Makes last_ the batch of the rows that need logits; false if the whole batch must run to the end.
bool Decoder::take_last_rows(const ForwardBatch& batch, const KvStorage& cache) {
  last_groups_.clear();
  for (const int stored : last_cache_layers_) {
    const int group = cache.group_of(stored);
    if (std::ranges::count(last_groups_, group) == 0) last_groups_.push_back(group);
  }
  return !last_groups_.empty() && take_logit_rows(batch, last_groups_, last_);
}

// Fills step_arrays_ and step_key_ (ops::StepInputs). `how`: the values that decide, besides shapes
// and addresses, which ops run.
void Decoder::describe_step(const ForwardBatch& batch, const KvStorage& cache, const Matrix& logits,
                            bool narrows, std::span<const int64_t> how) {
  step_arrays_.assign(
      {batch.token_ids, batch.positions, batch.query_start, batch.context_len, batch.logit_rows});
  step_key_.assign(
      {batch.tokens(), batch.sequences(), logits.rows, narrows ? last_.sequences() : int64_t{-1}});
  step_key_.insert(step_key_.end(), how.begin(), how.end());
  add_shape(batch.query_start, step_key_);
  if (narrows) add_shape(last_.query_start, step_key_);
  for (const BlockTables& table : batch.tables) {
    step_arrays_.push_back(table.ids);
    step_key_.push_back(table.stride);
  }
  // Copies of whole matrices: states, boundaries, a head's features.
  step_arrays_.push_back(std::span(every_).first(static_cast<size_t>(batch.tokens())));
  if (ops_.device() != nullptr) {
    for (int layer = 0; layer < static_cast<int>(cache.spec().layers.size()); ++layer) {
      const bool state = cache.spec().layers[static_cast<size_t>(layer)].state_bytes > 0;
      const uint8_t* const data = state ? cache.states(layer).data : cache.layer(layer).data;
      step_key_.push_back(reinterpret_cast<int64_t>(data));
    }
    // Another model on the same device has its own memory.
    step_key_.push_back(reinterpret_cast<int64_t>(logits.data));
  }
  if (narrows) {
    for (const std::vector<int32_t>* array :
         {&last_.positions, &last_.query_start, &last_.context_len}) {
      step_arrays_.push_back(*array);
    }
    for (const int group : last_groups_) {
      step_arrays_.push_back(last_.tables[static_cast<size_t>(group)].ids);
    }
  }
  const auto add = [&](std::span<const int32_t> array) {
    step_key_.push_back(std::ssize(array));
    if (!array.empty()) step_arrays_.push_back(array);
  };
  const auto add_views = [&](const std::vector<KeyView>& views) {
    for (const KeyView& view : views) {
      add(ops::numbers_of(view.ranges));
      add_shape(view.query_start, step_key_);
    }
  };
  add_views(key_views_);
  if (narrows) add_views(last_key_views_);
  for (const BlockTables& table : batch.tables) add(table.context_len);
  if (narrows) {
    for (const int group : last_groups_) {
      add(last_.tables[static_cast<size_t>(group)].context_len);
    }
  }
  add(batch.state_saves);
  add(even_);
  if (narrows) add(last_even_);
  if (spec_.token_types > 0) add(types_of(batch));
  if (!batch.ids_from.empty()) step_arrays_.push_back(batch.ids_from);
  step_arrays_.push_back(batch.samples);  // last, so that all arrays before it have a known size
}

void Decoder::find_views(const ForwardBatch& batch, const KvStorage& cache,
                         std::vector<KeyView>& views) {
  const std::vector<KvGroup>& groups = cache.spec().groups;
  views.resize(groups.size());
  for (size_t g = 0; g < groups.size(); ++g) {
    views[g].ranges.clear();
    views[g].query_start.clear();
    views[g].tokens.clear();
    if (g >= batch.tables.size() || batch.tables[g].ids.empty()) continue;
    find_key_ranges(batch, static_cast<int>(g), groups[g], views[g]);
  }
}

void Decoder::start(const ForwardBatch& batch, const KvStorage& cache, const StepResults& results,
                    int turn) {
  const int64_t tokens = batch.tokens();
  const auto rows = static_cast<int64_t>(batch.logit_rows.size());
  FRESHET_CHECK(tokens > 0 && tokens <= max_tokens_, "a step of {} tokens, planned for {}", tokens,
                max_tokens_);
  FRESHET_CHECK(rows <= max_logit_rows_, "logits of {} tokens, planned for {}", rows,
                max_logit_rows_);
  FRESHET_CHECK(static_cast<int64_t>(batch.positions.size()) == tokens,
                "{} positions for {} tokens", batch.positions.size(), tokens);
  FRESHET_CHECK(rows == 0 || spec_.generates, "logits of a model without a head");
  FRESHET_CHECK(batch.token_types.empty() || std::ssize(batch.token_types) == tokens,
                "{} token types for {} tokens", batch.token_types.size(), tokens);
  FRESHET_CHECK(results.kept == nullptr || ops_.device() != nullptr, "states kept on the host");
  arena_.reset();
  const bool on_device = ops_.device() != nullptr;
  between_ = on_device ? nullptr : results.between;
  stopped_ = false;
  const bool wants_states = results.hidden != nullptr || results.kept != nullptr;
  Matrix logits{results.logits, rows, spec_.vocab_size, spec_.vocab_size};
  Matrix states{results.hidden, tokens, spec_.hidden_size, spec_.hidden_size};
  int32_t* best = nullptr;
  if (on_device) {  // the same addresses in every step of the same shape
    logits = arena_.matrix(rows, spec_.vocab_size);
    if (wants_states) states = arena_.matrix(tokens, spec_.hidden_size);
    // On the host a sampler is as fast.
    if (results.best != nullptr && (!batch.best_only.empty() || !batch.samples.empty())) {
      best = named_.as<int32_t>();
    }
  }
  const bool takes = on_device && !batch.ids_from.empty();
  const bool draws = best != nullptr && !batch.samples.empty();
  boundaries_.clear();
  for (float* const to : results.boundaries) {
    boundaries_.push_back(on_device ? arena_.matrix(tokens, spec_.hidden_size)
                                    : Matrix{to, tokens, spec_.hidden_size, spec_.hidden_size});
  }
  // After the last branch that stores, only some rows continue.
  const bool all_rows = wants_states || !batch.scored.empty() || spec_.features.has_value() ||
                        (!boundaries_.empty() && captures_.back() > last_stored_.layer);
  const bool narrows = !all_rows && take_last_rows(batch, cache);
  if (!batch.encoder_inputs.empty()) encode(batch, cache);
  find_views(batch, cache, key_views_);
  if (narrows) find_views(last_, cache, last_key_views_);
  const bool even = find_even_positions(batch, narrows);
  describe_step(
      batch, cache, logits, narrows,
      std::array<int64_t, 11>{
          wants_states, best != nullptr, draws, takes, std::ssize(boundaries_), batch.own_states,
          reinterpret_cast<int64_t>(batch.features), std::ssize(batch.embedding_rows), even,
          reinterpret_cast<int64_t>(results.kept), reinterpret_cast<int64_t>(batch.id_map)});
  Step step{ops_, spec_, batch, cache, arena_, cos_sin_, key_views_};
  Step last{ops_, spec_, last_, cache, arena_, last_cos_sin_, last_key_views_, true};
  const bool repeats =
      even && batch.embedding_rows.empty() && recurs(batch, spec_.features.has_value());
  ops_.step({step_arrays_, step_key_, repeats}, [&] {
    if (takes) {
      ops_.take_ids(batch.token_ids, batch.ids_from, named_.as<int32_t>(), batch.id_map);
    }
    run(step, narrows ? &last : nullptr, logits, states, boundaries_);
    if (results.kept != nullptr) {
      ops_.gather_rows({results.kept, rows, spec_.hidden_size, spec_.hidden_size}, states,
                       batch.logit_rows);
    }
    if (best == nullptr || rows == 0) return;
    if (draws) return ops_.sample(logits, batch.samples, batch.token_ids, best);
    ops_.argmax(logits, best);
  });
  if (on_device) fetch_all(batch, logits, states, best, results, turn);
}

}  // namespace freshet
