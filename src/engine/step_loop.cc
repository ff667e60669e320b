#include "engine/step_loop.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/philox.h"

namespace freshet::engine {
namespace {

int64_t now_us() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(t).count();
}

// FNV-1a: tenants are told apart by number.
uint64_t tenant_number(const std::string& name) {
  uint64_t h = 0xCBF29CE484222325;
  for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3;
  return h;
}

}  // namespace

StepLoop::StepLoop(const StepLoopOptions& options, const Tokenizer* tokenizer, ThreadPool& pool,
                   std::unique_ptr<kv_cache::BlockCache> blocks, ModelRunner runner)
    : options_(options),
      tokenizer_(tokenizer),
      pool_(pool),
      blocks_(std::move(blocks)),
      runner_(std::move(runner)) {
  for (int i = 0; i < pool.size(); ++i) workers_.emplace_back(runner_.vocab());
}

Result<std::unique_ptr<StepLoop>> StepLoop::start(const StepLoopOptions& options, Model& model,
                                                  KvStorage cache, const Tokenizer* tokenizer,
                                                  ThreadPool& pool, Memory* host_memory) {
  kv_cache::BlockCache::Options blocks;
  for (size_t g = 0; g < options.blocks.size(); ++g) {
    blocks.groups.push_back({cache.spec().groups[g].window, options.blocks[g]});
  }
  blocks.share_prefixes = options.share_prefixes;
  blocks.hash_seed = options.seed;
  blocks.timed_share = options.timed_share;
  FRESHET_ASSIGN_OR_RETURN(
      ModelRunner runner,
      ModelRunner::create(model, std::move(cache), options.scheduler.max_num_batched_tokens,
                          options.scheduler.max_logit_rows, host_memory));
  std::unique_ptr<StepLoop> loop(
      new StepLoop(options, tokenizer, pool,
                   std::make_unique<kv_cache::BlockCache>(std::move(blocks)), std::move(runner)));
  FRESHET_ASSIGN_OR_RETURN(loop->scheduler_,
                           scheduler::Scheduler::create(options.scheduler, *loop->blocks_));
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
}

// ---- from any thread -------------------------------------------------------------------------

std::optional<RequestError> StepLoop::check(const Request& r) const {
  if (auto error = find_error(r.params, runner_.vocab())) return error;
  const auto length = static_cast<int64_t>(r.prompt.size());
  if (length == 0) return wrong("prompt", "the prompt is empty");
  if (length >= options_.scheduler.max_model_len) {
    return wrong(
        "prompt",
        "the prompt has {} tokens; at most {} fit with a token to follow (max_model_len {})",
        length, options_.scheduler.max_model_len - 1, options_.scheduler.max_model_len);
  }
  for (const int32_t id : r.prompt) {
    if (id < 0 || id >= runner_.vocab()) {
      return wrong("prompt", "token id {} in the prompt: the model has ids 0 to {}", id,
                   runner_.vocab() - 1);
    }
  }
  if (r.params.grammar && r.params.beam_width > 0) {
    return wrong("grammar", "structured output and beam search do not go together");
  }
  if (r.params.grammar &&
      (r.params.grammar->trie().vocab_size() > runner_.vocab() ||
       (r.params.thought && r.params.thought->vocab_size() > runner_.vocab()))) {
    return wrong("grammar", "the grammar was compiled for another vocabulary");
  }
  const int sequences = std::max(r.params.n, r.params.beam_width);
  if (sequences > options_.scheduler.max_num_seqs) {
    return wrong("n", "{} sequences in one request: at most {} run at once (max_num_seqs)",
                 sequences, options_.scheduler.max_num_seqs);
  }
  if (tokenizer_ == nullptr && !r.params.stop.empty()) {
    return wrong("stop", "stop strings need a vocabulary, and this model came without one");
  }
  if (!(r.deadline_s >= 0.0) || r.deadline_s > 1e9) {
    return wrong("deadline_s", "deadline_s must be between 0 and 1e9, not {}", r.deadline_s);
  }
  return {};
}

Result<uint64_t> StepLoop::submit(Request request) {
  if (const auto error = check(request)) return invalid_argument("{}", error->message);
  const auto tokens = static_cast<int64_t>(request.prompt.size());
  uint64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    if (options_.max_queued_requests > 0 && queued_requests_ >= options_.max_queued_requests) {
      return resource_exhausted("the queue is full: {} requests wait", queued_requests_);
    }
    if (options_.max_queued_tokens > 0 && queued_tokens_ + tokens > options_.max_queued_tokens) {
      return resource_exhausted("the queue is full: {} prompt tokens wait, {} may", queued_tokens_,
                                options_.max_queued_tokens);
    }
    ++queued_requests_;
    queued_tokens_ += tokens;
    id = next_id_++;
    if (request.id.empty()) request.id = fmt::format("req-{}", id);
    arrived_.emplace_back(id, std::move(request));
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

EngineStats StepLoop::stats() const {
  const std::lock_guard lock(mutex_);
  return published_;
}

// ---- the step thread -------------------------------------------------------------------------

void StepLoop::loop() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto called = [this] { return stop_ || !arrived_.empty() || !left_.empty(); };
      if (wake_at_ == 0) {
        wake_.wait(lock, called);
      } else if (wake_at_ > now_us()) {
        wake_.wait_for(lock, std::chrono::microseconds(wake_at_ - now_us()), called);
      }
      if (stop_) break;
    }
    empty_inbox();
    if (step()) wake_at_ = 1;  // long past: go on at once
    publish();
  }
  if (ahead_) runner_.finish();  // its results have a place as long as they are on their way
  std::vector<uint64_t> ids;
  ids.reserve(live_.size());
  for (const auto& [id, live] : live_) ids.push_back(id);
  empty_inbox();
  for (const auto& [id, live] : live_) {
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  }
  std::ranges::sort(ids);
  for (const uint64_t id : ids)
    end_request(id, FinishReason::kCancelled, cancelled("the engine shuts down"));
}

void StepLoop::empty_inbox() {
  std::vector<std::pair<uint64_t, Request>> arrived;
  std::vector<uint64_t> left;
  {
    const std::lock_guard lock(mutex_);
    arrived.swap(arrived_);
    left.swap(left_);
  }
  for (auto& [id, request] : arrived) begin(id, std::move(request));
  for (const uint64_t id : left) end_request(id, FinishReason::kCancelled, cancelled("cancelled"));
}

void StepLoop::begin(uint64_t id, Request request) {
  auto live = std::make_unique<LiveRequest>();
  LiveRequest& r = *live;
  r.id = id;
  const SamplingParams& p = request.params;
  const auto prompt = static_cast<int>(request.prompt.size());
  r.max_tokens = std::min(p.max_tokens, options_.scheduler.max_model_len - prompt);
  r.seed = p.seed ? *p.seed : static_cast<uint64_t>(philox_uniform(options_.seed, id, 0) * 0x1p53);
  r.usage.prompt_tokens = prompt;
  r.usage.seed = r.seed;
  r.end_ids = p.stop_token_ids;
  if (!p.ignore_eos) r.end_ids.insert(r.end_ids.end(), options_.eos.begin(), options_.eos.end());
  std::ranges::sort(r.end_ids);
  if (request.pooling != Pooling::kNone) {
    r.embedding.emplace();
    r.open = 1;
    ++embeddings_;
  } else {
    r.open = p.n;
  }
  if (p.prompt_logprobs >= 0) r.prompt_logprobs.resize(request.prompt.size());

  scheduler::NewRequest order;
  order.id = id;
  order.prompt = request.prompt;
  order.max_tokens = r.embedding ? 0 : r.max_tokens;
  order.samples = r.embedding ? 1 : std::max(p.n, p.beam_width);
  order.compute_all = request.pooling == Pooling::kMean;
  order.pin_tokens = request.pin_tokens;
  order.priority = request.priority;
  order.tenant = tenant_number(request.tenant);
  order.salt = request.cache_salt;
  const int64_t now = now_us();
  if (request.deadline_s > 0)
    order.deadline = now + std::max<int64_t>(1, std::llround(request.deadline_s * 1e6));
  if (p.prompt_logprobs >= 0) order.logits_from = 0;
  r.request = std::move(request);
  live_[id] = std::move(live);
  const auto sequence = scheduler_->submit(std::move(order), now);
  if (!sequence.ok()) {
    end_request(id, FinishReason::kError, sequence.status());
    return;
  }
  if (r.prompt_logprobs.size() == 1) {
    r.prompt_logprobs_sent = true;
    if (r.request.on_prompt_logprobs) r.request.on_prompt_logprobs(r.prompt_logprobs);
  }
}

// Gives a request that runs for the first time its samples or beams: those that wait may be many.
void StepLoop::furnish(LiveRequest& r, scheduler::SequenceId sequence) {
  if (!r.samples.empty() || r.beams || r.embedding) return;
  const SamplingParams& p = r.request.params;
  if (p.beam_width > 0) {
    r.beams.emplace(
        Beams{BeamSearch({p.beam_width, p.length_penalty, false, r.end_ids}, runner_.vocab()),
              {sequence},
              {},
              {false},
              0});
    return;
  }
  for (int i = 0; i < p.n; ++i) {
    r.samples.push_back(std::make_unique<Sample>(Sample{
        i,
        0,
        Sampler(p, runner_.vocab(), r.seed, static_cast<uint32_t>(i), r.request.prompt,
                r.max_tokens, r.end_ids),
        TextAssembler(tokenizer_, p.skip_special_tokens, p.stop, p.include_stop_str_in_output),
        {},
        {}}));
    if (!p.grammar) continue;
    r.samples.back()->matcher.emplace(p.grammar, p.thought, p.in_thought);
  }
  r.samples.front()->sequence = sequence;
}

bool StepLoop::step() {
  const int64_t now = now_us();
  blocks_->lives().set_time(now);
  scheduler::Step step = scheduler_->schedule(now);
  count_evicted_blocks();
  wake_at_ = step.wake_at;
  for (const uint64_t id : step.expired) {
    end_request(id, FinishReason::kCancelled, cancelled("the deadline passed"));
  }
  if (step.items.empty()) {
    if (!ahead_) return false;
    complete();
    return true;
  }
  for (const scheduler::StepItem& item : step.items)
    furnish(*live_.at(scheduler_->sequence(item.sequence).request->id), item.sequence);
  // Single tokens in front: a device has a kernel for them.
  std::ranges::stable_partition(step.items, [](const auto& item) { return item.count == 1; });
  fill_masks(step);
  runner_.start(step, *scheduler_, embeddings_ > 0,
                [this](const scheduler::StepItem& item, std::vector<int32_t>& words) {
                  return describe(item, words);
                });
  if (ahead_) complete();  // the step in front, while this one runs
  step_ = std::move(step);
  scheduler_->ran(step_);
  prompt_tokens_ = prompt_tokens(step_);  // while its sequences are all there
  gather();
  ahead_ = may_run_ahead();
  if (ahead_) {
    expect_tokens();
  } else {
    complete();
  }
  return true;
}

// Takes what the step brought: tokens, texts, ends.
void StepLoop::complete() {
  const int64_t from = now_us();
  runner_.finish();
  if (runner_.overlaps())
    counted_.device_wait_seconds += static_cast<double>(now_us() - from) * 1e-6;
  ahead_ = false;
  take_rows();
  sample_all();
  count_step(prompt_tokens_ + chosen_tokens());  // before anybody hears of its tokens
  if (embeddings_ > 0) embed(step_);
  deliver_prompt_logprobs();
  for (Choice& choice : choices_) apply(choice);
  for (size_t i = 0; i < step_.items.size(); ++i) {
    const scheduler::StepItem& item = step_.items[i];
    if (!scheduler_->has(item.sequence)) continue;
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    LiveRequest& live = *live_.at(s.request->id);
    if (live.beams && s.awaits_token())
      advance_beams(live, item.sequence, runner_.row(i, item.logits - 1));
  }
}

// Of prompts, computed in this step.
int64_t StepLoop::prompt_tokens(const scheduler::Step& step) const {
  int64_t tokens = 0;
  for (const scheduler::StepItem& item : step.items) {
    if (!scheduler_->has(item.sequence)) continue;
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    tokens += std::clamp(s.prompt_tokens - item.first, 0, item.count);
  }
  return tokens;
}

// A beam chooses one, whichever of them is kept.
int64_t StepLoop::chosen_tokens() const {
  int64_t tokens = std::ranges::count_if(choices_, [](const Choice& c) { return c.token >= 0; });
  for (const scheduler::StepItem& item : step_.items) {
    if (!scheduler_->has(item.sequence)) continue;
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    if (s.awaits_token() && live_.at(s.request->id)->beams) ++tokens;
  }
  return tokens;
}

void StepLoop::count_step(int64_t tokens) {
  const auto& bounds = EngineStats::kStepTokens;
  ++counted_.steps;
  counted_.step_tokens += tokens;
  ++counted_.steps_by_tokens[static_cast<size_t>(std::ranges::lower_bound(bounds, tokens) -
                                                 bounds.begin())];
}

void StepLoop::count_evicted_blocks() {
  for (const kv_cache::BlockLife& life : blocks_->lives().take()) {
    counted_.block_lifetime.add(static_cast<double>(life.lifetime) * 1e-6);
    counted_.block_idle.add(static_cast<double>(life.idle) * 1e-6);
    for (const int64_t gap : life.gaps)
      counted_.block_reuse_gap.add(static_cast<double>(gap) * 1e-6);
  }
}

void StepLoop::publish_stats() {
  const scheduler::SchedulerStats s = scheduler_->stats();
  counted_.running = s.running;
  counted_.waiting = s.waiting;
  counted_.preemptions = s.preemptions;
  counted_.prompt_tokens = s.prompt_tokens;
  counted_.cached_tokens = s.cached_tokens;
  counted_.recomputed_tokens = s.recomputed_tokens;
  counted_.deferred = s.deferred;
  counted_.kv_cache_usage = 0.0;
  for (int g = 0; g < blocks_->groups(); ++g) {
    const double used = 1.0 - static_cast<double>(blocks_->available(g)) / blocks_->pool(g).size();
    counted_.kv_cache_usage = std::max(counted_.kv_cache_usage, used);
  }
  const std::lock_guard lock(mutex_);
  published_ = counted_;
}

void StepLoop::publish() {
  publish_stats();
  const scheduler::SchedulerStats s = scheduler_->stats();
  const std::lock_guard lock(mutex_);
  queued_requests_ = s.queued_requests;
  queued_tokens_ = s.queued_tokens;
  for (const auto& [id, request] : arrived_) {
    ++queued_requests_;
    queued_tokens_ += static_cast<int64_t>(request.prompt.size());
  }
}

}  // namespace freshet::engine
