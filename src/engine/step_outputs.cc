// What a step's logits become: log-probabilities, tokens, texts, ends. Part of StepLoop.
#include <algorithm>
#include <utility>

#include "engine/step_loop.h"

namespace freshet::engine {

namespace {

// Writes what the grammar allows. Behind the same tokens the same, whatever else runs.
void fill_mask(Sample& sample, int64_t vocab, std::span<const int32_t> end_ids) {
  sample.mask.resize((static_cast<size_t>(vocab) + 31) / 32);
  if (!sample.matcher->fill_mask(sample.mask)) sample.mask.clear();
  const auto none = [&] {
    return std::ranges::all_of(sample.mask, [](uint32_t w) { return w == 0; });
  };
  sample.complete = false;
  if (!sample.matcher->can_end()) return;
  sample.complete = end_ids.empty() && none();
  for (const int32_t id : end_ids) {
    sample.mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
  }
}

}  // namespace

// Of the samples that a step gives tokens.
void StepLoop::fill_masks(const scheduler::Step& step) {
  masked_.clear();
  for (const scheduler::StepItem& item : step.items) {
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    LiveRequest& live = *live_.at(s.request->id);
    if (!live.request.params.grammar || item.first + item.count < s.size()) continue;
    for (const auto& sample : live.samples) {
      if (!live.forked || sample->sequence == s.id) masked_.emplace_back(&live, sample.get());
    }
  }
  pool_.parallel_for(std::ssize(masked_), [&](int64_t i, int) {
    auto& [live, sample] = masked_[static_cast<size_t>(i)];
    fill_mask(*sample, runner_.vocab(), live->end_ids);
  });
}

// What is to become of an item's last row of logits, as far as a device may be told.
ops::SampleRow StepLoop::describe(const scheduler::StepItem& item,
                                  std::vector<int32_t>& words) const {
  const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
  const LiveRequest& live = *live_.at(s.request->id);
  ops::SampleRow row;
  if (live.beams || live.embedding || item.first + item.count < s.size()) return row;
  const Sample* its = nullptr;
  for (const auto& sample : live.samples) {
    if (live.forked && sample->sequence != s.id) continue;
    if (its != nullptr) return {};  // samples that have not parted draw from one row
    its = sample.get();
  }
  if (its != nullptr && !its->complete) {
    its->sampler.describe(s.size(), its->mask, s.expects(), row, words);
  }
  return row;
}

void StepLoop::gather() {
  choices_.clear();
  prompt_rows_.clear();
  for (size_t i = 0; i < step_.items.size(); ++i) {
    const scheduler::StepItem& item = step_.items[i];
    if (!scheduler_->has(item.sequence)) continue;
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    LiveRequest& live = *live_.at(s.request->id);
    if (live.request.params.prompt_logprobs >= 0) gather_prompt_rows(live, item, i);
    if (!s.awaits_token() || live.beams || live.embedding) continue;
    for (const auto& sample : live.samples) {
      // Before the samples part, the prompt's last row is for all of them.
      if (live.forked && sample->sequence != s.id) continue;
      Choice& c = choices_.emplace_back();
      c.request = live.id;
      c.live = &live;
      c.sample = sample.get();
      c.item = i;
      c.k = item.logits - 1;
      c.shared = !live.forked && live.samples.size() > 1;
      c.position = s.size();
    }
  }
}

void StepLoop::gather_prompt_rows(LiveRequest& live, const scheduler::StepItem& item,
                                  size_t index) {
  const auto prompt = static_cast<int32_t>(live.request.prompt.size());
  const int32_t first = item.first + item.count - item.logits;
  for (int32_t k = 0; k < item.logits && first + k + 1 < prompt; ++k) {
    prompt_rows_.push_back({&live, index, k, first + k + 1, {}});
  }
}

// Whether the next step may be made of this one's items before its tokens are known.
bool StepLoop::may_run_ahead() const {
  if (!runner_.overlaps() || embeddings_ > 0 || !prompt_rows_.empty()) return false;
  const bool beams = std::any_of(live_.begin(), live_.end(), [](const auto& l) {
    return l.second->request.params.beam_width > 0;
  });
  return !beams && std::ranges::all_of(choices_, [&](const Choice& c) {
    return !c.shared && !c.sample->matcher && runner_.names(c.item, c.k);
  });
}

void StepLoop::expect_tokens() {
  for (Choice& c : choices_) {
    c.expected = c.sample->outputs + 1 < c.live->max_tokens;
    if (c.expected) scheduler_->expect(c.sample->sequence);
  }
}

// What the model left for the choices, of those that are still to be made.
void StepLoop::take_rows() {
  std::erase_if(choices_,
                [&](const Choice& c) { return !live_.contains(c.request) || c.sample->ended; });
  for (Choice& c : choices_) {
    c.named = runner_.named(c.item, c.k);
    c.row = runner_.row(c.item, c.k);
  }
  for (PromptRow& p : prompt_rows_) p.row = runner_.row(p.item, p.k);
}

// Before min_tokens the end may be the one thing that the grammar leaves.
void StepLoop::see_end(Choice& c) {
  const auto& matcher = c.sample->matcher;
  if (matcher && matcher->can_end()) c.token = kSentenceComplete;
}

void StepLoop::choose(Choice& c, Worker& worker) {
  if (c.named != StepResults::kSeeLogits) {
    c.token = c.named;
    if (c.token < 0) see_end(c);
    return;
  }
  std::span<float> row = c.row;
  if (c.shared) {  // sample() changes its row
    std::ranges::copy(row, worker.row.begin());
    row = worker.row;
  }
  Sample& sample = *c.sample;
  if (sample.complete) {
    c.token = kSentenceComplete;
    return;
  }
  const bool wanted = c.live->request.params.logprobs >= 0;
  c.token = sample.sampler.sample(row, c.position, worker.scratch, sample.mask,
                                  wanted ? &c.logprobs : nullptr);
  if (c.token < 0) see_end(c);
}

void StepLoop::sample_all() {
  const auto prompts = static_cast<int64_t>(prompt_rows_.size());
  const bool named = prompts == 0 && std::ranges::all_of(choices_, [](const Choice& c) {
                       return c.named != StepResults::kSeeLogits;
                     });
  if (named) {  // not worth waking the pool
    for (Choice& c : choices_) choose(c, workers_.front());
    return;
  }
  const auto total = prompts + static_cast<int64_t>(choices_.size());
  pool_.parallel_for(total, [&](int64_t i, int w) {
    Worker& worker = workers_[static_cast<size_t>(w)];
    if (i < prompts) {
      const PromptRow& p = prompt_rows_[static_cast<size_t>(i)];
      const auto at = static_cast<size_t>(p.position);
      raw_logprobs(p.row, p.live->request.prompt[at], p.live->request.params.prompt_logprobs,
                   worker.scratch, p.live->prompt_logprobs[at]);
      return;
    }
    choose(choices_[static_cast<size_t>(i - prompts)], worker);
  });
}

// A prompt's log-probabilities are complete when its samples get their first token.
void StepLoop::deliver_prompt_logprobs() {
  const auto deliver = [](LiveRequest& live) {
    if (live.request.params.prompt_logprobs < 0 || live.prompt_logprobs_sent) return;
    live.prompt_logprobs_sent = true;
    if (live.request.on_prompt_logprobs) live.request.on_prompt_logprobs(live.prompt_logprobs);
    live.prompt_logprobs.shrink_to_fit();
  };
  for (const Choice& choice : choices_) deliver(*choice.live);
  for (const PromptRow& row : prompt_rows_) {
    if (row.position + 1 == std::ssize(row.live->request.prompt)) deliver(*row.live);
  }
}

void StepLoop::fork_samples(LiveRequest& live) {
  live.forked = true;
  const scheduler::SequenceId first = live.samples.front()->sequence;
  for (const auto& sample : live.samples) {
    if (sample->sequence == 0) sample->sequence = scheduler_->fork(first);
  }
}

// Makes the chosen token part of its sample, and tells the client.
void StepLoop::apply(Choice& c) {
  LiveRequest& live = *c.live;
  Sample& sample = *c.sample;
  const SamplingParams& p = live.request.params;
  if (!live.forked) fork_samples(live);
  Delta delta;
  delta.index = sample.index;
  if (c.token == kSentenceComplete) {
    delta.finish = FinishReason::kStop;
  } else if (c.token < 0) {
    delta.finish = FinishReason::kError;
    delta.error =
        internal_error("no token can follow: every logit is minus infinity or not a number");
  } else {
    sample.sampler.accept(c.token);
    ++sample.outputs;
    ++counted_.generated_tokens;
    ++live.usage.completion_tokens;
    delta.ids.push_back(c.token);
    if (p.logprobs >= 0) delta.logprobs.push_back(std::move(c.logprobs));
    const bool ends = std::ranges::binary_search(live.end_ids, c.token);
    if (sample.matcher && !ends) sample.matcher->accept(c.token);
    if (!ends || p.include_stop_str_in_output)
      delta.text = sample.text.push(c.token, sample.outputs >= p.min_tokens);
    if (ends) {
      delta.finish = FinishReason::kStop;
      if (std::ranges::find(p.stop_token_ids, c.token) != p.stop_token_ids.end()) {
        delta.stop_reason = std::to_string(c.token);
      }
    } else if (const std::string* stop = sample.text.stopped_by()) {
      delta.finish = FinishReason::kStop;
      delta.stop_reason = *stop;
    } else if (sample.outputs == live.max_tokens) {
      delta.finish = FinishReason::kLength;
    }
  }
  if (delta.finish == FinishReason::kNone) {
    if (c.expected) {
      scheduler_->known(sample.sequence, c.token);
    } else {
      scheduler_->commit(sample.sequence, {&c.token, 1});
    }
  } else {
    delta.text += sample.text.finish();
    sample.ended = true;
    --live.open;
    if (live.open == 0) record_usage(live);
    scheduler_->finish(sample.sequence);
  }
  if (live.request.on_delta) live.request.on_delta(delta);
  finish_if_over(live);
}

// ---- beams -----------------------------------------------------------------------------------

void StepLoop::advance_beams(LiveRequest& live, scheduler::SequenceId sequence,
                             std::span<const float> row) {
  Beams& beams = *live.beams;
  const auto at =
      static_cast<size_t>(std::ranges::find(beams.sequences, sequence) - beams.sequences.begin());
  beams.logits.resize(beams.sequences.size() * row.size());
  std::ranges::copy(row, beams.logits.begin() + static_cast<std::ptrdiff_t>(at * row.size()));
  beams.ready[at] = true;
  if (std::ranges::find(beams.ready, false) != beams.ready.end()) return;

  const auto steps = beams.search.advance(beams.logits);
  ++beams.length;
  if (steps.empty() || beams.search.done() || beams.length == live.max_tokens) {
    end_beams(live);
  } else {
    continue_beams(live, steps);
  }
}

void StepLoop::continue_beams(LiveRequest& live, std::span<const BeamSearch::Step> steps) {
  Beams& beams = *live.beams;
  const std::vector<scheduler::SequenceId> parents = std::move(beams.sequences);
  beams.sequences.clear();
  std::vector<bool> used(parents.size(), false);
  for (const BeamSearch::Step& s : steps) used[static_cast<size_t>(s.parent)] = true;
  for (size_t i = 0; i < parents.size(); ++i) {  // first, so that their seats are free
    if (!used[i]) scheduler_->finish(parents[i]);
  }
  used.assign(parents.size(), false);
  for (const BeamSearch::Step& s : steps) {
    const auto parent = static_cast<size_t>(s.parent);
    beams.sequences.push_back(used[parent] ? scheduler_->fork(parents[parent]) : parents[parent]);
    used[parent] = true;
  }
  for (size_t i = 0; i < steps.size(); ++i)
    scheduler_->commit(beams.sequences[i], {&steps[i].id, 1});
  beams.ready.assign(steps.size(), false);
}

void StepLoop::end_beams(LiveRequest& live) {
  const SamplingParams& p = live.request.params;
  std::vector<BeamHypothesis> best = live.beams->search.finish();
  best.resize(std::min(best.size(), static_cast<size_t>(p.n)));
  std::vector<Delta> deltas;
  for (size_t i = 0; i < best.size(); ++i) {
    Delta& delta = deltas.emplace_back();
    delta.index = static_cast<int>(i);
    delta.finish = best[i].stopped ? FinishReason::kStop : FinishReason::kLength;
    TextAssembler text(tokenizer_, p.skip_special_tokens, p.stop, p.include_stop_str_in_output);
    for (const int32_t id : best[i].ids) {
      delta.ids.push_back(id);
      if (std::ranges::binary_search(live.end_ids, id) && !p.include_stop_str_in_output) break;
      delta.text += text.push(id, true);
      if (text.stopped_by() == nullptr) continue;
      delta.finish = FinishReason::kStop;
      delta.stop_reason = *text.stopped_by();
      break;
    }
    delta.text += text.finish();
    live.usage.completion_tokens += static_cast<int>(delta.ids.size());
    counted_.generated_tokens += static_cast<int64_t>(delta.ids.size());
  }
  while (deltas.size() < static_cast<size_t>(p.n)) {
    Delta& delta = deltas.emplace_back();
    delta.index = static_cast<int>(deltas.size()) - 1;
    delta.finish = FinishReason::kError;
    delta.error =
        internal_error("no token can follow: every logit is minus infinity or not a number");
  }
  record_usage(live);
  live.open = 0;
  scheduler_->cancel(live.id);
  if (live.request.on_delta) {
    for (const Delta& delta : deltas) live.request.on_delta(delta);
  }
  finish_if_over(live);
}

// ---- embeddings ------------------------------------------------------------------------------

void StepLoop::embed(const scheduler::Step& step) {
  for (size_t i = 0; i < step.items.size(); ++i) {
    const scheduler::StepItem& item = step.items[i];
    if (!scheduler_->has(item.sequence)) continue;
    const scheduler::Sequence& s = scheduler_->sequence(item.sequence);
    LiveRequest& live = *live_.at(s.request->id);
    if (!live.embedding) continue;
    Embedding& e = *live.embedding;
    const bool mean = live.request.pooling == Pooling::kMean;
    const int32_t end = item.first + item.count;
    const int32_t first = mean ? std::max(item.first, e.positions) : end - 1;
    for (int32_t p = first; p < end; ++p) {
      const auto state = runner_.state(i, p - item.first);
      if (!mean) e.sum.clear();
      e.sum.resize(state.size(), 0.0);
      for (size_t k = 0; k < state.size(); ++k) e.sum[k] += static_cast<double>(state[k]);
    }
    e.positions = std::max(e.positions, end);
    if (!s.awaits_token()) continue;
    const double count = mean ? s.size() : 1;
    std::vector<float> pooled;
    pooled.reserve(e.sum.size());
    for (const double v : e.sum) pooled.push_back(static_cast<float>(v / count));
    live.open = 0;
    record_usage(live);
    scheduler_->finish(item.sequence);
    if (live.request.on_embedding) live.request.on_embedding(pooled);
    finish_if_over(live);
  }
}

// ---- ends ------------------------------------------------------------------------------------

// Before the scheduler forgets the request.
void StepLoop::record_usage(LiveRequest& live) {
  const scheduler::Request* request = scheduler_->request(live.id);
  if (request == nullptr) return;
  live.usage.cached_tokens = request->cached_tokens;
  live.usage.preemptions = request->preemptions;
  const scheduler::WaitTimes times = scheduler_->waits(live.id, 0);
  for (size_t i = 0; i < times.size(); ++i) {
    if (times[i] <= 0) continue;
    live.usage.waited.emplace_back(name_of(static_cast<scheduler::WaitReason>(i)),
                                   static_cast<double>(times[i]) * 1e-6);
  }
}

void StepLoop::finish_if_over(LiveRequest& live) {
  if (live.open > 0) return;
  const auto node = live_.extract(live.id);
  if (live.embedding) --embeddings_;
  publish_stats();
  if (live.request.on_done) live.request.on_done(live.usage);
}

// Ends all open samples of a request that may or may not be known to the scheduler still.
void StepLoop::end_request(uint64_t id, FinishReason reason, const Status& status) {
  const auto node = live_.extract(id);
  if (node.empty()) return;
  LiveRequest& live = *node.mapped();
  if (live.embedding) --embeddings_;
  record_usage(live);
  scheduler_->cancel(id);
  std::vector<Delta> deltas;
  for (int i = 0; i < live.request.params.n; ++i) {
    Delta delta;
    delta.index = i;
    delta.finish = reason;
    delta.error = status;
    if (!live.samples.empty()) {
      Sample& sample = *live.samples[static_cast<size_t>(i)];
      if (sample.ended) continue;
      delta.text = sample.text.finish();
    }
    deltas.push_back(std::move(delta));
  }
  if (live.request.on_delta) {
    for (const Delta& delta : deltas) live.request.on_delta(delta);
  }
  publish_stats();
  if (live.request.on_done) live.request.on_done(live.usage);
}

}  // namespace freshet::engine
