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
      Buffer::allocate(static_cast<size_t>(max_logit_rows) * sizeof(int32_t), host_memory));
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
  batch_.tables.resize(cache_.spec().groups.size());
}

void ModelRunner::add(const StepItem& item, const Sequence& s) {
  const int32_t known = s.size();
  for (int32_t p = item.first; p < item.first + item.count; ++p) {
    const bool draft = p >= known;
    batch_.token_ids.push_back(draft ? s.draft[static_cast<size_t>(p - known)]
                                     : s.tokens[static_cast<size_t>(p)]);
    batch_.positions.push_back(p);
  }
  const auto tokens = static_cast<int32_t>(batch_.token_ids.size());
  batch_.query_start.push_back(tokens);
  batch_.context_len.push_back(item.first + item.count);
  first_row_.push_back(static_cast<int64_t>(batch_.logit_rows.size()));
  for (int32_t i = tokens - item.logits; i < tokens; ++i) batch_.logit_rows.push_back(i);
}

// Where the best of the logits as they are will do, for all that are looked at, argmax() is told
// less. Lists that a step has no room for leave their rows to the host.
void ModelRunner::describe_rows(const Step& step, Describe describe) {
  constexpr size_t kMostWords = size_t{1} << 20;
  const size_t rows = batch_.logit_rows.size();
  std::vector<int32_t>& words = batch_.samples;
  words.assign(rows * ops::kSampleRowWords, 0);
  batch_.best_only.assign(rows, 0);
  bool plain = true;
  for (size_t i = 0; i < step.items.size(); ++i) {
    if (step.items[i].logits == 0) continue;
    const size_t before = words.size();
    ops::SampleRow row = describe(step.items[i], words);
    if (words.size() > kMostWords) {
      words.resize(before);
      row = {};
    }
    const auto at = static_cast<size_t>(first_row_[i] + step.items[i].logits - 1);
    std::memcpy(words.data() + at * ops::kSampleRowWords, &row, sizeof row);
    const bool best = row.how == ops::SampleRow::kBest && words.size() == before;
    batch_.best_only[at] = best;
    plain = plain && (best || row.how == ops::SampleRow::kNotHere);
  }
  if (plain || !model_->samples()) words.clear();
}

void ModelRunner::run(const Step& step, const scheduler::Scheduler& scheduler, bool hidden,
                      Describe describe) {
  for (const kv_cache::BlockCopy& copy : step.copies) {
    cache_.copy_block(copy.group, copy.from, copy.to);
  }
  batch_.token_ids.clear();
  batch_.positions.clear();
  batch_.query_start.assign(1, 0);
  batch_.context_len.clear();
  batch_.logit_rows.clear();
  first_row_.clear();
  for (const StepItem& item : step.items) {
    add(item, scheduler.sequence(item.sequence));
  }
  describe_rows(step, describe);

  for (size_t g = 0; g < batch_.tables.size(); ++g) {
    BlockTables& tables = batch_.tables[g];
    size_t stride = 0;
    for (const StepItem& item : step.items) {
      stride = std::max(stride, scheduler.sequence(item.sequence).blocks.ids[g].size());
    }
    // In whole pieces, so that a device sees few different shapes.
    constexpr size_t kPiece = 64;
    stride = (stride + kPiece - 1) / kPiece * kPiece;
    tables.stride = static_cast<int64_t>(stride);
    tables.ids.assign(stride * step.items.size(), kv_cache::kNoBlock);
    auto out = tables.ids.begin();
    for (const StepItem& item : step.items) {
      std::ranges::copy(scheduler.sequence(item.sequence).blocks.ids[g], out);
      out += static_cast<std::ptrdiff_t>(stride);
    }
  }
  FRESHET_CHECK(std::ssize(batch_.logit_rows) * vocab_ * 4 <= static_cast<int64_t>(logits_.size()),
                "{} rows of logits", batch_.logit_rows.size());
  model_->forward(
      batch_, cache_,
      {logits_.as<float>(), hidden ? states_.as<float>() : nullptr, best_.as<int32_t>()});
}

std::span<float> ModelRunner::row(size_t item, int32_t k) {
  return {logits_.as<float>() + (first_row_[item] + k) * vocab_, static_cast<size_t>(vocab_)};
}

int32_t ModelRunner::named(size_t item, int32_t k) const {
  return best_.as<int32_t>()[first_row_[item] + k];
}

std::span<const float> ModelRunner::state(size_t item, int32_t i) const {
  const auto hidden = static_cast<size_t>(model_->spec().hidden_size);
  const auto token = static_cast<size_t>(batch_.query_start[item]) + static_cast<size_t>(i);
  return {states_.as<float>() + token * hidden, hidden};
}

}  // namespace freshet::engine
