// Scheduler: prefixes that come from a store below the cache.
#include "scheduler/scheduler.h"

namespace freshet::scheduler {

void Scheduler::set_store(kv_cache::BlockStore& store, bool prompt_only) {
  FRESHET_CHECK(sequences_.empty() && !offload_);
  FRESHET_CHECK(cache_.state_group() < 0, "states cannot be stored");
  FRESHET_CHECK(options_.encoder_blocks == 0, "tokens alone do not tell what an encoder read");
  offload_.emplace(store, cache_, prompt_only);
}

// Puts the sequences whose loads have ended back into their queues, at their ranks.
void Scheduler::finish_loads() {
  if (!offload_) return;
  for (Sequence* s : offload_->take_loaded()) {
    loading_.erase(s);
    slots_taken_ -= slots(*s);
    enqueue(*s);
  }
}

// Starts to load the sequence's prefix, if that pays. It keeps a running slot meanwhile.
bool Scheduler::start_load(Sequence& s) {
  if (!offload_ || s.tier.looked || slots_taken_ + slots(s) > options_.max_num_seqs) return false;
  if (!offload_->find(s, may_be_cached(s))) return false;
  std::swap(s.blocks, s.tier.loaded);
  const bool fits = fits_whole(s);
  std::swap(s.blocks, s.tier.loaded);
  if (!offload_->order(s, fits)) return false;
  dequeue(s);
  s.state = State::kLoading;
  s.waits_for = WaitReason::kKvLoad;
  slots_taken_ += slots(s);
  loading_.insert(&s);
  return true;
}

// Gives a waiting sequence the blocks that were loaded for it, or else its cached prefix. Returns
// the prefix's tokens.
int32_t Scheduler::take_prefix(Sequence& s, std::vector<kv_cache::BlockCopy>& copies) {
  s.tier.taken = offload_ && !s.tier.loaded.empty() &&
                 offload_->take(s, cache_.cached(s.request->salt, may_be_cached(s)));
  if (s.tier.taken) return s.tier.loaded_tokens;
  return cache_.begin(s.blocks, s.request->salt, may_be_cached(s), copies);
}

void Scheduler::give_back_prefix(Sequence& s) {
  if (s.tier.taken) {
    offload_->put_back(s);
  } else {
    cache_.release(s.blocks);
  }
}

// Releases blocks that were loaded for another sequence that waits.
bool Scheduler::drop_loaded(const Sequence& for_whom) {
  return offload_ && offload_->drop_one(for_whom);
}

// The books of a request that starts with `cached` tokens.
void Scheduler::count_start(const Sequence& s, int32_t cached) {
  const int32_t loaded = s.tier.taken ? s.tier.from_store : 0;
  stats_.prompt_tokens += s.prompt_tokens;
  stats_.cached_tokens += cached - loaded;
  if (offload_) {
    stats_.tier_queries += s.prompt_tokens - (cached - loaded);
    stats_.tier_hits += loaded;
  }
  const bool to_the_end = cached > 0 && cached + 1 == s.size();
  if (to_the_end && cache_.cached(s.request->salt, s.cached_as()) == s.size())
    ++stats_.recomputed_tokens;
}

void Scheduler::forget_load(Sequence& s) {
  if (!offload_) return;
  if (loading_.erase(&s) > 0) {
    slots_taken_ -= slots(s);
    s.state = State::kSuspended;  // it is in no queue
  }
  offload_->forget(s);
}

}  // namespace freshet::scheduler
