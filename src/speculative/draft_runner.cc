#include "speculative/draft_runner.h"

#include <algorithm>
#include <cstring>

namespace freshet::speculative {

using kv_cache::kBlockTokens;

namespace {

constexpr int kMostRounds = 16;  // of a chain

}  // namespace

size_t DraftRunner::buffer_bytes(const ModelSpec& spec, int64_t tokens, int64_t rows) {
  int64_t numbers = rows * spec.vocab_size;
  if (spec.features) {
    const int64_t width = std::max(spec.hidden_size, spec.features->width);
    numbers += rows * spec.hidden_size + tokens * (spec.hidden_size + width);
  }
  return static_cast<size_t>(numbers) * sizeof(float);
}

size_t cache_bytes_per_token(const ModelSpec& spec, ops::KvType type) {
  return kv_cache_spec(spec, type).bytes_per_token();
}

DraftRunner::DraftRunner(std::unique_ptr<runtime::LoadedModel> model,
                         const DraftRunnerLimits& limits, KvStorage cache,
                         std::unique_ptr<kv_cache::BlockCache> blocks)
    : model_(std::move(model)),
      limits_(limits),
      cache_(std::move(cache)),
      blocks_(std::move(blocks)) {
  batch_.tables.resize(cache_.spec().groups.size());
}

Result<std::unique_ptr<DraftRunner>> DraftRunner::create(
    std::unique_ptr<runtime::LoadedModel> model, const DraftRunnerLimits& limits) {
  FRESHET_RETURN_IF_ERROR(
      model->reserve({limits.max_tokens, limits.max_rows, limits.max_model_len}));
  const KvCacheSpec spec = kv_cache_spec(model->spec(), limits.kv_type);
  if (spec.state_group() >= 0) {
    return unsupported(
        "a draft model with state-space or linear-attention layers ({}) cannot take "
        "drafts back: choose one with attention alone",
        model->spec().architecture);
  }
  // A block more for each sequence: drafts run ahead of the target's tokens.
  const int64_t blocks = limits.cache_tokens / kBlockTokens + 2 * int64_t{limits.max_rows};
  const std::vector<int32_t> pools(spec.groups.size(),
                                   static_cast<int32_t>(std::min<int64_t>(blocks, INT32_MAX)));
  FRESHET_ASSIGN_OR_RETURN(KvStorage cache, model->make_cache(limits.kv_type, pools));
  kv_cache::BlockCache::Options options;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    options.groups.push_back({spec.groups[g].window, pools[g]});
  }
  auto block_cache = std::make_unique<kv_cache::BlockCache>(std::move(options));
  std::unique_ptr<DraftRunner> runner(
      new DraftRunner(std::move(model), limits, std::move(cache), std::move(block_cache)));
  FRESHET_RETURN_IF_ERROR(runner->allocate());
  return runner;
}

Status DraftRunner::allocate() {
  Memory* const memory = model_->ops().host_memory();
  const auto rows = static_cast<size_t>(limits_.max_rows);
  const auto tokens = static_cast<size_t>(limits_.max_tokens);
  const ModelSpec& spec = model_->spec();
  FRESHET_ASSIGN_OR_RETURN(logits_, model_->make_logits(limits_.max_rows));
  FRESHET_ASSIGN_OR_RETURN(best_, Buffer::allocate(kMostRounds * rows * sizeof(int32_t), memory));
  if (!spec.features) return {};
  const auto hidden = static_cast<size_t>(spec.hidden_size);
  last_states_.resize(rows * hidden);
  if (ops::Ops& ops = model_->ops(); ops.device() != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(kept_, Buffer::allocate(rows * hidden * sizeof(float), ops.memory()));
  }
  const size_t width = std::max(hidden, static_cast<size_t>(spec.features->width));
  FRESHET_ASSIGN_OR_RETURN(states_, Buffer::allocate(tokens * hidden * sizeof(float), memory));
  FRESHET_ASSIGN_OR_RETURN(features_, Buffer::allocate(tokens * width * sizeof(float), memory));
  return {};
}

bool DraftRunner::stores_features() const {
  return spec().features && spec().features->use == FeatureSpec::Use::kStored;
}

void DraftRunner::begin(DraftSequence& s, std::span<const int32_t> ids) {
  copies_.clear();
  const int32_t found = blocks_->begin(s.blocks, s.salt, ids, copies_);
  for (const kv_cache::BlockCopy& copy : copies_) cache_.copy_block(copy.group, copy.from, copy.to);
  s.ids.assign(ids.begin(), ids.begin() + found);
  s.confirmed = found;
}

void DraftRunner::cut(DraftSequence& s, int32_t count) {
  FRESHET_CHECK(count >= s.confirmed, "{} ids are confirmed, {} would be kept", s.confirmed, count);
  if (count < std::ssize(s.ids)) s.ids.resize(static_cast<size_t>(count));
}

void DraftRunner::confirm(DraftSequence& s, int32_t count) {
  if (count <= s.confirmed) return;
  blocks_->computed(s.blocks, s.ids, count);
  s.confirmed = count;
}

void DraftRunner::release(DraftSequence& s) {
  blocks_->release(s.blocks);
  s.ids.clear();
  s.confirmed = 0;
}

DraftSequence DraftRunner::fork(const DraftSequence& s) {
  DraftSequence copy;
  copy.blocks = blocks_->fork(s.blocks, static_cast<int32_t>(s.ids.size()));
  copy.ids = s.ids;
  copy.confirmed = s.confirmed;
  copy.salt = s.salt;
  return copy;
}

bool DraftRunner::reserve(Work& work) {
  DraftSequence& s = *work.sequence;
  const auto computed = static_cast<int32_t>(s.ids.size());
  const int32_t end = computed + static_cast<int32_t>(work.ids.size());
  if (end > limits_.max_model_len) return false;
  if (s.blocks.empty()) {  // a table without a prefix
    copies_.clear();
    blocks_->begin(s.blocks, s.salt, {}, copies_);
  }
  copies_.clear();
  if (!blocks_->reserve(s.blocks, computed, end, copies_)) return false;
  for (const kv_cache::BlockCopy& copy : copies_) cache_.copy_block(copy.group, copy.from, copy.to);
  return true;
}

// Steps of at most max_tokens ids and max_rows sequences. REQUIRES: no work is larger than a step.
void DraftRunner::run(std::span<Work> work, bool own_states) {
  step_.clear();
  int64_t tokens = 0;
  size_t rows = 0;
  int wanted = 0;
  const auto flush = [&] {
    if (!step_.empty()) run_batch(step_, own_states, rows);
    step_.clear();
    tokens = wanted = 0;
  };
  for (Work& w : work) {
    const auto count = std::ssize(w.ids);
    if (tokens + count > limits_.max_tokens || wanted + w.wanted > limits_.max_rows) flush();
    w.failed = !reserve(w);
    if (w.failed) continue;
    step_.push_back(&w);
    tokens += count;
    wanted += w.wanted;
  }
  flush();
}

void DraftRunner::add(Work& work, size_t row) {
  DraftSequence& s = *work.sequence;
  const size_t first = batch_.token_ids.size();
  const auto begin = static_cast<int32_t>(s.ids.size());
  const ops::KeyRange span{begin, begin + static_cast<int32_t>(work.ids.size())};
  if (stores_features() && work.features == nullptr)
    batch_.spans.insert(batch_.spans.end(), work.ids.size(), span);
  for (const int32_t id : work.ids) {
    batch_.positions.push_back(static_cast<int32_t>(s.ids.size()));
    batch_.token_ids.push_back(id);
    s.ids.push_back(id);
  }
  const auto end = static_cast<int32_t>(batch_.token_ids.size());
  batch_.query_start.push_back(end);
  batch_.context_len.push_back(static_cast<int32_t>(s.ids.size()));
  for (int at = end - work.wanted; work.wants_token && at < end; ++at) {
    batch_.logit_rows.push_back(at);
    batch_.best_only.push_back(work.wants_logits ? 0 : 1);
  }
  for (size_t g = 0; g < batch_.tables.size(); ++g) {
    BlockTables& t = batch_.tables[g];
    std::ranges::copy(s.blocks.ids[g], t.ids.begin() + static_cast<std::ptrdiff_t>(row) * t.stride);
  }
  if (work.features == nullptr) return;
  const FeatureSpec& f = *spec().features;
  const auto width = static_cast<size_t>(batch_.own_states ? spec().hidden_size : f.width);
  std::memcpy(features_.as<float>() + first * width, work.features,
              work.ids.size() * width * sizeof(float));
}

void DraftRunner::make_batch(std::span<Work* const> work, bool own_states) {
  order_.assign(work.begin(), work.end());
  std::ranges::stable_partition(order_, [](const Work* w) { return w->ids.size() == 1; });
  ForwardBatch& b = batch_;
  b.token_ids.clear();
  b.positions.clear();
  b.query_start.assign(1, 0);
  b.context_len.clear();
  b.logit_rows.clear();
  b.best_only.clear();
  b.ids_from.clear();
  b.id_map = nullptr;
  b.spans.clear();
  b.own_states = own_states;
  const bool block = stores_features() && order_.front()->features == nullptr;
  b.features = spec().features && !block ? features_.as<float>() : nullptr;
  for (size_t g = 0; g < b.tables.size(); ++g) {
    size_t longest = 0;
    for (const Work* w : order_) longest = std::max(longest, w->sequence->blocks.ids[g].size());
    const auto stride = static_cast<int64_t>(longest);
    b.tables[g].stride = (stride + kTablePiece - 1) / kTablePiece * kTablePiece;
    b.tables[g].ids.assign(order_.size() * static_cast<size_t>(b.tables[g].stride),
                           kv_cache::kNoBlock);
  }
  for (size_t i = 0; i < order_.size(); ++i) add(*order_[i], i);
}

void DraftRunner::run_batch(std::span<Work* const> work, bool own_states, size_t& rows) {
  make_batch(work, own_states);
  const ForwardBatch& b = batch_;
  const auto vocab = static_cast<size_t>(spec().vocab_size);
  const auto hidden = static_cast<size_t>(spec().hidden_size);
  const bool heads = spec().features && !stores_features();  // those that read their own states
  const StepResults results{logits_.as<float>() + rows * vocab,
                            heads ? states_.as<float>() : nullptr, best_.as<int32_t>() + rows};
  model_->model().forward(b, cache_, results);
  for (size_t i = 0; i < order_.size(); ++i) {
    Work& w = *order_[i];
    if (!w.wants_token) continue;
    if (heads) {
      const auto last = static_cast<size_t>(b.query_start[i + 1]) - 1;
      float* const kept = last_states_.data() + rows * hidden;
      std::copy_n(states_.as<float>() + last * hidden, hidden, kept);
      w.state = {kept, hidden};
    }
    const auto wanted = static_cast<size_t>(w.wanted);
    const std::span<int32_t> best(best_.as<int32_t>() + rows, wanted);
    const std::span<float> logits(logits_.as<float>() + rows * vocab, wanted * vocab);
    rows += wanted;
    for (size_t k = 0; k < wanted; ++k) {
      if (best[k] != StepResults::kSeeLogits) continue;
      w.logits = logits;
      if (w.wants_logits) continue;
      const std::span<float> row = logits.subspan(k * vocab, vocab);
      best[k] = static_cast<int32_t>(std::ranges::max_element(row) - row.begin());
    }
    w.tokens = best;
    w.token = best.back();
  }
}

// ---- rounds without the host -------------------------------------------------------------------

Status DraftRunner::set_id_map(std::span<const int32_t> ids) {
  ops::Ops& ops = model_->ops();
  if (ids.empty() || ops.device() == nullptr) return {};
  // Ops copy bytes.
  const auto* const bits = reinterpret_cast<const float*>(ids.data());
  FRESHET_ASSIGN_OR_RETURN(id_map_, ops.upload(std::span(bits, ids.size())));
  return {};
}

bool DraftRunner::chains(std::span<const Work> work, std::span<const int> rounds) const {
  if (model_->ops().device() == nullptr || !model_->model().samples()) return false;
  int64_t tokens = 0;
  for (const Work& w : work) {
    if (w.wants_logits || w.wanted != 1) return false;
    tokens += std::ssize(w.ids);
  }
  return tokens <= limits_.max_tokens && std::ssize(work) <= limits_.max_rows &&
         std::ranges::all_of(rounds, [](int n) { return n <= kMostRounds; });
}

std::vector<std::vector<int32_t>> DraftRunner::chain(std::span<Work> work,
                                                     std::span<const int> rounds) {
  const bool heads = spec().features.has_value();
  const auto hidden = static_cast<size_t>(spec().hidden_size);
  constexpr int32_t kUnknown = -1;
  std::vector<Work> later(work.begin(), work.end());
  std::vector<std::vector<size_t>> rows;  // of each round: the works in the order of their rows
  std::vector<int32_t> row_of(work.size(), -1);  // in the round before
  StepResults results{.logits = logits_.as<float>()};
  size_t done = 0;
  for (int round = 0; round < kMostRounds; ++round) {
    step_.clear();
    for (size_t i = 0; i < work.size(); ++i) {
      Work& w = round == 0 ? work[i] : later[i];
      if (rounds[i] <= round || work[i].failed) continue;
      if (round > 0) {
        if (row_of[i] < 0) continue;
        w.ids = std::span(&kUnknown, 1);
        w.features = nullptr;
      }
      w.failed = !reserve(w);
      if (!w.failed) step_.push_back(&w);
    }
    if (step_.empty()) break;
    make_batch(step_, round > 0);
    const Work* const first = round == 0 ? work.data() : later.data();
    std::vector<size_t>& order = rows.emplace_back();
    for (const Work* w : order_) order.push_back(static_cast<size_t>(w - first));
    if (round > 0) {
      for (const size_t i : order) batch_.ids_from.push_back(row_of[i]);
      std::ranges::fill(batch_.token_ids, 0);
      batch_.id_map = id_map_.size() > 0 ? id_map_.as<int32_t>() : nullptr;
      batch_.features = heads ? kept_.as<float>() : nullptr;
    }
    std::ranges::fill(row_of, -1);
    for (size_t r = 0; r < order.size(); ++r) row_of[order[r]] = static_cast<int32_t>(r);
    results.best = best_.as<int32_t>() + done;
    results.hidden = heads && round == 0 ? states_.as<float>() : nullptr;
    results.kept = heads ? kept_.as<float>() : nullptr;
    model_->model().start(batch_, cache_, results, 0);
    if (round == 0) first_rows_.assign(batch_.query_start.begin() + 1, batch_.query_start.end());
    done += order.size();
  }
  std::vector<std::vector<int32_t>> tokens(work.size());
  if (rows.empty()) return tokens;
  model_->model().finish(batch_, results, 0);
  const int32_t* best = best_.as<int32_t>();
  for (const std::vector<size_t>& order : rows) {
    for (const size_t i : order) tokens[i].push_back(*best++);
  }
  for (size_t r = 0; heads && r < rows.front().size(); ++r) {
    float* const kept = last_states_.data() + r * hidden;
    const auto last = static_cast<size_t>(first_rows_[r]) - 1;
    std::copy_n(states_.as<float>() + last * hidden, hidden, kept);
    work[rows.front()[r]].state = {kept, hidden};
  }
  return tokens;
}

}  // namespace freshet::speculative
