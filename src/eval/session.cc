#include "eval/session.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "loader/checkpoint.h"

namespace freshet::eval {

Result<ModelSpec> Session::read_spec(const std::string& model) {
  FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(model));
  return freshet::read_spec(checkpoint);
}

Result<std::unique_ptr<Session>> Session::open(const SessionOptions& options) {
  std::unique_ptr<Session> s(new Session(options));
  s->loaded_ = options.loaded;
  s->compute_ = s->loaded_ != nullptr ? s->loaded_->shared_compute() : options.compute;
  if (s->compute_ == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(s->compute_, runtime::Compute::open(options));
  }
  // A wrong name is said before anything is loaded.
  FRESHET_RETURN_IF_ERROR(s->compute_->kv_type(options.kv_cache_dtype).status());
  if (s->loaded_ == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(s->loaded_, runtime::LoadedModel::load(s->compute_, options));
  }
  if (s->model().spec().encoder != nullptr && !options.encodes) {
    return unsupported("{} is an encoder-decoder: only `run`, `serve` and `eval logits` take those",
                       options.model);
  }
  if (!s->model().spec().generates && !options.states) {
    return invalid_argument(
        "{} gives no probabilities of tokens: this needs a model that writes text", options.model);
  }
  FRESHET_ASSIGN_OR_RETURN(s->kv_types_,
                           runtime::kv_types(*s->compute_, options.kv_cache_dtype,
                                             options.kv_cache_skip_layers, s->model().spec()));
  FRESHET_RETURN_IF_ERROR(s->make_cache());
  FRESHET_RETURN_IF_ERROR(
      s->loaded_->reserve({options.batch, options.logit_rows, options.context}));
  FRESHET_ASSIGN_OR_RETURN(s->logits_, s->loaded_->make_logits(options.logit_rows));
  return s;
}

Status Session::make_cache() {
  KvCacheSpec spec = kv_cache_spec(model().spec(), kv_types_);
  if (options_.sparse.selects()) {
    bool any = false;
    for (size_t g = 0; g < spec.groups.size(); ++g)
      any = any || spec.may_select(static_cast<int>(g));
    if (!any || compute_->device() != nullptr) {
      return unsupported("no layer of {} can read keys and values selectively{}", options_.model,
                         compute_->device() != nullptr ? " on a GPU; use --device cpu" : "");
    }
    if (options_.sparse.policy == kv_cache::SparsePolicy::kQuest) spec = with_bounds(spec);
    if (options_.sparse.policy == kv_cache::SparsePolicy::kSparq) spec = with_sums(spec);
  }
  if (options_.eviction != nullptr) FRESHET_RETURN_IF_ERROR(start_evictions(spec));
  std::vector<int32_t> pools;
  group_blocks_.clear();
  for (const KvGroup& group : spec.groups) {
    const int64_t tokens = group.cross > 0 ? group.cross : options_.context;
    const bool states = group.kind == KvKind::kState;
    group_blocks_.push_back(states ? 1 : (tokens + ops::kBlockTokens - 1) / ops::kBlockTokens);
    if (evictions_ != nullptr) ++group_blocks_.back();
    const int64_t all = group_blocks_.back() * options_.sequences;
    if (all > INT32_MAX) return resource_exhausted("{} blocks of cache are too many", all);
    pools.push_back(static_cast<int32_t>(all));
  }
  FRESHET_ASSIGN_OR_RETURN(cache_, loaded_->make_cache(spec, pools));
  length_.assign(static_cast<size_t>(options_.sequences), 0);
  encoded_.assign(static_cast<size_t>(options_.sequences), 0);
  state_group_ = spec.state_group();
  batch_.tables.resize(spec.groups.size());
  return {};
}

Status Session::start_evictions(KvCacheSpec& spec) {
  if (compute_->device() != nullptr)
    return unsupported("keys are evicted on the CPU only; use --device cpu");
  if (options_.eviction->differs_by_layer()) spec = group_by_layer(spec);
  FRESHET_ASSIGN_OR_RETURN(evictions_,
                           Evictions::make(options_.eviction, spec, options_.sequences));
  return {};
}

void Session::set_length(int sequence, int64_t tokens) {
  FRESHET_CHECK(tokens <= options_.context && evictions_ == nullptr);
  length_[static_cast<size_t>(sequence)] = tokens;
}

void Session::fill_tables(const Piece& piece, int row) {
  const auto sequence = static_cast<size_t>(piece.sequence);
  if (piece.encoder.positions() > 0) {
    batch_.encoder_inputs.push_back(piece.encoder);
    batch_.encoder_inputs.back().sequence = row;
    encoded_[sequence] = static_cast<int32_t>(piece.encoder.positions());
  }
  const std::vector<KvGroup>& groups = cache_.spec().groups;
  for (size_t g = 0; g < groups.size(); ++g) {
    BlockTables& t = batch_.tables[g];
    for (int64_t b = 0; b < t.stride; ++b)
      t.ids.push_back(static_cast<int32_t>(piece.sequence * t.stride + b));
    if (groups[g].cross == 0) continue;
    FRESHET_CHECK(encoded_[sequence] > 0 || groups[g].spans != SpanUse::kNone,
                  "a sequence without an input of the encoder");
    t.context_len.push_back(encoded_[sequence]);
  }
}

void Session::fill_batch(std::span<const Piece> pieces) {
  batch_.token_ids.clear();
  batch_.positions.clear();
  batch_.token_types.clear();
  batch_.query_start.assign(1, 0);
  batch_.context_len.clear();
  batch_.logit_rows.clear();
  batch_.encoder_inputs.clear();
  batch_.sparse.clear();
  batch_.scored.clear();
  runtime::clear_picture_tokens(batch_);
  const int axes = position_axes(model().spec());
  for (size_t g = 0; g < batch_.tables.size(); ++g) {
    batch_.tables[g].ids.clear();
    batch_.tables[g].context_len.clear();
    batch_.tables[g].stride = group_blocks_[g];
  }
  for (const Piece& piece : pieces) {
    int64_t& length = length_[static_cast<size_t>(piece.sequence)];
    const auto first = static_cast<int32_t>(batch_.token_ids.size());
    const auto count = static_cast<int32_t>(piece.ids.size());
    if (piece.pictures != nullptr) {
      runtime::add_picture_tokens(piece.pictures->prompt, piece.pictures->pointers(), axes,
                                  static_cast<int32_t>(length), count, batch_);
    }
    batch_.token_ids.insert(batch_.token_ids.end(), piece.ids.begin(), piece.ids.end());
    batch_.positions.resize(batch_.token_ids.size());
    std::iota(batch_.positions.begin() + first, batch_.positions.end(),
              static_cast<int32_t>(length));
    if (!piece.token_types.empty()) {
      batch_.token_types.resize(static_cast<size_t>(first));
      batch_.token_types.insert(batch_.token_types.end(), piece.token_types.begin(),
                                piece.token_types.end());
    }
    length += count;
    FRESHET_CHECK(length <= options_.context, "{} tokens, planned for {}", length,
                  options_.context);
    batch_.query_start.push_back(first + count);
    batch_.context_len.push_back(static_cast<int32_t>(length));
    if (const kv_cache::SparseAttention& sparse = options_.sparse; sparse.selects())
      batch_.sparse.push_back({sparse.rule(0), sparse.dense_layers});
    fill_tables(piece, static_cast<int>(batch_.context_len.size()) - 1);
    if (evictions_ != nullptr) evictions_->describe(piece.sequence, length, count, batch_);
    for (int64_t r = piece.logits_from; r >= 0 && r < count; ++r)
      batch_.logit_rows.push_back(first + static_cast<int32_t>(r));
  }
  if (!batch_.token_types.empty()) batch_.token_types.resize(batch_.token_ids.size());
  runtime::complete_picture_tokens(axes, batch_);
  FRESHET_CHECK(batch_.tokens() <= options_.batch &&
                std::ssize(batch_.logit_rows) <= options_.logit_rows);
}

// Runs a piece from eviction to eviction. Its rows of logits follow the first `row`; returns how
// many there are.
int64_t Session::run_evicting(const Piece& piece, int64_t row) {
  int64_t rows = 0;
  for (size_t done = 0, count = 0; done < piece.ids.size(); done += count) {
    const int64_t length = length_[static_cast<size_t>(piece.sequence)];
    evictions_->evict_due(piece.sequence, length, cache_, group_blocks_, loaded_->ops());
    count = std::min(piece.ids.size() - done,
                     static_cast<size_t>(evictions_->next(piece.sequence) - length));
    Piece part = piece;
    part.ids = piece.ids.subspan(done, count);
    if (piece.logits_from >= 0)
      part.logits_from = std::max<int64_t>(0, piece.logits_from - static_cast<int64_t>(done));
    fill_batch({&part, 1});
    float* const to = logits_.as<float>() + (row + rows) * model().spec().vocab_size;
    loaded_->model().forward(batch_, cache_, {to});
    rows += std::ssize(batch_.logit_rows);
  }
  return rows;
}

std::span<float> Session::run(std::span<const Piece> pieces) {
  if (evictions_ != nullptr) {
    int64_t row = 0;
    for (const Piece& piece : pieces) row += run_evicting(piece, row);
    return {logits_.as<float>(), static_cast<size_t>(row * model().spec().vocab_size)};
  }
  fill_batch(pieces);
  const auto rows = static_cast<int64_t>(batch_.logit_rows.size());
  loaded_->model().forward(batch_, cache_, {logits_.as<float>()});
  return {logits_.as<float>(), static_cast<size_t>(rows * model().spec().vocab_size)};
}

std::span<const float> Session::run_states(std::span<const Piece> pieces) {
  fill_batch(pieces);
  states_.resize(static_cast<size_t>(batch_.tokens() * model().spec().hidden_size));
  loaded_->model().forward(batch_, cache_, {logits_.as<float>(), states_.data()});
  return states_;
}

}  // namespace freshet::eval
