#include "engine/model_runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "sampling/logits.h"

namespace freshet::engine {

using scheduler::Sequence;
using scheduler::Step;
using scheduler::StepItem;

Result<ModelRunner> ModelRunner::create(Model& model, KvStorage cache, int max_tokens,
                                        int max_logit_rows, Memory* host_memory) {
  if (model.spec().vocab_size > kMostVocab) {
    return unsupported("a vocabulary of {}: at most {} can be sampled from",
                       model.spec().vocab_size, kMostVocab);
  }
  const auto bytes = static_cast<size_t>(max_logit_rows) *
                     static_cast<size_t>(model.spec().vocab_size) * sizeof(float);
  FRESHET_ASSIGN_OR_RETURN(Buffer logits, Buffer::allocate(bytes, host_memory));
  FRESHET_ASSIGN_OR_RETURN(
      Buffer best,
      Buffer::allocate(2 * static_cast<size_t>(max_logit_rows) * sizeof(int32_t), host_memory));
  const auto state_bytes = static_cast<size_t>(max_tokens) *
                           static_cast<size_t>(model.spec().hidden_size) * sizeof(float);
  FRESHET_ASSIGN_OR_RETURN(Buffer states, Buffer::allocate(state_bytes));
  return ModelRunner(model, std::move(cache), std::move(logits), std::move(best),
                     std::move(states));
}

ModelRunner::ModelRunner(Model& model, KvStorage cache, Buffer logits, Buffer best, Buffer states)
    : model_(&model),
      cache_(std::move(cache)),
      logits_(std::move(logits)),
      best_(std::move(best)),
      states_(std::move(states)),
      vocab_(model.spec().vocab_size) {
  for (Turn& turn : turns_) turn.batch.tables.resize(cache_.spec().groups.size());
}

void ModelRunner::add(Turn& turn, const StepItem& item, const Sequence& s) {
  ForwardBatch& b = turn.batch;
  const int32_t known = s.size();
  for (int32_t p = item.first; p < item.first + item.count; ++p) {
    const bool draft = p >= known;
    const int32_t id =
        draft ? s.draft[static_cast<size_t>(p - known)] : s.tokens[static_cast<size_t>(p)];
    const bool expected = id == scheduler::kExpected;
    b.token_ids.push_back(expected ? 0 : id);
    if (overlaps()) b.ids_from.push_back(expected ? row_before_.at(s.id) : -1);
    b.positions.push_back(p);
  }
  const auto tokens = static_cast<int32_t>(b.token_ids.size());
  b.query_start.push_back(tokens);
  b.context_len.push_back(item.first + item.count);
  turn.first_row.push_back(static_cast<int64_t>(b.logit_rows.size()));
  for (int32_t i = tokens - item.logits; i < tokens; ++i) b.logit_rows.push_back(i);
  if (item.logits > 0) row_of_[s.id] = static_cast<int32_t>(b.logit_rows.size()) - 1;
}

// Where the best of the logits as they are will do, for all that are looked at, argmax() is told
// less. Lists that a step has no room for leave their rows to the host.
void ModelRunner::describe_rows(Turn& turn, const Step& step, Describe describe) {
  constexpr size_t kMostWords = size_t{1} << 20;
  ForwardBatch& b = turn.batch;
  const size_t rows = b.logit_rows.size();
  std::vector<int32_t>& words = b.samples;
  words.assign(rows * ops::kSampleRowWords, 0);
  b.best_only.assign(rows, 0);
  bool plain = true;
  for (size_t i = 0; i < step.items.size(); ++i) {
    if (step.items[i].logits == 0) continue;
    const size_t before = words.size();
    ops::SampleRow row = describe(step.items[i], words);
    if (words.size() > kMostWords) {
      words.resize(before);
      row = {};
    }
    const auto at = static_cast<size_t>(turn.first_row[i] + step.items[i].logits - 1);
    if (row.last >= 0) row.last = b.logit_rows[at];
    std::memcpy(words.data() + at * ops::kSampleRowWords, &row, sizeof row);
    const bool best = row.how == ops::SampleRow::kBest && words.size() == before && row.last < 0;
    b.best_only[at] = best;
    plain = plain && (best || row.how == ops::SampleRow::kNotHere);
  }
  if (plain || !model_->samples()) words.clear();
}

void ModelRunner::start(const Step& step, const scheduler::Scheduler& scheduler, bool hidden,
                        Describe describe) {
  for (const kv_cache::BlockCopy& copy : step.copies) {
    cache_.copy_block(copy.group, copy.from, copy.to);
  }
  started_ ^= 1;
  Turn& turn = turns_[started_];
  ForwardBatch& b = turn.batch;
  row_before_.swap(row_of_);
  row_of_.clear();
  b.token_ids.clear();
  b.ids_from.clear();
  b.positions.clear();
  b.query_start.assign(1, 0);
  b.context_len.clear();
  b.logit_rows.clear();
  turn.first_row.clear();
  for (const StepItem& item : step.items) add(turn, item, scheduler.sequence(item.sequence));
  describe_rows(turn, step, describe);

  for (size_t g = 0; g < b.tables.size(); ++g) {
    BlockTables& tables = b.tables[g];
    size_t stride = 0;
    for (const StepItem& item : step.items) {
      stride = std::max(stride, scheduler.sequence(item.sequence).blocks.ids[g].size());
    }
    constexpr size_t kPiece = kTablePiece;
    stride = (stride + kPiece - 1) / kPiece * kPiece;
    tables.stride = static_cast<int64_t>(stride);
    tables.ids.assign(stride * step.items.size(), kv_cache::kNoBlock);
    auto out = tables.ids.begin();
    for (const StepItem& item : step.items) {
      std::ranges::copy(scheduler.sequence(item.sequence).blocks.ids[g], out);
      out += static_cast<std::ptrdiff_t>(stride);
    }
  }
  FRESHET_CHECK(std::ssize(b.logit_rows) * vocab_ * 4 <= static_cast<int64_t>(logits_.size()),
                "{} rows of logits", b.logit_rows.size());
  auto* named = best_.as<int32_t>() + static_cast<size_t>(started_) * best_.size() / 8;
  turn.results = {logits_.as<float>(), hidden ? states_.as<float>() : nullptr, named};
  model_->start(b, cache_, turn.results, started_);
}

void ModelRunner::finish() {
  finished_ ^= 1;
  Turn& turn = turns_[finished_];
  model_->finish(turn.batch, turn.results, finished_);
}

bool ModelRunner::names(size_t item, int32_t k) const {
  const Turn& turn = turns_[started_];
  return overlaps() && turn.batch.names_token(static_cast<size_t>(turn.first_row[item] + k));
}

std::span<float> ModelRunner::row(size_t item, int32_t k) {
  const int64_t row = turns_[finished_].first_row[item] + k;
  return {logits_.as<float>() + row * vocab_, static_cast<size_t>(vocab_)};
}

int32_t ModelRunner::named(size_t item, int32_t k) const {
  const Turn& turn = turns_[finished_];
  return turn.results.best[turn.first_row[item] + k];
}

std::span<const float> ModelRunner::state(size_t item, int32_t i) const {
  const auto hidden = static_cast<size_t>(model_->spec().hidden_size);
  const ForwardBatch& b = turns_[finished_].batch;
  const auto token = static_cast<size_t>(b.query_start[item]) + static_cast<size_t>(i);
  return {states_.as<float>() + token * hidden, hidden};
}

}  // namespace freshet::engine
