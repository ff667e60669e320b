#include "scheduler/scheduler.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

namespace freshet::scheduler {
namespace {

// A scheduler over one pool, and a model that always answers 7.
class Rig {
 public:
  explicit Rig(SchedulerOptions options, int32_t blocks = 1000)
      : cache_(kv_cache::BlockCache::Options{{{0, blocks}}, true, 0}) {
    if (options.max_model_len == 0) options.max_model_len = 256;
    scheduler_ = *Scheduler::create(options, cache_);
  }

  SequenceId submit(RequestId id, int32_t length, int32_t max_tokens = 4, int32_t priority = 0,
                    uint64_t tenant = 0) {
    NewRequest r;
    r.id = id;
    r.prompt.assign(static_cast<size_t>(length), static_cast<int32_t>(id));
    r.max_tokens = max_tokens;
    r.priority = priority;
    r.tenant = tenant;
    remaining_[id] = max_tokens;
    return *scheduler_->submit(std::move(r), now);
  }

  // Runs a step; returns the requests that took part, in order.
  std::vector<RequestId> step() {
    last = scheduler_->schedule(now);
    scheduler_->ran(last);
    std::vector<RequestId> took_part;
    for (const StepItem& item : last.items) {
      const Sequence& s = scheduler_->sequence(item.sequence);
      const RequestId id = s.request->id;
      took_part.push_back(id);
      if (!s.awaits_token()) continue;
      const int32_t seven = 7;
      scheduler_->commit(s.id, {&seven, 1});
      if (--remaining_[id] > 0) continue;
      scheduler_->finish(item.sequence);
      finished.push_back(id);
    }
    EXPECT_TRUE(scheduler_->check().ok()) << scheduler_->check().message();
    return took_part;
  }

  Scheduler& operator*() { return *scheduler_; }
  Scheduler* operator->() { return scheduler_.get(); }

  int64_t now = 1000;
  Step last;
  std::vector<RequestId> finished;

 private:
  kv_cache::BlockCache cache_;
  std::unique_ptr<Scheduler> scheduler_;
  std::map<RequestId, int32_t> remaining_;
};

using Ids = std::vector<RequestId>;

TEST(Scheduler, ChunksRideAlongWithDecodes) {
  Rig rig({.max_num_batched_tokens = 32});
  rig.submit(1, 10, 20);
  EXPECT_EQ(rig.step(), Ids({1}));
  rig.submit(2, 100);
  EXPECT_EQ(rig.step(), Ids({1, 2}));
  EXPECT_EQ(rig.last.items[0].count, 1);
  EXPECT_EQ(rig.last.items[1].count, 31);  // the rest of the budget
  EXPECT_EQ(rig.last.items[1].logits, 0);
  rig.step();
  rig.step();
  rig.step();
  EXPECT_EQ(rig.last.items[1].first, 93);
  EXPECT_EQ(rig.last.items[1].count, 7);
  EXPECT_EQ(rig.last.items[1].logits, 1);
}

TEST(Scheduler, LowerPriorityNumbersGoFirst) {
  Rig rig({.max_num_seqs = 1, .ageing_us = 0});
  rig.submit(1, 4, 1, 5);
  rig.submit(2, 4, 1, 0);
  rig.submit(3, 4, 1, -1);
  rig.submit(4, 4, 1, 0);
  for (int i = 0; i < 4; ++i) rig.step();
  EXPECT_EQ(rig.finished, Ids({3, 2, 4, 1}));
}

TEST(Scheduler, ABetterPriorityTakesASeat) {
  Rig rig({.max_num_seqs = 1, .ageing_us = 0});
  rig.submit(1, 4, 50, 1);
  rig.step();
  rig.submit(2, 4, 1, 1);  // no better: waits
  EXPECT_EQ(rig.step(), Ids({1}));
  rig.submit(3, 4, 1, 0);
  EXPECT_EQ(rig.step(), Ids({3}));
  EXPECT_EQ(rig->stats().preemptions, 1);
  EXPECT_EQ(rig.step(), Ids({1}));  // goes on before who is new
}

TEST(Scheduler, AgeingEndsWaiting) {
  const auto steps_until_served = [](int64_t ageing_us) {
    Rig rig({.max_num_seqs = 1, .ageing_us = ageing_us});
    rig.submit(1'000'000, 4, 1, 3);
    for (int i = 1; i <= 500; ++i) {  // a flood of better ones
      rig.submit(static_cast<RequestId>(i), 4, 1, 0);
      rig.now += 1000;
      rig.step();
      if (std::ranges::find(rig.finished, 1'000'000) != rig.finished.end()) return i;
    }
    return -1;
  };
  EXPECT_EQ(steps_until_served(0), -1);
  const int steps = steps_until_served(10'000);
  EXPECT_GE(steps, 29);
  EXPECT_LE(steps, 45);
}

TEST(Scheduler, TenantsShareFairly) {
  Rig rig({.max_num_seqs = 1, .ageing_us = 0});
  for (RequestId id = 1; id <= 20; ++id) rig.submit(id, 8, 1, 0, 1);  // a crowd
  rig.step();
  rig.submit(101, 8, 1, 0, 2);
  rig.submit(102, 8, 1, 0, 2);
  for (int i = 0; i < 5; ++i) rig.step();
  // The small tenant does not wait for the crowd, and does not get more than its turns.
  EXPECT_EQ(rig.finished, Ids({1, 2, 101, 3, 102, 4}));
}

TEST(Scheduler, WithoutFairShareFirstComesFirst) {
  Rig rig({.max_num_seqs = 1, .fair_share = false});
  for (RequestId id = 1; id <= 4; ++id) rig.submit(id, 8, 1, 0, id % 2);
  for (int i = 0; i < 4; ++i) rig.step();
  EXPECT_EQ(rig.finished, Ids({1, 2, 3, 4}));
}

TEST(Scheduler, PreemptsTheLastAndResumesIt) {
  Rig rig({.max_model_len = 64}, 5);
  rig.submit(1, 30, 30);
  rig.submit(2, 30, 30);
  while (rig->stats().preemptions == 0) rig.step();
  EXPECT_EQ(rig.last.preempted.size(), 1u);
  EXPECT_EQ(rig.last.items.size(), 1u);
  EXPECT_EQ(rig->sequence(rig.last.items[0].sequence).request->id, 1u);
  for (int i = 0; i < 100 && !rig->idle(); ++i) rig.step();
  EXPECT_EQ(rig.finished, Ids({1, 2}));
}

TEST(Scheduler, LooksAheadSoThatNobodyLosesItsBlocks) {
  for (const bool ahead : {false, true}) {
    Rig rig({.max_model_len = 64, .look_ahead = ahead}, 5);
    rig.submit(1, 30, 30);
    rig.submit(2, 30, 30);
    for (int i = 0; i < 100 && !rig->idle(); ++i) rig.step();
    EXPECT_EQ(rig.finished, Ids({1, 2}));
    EXPECT_EQ(rig->stats().preemptions, ahead ? 0 : 1);
  }
  // Texts turn out to be short: then more of them run at once.
  Rig rig({.max_model_len = 64, .look_ahead = true}, 8);
  for (RequestId id = 1; id <= 80; ++id) rig.submit(id, 15, 1);
  while (!rig->idle()) rig.step();
  for (RequestId id = 81; id <= 86; ++id) rig.submit(id, 15, 40);
  EXPECT_GE(rig.step().size(), 6u);
}

TEST(Scheduler, RecordsWhyARequestWaits) {
  Rig rig({.max_num_seqs = 1});
  rig.submit(1, 4, 3);
  rig.submit(2, 4, 1);
  rig.submit(3, 4, 1);
  for (int i = 0; i < 4; ++i) {
    rig.step();
    rig.now += 100;
  }
  const auto of = [](const WaitTimes& t, WaitReason r) { return t[static_cast<size_t>(r)]; };
  const WaitTimes third = rig->waits(3, rig.now);
  EXPECT_EQ(of(third, WaitReason::kSlots) + of(third, WaitReason::kQueued), 400);
  EXPECT_GE(of(third, WaitReason::kQueued), 300);
  rig.submit(4, 4, 1);
  rig.now += 50;
  EXPECT_EQ(of(rig->waits(4, rig.now), WaitReason::kQueued), 50);
}

TEST(Scheduler, LimitsAdmission) {
  Rig rig({.max_num_seqs = 1, .max_queued_requests = 2, .max_queued_tokens = 20});
  const auto refuses = [&](RequestId id, int32_t length) {
    NewRequest r;
    r.id = id;
    r.prompt.assign(static_cast<size_t>(length), 1);
    r.max_tokens = 1;
    const auto s = rig->submit(std::move(r), rig.now);
    return !s.ok() && s.status().code() == StatusCode::kResourceExhausted;
  };
  EXPECT_TRUE(refuses(1, 21));
  rig.submit(2, 10, 50);
  rig.step();
  rig.submit(3, 10);
  EXPECT_TRUE(refuses(4, 11));
  rig.submit(5, 10);
  EXPECT_TRUE(refuses(6, 1));
}

TEST(Scheduler, ExpiresAndTellsWhenToLookAgain) {
  Rig rig({});
  NewRequest r;
  r.id = 1;
  r.prompt = {1, 2, 3};
  r.max_tokens = 100;
  r.deadline = 5000;
  ASSERT_TRUE(rig->submit(std::move(r), rig.now).ok());
  Step step = rig->schedule(1000);
  rig->ran(step);  // now awaits a token that does not come
  step = rig->schedule(2000);
  EXPECT_TRUE(step.items.empty());
  EXPECT_EQ(step.wake_at, 5000);
  step = rig->schedule(5000);
  EXPECT_EQ(step.expired, std::vector<RequestId>{1});
  EXPECT_TRUE(rig->idle());
}

TEST(Scheduler, RefusesPoolsThatHoldNoSequence) {
  kv_cache::BlockCache cache({{{0, 4}}, true, 0});
  SchedulerOptions options;
  options.max_model_len = 65;
  EXPECT_FALSE(Scheduler::create(options, cache).ok());
  options.max_model_len = 64;
  EXPECT_TRUE(Scheduler::create(options, cache).ok());
}

TEST(Scheduler, GrantsDraftsAndKeepsTheRightOnes) {
  Rig rig({});
  const SequenceId s = rig.submit(1, 10, 50);
  rig.step();
  rig->set_draft(s, {7, 8, 9});
  const Step step = rig->schedule(rig.now);
  ASSERT_EQ(step.items.size(), 1u);
  EXPECT_EQ(step.items[0].count, 4);
  EXPECT_EQ(step.items[0].draft, 3);
  EXPECT_EQ(step.items[0].logits, 4);
  rig->ran(step);
  const int32_t accepted[] = {7, 8, 1};  // two were right; the third is corrected
  rig->commit(s, accepted);
  EXPECT_EQ(rig->sequence(s).computed, 13);
  EXPECT_EQ(rig->sequence(s).size(), 14);
  const Step next = rig->schedule(rig.now);
  EXPECT_EQ(next.items[0].first, 13);
  EXPECT_EQ(next.items[0].count, 1);
}

// A tree 7 8 9 | 7 5 | 4: the branch that is accepted becomes the sequence, and no block is lost.
TEST(Scheduler, ABranchMayWin) {
  Rig rig({});
  const SequenceId s = rig.submit(1, 18, 50);
  rig.step();
  rig->set_draft(s, {7, 8, 9}, {{7, 5, 6}, {7, 8}, {4}});
  const Step step = rig->schedule(rig.now);
  ASSERT_EQ(step.items.size(), 3u);  // 7 8 is a part of the main path
  const StepItem& branch = step.items[1];
  EXPECT_EQ(branch.first, step.items[0].first);
  EXPECT_EQ(branch.count, 4);
  EXPECT_EQ(branch.draft, 3);
  EXPECT_EQ(branch.logits, 2);  // the row behind 7 is the main path's
  EXPECT_EQ(step.items[2].count, 2);
  EXPECT_EQ(step.tokens, 4 + 4 + 2);
  EXPECT_EQ(step.logit_rows, 4 + 2 + 1);
  EXPECT_EQ(rig->stats().branch_rows, 4 + 2);
  EXPECT_EQ(rig->stats().repeated_rows, 2 + 1);
  const kv_cache::BlockTable blocks = rig->sequence(s).branches[0].blocks;
  EXPECT_EQ(blocks.ids[0][0], rig->sequence(s).blocks.ids[0][0]);  // complete: shared
  EXPECT_NE(blocks.ids[0][1], rig->sequence(s).blocks.ids[0][1]);
  EXPECT_TRUE(rig->check().ok());
  rig->ran(step);
  const int32_t accepted[] = {7, 5, 1};
  rig->commit(s, accepted);
  EXPECT_EQ(rig->sequence(s).accepted_branch, 0);
  EXPECT_EQ(rig->sequence(s).computed, 21);
  EXPECT_EQ(rig->sequence(s).blocks.ids, blocks.ids);
  EXPECT_TRUE(rig->sequence(s).branches.empty());
  EXPECT_TRUE(rig->check().ok());
}

// Branches get what is left of tokens, rows and blocks, and are never a reason to preempt.
TEST(Scheduler, BranchesGoWithoutFirst) {
  for (const int32_t rows : {3, 4, 5, 6}) {
    Rig rig({.max_logit_rows = rows});
    const SequenceId s = rig.submit(1, 10, 50);
    rig.step();
    rig->set_draft(s, {7, 8}, {{4, 3}});
    const Step step = rig->schedule(rig.now);
    EXPECT_EQ(step.items[0].draft, 2);
    ASSERT_EQ(step.items.size(), rows == 3 ? 1u : 2u);
    if (rows > 3) {
      EXPECT_EQ(step.items[1].draft, std::min(2, rows - 3));
    }
  }
  Rig rig({.max_model_len = 32}, 2);
  const SequenceId s = rig.submit(1, 18, 10);
  rig.step();
  rig->set_draft(s, {7, 8}, {{4, 3}});  // no block is left for a copy
  const Step step = rig->schedule(rig.now);
  ASSERT_EQ(step.items.size(), 1u);
  EXPECT_EQ(step.items[0].draft, 2);
  EXPECT_TRUE(step.preempted.empty());
  EXPECT_TRUE(rig->check().ok());
}

// Whatever ends a sequence with a tree in flight gives its blocks back.
TEST(Scheduler, BranchesEndWithTheirSequence) {
  for (const bool cancelled : {false, true}) {
    Rig rig({});
    const SequenceId s = rig.submit(1, 18, 50);
    rig.step();
    rig->set_draft(s, {7}, {{4, 3}, {5, 6}});
    const Step step = rig->schedule(rig.now);
    ASSERT_EQ(step.items.size(), 3u);
    if (cancelled) {
      rig->cancel(1);
    } else {
      rig->ran(step);
      rig->finish(s);
    }
    EXPECT_TRUE(rig->check().ok());
  }
}

TEST(Scheduler, DecodingSequencesAreThoseThatDraftsMayFollow) {
  Rig rig({});
  const SequenceId s = rig.submit(1, 10, 50);
  EXPECT_TRUE(rig->decoding().empty());  // waits
  const Step prompt = rig->schedule(rig.now);
  rig->ran(prompt);
  EXPECT_TRUE(rig->decoding().empty());  // awaits its token
  rig->expect(s);
  EXPECT_TRUE(rig->decoding().empty());  // which is not known
  rig->known(s, 5);
  EXPECT_EQ(rig->decoding(), std::vector<SequenceId>{s});
}

BatchingOptions policy(BatchingKind kind, int32_t batch_size, int64_t wait_us) {
  BatchingOptions options;
  options.kind = kind;
  options.max_batch_size = batch_size;
  options.max_wait_us = wait_us;
  return options;
}

TEST(Scheduler, PinnedPrefixesOutliveOthers) {
  const auto cached_after_crowd = [](int32_t pin_tokens) {
    Rig rig({.max_num_seqs = 1}, 40);
    const auto send = [&](RequestId id, int32_t token, int32_t pin) {
      NewRequest r;
      r.id = id;
      r.prompt.assign(100, token);
      r.max_tokens = 1;
      r.pin_tokens = pin;
      EXPECT_TRUE(rig->submit(std::move(r), rig.now).ok());
      const Step step = rig->schedule(rig.now);
      rig->ran(step);
      const int32_t cached = rig->request(id)->cached_tokens;
      rig->finish(step.items[0].sequence);
      EXPECT_TRUE(rig->check().ok());
      return cached;
    };
    send(1, 1, pin_tokens);
    for (int32_t i = 2; i < 20; ++i) send(static_cast<RequestId>(i), i, 0);
    return send(100, 1, 0);
  };
  EXPECT_EQ(cached_after_crowd(0), 0);
  EXPECT_EQ(cached_after_crowd(70), 64);
}

// ---- policies --------------------------------------------------------------------------------

TEST(BatchingPolicy, StaticCollectsAndRunsToTheEnd) {
  SchedulerOptions options;
  options.batching = policy(BatchingKind::kStatic, 3, 10'000);
  Rig rig(options);
  rig.submit(1, 4, 1);
  EXPECT_EQ(rig.step(), Ids());
  EXPECT_EQ(rig.last.wake_at, 11'000);
  rig.submit(2, 4, 5);
  EXPECT_EQ(rig.step(), Ids());
  rig.submit(3, 4, 1);
  EXPECT_EQ(rig.step(), Ids({1, 2, 3}));
  for (RequestId id = 4; id < 7; ++id) rig.submit(id, 4, 1);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rig.step(), Ids({2}));  // holes are not filled
  EXPECT_EQ(rig.step(), Ids({4, 5, 6}));
  rig.submit(7, 4, 1);
  rig.now += 10'000;
  EXPECT_EQ(rig.step(), Ids({7}));  // waited long enough
}

TEST(BatchingPolicy, ABatchLargerThanAStepEntersWhole) {
  SchedulerOptions options;
  options.max_num_batched_tokens = 10;
  options.batching = policy(BatchingKind::kStatic, 2, 10'000);
  Rig rig(options);
  rig.submit(1, 10, 5);
  rig.submit(2, 10, 5);
  EXPECT_EQ(rig.step(), Ids({1}));
  EXPECT_EQ(rig.step(), Ids({1, 2}));
}

TEST(BatchingPolicy, DynamicPrefersSizesAndBoundsDelay) {
  SchedulerOptions options;
  options.batching = policy(BatchingKind::kDynamic, 4, 10'000);
  options.batching.preferred_batch_sizes = {2};
  options.batching.instances = 2;
  Rig rig(options);
  rig.submit(1, 4, 9);
  EXPECT_EQ(rig.step(), Ids());
  rig.submit(2, 4, 9);
  EXPECT_EQ(rig.step(), Ids({1, 2}));
  rig.submit(3, 4, 9);
  rig.now += 10'000;
  EXPECT_EQ(rig.step(), Ids({1, 2, 3}));  // a second instance, after the delay
  rig.submit(4, 4, 9);
  rig.submit(5, 4, 9);
  EXPECT_EQ(rig.step(), Ids({1, 2, 3}));  // both are busy
}

TEST(BatchingPolicy, TokensLimitABatch) {
  SchedulerOptions options;
  options.batching = policy(BatchingKind::kDynamic, 8, 0);
  options.batching.max_tokens_per_batch = 25;
  Rig rig(options);
  for (RequestId id = 1; id <= 4; ++id) rig.submit(id, 10, 1);
  EXPECT_EQ(rig.step(), Ids({1, 2}));
  EXPECT_EQ(rig.step(), Ids({3, 4}));
  rig.submit(5, 200, 1);
  EXPECT_EQ(rig.step(), Ids({5}));  // one may always enter
}

TEST(BatchingPolicy, RefusesNonsense) {
  EXPECT_FALSE(batching_by_name("eager").ok());
  EXPECT_EQ(*batching_by_name("dynamic"), BatchingKind::kDynamic);
  EXPECT_FALSE(make_batching_policy(policy(BatchingKind::kStatic, 0, 0)).ok());
  EXPECT_FALSE(make_batching_policy(policy(BatchingKind::kStatic, 1, -1)).ok());
  BatchingOptions options = policy(BatchingKind::kDynamic, 4, 0);
  EXPECT_TRUE(make_batching_policy(options).ok());
  options.preferred_batch_sizes = {8};
  EXPECT_FALSE(make_batching_policy(options).ok());
  options.preferred_batch_sizes.clear();
  options.instances = 0;
  EXPECT_FALSE(make_batching_policy(options).ok());
}

// Prompts with a shared beginning, for a model with states: the second visitor finds a checkpoint
// within the interval of the point where it parts from the first, the third within a block.
TEST(Scheduler, VisitorsOfASharedBeginningFindCheckpoints) {
  constexpr int32_t kInterval = 64, kShared = 300, kPrompt = 340;
  for (const int32_t budget : {32, 100, 512}) {
    kv_cache::BlockCache cache(
        {.groups = {{.blocks = 200}, {.blocks = 40, .kind = KvKind::kState}}});
    SchedulerOptions options;
    options.max_num_batched_tokens = budget;
    options.max_model_len = 400;
    options.checkpoint_interval = kInterval;
    auto scheduler = Scheduler::create(options, cache);
    ASSERT_TRUE(scheduler.ok());
    std::vector<int32_t> cached;
    for (int32_t visitor = 0; visitor < 4; ++visitor) {
      NewRequest request;
      request.id = static_cast<RequestId>(visitor) + 1;
      for (int32_t i = 0; i < kPrompt; ++i)
        request.prompt.push_back(i < kShared ? i : 1000 * std::min(visitor, 2) + i);
      request.max_tokens = 1;
      const auto id = (*scheduler)->submit(std::move(request), 1);
      ASSERT_TRUE(id.ok());
      while (true) {
        const Step step = (*scheduler)->schedule(1);
        ASSERT_EQ(step.items.size(), 1u);
        if (cached.size() == static_cast<size_t>(visitor)) cached.push_back(step.items[0].first);
        (*scheduler)->ran(step);
        EXPECT_EQ((*scheduler)->check().message(), "");
        if ((*scheduler)->sequence(*id).awaits_token()) break;
      }
      (*scheduler)->finish(*id);
    }
    EXPECT_EQ(cached[0], 0);
    EXPECT_EQ(cached[1], kShared / kInterval * kInterval) << budget;
    EXPECT_EQ(cached[2], kShared / 16 * 16) << budget;
    EXPECT_EQ(cached[3], (kPrompt - 1) / 16 * 16) << budget;  // the same prompt again
  }
}

// A conversation goes on where its last answer ended, to within a block.
TEST(Scheduler, ATurnBeginsAtTheEndOfTheLastAnswer) {
  kv_cache::BlockCache cache({.groups = {{.blocks = 100}, {.blocks = 8, .kind = KvKind::kState}}});
  SchedulerOptions options;
  options.max_model_len = 400;
  auto scheduler = Scheduler::create(options, cache);
  ASSERT_TRUE(scheduler.ok());
  std::vector<int32_t> text;
  for (int32_t i = 0; i < 50; ++i) text.push_back(i);
  for (RequestId turn = 1; turn <= 3; ++turn) {
    NewRequest request;
    request.id = turn;
    request.prompt = text;
    request.max_tokens = 70;
    const auto id = (*scheduler)->submit(std::move(request), 1);
    ASSERT_TRUE(id.ok());
    for (int32_t n = 0; n < 70; ++n) {
      const Step step = (*scheduler)->schedule(1);
      ASSERT_EQ(step.items.size(), 1u);
      if (n == 0 && turn > 1) EXPECT_GE(step.items[0].first, std::ssize(text) - 10 - 17);
      (*scheduler)->ran(step);
      const int32_t token = 7 * n + static_cast<int32_t>(turn);
      text.push_back(token);
      (*scheduler)->commit(*id, {&token, 1});
      EXPECT_EQ((*scheduler)->check().message(), "");
    }
    (*scheduler)->finish(*id);
    for (int32_t i = 0; i < 10; ++i) text.push_back(500 + i);  // the next question
  }
  EXPECT_LE(cache.idle(1), 6);  // a prompt's and an answer's each
}

// A prompt of `length` equal tokens whose rows [first, first + count) are a picture's.
NewRequest with_picture(RequestId id, int32_t length, int32_t first, int32_t count, int32_t name,
                        bool both_ways = false) {
  NewRequest r;
  r.id = id;
  r.prompt.assign(static_cast<size_t>(length), 9);
  r.max_tokens = 1;
  r.pictures = {{first, count, name, {name}, both_ways}};
  return r;
}

TEST(Scheduler, PicturesAreCachedByContent) {
  Rig rig({});
  const auto cached_of = [&](NewRequest request) {
    const RequestId id = request.id;
    const SequenceId sequence = *rig->submit(std::move(request), rig.now);
    const Step step = rig->schedule(rig.now);
    rig->ran(step);
    const int32_t cached = rig->request(id)->cached_tokens;
    rig->finish(sequence);
    return cached;
  };
  EXPECT_EQ(cached_of(with_picture(1, 80, 20, 40, -2)), 0);
  EXPECT_EQ(cached_of(with_picture(2, 80, 20, 40, -2)), 79);  // the same again
  EXPECT_EQ(cached_of(with_picture(3, 80, 20, 40, -3)), 20);  // another picture, equal ids
  EXPECT_EQ(cached_of(with_picture(4, 80, 21, 40, -2)), 20);  // the same at another place
  NewRequest text = with_picture(5, 80, 20, 40, -2);
  text.pictures.clear();
  EXPECT_EQ(cached_of(std::move(text)), 21);  // token ids alone, as (4) began
}

TEST(Scheduler, NoStepCutsAPictureThatAttendsBothWays) {
  Rig rig({.max_num_batched_tokens = 32});
  const SequenceId id = *rig->submit(with_picture(1, 80, 20, 30, -2, true), rig.now);
  std::vector<int32_t> ends;
  while (!rig->sequence(id).awaits_token()) {
    const Step step = rig->schedule(rig.now);
    ASSERT_EQ(step.items.size(), 1u);
    ends.push_back(step.items[0].first + step.items[0].count);
    rig->ran(step);
  }
  EXPECT_EQ(ends, (std::vector<int32_t>{20, 52, 80}));
  rig->finish(id);
  const auto refused = rig->submit(with_picture(2, 80, 20, 33, -3, true), rig.now);
  EXPECT_NE(refused.status().message().find("max_num_batched_tokens"), std::string::npos);
  EXPECT_TRUE(rig->submit(with_picture(3, 80, 20, 33, -3), rig.now).ok());
  EXPECT_FALSE(rig->submit(with_picture(4, 80, 60, 30, -3), rig.now).ok());  // behind the prompt
}

// The tokens that decoding sequences would get go to the picture, or it would wait for their ends.
TEST(Scheduler, APictureRunsBesideManyDecodes) {
  Rig rig({.max_num_seqs = 64, .max_num_batched_tokens = 32, .fair_share = false});
  const SequenceId id = *rig->submit(with_picture(1, 36, 4, 32, -2, true), rig.now);
  for (RequestId other = 2; other < 12; ++other) rig.submit(other, 1, 100);
  EXPECT_EQ(rig.step().size(), 11u);
  EXPECT_EQ(rig.last.items[0].count, 4);
  EXPECT_EQ(rig.step(), Ids({1}));  // ten decode, and 22 tokens would be left
  EXPECT_EQ(rig.last.items[0].sequence, id);
  EXPECT_EQ(rig.last.items[0].count, 32);
}

}  // namespace
}  // namespace freshet::scheduler
