#include "eval/session.h"

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
  s->compute_ = options.compute;
  if (s->compute_ == nullptr) {
    FRESHET_ASSIGN_OR_RETURN(s->compute_, runtime::Compute::open(options));
  }
  FRESHET_ASSIGN_OR_RETURN(s->kv_type_, s->compute_->kv_type(options.kv_cache_dtype));
  FRESHET_ASSIGN_OR_RETURN(s->loaded_, runtime::LoadedModel::load(s->compute_, options));
  FRESHET_RETURN_IF_ERROR(s->make_cache());
  FRESHET_RETURN_IF_ERROR(
      s->loaded_->reserve({options.batch, options.logit_rows, options.context}));
  FRESHET_ASSIGN_OR_RETURN(s->logits_, s->loaded_->make_logits(options.logit_rows));
  return s;
}

Status Session::make_cache() {
  const KvCacheSpec spec = kv_cache_spec(model().spec(), kv_type_);
  blocks_ = (options_.context + ops::kBlockTokens - 1) / ops::kBlockTokens;
  const int64_t all = blocks_ * options_.sequences;
  if (all > INT32_MAX) return resource_exhausted("{} blocks of cache are too many", all);
  FRESHET_ASSIGN_OR_RETURN(cache_,
                           loaded_->make_cache(kv_type_, spec.pools(options_.sequences, all)));
  length_.assign(static_cast<size_t>(options_.sequences), 0);
  state_group_ = spec.state_group();
  batch_.tables.resize(spec.groups.size());
  return {};
}

void Session::set_length(int sequence, int64_t tokens) {
  FRESHET_CHECK(tokens <= options_.context);
  length_[static_cast<size_t>(sequence)] = tokens;
}

std::span<float> Session::run(std::span<const Piece> pieces) {
  batch_.token_ids.clear();
  batch_.positions.clear();
  batch_.query_start.assign(1, 0);
  batch_.context_len.clear();
  batch_.logit_rows.clear();
  for (BlockTables& t : batch_.tables) {
    t.ids.clear();
    t.stride = blocks_;
  }
  for (const Piece& piece : pieces) {
    int64_t& length = length_[static_cast<size_t>(piece.sequence)];
    const auto first = static_cast<int32_t>(batch_.token_ids.size());
    const auto count = static_cast<int32_t>(piece.ids.size());
    batch_.token_ids.insert(batch_.token_ids.end(), piece.ids.begin(), piece.ids.end());
    batch_.positions.resize(batch_.token_ids.size());
    std::iota(batch_.positions.begin() + first, batch_.positions.end(),
              static_cast<int32_t>(length));
    length += count;
    FRESHET_CHECK(length <= options_.context, "{} tokens, planned for {}", length,
                  options_.context);
    batch_.query_start.push_back(first + count);
    batch_.context_len.push_back(static_cast<int32_t>(length));
    for (BlockTables& t : batch_.tables) {
      if (&t - batch_.tables.data() == state_group_) {
        t.stride = 1;
        t.ids.push_back(piece.sequence);
        continue;
      }
      for (int64_t b = 0; b < blocks_; ++b)
        t.ids.push_back(static_cast<int32_t>(piece.sequence * blocks_ + b));
    }
    for (int64_t r = piece.logits_from; r >= 0 && r < count; ++r)
      batch_.logit_rows.push_back(first + static_cast<int32_t>(r));
  }
  const auto rows = static_cast<int64_t>(batch_.logit_rows.size());
  FRESHET_CHECK(batch_.tokens() <= options_.batch && rows <= options_.logit_rows);
  loaded_->model().forward(batch_, cache_, {logits_.as<float>()});
  return {logits_.as<float>(), static_cast<size_t>(rows * model().spec().vocab_size)};
}

}  // namespace freshet::eval
