#include "scheduler/scheduler.h"

#include <algorithm>
#include <utility>

namespace freshet::scheduler {

const char* name_of(WaitReason reason) {
  switch (reason) {
    case WaitReason::kNone:
      return "none";
    case WaitReason::kQueued:
      return "queued";
    case WaitReason::kSlots:
      return "running slots";
    case WaitReason::kBlocks:
      return "blocks";
    case WaitReason::kTokenBudget:
      return "token budget";
    case WaitReason::kBatchPolicy:
      return "batch policy";
    case WaitReason::kPreempted:
      return "preempted";
    case WaitReason::kKvLoad:
      return "kv load";
    case WaitReason::kEncoder:
      return "encoder";
    case WaitReason::kCount:
      break;
  }
  return "?";
}

namespace {

int32_t blocks_of(int32_t encoder_tokens) {
  return (encoder_tokens + kv_cache::kBlockTokens - 1) / kv_cache::kBlockTokens;
}

// Salts may hold any byte: their length keeps them apart from contents.
std::string encoder_key_of(const std::string& content, const std::string& salt) {
  return content.empty() ? "" : std::to_string(salt.size()) + ':' + salt + content;
}

// What a request keeps of its order as it is.
std::unique_ptr<Request> kept_of(NewRequest& order) {
  auto r = std::make_unique<Request>();
  r->id = order.id;
  r->priority = order.priority;
  r->tenant = order.tenant;
  r->salt = std::move(order.salt);
  r->encoder_tokens = order.encoder_tokens;
  r->prepares = order.prepares;
  r->deadline = order.deadline;
  r->eviction = std::move(order.eviction);
  r->sparse = order.sparse;
  r->cross_weights = order.cross_weights;
  return r;
}

}  // namespace

// ---- life of requests ------------------------------------------------------------------------

Scheduler::Scheduler(const SchedulerOptions& options, kv_cache::BlockCache& cache,
                     std::unique_ptr<BatchingPolicy> policy)
    : options_(options),
      cache_(cache),
      encoders_(options.encoder_blocks, options.share_encoders),
      policy_(std::move(policy)),
      queue_(options.ageing_us, options.fair_share) {
  // Initial guess of output lengths: 16 to 1,024 tokens.
  for (size_t i = 0; i < outputs_.size(); ++i) outputs_[i] = 16 * static_cast<int32_t>(i + 1);
  sorted_outputs_ = outputs_;
}

Result<std::unique_ptr<Scheduler>> Scheduler::create(const SchedulerOptions& options,
                                                     kv_cache::BlockCache& cache) {
  if (options.max_num_seqs < 1)
    return invalid_argument("max_num_seqs is {}: must be 1 or more", options.max_num_seqs);
  if (options.max_num_batched_tokens < 1) {
    return invalid_argument("max_num_batched_tokens is {}: must be 1 or more",
                            options.max_num_batched_tokens);
  }
  if (options.max_model_len < 2)
    return invalid_argument("max_model_len is {}: must be 2 or more", options.max_model_len);
  if (options.max_logit_rows < 1)
    return invalid_argument("max_logit_rows is {}: must be 1 or more", options.max_logit_rows);
  if (options.ageing_us < 0)
    return invalid_argument("ageing_us is {}: must not be negative", options.ageing_us);
  FRESHET_ASSIGN_OR_RETURN(auto policy, make_batching_policy(options.batching));
  std::unique_ptr<Scheduler> scheduler(new Scheduler(options, cache, std::move(policy)));
  for (int g = 0; g < cache.groups(); ++g) {
    const bool evicts = options.max_slots > 0 && cache.window(g) == 0 && g != cache.state_group();
    const int32_t longest =
        evicts ? std::min(options.max_slots, options.max_model_len) : options.max_model_len;
    const int32_t most = cache.most_blocks_in(g, longest, scheduler->chunk());
    if (most > cache.pool(g).size()) {
      return invalid_argument("a sequence of {} tokens needs {} cache blocks; there are {}",
                              options.max_model_len, most, cache.pool(g).size());
    }
  }
  return scheduler;
}

int32_t Scheduler::chunk() const {
  return options_.max_chunk > 0 ? std::min(options_.max_chunk, options_.max_num_batched_tokens)
                                : options_.max_num_batched_tokens;
}

Result<SequenceId> Scheduler::submit(NewRequest request, int64_t now) {
  now_ = std::max(now_, now);
  const auto prompt_tokens = static_cast<int64_t>(request.prompt.size());
  if (prompt_tokens == 0) return invalid_argument("the prompt is empty");
  if (request.max_tokens < 0 || prompt_tokens + request.max_tokens > options_.max_model_len) {
    return invalid_argument("{} prompt tokens and {} new ones exceed max_model_len {}",
                            prompt_tokens, request.max_tokens, options_.max_model_len);
  }
  if (request.whole && prompt_tokens > options_.max_num_batched_tokens) {
    return invalid_argument("{} prompt tokens run in one step: max_num_batched_tokens is {}",
                            prompt_tokens, options_.max_num_batched_tokens);
  }
  FRESHET_RETURN_IF_ERROR(check_pictures(request));
  if (request.samples < 1 || request.samples > options_.max_num_seqs) {
    return invalid_argument("{} sequences per request: must be 1 to max_num_seqs ({})",
                            request.samples, options_.max_num_seqs);
  }
  if (options_.max_queued_requests > 0 && queue_.size() >= options_.max_queued_requests) {
    return resource_exhausted("the queue is full: {} requests are waiting", queue_.size());
  }
  if (options_.max_queued_tokens > 0 &&
      queue_.prompt_tokens() + prompt_tokens > options_.max_queued_tokens) {
    return resource_exhausted("the queue is full: {} prompt tokens are waiting, and at most {} may",
                              queue_.prompt_tokens(), options_.max_queued_tokens);
  }
  const int32_t encoder_blocks = blocks_of(request.encoder_tokens);
  if (encoder_blocks > encoders_.size()) {
    return invalid_argument("the encoder's output needs {} cache blocks; there are {}",
                            encoder_blocks, encoders_.size());
  }
  FRESHET_RETURN_IF_ERROR(fits_pools(request));
  FRESHET_CHECK(!requests_.contains(request.id), "request {} was added twice", request.id);
  auto& r = requests_[request.id];
  r = kept_of(request);
  r->encoder_key = encoder_key_of(request.encoder_content, r->salt);
  r->arrival = now_;
  if (r->deadline > 0) deadlines_.emplace(r->deadline, r->id);

  auto s = std::make_unique<Sequence>();
  s->id = next_sequence_++;
  s->request = r.get();
  s->rank = queue_.rank_of(*r, s->id);
  s->tokens = std::move(request.prompt);
  s->prompt_tokens = s->size();
  s->max_tokens = request.max_tokens;
  s->pending_forks = request.samples - 1;
  s->logits_from = request.logits_from;
  s->compute_all = request.compute_all;
  s->logits = request.logits;
  s->whole = request.whole;
  s->token_types = std::move(request.token_types);
  s->pictures = std::move(request.pictures);
  if (!s->pictures.empty()) s->keys = key_tokens(s->tokens, s->pictures);
  s->pin_tokens = std::clamp(request.pin_tokens, 0, s->prompt_tokens);
  restart_evictions(*s);
  r->sequences.push_back(s->id);
  queue_.arrive(*r);
  const SequenceId id = s->id;
  enqueue(*sequences_.emplace(id, std::move(s)).first->second);
  return id;
}

// A picture whose rows attend to one another runs in one step.
Status Scheduler::check_pictures(const NewRequest& request) const {
  const auto tokens = static_cast<int32_t>(request.prompt.size());
  if (const std::string error = error_in(request.pictures, tokens); !error.empty())
    return invalid_argument("{}", error);
  for (const PictureSpan& p : request.pictures) {
    if (!p.both_ways) continue;
    if (p.count > chunk()) {
      return invalid_argument(
          "a picture of {} rows runs in one step, which has at most {} tokens of a prompt "
          "(max_num_batched_tokens)",
          p.count, chunk());
    }
    if (request.logits_from >= 0 && p.end() > request.logits_from &&
        p.count > options_.max_logit_rows) {
      return invalid_argument("logits of a picture of {} rows: a step gives at most {}", p.count,
                              options_.max_logit_rows);
    }
  }
  return {};
}

void Scheduler::enqueue(Sequence& s) {
  s.state = State::kWaiting;
  s.queued_at = now_;
  s.waits_for = s.started ? WaitReason::kPreempted : WaitReason::kQueued;
  if (s.started) {
    resumed_.insert(&s);
  } else {
    queue_.add(s);
  }
}

void Scheduler::dequeue(Sequence& s) {
  if (s.started) {
    resumed_.erase(&s);
  } else {
    queue_.remove(s);
  }
  if (head_ == s.id) head_ = 0;
  s.waits_for = WaitReason::kNone;
}

// Whether the request has its blocks for the encoder's output, or could take them.
bool Scheduler::has_encoder_blocks(const Request& r) const {
  return !r.encoder_blocks.empty() || encoders_.fits(r.encoder_key, blocks_of(r.encoder_tokens));
}

// All or nothing. A request keeps its blocks while it is preempted: those that wait have none, so
// the best-ranked request always goes on.
bool Scheduler::take_encoder_blocks(Request& r) {
  if (r.encoder_tokens == 0 || !r.encoder_blocks.empty()) return true;
  auto taken = encoders_.take(r.encoder_key, blocks_of(r.encoder_tokens));
  if (!taken) return false;
  r.encoder_blocks = std::move(taken->blocks);
  r.encoder_found = taken->found;
  return true;
}

void Scheduler::free_encoder_blocks(Request& r) {
  encoders_.release(r.encoder_key, r.encoder_blocks);
}

void Scheduler::stop_running(Sequence& s) {
  running_.erase(&s);
  slots_taken_ -= slots(s);
  cache_.release(s.blocks);
  s.computed = 0;
  s.draft.clear();
  s.accepted_branch = -1;
  drop_branches(s);
  restart_evictions(s);
}

void Scheduler::drop(Sequence& s) {
  forget_load(s);
  if (s.state == State::kRunning) stop_running(s);
  if (s.state == State::kWaiting) dequeue(s);
  Request& r = *s.request;
  if (s.started && --batches_[r.batch] == 0) batches_.erase(r.batch);
  std::erase(r.sequences, s.id);
  const bool last = r.sequences.empty();
  gone_.push_back(s.id);
  sequences_.erase(SequenceId{s.id});
  if (!last) return;
  queue_.leave(r);
  free_encoder_blocks(r);
  if (r.deadline > 0) deadlines_.erase({r.deadline, r.id});
  requests_.erase(RequestId{r.id});
}

void Scheduler::finish(SequenceId sequence) {
  const Sequence& s = at(sequence);
  const int32_t output = s.size() - s.prompt_tokens;
  outputs_[ended_++ % outputs_.size()] = output;
  sorted_outputs_ = outputs_;
  std::ranges::sort(sorted_outputs_);
  drop(at(sequence));
}

bool Scheduler::cancel(RequestId request) {
  const auto it = requests_.find(request);
  if (it == requests_.end()) return false;
  const std::vector<SequenceId> sequences = it->second->sequences;
  for (const SequenceId id : sequences) drop(at(id));
  return true;
}

std::vector<SequenceId> Scheduler::take_ended() {
  return std::exchange(gone_, {});
}

const Request* Scheduler::request(RequestId request) const {
  const auto it = requests_.find(request);
  return it == requests_.end() ? nullptr : it->second.get();
}

// ---- what a step brought ---------------------------------------------------------------------

void Scheduler::ran(const Step& step) {
  if (offload_) offload_->issue();
  for (const StepItem& item : step.items) {
    const auto it = sequences_.find(item.sequence);
    if (it == sequences_.end() || item.branch >= 0) continue;
    Sequence& s = *it->second;
    // The virtual token counter weighs a prompt token half as much as a generated one.
    const int32_t of_prompt = std::clamp(s.prompt_tokens - item.first, 0, item.count);
    queue_.charge(*s.request, of_prompt + int64_t{2} * (item.count - of_prompt));
    s.computed = item.first + item.count - item.draft;
    if (s.logits_from >= 0) s.logits_from = std::max(s.logits_from, s.computed);
    cache_.computed(s.blocks, s.cached_as(), s.computed, s.sharable(s.computed));
    if (item.draft == 0) cache_.settle(s.blocks, s.computed);
    if (offload_) offload_->save(s);
    if (s.pin_tokens >= kv_cache::kBlockTokens && s.computed >= s.pin_tokens) pin(s);
  }
}

// Keeps the cached blocks of the prefix in a table of their own. A prefix that is pinned again
// counts as used now. At most a quarter of each pool is pinned.
void Scheduler::pin(Sequence& s) {
  const auto whole =
      static_cast<size_t>(s.pin_tokens / kv_cache::kBlockTokens) * kv_cache::kBlockTokens;
  s.pin_tokens = 0;
  kv_cache::BlockTable table;
  std::vector<kv_cache::BlockCopy> copies;
  cache_.begin(table, s.request->salt, std::span(s.cached_as()).first(whole), copies);
  if (table.node == kv_cache::kNoNode) {  // nothing is shared
    cache_.release(table);
    return;
  }
  std::erase_if(pins_, [&](kv_cache::BlockTable& old) {
    if (old.node != table.node) return false;
    cache_.release(old);
    return true;
  });
  pins_.push_back(std::move(table));
  const auto too_many = [&] {
    for (int g = 0; g < cache_.groups(); ++g) {
      int64_t held = 0;
      for (const kv_cache::BlockTable& pinned : pins_) held += pinned.blocks(g);
      if (held > cache_.pool(g).size() / 4) return true;
    }
    return false;
  };
  while (!pins_.empty() && too_many()) unpin_oldest();
}

bool Scheduler::unpin_oldest() {
  if (pins_.empty()) return false;
  cache_.release(pins_.front());
  pins_.pop_front();
  return true;
}

void Scheduler::unpin_all() {
  while (unpin_oldest()) {
  }
}

void Scheduler::commit(SequenceId sequence, std::span<const int32_t> tokens) {
  Sequence& s = at(sequence);
  FRESHET_CHECK(!tokens.empty() && (s.awaits_token() || s.state == State::kSuspended),
                "sequence {} is not waiting for a token", sequence);
  take_branch(s, tokens.first(tokens.size() - 1));
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  if (!s.pictures.empty()) s.keys.insert(s.keys.end(), tokens.begin(), tokens.end());
  s.draft.clear();
  if (s.state == State::kSuspended) {
    enqueue(s);
    return;
  }
  if (tokens.size() > 1) {  // accepted drafts are in the cache already
    s.computed = s.size() - 1;
    cache_.computed(s.blocks, s.cached_as(), s.computed, s.sharable(s.computed));
  }
  take_draft_scores(s);
  cache_.settle(s.blocks, s.computed);
}

// Keeps the blocks of the first path that begins with the accepted drafts. Its other drafts are
// behind the sequence's end, where the next step writes.
void Scheduler::take_branch(Sequence& s, std::span<const int32_t> accepted) {
  const auto begins = [&](const std::vector<int32_t>& path) {
    return path.size() >= accepted.size() &&
           std::ranges::equal(accepted, std::span(path).first(accepted.size()));
  };
  s.accepted_branch = -1;
  for (size_t b = 0; b < s.branches.size() && !begins(s.draft) && s.accepted_branch < 0; ++b) {
    Branch& branch = s.branches[b];
    if (branch.item < 0 || !begins(branch.draft)) continue;
    std::swap(s.blocks, branch.blocks);
    s.accepted_branch = static_cast<int32_t>(b);
  }
  drop_branches(s);
}

void Scheduler::drop_branches(Sequence& s) {
  for (Branch& branch : s.branches) cache_.release(branch.blocks);
  s.branches.clear();
}

void Scheduler::expect(SequenceId sequence) {
  commit(sequence, {&kExpected, 1});
}

void Scheduler::known(SequenceId sequence, int32_t token) {
  Sequence& s = at(sequence);
  FRESHET_CHECK(s.expects(), "sequence {} expects no token", sequence);
  s.tokens.back() = token;
  if (!s.pictures.empty()) s.keys.back() = token;
}

SequenceId Scheduler::fork(SequenceId sequence) {
  Sequence& parent = at(sequence);
  FRESHET_CHECK(parent.awaits_token() || parent.state == State::kSuspended);
  auto child = std::make_unique<Sequence>();
  child->id = next_sequence_++;
  child->request = parent.request;
  child->rank = queue_.rank_of(*parent.request, child->id);
  child->tokens = parent.tokens;
  child->prompt_tokens = parent.prompt_tokens;
  child->max_tokens = parent.max_tokens;
  child->pictures = parent.pictures;
  child->keys = parent.keys;
  child->started = true;
  child->state = parent.state;
  child->waits_for = WaitReason::kNone;
  child->tier.keys = parent.tier.keys;
  child->tier.saved = parent.tier.saved;
  restart_evictions(*child);
  parent.request->sequences.push_back(child->id);
  ++batches_[parent.request->batch];
  Sequence& c = *sequences_.emplace(child->id, std::move(child)).first->second;
  if (parent.pending_forks > 0) {  // its running slot was reserved
    --parent.pending_forks;
    if (parent.state == State::kRunning) --slots_taken_;
  }
  if (parent.state == State::kRunning && slots_taken_ == options_.max_num_seqs) {
    c.state = State::kSuspended;
  } else if (parent.state == State::kRunning) {
    c.computed = parent.computed;
    c.blocks = cache_.fork(parent.blocks, parent.computed);
    c.evict_at = parent.evict_at;
    c.scored_from = parent.scored_from;
    c.scores = parent.scores;
    c.draft_scores = parent.draft_scores;
    c.draft_scored_from = parent.draft_scored_from;
    running_.insert(&c);
    ++slots_taken_;
  }
  return c.id;
}

void Scheduler::set_draft(SequenceId sequence, std::vector<int32_t> draft,
                          std::vector<std::vector<int32_t>> branches) {
  Sequence& s = at(sequence);
  const auto room = static_cast<size_t>(std::max(0, options_.max_model_len - s.size()));
  if (draft.size() > room) draft.resize(room);
  s.draft = std::move(draft);
  drop_branches(s);
  if (s.request->eviction != nullptr) return;
  for (std::vector<int32_t>& branch : branches) {
    if (branch.size() > room) branch.resize(room);
    s.branches.push_back({.draft = std::move(branch)});
  }
}

std::vector<SequenceId> Scheduler::decoding() const {
  std::vector<SequenceId> ids;
  for (const Sequence* s : running_) {
    if (s->size() - s->computed == 1 && !s->expects()) ids.push_back(s->id);
  }
  return ids;
}

// ---- books -----------------------------------------------------------------------------------

// Time in the queue without another reason was spent behind other requests.
int64_t Scheduler::behind_others(const Request& r, int64_t now) {
  int64_t left = now - r.arrival;
  for (const int64_t t : r.waited) left -= t;
  return std::max<int64_t>(0, left);
}

WaitTimes Scheduler::waits(RequestId request, int64_t now) const {
  const Request* r = this->request(request);
  if (r == nullptr) return {};
  WaitTimes times = r->waited;
  const int64_t dt = std::max<int64_t>(0, now - now_);
  bool queued = false;
  for (const SequenceId id : r->sequences) {
    const Sequence& s = sequence(id);
    queued = queued || !s.started;
    if (s.waits_for != WaitReason::kNone && s.waits_for != WaitReason::kQueued) {
      times[static_cast<size_t>(s.waits_for)] += dt;
    }
  }
  if (queued) {
    int64_t named = 0;
    for (const int64_t t : times) named += t;
    times[static_cast<size_t>(WaitReason::kQueued)] =
        std::max<int64_t>(0, std::max(now, now_) - r->arrival - named);
  }
  return times;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats s = stats_;
  s.running = static_cast<int32_t>(running_.size());
  s.loading = static_cast<int64_t>(loading_.size());
  s.queued_requests = queue_.size();
  s.queued_tokens = queue_.prompt_tokens();
  if (encoders_.size() > 0)
    s.encoder_usage = 1.0 - static_cast<double>(encoders_.available()) / encoders_.size();
  s.waiting = queue_.size() + static_cast<int32_t>(resumed_.size() + loading_.size());
  const auto head = sequences_.find(head_);
  const bool held = head != sequences_.end() && head->second->waits_for == WaitReason::kBatchPolicy;
  s.deferred = held ? queue_.size() : 0;  // the queue behind it waits for the same reason
  return s;
}

Status Scheduler::check(std::span<const kv_cache::BlockTable* const> others) const {
  std::vector<const kv_cache::BlockTable*> tables(others.begin(), others.end());
  int32_t taken = 0;
  for (const auto& [id, s] : sequences_) {
    const bool runs = s->state == State::kRunning;
    const bool loads = s->state == State::kLoading;
    if (runs != running_.contains(s.get()) || loads != loading_.contains(s.get()))
      return internal_error("sequence {} is in the wrong set", id);
    if (runs || loads) taken += slots(*s);
    if (runs && !s->tier.loaded.empty())
      return internal_error("sequence {} runs and holds loaded blocks", id);
    tables.push_back(&s->tier.loaded);
    if (!runs && !s->blocks.empty())
      return internal_error("sequence {} holds blocks and does not run", id);
    if (s->computed > s->size()) return internal_error("sequence {} computed what it has not", id);
    for (int g = 0; runs && g < cache_.groups(); ++g) {
      const int32_t holds = s->blocks.blocks(g);
      const int32_t slots = s->blocks.slots(g, s->computed);
      if (g == cache_.state_group() ? holds == 0 : holds * kv_cache::kBlockTokens < slots) {
        return internal_error("sequence {} lacks blocks for what it computed", id);
      }
    }
    tables.push_back(&s->blocks);
    for (const Branch& branch : s->branches) {
      if (!runs && !branch.blocks.empty())
        return internal_error("sequence {} has a branch and does not run", id);
      tables.push_back(&branch.blocks);
    }
  }
  std::vector<int32_t> encoders(static_cast<size_t>(encoders_.size()), 0);
  for (const auto& [id, r] : requests_) {
    for (const int32_t block : r->encoder_blocks) ++encoders[static_cast<size_t>(block)];
  }
  FRESHET_RETURN_IF_ERROR(encoders_.check(encoders));
  for (const kv_cache::BlockTable& pinned : pins_) tables.push_back(&pinned);
  if (offload_) offload_->list_tables(tables);
  if (taken != slots_taken_)
    return internal_error("{} running slots are taken, {} counted", taken, slots_taken_);
  return cache_.check(tables);
}

}  // namespace freshet::scheduler
