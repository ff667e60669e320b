// Shared by tests of StepLoop: a loop over the fake model (fake_model_test.h), requests for it and
// their outcomes. A Rig is used by one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/fake_model_test.h"
#include "engine/step_loop.h"

namespace freshet::engine {

struct Outcome {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<std::vector<TokenLogprob>>> logprobs;
  std::vector<FinishReason> finish;
  std::vector<std::string> reason;
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;
  Usage usage;
};

// A request whose outcome can be waited for.
struct Pending {
  std::promise<void> promise;
  Outcome outcome;
  uint64_t id = 0;
};

struct RigOptions {
  std::vector<int> windows = {0};
  int max_model_len = 512;
  int max_num_seqs = 128;
  int tokens = 2048;
  int chunk = 0;
  int rows = 256;
  bool share = true;
  int max_queued = 0;
  int threads = 2;
  std::vector<int32_t> eos;
  std::vector<int32_t> blocks;  // empty: plenty
  bool draws = false;           // the model samples tokens, as a device does
  speculative::Drafter* drafter = nullptr;
  speculative::DraftLengths* lengths = nullptr;
  speculative::AcceptanceOptions acceptance = {};
  int tree_max_batch = 0;
  // Opens the tiers over the cache; they must outlive the rig. nullptr: none.
  std::function<kv_cache::TierStore*(const KvStorage&)> tiers = nullptr;
};

class Rig {
 public:
  explicit Rig(const RigOptions& s) : model_(s.windows, s.draws), pool_(s.threads, false) {
    StepLoopOptions o;
    o.scheduler.max_model_len = s.max_model_len;
    o.scheduler.max_num_seqs = s.max_num_seqs;
    o.scheduler.max_num_batched_tokens = s.tokens;
    o.scheduler.max_chunk = s.chunk;
    o.scheduler.max_logit_rows = s.rows;
    o.blocks = s.blocks.empty() ? std::vector<int32_t>(s.windows.size(), 4096) : s.blocks;
    o.share_prefixes = s.share;
    o.eos = s.eos;
    o.seed = 99;
    o.max_queued_requests = s.max_queued;
    o.drafter = s.drafter;
    o.lengths = s.lengths;
    o.acceptance = s.acceptance;
    o.tree_max_batch = s.tree_max_batch;
    auto cache = KvStorage::allocate(model_.kv_spec(), o.blocks);
    if (s.tiers) o.tiers = s.tiers(*cache);
    auto loop = StepLoop::start(o, model_, std::move(*cache), nullptr, pool_);
    EXPECT_TRUE(loop.ok()) << loop.status().message();
    loop_ = std::move(*loop);
  }

  Pending& send(Request r) {
    auto& p = pending_.emplace_back();
    const auto n = static_cast<size_t>(r.params.n);
    p.outcome.ids.resize(n);
    p.outcome.logprobs.resize(n);
    p.outcome.finish.resize(n);
    p.outcome.reason.resize(n);
    auto* q = &p;
    if (!r.on_delta) {
      r.on_delta = [q](const Delta& d) {
        const auto i = static_cast<size_t>(d.index);
        q->outcome.ids[i].insert(q->outcome.ids[i].end(), d.ids.begin(), d.ids.end());
        q->outcome.logprobs[i].insert(q->outcome.logprobs[i].end(), d.logprobs.begin(),
                                      d.logprobs.end());
        q->outcome.finish[i] = d.finish;
        q->outcome.reason[i] = d.stop_reason;
      };
    }
    r.on_prompt_logprobs = [q](const auto& l) { q->outcome.prompt_logprobs = l; };
    r.on_done = [q](const Usage& usage) {
      q->outcome.usage = usage;
      q->promise.set_value();
    };
    const auto id = loop_->submit(std::move(r));
    EXPECT_TRUE(id.ok()) << id.status().message();
    p.id = *id;
    return p;
  }
  static const Outcome& wait(Pending& p) {
    EXPECT_EQ(p.promise.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
    return p.outcome;
  }
  const Outcome& run(Request r) { return wait(send(std::move(r))); }
  StepLoop& loop() { return *loop_; }
  const FakeModel& model() const { return model_; }
  void stop() { loop_.reset(); }

 private:
  FakeModel model_;
  ThreadPool pool_;
  std::deque<Pending> pending_;
  std::unique_ptr<StepLoop> loop_;
};

// A prompt whose first half is the same for every `which`.
inline std::vector<int32_t> prompt_of(int length, int which) {
  std::vector<int32_t> ids;
  for (int i = 0; i < length; ++i)
    ids.push_back((i * 31 + (i < length / 2 ? 0 : which * 17) + 5) % FakeModel::kVocab);
  return ids;
}

inline Request request_of(int which) {
  Request r;
  r.prompt = prompt_of(40 + which % 7 * 13, which);
  SamplingParams& p = r.params;
  p.max_tokens = 24 + which % 5;
  p.seed = static_cast<uint64_t>(which) + 1;
  p.logprobs = 2;
  switch (which % 5) {
    case 0:
      p.temperature = 0;
      break;
    case 1:
      p.temperature = 0.9f;
      break;
    case 2:
      p.top_k = 7, p.top_p = 0.8f, p.repetition_penalty = 1.3f;
      break;
    case 3:
      p.n = 3, p.min_p = 0.02f, p.frequency_penalty = 0.5f;
      break;
    case 4:
      p.beam_width = 3, p.n = 2, p.logprobs = -1;
      break;
  }
  return r;
}

// All kinds of request but beams; some end by tokens of their own before their last draft.
inline Request drafted_request(int which, bool logprobs) {
  Request r = request_of(which);
  r.params.beam_width = 0;
  if (which % 3 == 0) r.params.stop_token_ids = {which % FakeModel::kVocab, 40};
  if (which % 7 == 2) r.params.max_tokens = 1 + which % 3;
  if (which % 4 == 1) r.params.min_tokens = std::min(9, r.params.max_tokens);
  if (!logprobs) r.params.logprobs = -1;
  return r;
}

inline void expect_same(const Outcome& a, const Outcome& b, int which) {
  EXPECT_EQ(a.ids, b.ids) << "request " << which;
  EXPECT_EQ(a.finish, b.finish) << "request " << which;
  ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
  for (size_t s = 0; s < a.logprobs.size(); ++s) {
    ASSERT_EQ(a.logprobs[s].size(), b.logprobs[s].size());
    for (size_t t = 0; t < a.logprobs[s].size(); ++t) {
      for (size_t k = 0; k < a.logprobs[s][t].size(); ++k) {
        EXPECT_EQ(a.logprobs[s][t][k].id, b.logprobs[s][t][k].id);
        EXPECT_EQ(a.logprobs[s][t][k].logprob, b.logprobs[s][t][k].logprob);  // to the bit
      }
    }
  }
}

inline constexpr int kRequests = 64;

}  // namespace freshet::engine
