#include "engine/model_runner.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "sampling/logits.h"

namespace freshet::engine {

using scheduler::Sequence;
using scheduler::Step;
using scheduler::StepItem;

Result<ModelRunner> ModelRunner::create(Model& model, KvStorage cache, int max_tokens,
                                        int max_logit_rows, int boundaries, bool states_ahead,
                                        Memory* host_memory) {
  if (model.spec().vocab_size > kMostVocab) {
    return unsupported("a vocabulary of {}: at most {} can be sampled from",
                       model.spec().vocab_size, kMostVocab);
  }
  const auto width = static_cast<size_t>(model.spec().generates ? model.spec().vocab_size : 1);
  const auto bytes = static_cast<size_t>(max_logit_rows) * width * sizeof(float);
  FRESHET_ASSIGN_OR_RETURN(Buffer logits, Buffer::allocate(bytes, host_memory));
  FRESHET_ASSIGN_OR_RETURN(
      Buffer sampled,
      Buffer::allocate(2 * static_cast<size_t>(max_logit_rows) * sizeof(int32_t), host_memory));
  const bool twice = states_ahead && model.samples();
  const auto state_bytes = static_cast<size_t>(twice ? 2 : 1) * static_cast<size_t>(max_tokens) *
                           static_cast<size_t>(model.spec().hidden_size) * sizeof(float);
  FRESHET_ASSIGN_OR_RETURN(Buffer states,
                           Buffer::allocate(state_bytes, twice ? host_memory : nullptr));
  std::vector<Buffer> inner(static_cast<size_t>(boundaries));
  for (Buffer& buffer : inner) {
    FRESHET_ASSIGN_OR_RETURN(buffer, Buffer::allocate(state_bytes, host_memory));
  }
  return ModelRunner(model, std::move(cache), std::move(logits), std::move(sampled),
                     std::move(states), std::move(inner), twice);
}

ModelRunner::ModelRunner(Model& model, KvStorage cache, Buffer logits, Buffer sampled,
                         Buffer states, std::vector<Buffer> boundaries, bool states_twice)
    : model_(&model),
      cache_(std::move(cache)),
      logits_(std::move(logits)),
      sampled_(std::move(sampled)),
      states_(std::move(states)),
      boundaries_(std::move(boundaries)),
      vocab_(model.spec().vocab_size),
      axes_(position_axes(model.spec())) {
  for (Turn& turn : turns_) turn.batch.tables.resize(cache_.spec().groups.size());
  for (size_t turn = 0; turn < 2; ++turn) {
    const size_t place = states_twice ? turn : 0;
    const auto at = [&](Buffer& b) {
      return b.as<float>() + place * (b.size() / sizeof(float) / 2);
    };
    state_data_[turn] = at(states_);
    for (Buffer& buffer : boundaries_) boundary_data_[turn].push_back(at(buffer));
  }
}

void ModelRunner::clear(Turn& turn, const Step& step) {
  ForwardBatch& b = turn.batch;
  b.token_ids.clear();
  b.ids_from.clear();
  b.positions.clear();
  b.token_types.clear();
  b.query_start.assign(1, 0);
  b.context_len.clear();
  b.logit_rows.clear();
  b.scored.clear();
  turn.scores.clear();
  b.sparse.clear();
  b.cross_readers.clear();
  b.state_saves.clear();
  runtime::clear_picture_tokens(b);
  turn.order.clear();
  for (const bool single : {true, false}) {
    for (size_t i = 0; i < step.items.size(); ++i) {
      if ((step.items[i].count == 1) == single) turn.order.push_back(i);
    }
  }
  turn.first_row.resize(step.items.size());
  turn.first_token.resize(step.items.size());
}

void ModelRunner::add(Turn& turn, size_t item, const StepItem& part, const Sequence& s,
                      const Pictures& pictures) {
  ForwardBatch& b = turn.batch;
  const int32_t known = s.size();
  const std::vector<int32_t>& drafts = s.draft_of(part);
  turn.first_token[item] = std::ssize(b.token_ids);
  if (pictures.prompt != nullptr) {
    runtime::add_picture_tokens(*pictures.prompt, pictures.rows, axes_, part.first, part.count, b);
  }
  for (int32_t p = part.first; p < part.first + part.count; ++p) {
    const bool draft = p >= known;
    const int32_t id =
        draft ? drafts[static_cast<size_t>(p - known)] : s.tokens[static_cast<size_t>(p)];
    const bool expected = id == scheduler::kExpected;
    b.token_ids.push_back(expected ? 0 : id);
    if (overlaps()) b.ids_from.push_back(expected ? row_before_.at(s.id) : -1);
    b.positions.push_back(p);
  }
  if (!s.token_types.empty()) {
    b.token_types.resize(static_cast<size_t>(turn.first_token[item]));
    for (int32_t p = part.first; p < part.first + part.count; ++p)
      b.token_types.push_back(s.token_types[static_cast<size_t>(p)]);
  }
  const std::vector<kv_cache::SavedState>& saves = s.blocks_of(part).saves;
  if (!saves.empty()) b.state_saves.resize(b.token_ids.size(), -1);
  for (const kv_cache::SavedState& saved : saves) {
    const int32_t token =
        static_cast<int32_t>(turn.first_token[item]) + saved.tokens - 1 - part.first;
    b.state_saves[static_cast<size_t>(token)] = saved.slot;
  }
  const auto tokens = static_cast<int32_t>(b.token_ids.size());
  b.query_start.push_back(tokens);
  b.context_len.push_back(part.first + part.count);
  if (part.first + part.count > s.scored_from) score(turn, part, s);
  if (const kv_cache::SparseAttention& sparse = s.request->sparse; sparse.selects()) {
    b.sparse.resize(b.context_len.size());
    b.sparse.back() = {sparse.rule(s.prompt_tokens), sparse.dense_layers};
  }
  if (s.request->cross_weights != nullptr) {
    b.cross_readers.push_back(
        {static_cast<int32_t>(b.context_len.size()) - 1, s.request->cross_weights});
  }
  turn.first_row[item] = std::ssize(b.logit_rows);
  for (int32_t i = tokens - part.logits; i < tokens; ++i) b.logit_rows.push_back(i);
  if (part.logits > 0 && part.branch < 0)
    row_of_[s.id] = static_cast<int32_t>(b.logit_rows.size()) - 1;
}

// If all described rows are plain greedy, the descriptors are dropped, and the model runs argmax()
// on these rows. Rows whose lists exceed the room of a step are left to the host.
void ModelRunner::describe_rows(Turn& turn, const Step& step, Describe describe) {
  constexpr size_t kMostWords = size_t{1} << 20;
  ForwardBatch& b = turn.batch;
  std::vector<int32_t>& words = b.samples;
  words.assign(b.logit_rows.size() * ops::kSampleRowWords, 0);
  b.best_only.assign(b.logit_rows.size(), 0);
  bool greedy = true;
  for (const size_t item : turn.order) {
    const StepItem& part = step.items[item];
    for (int32_t row = std::max(0, part.logits - 1 - part.draft); row < part.logits; ++row) {
      const size_t before = words.size();
      ops::SampleRow descriptor = describe(item, row, words);
      if (words.size() > kMostWords) {
        words.resize(before);
        descriptor = {};
      }
      const size_t at = row_at(turn, item, row);
      if (descriptor.last >= 0) descriptor.last = b.logit_rows[at];
      std::memcpy(words.data() + at * ops::kSampleRowWords, &descriptor, sizeof descriptor);
      const bool best =
          descriptor.how == ops::SampleRow::kBest && words.size() == before && descriptor.last < 0;
      b.best_only[at] = best;
      greedy = greedy && (best || descriptor.how == ops::SampleRow::kNotHere);
    }
  }
  if (greedy || !model_->samples()) words.clear();
}

void ModelRunner::fill_tables(Turn& turn, const Step& step, const scheduler::Scheduler& scheduler) {
  for (size_t g = 0; g < turn.batch.tables.size(); ++g) {
    if (cache_.spec().groups[g].cross > 0) {
      fill_encoder_table(turn, g, step, scheduler);
      continue;
    }
    BlockTables& tables = turn.batch.tables[g];
    size_t stride = 0;
    for (const StepItem& item : step.items) {
      stride = std::max(stride, scheduler.sequence(item.sequence).blocks_of(item).ids[g].size());
    }
    constexpr size_t kPiece = kTablePiece;
    stride = (stride + kPiece - 1) / kPiece * kPiece;
    tables.stride = static_cast<int64_t>(stride);
    tables.ids.assign(stride * step.items.size(), kv_cache::kNoBlock);
    tables.context_len.clear();
    auto out = tables.ids.begin();
    bool evicted = false;
    for (const size_t i : turn.order) {
      const StepItem& item = step.items[i];
      const kv_cache::BlockTable& blocks = scheduler.sequence(item.sequence).blocks_of(item);
      std::ranges::copy(blocks.ids[g], out);
      out += static_cast<std::ptrdiff_t>(stride);
      tables.context_len.push_back(blocks.slots(static_cast<int>(g), item.first + item.count));
      evicted = evicted || blocks.evicts();
    }
    if (!evicted) tables.context_len.clear();
    fill_coarse_table(turn, g, step, scheduler);
  }
}

void ModelRunner::fill_coarse_table(Turn& turn, size_t group, const Step& step,
                                    const scheduler::Scheduler& scheduler) {
  BlockTables& tables = turn.batch.tables[group];
  tables.coarse_slots.clear();
  tables.coarse_ids.clear();
  tables.coarse_stride = 0;
  const auto blocks_of = [&](size_t i) -> const kv_cache::BlockTable& {
    return scheduler.sequence(step.items[i].sequence).blocks_of(step.items[i]);
  };
  for (const size_t i : turn.order) {
    if (blocks_of(i).coarse_slots(static_cast<int>(group)) > 0)
      tables.coarse_stride = std::max(tables.coarse_stride, std::ssize(blocks_of(i).coarse[group]));
  }
  if (tables.coarse_stride == 0) return;
  tables.coarse_parts = cache_.spec().coarse_parts(static_cast<int>(group));
  for (const size_t i : turn.order) {
    tables.coarse_slots.push_back(blocks_of(i).coarse_slots(static_cast<int>(group)));
    if (tables.coarse_slots.back() > 0)
      std::ranges::copy(blocks_of(i).coarse[group], std::back_inserter(tables.coarse_ids));
    tables.coarse_ids.resize(tables.coarse_slots.size() * static_cast<size_t>(tables.coarse_stride),
                             kv_cache::kNoBlock);
  }
}

// The encoder's output belongs to the request, whose sequences all read it.
void ModelRunner::fill_encoder_table(Turn& turn, size_t group, const Step& step,
                                     const scheduler::Scheduler& scheduler) {
  BlockTables& tables = turn.batch.tables[group];
  tables.ids.clear();
  tables.context_len.clear();
  tables.stride = 0;
  const auto request_of = [&](size_t i) -> const scheduler::Request& {
    return *scheduler.sequence(step.items[i].sequence).request;
  };
  for (const size_t i : turn.order)
    tables.stride = std::max(tables.stride, std::ssize(request_of(i).encoder_blocks));
  for (const size_t i : turn.order) {
    const scheduler::Request& r = request_of(i);
    tables.context_len.push_back(r.encoder_tokens);
    tables.ids.insert(tables.ids.end(), r.encoder_blocks.begin(), r.encoder_blocks.end());
    tables.ids.resize(tables.context_len.size() * static_cast<size_t>(tables.stride),
                      kv_cache::kNoBlock);
  }
}

void ModelRunner::start(const Step& step, const scheduler::Scheduler& scheduler, bool states,
                        Describe describe, Encode encode, Show show) {
  for (const kv_cache::BlockCopy& copy : step.copies) {
    cache_.copy_block(copy.group, copy.from, copy.to);
  }
  started_ ^= 1;
  Turn& turn = turns_[started_];
  ForwardBatch& b = turn.batch;
  row_before_.swap(row_of_);
  row_of_.clear();
  clear(turn, step);
  for (const size_t item : turn.order)
    add(turn, item, step.items[item], scheduler.sequence(step.items[item].sequence), show(item));
  runtime::complete_picture_tokens(axes_, b);
  if (!b.token_types.empty()) b.token_types.resize(b.token_ids.size());
  b.encoder_inputs.clear();
  for (size_t row = 0; row < turn.order.size(); ++row) {
    if (!step.items[turn.order[row]].encodes) continue;
    b.encoder_inputs.push_back(encode(turn.order[row]));
    b.encoder_inputs.back().sequence = static_cast<int>(row);
  }
  if (!b.state_saves.empty()) b.state_saves.resize(b.token_ids.size(), -1);
  if (!b.sparse.empty()) b.sparse.resize(b.context_len.size());
  describe_rows(turn, step, describe);
  fill_tables(turn, step, scheduler);
  FRESHET_CHECK(std::ssize(b.logit_rows) * vocab_ * 4 <= static_cast<int64_t>(logits_.size()),
                "{} rows of logits", b.logit_rows.size());
  auto* sampled = sampled_.as<int32_t>() + static_cast<size_t>(started_) * sampled_.size() / 8;
  turn.results = {logits_.as<float>(), states ? state_data_[started_] : nullptr, sampled,
                  boundary_data_[started_]};
  model_->start(b, cache_, turn.results, started_);
}

void ModelRunner::finish() {
  finished_ ^= 1;
  Turn& turn = turns_[finished_];
  model_->finish(turn.batch, turn.results, finished_);
}

bool ModelRunner::will_sample(size_t item, int32_t row) const {
  const Turn& turn = turns_[started_];
  return overlaps() && turn.batch.names_token(row_at(turn, item, row));
}

std::span<float> ModelRunner::row(size_t item, int32_t row) {
  const size_t at = row_at(turns_[finished_], item, row);
  return {logits_.as<float>() + static_cast<int64_t>(at) * vocab_, static_cast<size_t>(vocab_)};
}

int32_t ModelRunner::sampled(size_t item, int32_t row) const {
  const Turn& turn = turns_[finished_];
  return turn.results.best[row_at(turn, item, row)];
}

std::span<const float> ModelRunner::state(size_t item, int32_t i) const {
  const auto hidden = static_cast<size_t>(model_->spec().hidden_size);
  const auto token = static_cast<size_t>(turns_[finished_].first_token[item] + i);
  return {state_data_[finished_] + token * hidden, hidden};
}

const float* ModelRunner::boundary(size_t which, size_t item, int32_t i) const {
  const auto hidden = static_cast<size_t>(model_->spec().hidden_size);
  const auto token = static_cast<size_t>(turns_[finished_].first_token[item] + i);
  return boundary_data_[finished_][which] + token * hidden;
}

}  // namespace freshet::engine
