#include "engine/step_loop.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "engine/request_check.h"
#include "engine/tiers.h"

namespace freshet::engine {
namespace {

constexpr int32_t kOwnPass = 512;  // longer inputs gain nothing from sharing an encoder's pass

// The owner of a sequence's cached blocks: its tenant and cache salt.
uint64_t owner_of(const scheduler::Sequence& s) {
  return s.request->tenant * 0x9E3779B97F4A7C15 ^ std::hash<std::string>()(s.request->salt);
}

}  // namespace

int64_t StepLoop::now_us() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(t).count();
}

StepLoop::StepLoop(const StepLoopOptions& options, const Tokenizer* tokenizer, ThreadPool& pool,
                   std::unique_ptr<kv_cache::BlockCache> blocks,
                   std::unique_ptr<scheduler::Scheduler> scheduler, ModelRunner runner,
                   Model& model)
    : options_(options),
      has_tokenizer_(tokenizer != nullptr),
      generates_(model.spec().generates),
      whole_prompts_(reads_both_ways(model.spec())),
      token_types_(model.spec().token_types),
      encoder_(limits_of(model.spec().encoder.get())),
      spec_(model.spec()),
      sees_(model.vision() != nullptr),
      model_(model),
      prepares_(!runner.on_device() && model.key_ops() != nullptr && options.tiers == nullptr),
      tower_(model.vision(), options.picture_cache_bytes),
      pool_(pool),
      blocks_(std::move(blocks)),
      scheduler_(std::move(scheduler)),
      runner_(std::move(runner)),
      services_{*scheduler_,         tokenizer,      runner_.vocab(), counted_,
                options_.acceptance, options_.heads, whole_prompts_} {
  if (options_.drafter != nullptr) needs_ = options_.drafter->needs();
  for (int i = 0; i < pool.size(); ++i) scratch_.emplace_back(runner_.vocab());
}

Result<std::unique_ptr<StepLoop>> StepLoop::start(const StepLoopOptions& options, Model& model,
                                                  KvStorage cache, const Tokenizer* tokenizer,
                                                  ThreadPool& pool, Memory* host_memory) {
  kv_cache::BlockCache::Options cache_options;
  scheduler::SchedulerOptions scheduling = options.scheduler;
  for (size_t g = 0; g < options.blocks.size(); ++g) {
    const KvGroup& group = cache.spec().groups[g];
    if (group.cross > 0) {  // the last group: the scheduler has its blocks
      FRESHET_CHECK(g + 1 == options.blocks.size(), "the encoder's output is group {}", g);
      scheduling.encoder_blocks = options.blocks[g];
      scheduling.share_encoders = options.share_prefixes;
      continue;
    }
    cache_options.groups.push_back({group.window, options.blocks[g], group.kind});
  }
  cache_options.share_prefixes = options.share_prefixes;
  cache_options.hash_seed = options.seed;
  cache_options.timed_share = options.timed_share;
  auto blocks = std::make_unique<kv_cache::BlockCache>(std::move(cache_options));
  const speculative::StateNeeds needs =
      options.drafter != nullptr ? options.drafter->needs() : speculative::StateNeeds();
  FRESHET_ASSIGN_OR_RETURN(
      ModelRunner runner,
      ModelRunner::create(model, std::move(cache), options.scheduler.max_num_batched_tokens,
                          options.scheduler.max_logit_rows,
                          static_cast<int>(needs.boundaries.size()), needs.any(), host_memory));
  FRESHET_ASSIGN_OR_RETURN(auto scheduler, scheduler::Scheduler::create(scheduling, *blocks));
  std::unique_ptr<StepLoop> loop(new StepLoop(options, tokenizer, pool, std::move(blocks),
                                              std::move(scheduler), std::move(runner), model));
  if (options.tiers != nullptr) {
    loop->scheduler_->set_store(*options.tiers, options.save_prompts_only);
    options.tiers->set_on_loaded([l = loop.get()] {
      {
        const std::lock_guard lock(l->mutex_);
        l->loaded_ = true;
      }
      l->wake_.notify_one();
    });
  }
  loop->thread_ = std::thread([l = loop.get()] { l->loop(); });
  return loop;
}

StepLoop::~StepLoop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  thread_.join();
  if (options_.tiers != nullptr) options_.tiers->stop();  // it uses the cache's memory
}

// ---- from any thread -------------------------------------------------------------------------

std::optional<RequestError> StepLoop::check(const Request& request) const {
  const scheduler::SchedulerOptions& steps = options_.scheduler;
  return find_error(
      request,
      {runner_.vocab(), steps.max_model_len, steps.max_num_seqs, has_tokenizer_,
       options_.drafter != nullptr, generates_, options_.heads.classifier.has_value(), token_types_,
       encoder_, runner_.evicts() ? &runner_.cache().spec() : nullptr, options_.retention, &spec_,
       sees_, scheduler_->chunk(), options_.sparse, runner_.on_device()});
}

Result<uint64_t> StepLoop::submit(Request request) {
  if (const auto error = check(request)) return invalid_argument("{}", error->message);
  if (encoder_.positions > 0 && request.frames == 0 && request.encoder_ids.empty())
    request.encoder_ids = std::exchange(request.prompt, options_.decoder_start);
  std::string content = encoder_content(request, secret_);
  const auto tokens = static_cast<int64_t>(request.prompt.size());
  uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    if (options_.max_queued_requests > 0 && queued_requests_ >= options_.max_queued_requests) {
      return resource_exhausted("the queue is full: {} requests are waiting", queued_requests_);
    }
    if (options_.max_queued_tokens > 0 && queued_tokens_ + tokens > options_.max_queued_tokens) {
      return resource_exhausted(
          "the queue is full: {} prompt tokens are waiting, and at most {} may", queued_tokens_,
          options_.max_queued_tokens);
    }
    ++queued_requests_;
    queued_tokens_ += tokens;
    id = next_id_++;
    if (request.id.empty()) request.id = fmt::format("req-{}", id);
    arrived_.push_back({id, std::move(request), std::move(content)});
  }
  wake_.notify_one();
  return id;
}

void StepLoop::cancel(uint64_t request) {
  {
    const std::lock_guard lock(mutex_);
    left_.push_back(request);
  }
  wake_.notify_one();
}

bool StepLoop::post(std::function<void()> order) {
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return false;
    orders_.push_back(std::move(order));
  }
  wake_.notify_one();
  return true;
}

EngineStats StepLoop::stats() const {
  std::unique_lock lock(mutex_);
  EngineStats s = published_;
  lock.unlock();
  if (options_.tiers == nullptr) return s;
  const EngineStats::Tiers counted = s.tiers;
  s.tiers = tier_numbers(*options_.tiers);
  s.tiers.queries = counted.queries;
  s.tiers.hits = counted.hits;
  s.tiers.loading = counted.loading;
  return s;
}

// ---- the step: five verbs --------------------------------------------------------------------

bool StepLoop::step() {
  draft();
  const bool scheduled = schedule();
  if (scheduled) run();
  if (in_flight_.empty()) return false;
  while (tokens_due(scheduled)) {
    verify(in_flight_.front());
    commit(in_flight_.front());
  }
  return true;
}

void StepLoop::draft() {
  if (options_.drafter == nullptr) return;
  drafts_.clear();
  drafted_.clear();
  for (const scheduler::SequenceId id : scheduler_->decoding()) {
    const scheduler::Sequence& s = scheduler_->sequence(id);
    speculative::DraftRequest request{
        .sequence = id, .tokens = s.tokens, .limit = drafts_left(s), .owner = owner_of(s)};
    if (request.limit <= 0) continue;
    for (const auto& output : live_.at(s.request->id)->outputs) {
      if (!output->asks_drafts(s, request)) continue;
      drafts_.push_back(std::move(request));
      drafted_.push_back(output.get());
      break;
    }
  }
  if (drafts_.empty()) return;
  const bool trees = std::ssize(drafts_) <= options_.tree_max_batch;
  for (speculative::DraftRequest& d : drafts_) {
    const scheduler::Sequence& s = scheduler_->sequence(d.sequence);
    d.tree = d.tree && trees && s.request->eviction == nullptr;
  }
  propose();
  for (size_t i = 0; i < drafts_.size(); ++i) {
    speculative::DraftRequest& d = drafts_[i];
    if (!d.tree) d.branches.clear();
    d.shorten(d.limit);
    // Where nothing was asked for, a grammar may still force tokens.
    if (d.limit == 0)
      d.limit = std::min(drafts_left(scheduler_->sequence(d.sequence)), options_.max_drafts);
    drafted_[i]->check_draft(d);
    scheduler_->set_draft(d.sequence, std::move(d.draft), std::move(d.branches));
  }
}

bool StepLoop::schedule() {
  const int64_t now = now_us();
  blocks_->lives().set_time(now);
  StepInFlight step;
  step.started_at = now;
  step.plan = scheduler_->schedule(now);
  if (options_.tiers != nullptr) options_.tiers->before_step();
  count_evicted_blocks();
  for (const scheduler::Eviction& e : step.plan.evictions)
    runner_.evict(e, *live_.at(e.request)->retention);
  wake_at_ = step.plan.wake_at;
  for (const uint64_t id : step.plan.expired) {
    end_request(id, FinishReason::kCancelled, cancelled("the deadline passed"));
  }
  if (step.plan.items.empty()) return false;
  for (const scheduler::StepItem& item : step.plan.items) {
    LiveRequest& live = *live_.at(scheduler_->sequence(item.sequence).request->id);
    step.requests.push_back(&live);
    step.request_ids.push_back(live.id);
    if (std::exchange(live.started, true)) continue;
    count_encoded(item, live);
    for (const auto& output : live.outputs) output->start(item.sequence);
  }
  step.next_sequence = scheduler_->next_sequence();
  in_flight_.push_back(std::move(step));
  return true;
}

void StepLoop::run() {
  StepInFlight& step = in_flight_.back();
  fill_masks(step);
  find_rows(step);
  runner_.start(
      step.plan, *scheduler_, wants_states(step),
      [&](size_t i, int32_t row, std::vector<int32_t>& words) {
        const scheduler::StepItem& item = step.plan.items[i];
        const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
        ops::SampleRow descriptor;
        for (const auto& output : step.requests[i]->outputs) {
          descriptor = output->descriptor(item, s, row, words);
          if (descriptor.how != ops::SampleRow::kNotHere) break;
        }
        return descriptor;
      },
      [&](size_t i) { return encoder_input(*step.requests[i]); },
      [&](size_t i) { return pictures_of(*step.requests[i]); });
  step.scores = runner_.scores();
  for (size_t i = 0; prepares_ && i < step.requests.size(); ++i) {
    if (step.plan.items[i].encodes) step.requests[i]->encoded = {};
  }
  // With a step in front, the rows are listed when its tokens are known (commit).
  if (in_flight_.size() == 1) list_rows(step);
}

void StepLoop::verify(StepInFlight& step) {
  const int64_t from = now_us();
  runner_.finish();
  if (runner_.overlaps())
    counted_.device_wait_seconds += static_cast<double>(now_us() - from) * 1e-6;
  std::vector<RowTask>& tasks = step.tasks;
  std::erase_if(tasks, [&](const RowTask& t) { return !live_.contains(t.request); });
  const auto read = [&](RowTask& t, VerifyScratch& scratch) {
    t.tokens = t.output->verify(t, runner_, scratch);
  };
  const bool sampled = std::ranges::all_of(tasks, [&](const RowTask& t) {
    for (int32_t i = 0; i < t.rows; ++i) {
      if (runner_.sampled(t.item, t.row + i) == StepResults::kSeeLogits) return false;
    }
    return true;
  });
  if (sampled) {  // not worth waking the pool
    for (RowTask& t : tasks) read(t, scratch_.front());
    return;
  }
  pool_.parallel_for(std::ssize(tasks), [&](int64_t i, int worker) {
    read(tasks[static_cast<size_t>(i)], scratch_[static_cast<size_t>(worker)]);
  });
}

void StepLoop::commit(StepInFlight& step) {
  int64_t tokens = step.prompt_tokens;
  for (const RowTask& task : step.tasks) tokens += task.tokens;
  count_step(tokens);  // before any client hears of its tokens
  for (const RowTask& task : step.tasks) {
    const auto live = live_.find(task.request);
    if (live == live_.end()) continue;
    task.output->commit(task);
    if (live->second->over) retire(task.request);
  }
  // A step that is mostly prompt tells what computing one takes.
  if (options_.tiers != nullptr && step.prompt_tokens > tokens / 2) {
    options_.tiers->note_compute(step.prompt_tokens,
                                 static_cast<double>(now_us() - step.started_at) * 1e-6);
  }
  time_step(step, tokens - step.prompt_tokens);
  if (options_.drafter != nullptr && (needs_.any() || !step.runs_ahead)) show_rows(step);
  for (const scheduler::SequenceId id : scheduler_->take_ended()) {
    if (options_.drafter != nullptr) options_.drafter->forget(id);
    if (options_.lengths != nullptr) options_.lengths->forget(id);
  }
  in_flight_.pop_front();
  if (!in_flight_.empty()) list_rows(in_flight_.front());
}

// ---- what the verbs use ----------------------------------------------------------------------

// A step adds one token more than there are drafts.
int32_t StepLoop::drafts_left(const scheduler::Sequence& s) const {
  int32_t left = s.max_tokens - (s.size() - s.prompt_tokens) - 1;
  // Drafts end where the next eviction is due; one that is due now comes before them.
  if (s.evict_at > s.computed) left = std::min(left, s.evict_at - s.computed - 1);
  return options_.lengths != nullptr ? left : std::min(left, options_.max_drafts);
}

void StepLoop::propose() {
  size_t asked = drafts_.size();
  const int64_t start = now_us();
  if (options_.lengths != nullptr) {
    options_.lengths->choose(drafts_);
    asked = 0;
    for (size_t i = 0; i < drafts_.size(); ++i) {
      if (drafts_[i].limit <= 0 && drafts_[i].lookup_limit <= 0) continue;
      std::swap(drafts_[i], drafts_[asked]);
      std::swap(drafted_[i], drafted_[asked]);
      ++asked;
    }
  }
  const int64_t from = now_us();
  drafts_us_ += from - start;
  if (asked > 0) options_.drafter->propose(std::span(drafts_).first(asked));
  const double seconds = asked > 0 ? static_cast<double>(now_us() - from) * 1e-6 : 0.0;
  counted_.speculation.draft_seconds += seconds;
  if (options_.lengths != nullptr) options_.lengths->drafted(drafts_, seconds);
}

// Tells what the step cost. With a step in front, it counts from the end of that one.
void StepLoop::time_step(const StepInFlight& step, int64_t tokens) {
  const int64_t now = now_us();
  const int64_t from = std::max(step.started_at, std::exchange(committed_at_, now));
  if (options_.lengths == nullptr) return;
  speculative::StepDone done{
      .tokens = tokens,
      .seconds = static_cast<double>(now - from) * 1e-6,
      .more_seconds = static_cast<double>(std::exchange(drafts_us_, 0)) * 1e-6};
  for (const scheduler::StepItem& item : step.plan.items) {
    if (item.branch >= 0) {  // all of its rows are there for its drafts
      done.shape.add_rows(item.count, item.first + item.count);
      done.drafted += item.count;
      continue;
    }
    done.shape.add(item.count, item.first + item.count);
    done.drafted += item.draft;
    if (item.count > 1 + item.draft) done.prompt_tokens += item.count;
  }
  options_.lengths->stepped(done);
}

// Shows the drafter what the target computed: of a draft tree, the path that was accepted. The
// samples of a request part with their first tokens: each of them has the rows of the prompt.
void StepLoop::show_rows(const StepInFlight& step) {
  const int64_t from = now_us();
  rows_.clear();
  const auto show = [&](size_t item, const scheduler::Sequence& s) {
    const int32_t first = step.plan.items[item].first;
    const int32_t count = std::min(step.plan.items[item].count, s.computed - first);
    if (count <= 0 || s.size() <= first + count) return;
    speculative::TargetRows rows{
        .sequence = s.id, .tokens = s.tokens, .owner = owner_of(s), .first = first, .count = count};
    if (needs_.last) rows.last = runner_.state(item, 0).data();
    for (size_t b = 0; b < needs_.boundaries.size(); ++b) {
      rows.boundaries.push_back(runner_.boundary(b, item, 0));
    }
    rows_.push_back(std::move(rows));
  };
  for (size_t i = 0; i < step.plan.items.size(); ++i) {
    const scheduler::SequenceId id = step.plan.items[i].sequence;
    const int32_t branch = step.plan.items[i].branch;
    if (scheduler_->has(id) && scheduler_->sequence(id).accepted_branch == branch)
      show(i, scheduler_->sequence(id));
    if (branch >= 0) continue;
    const scheduler::Request* const request = scheduler_->request(step.request_ids[i]);
    if (request == nullptr) continue;
    for (const scheduler::SequenceId other : request->sequences) {
      if (other >= step.next_sequence) show(i, scheduler_->sequence(other));
    }
  }
  options_.drafter->observe(rows_);
  if (in_flight_.size() == 1) drafts_us_ += now_us() - from;  // otherwise the next step runs
}

// Whether the oldest step's tokens are to be taken now: another step runs behind it, or none can
// be scheduled until they are known.
bool StepLoop::tokens_due(bool scheduled) const {
  if (in_flight_.size() != 1) return !in_flight_.empty();
  return !scheduled || !in_flight_.front().runs_ahead;
}

void StepLoop::fill_masks(const StepInFlight& step) {
  masks_.clear();
  for (size_t i = 0; i < step.requests.size(); ++i) {
    const scheduler::StepItem& item = step.plan.items[i];
    if (item.branch >= 0) continue;  // masks are filled for samples, not for items
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    for (const auto& output : step.requests[i]->outputs) output->list_masks(item, s, masks_);
  }
  pool_.parallel_for(std::ssize(masks_), [&](int64_t i, int) {
    const MaskTask& task = masks_[static_cast<size_t>(i)];
    task.output->fill_mask(task.member);
  });
}

bool StepLoop::wants_states(const StepInFlight& step) const {
  if (needs_.last) return true;
  for (size_t i = 0; i < step.requests.size(); ++i) {
    const scheduler::StepItem& item = step.plan.items[i];
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    for (const auto& output : step.requests[i]->outputs) {
      if (output->wants_states(item, s)) return true;
    }
  }
  return false;
}

// The step counts as computed, and its sequences await tokens. REQUIRES: the tokens of the step in
// front are known.
void StepLoop::list_rows(StepInFlight& step) {
  scheduler_->ran(step.plan);
  for (size_t i = 0; i < step.requests.size(); ++i) {
    const scheduler::StepItem& item = step.plan.items[i];
    // The output that reads the main path reads its branches too.
    if (!scheduler_->has(item.sequence) || item.branch >= 0) continue;
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    step.prompt_tokens += std::clamp(s.prompt_tokens - item.first, 0, item.count);
    for (const auto& output : step.requests[i]->outputs) output->list_rows(i, item, s, step.tasks);
  }
  step.runs_ahead = may_run_ahead(step);
  if (!step.runs_ahead) return;
  for (const RowTask& task : step.tasks) task.output->expect(task);
}

// Whether the scores of the step's queries, or the keys of its tokens, are needed before the next
// step: an eviction selects by them, and samples of a request share and copy scores.
bool StepLoop::precedes_eviction(const StepInFlight& step) const {
  if (step.scores) return true;  // also of sequences that have ended since
  return std::ranges::any_of(step.plan.items, [this](const scheduler::StepItem& item) {
    if (!scheduler_->has(item.sequence)) return false;
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    const int32_t end = item.first + item.count;
    return end > s.scored_from || end >= s.evict_at;
  });
}

// A drafter that will be asked has to see every token before the next step.
bool StepLoop::may_run_ahead(const StepInFlight& step) const {
  const bool drafts =
      options_.drafter != nullptr && (options_.lengths == nullptr || !options_.lengths->resting());
  return runner_.overlaps() && !drafts && !precedes_eviction(step) &&
         std::ranges::all_of(step.tasks, [this](const RowTask& task) {
           return task.output->may_run_ahead(task, runner_);
         });
}

// Removes a request that is complete, and reports it to the client.
void StepLoop::retire(uint64_t id) {
  const auto node = live_.extract(id);
  const LiveRequest& live = *node.mapped();
  publish_stats();
  if (live.request.on_done) live.request.on_done(live.usage);
}

// Ends a request early; the scheduler may have forgotten it already.
void StepLoop::end_request(uint64_t id, FinishReason reason, const Status& status) {
  const auto node = live_.extract(id);
  if (node.empty()) return;
  LiveRequest& live = *node.mapped();
  record_usage(live, *scheduler_);
  scheduler_->cancel(id);
  std::vector<Delta> deltas;
  for (const auto& output : live.outputs) output->cancel(reason, status, deltas);
  if (live.request.on_delta) {
    for (const Delta& delta : deltas) live.request.on_delta(delta);
  }
  publish_stats();
  if (live.request.on_done) live.request.on_done(live.usage);
}

// ---- the step thread -------------------------------------------------------------------------

void StepLoop::loop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto called = [this] {
        return stop_ || loaded_ || !arrived_.empty() || !left_.empty() || !orders_.empty();
      };
      if (wake_at_ == 0) {
        wake_.wait(lock, called);
      } else if (wake_at_ > now_us()) {
        wake_.wait_for(lock, std::chrono::microseconds(wake_at_ - now_us()), called);
      }
      if (stop_) break;
    }
    empty_inbox();
    const bool prepared = prepare_next();
    // Long past: go on at once.
    if (prepared || step() || scheduler_->next_unready() != nullptr) wake_at_ = 1;
    publish();
  }
  for (size_t i = 0; i < in_flight_.size(); ++i) runner_.finish();  // they write to its buffers
  std::vector<uint64_t> ids;
  ids.reserve(live_.size());
  for (const auto& [id, live] : live_) ids.push_back(id);
  empty_inbox();
  for (const auto& [id, live] : live_) {
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  }
  std::ranges::sort(ids);
  for (const uint64_t id : ids)
    end_request(id, FinishReason::kCancelled, cancelled("the engine is shutting down"));
}

void StepLoop::empty_inbox() {
  std::vector<Arrival> arrived;
  std::vector<uint64_t> left;
  std::vector<std::function<void()>> orders;
  {
    const std::lock_guard lock(mutex_);
    arrived.swap(arrived_);
    left.swap(left_);
    orders.swap(orders_);
    loaded_ = false;  // schedule() takes what was loaded
  }
  for (const std::function<void()>& order : orders) order();
  for (Arrival& a : arrived) begin(a.id, std::move(a.request), a.encoder_content);
  for (const uint64_t id : left) end_request(id, FinishReason::kCancelled, cancelled("cancelled"));
}

void StepLoop::begin(uint64_t id, Request request, const std::string& encoder_content) {
  auto live = make_live_request(id, std::move(request),
                                {options_.scheduler.max_model_len, options_.seed, options_.eos,
                                 options_.retention, &runner_.cache().spec(), options_.sparse},
                                services_);
  const int64_t now = now_us();
  scheduler::NewRequest order = order_of(*live, now);
  if (!encoder_content.empty()) {
    // Keys and values of the decoder's tokens depend on what the encoder has read.
    order.salt += '\0' + encoder_content;
    order.encoder_content = encoder_content;
    order.prepares = prepares_ && (live->request.frames > 0 || order.encoder_tokens >= kOwnPass);
  }
  const Status pictured = begin_pictures(*live, order);
  live_[id] = std::move(live);
  if (!pictured.ok()) return end_request(id, FinishReason::kError, pictured);
  const auto sequence = scheduler_->submit(std::move(order), now);
  if (!sequence.ok()) end_request(id, FinishReason::kError, sequence.status());
}

}  // namespace freshet::engine
