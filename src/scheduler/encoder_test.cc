// Requests that share an encoder's output.
#include <gtest/gtest.h>

#include "scheduler/scheduler.h"

namespace freshet::scheduler {
namespace {

class EncoderRig {
 public:
  explicit EncoderRig(int32_t blocks, bool share = true, int32_t slots = 256)
      : cache_(kv_cache::BlockCache::Options{{{0, 1000}}, true, 0}) {
    SchedulerOptions options;
    options.max_num_seqs = slots;
    options.max_model_len = 64;
    options.encoder_blocks = blocks;
    options.share_encoders = share;
    scheduler_ = *Scheduler::create(options, cache_);
  }
  // An input of three blocks.
  SequenceId submit(const std::string& content, const std::string& salt = "", int32_t priority = 0,
                    bool prepares = false) {
    NewRequest r;
    r.id = ++requests_;
    r.prompt = {1};
    r.max_tokens = 8;
    r.salt = salt;
    r.priority = priority;
    r.prepares = prepares;
    r.encoder_tokens = 40;
    r.encoder_content = content;
    return *scheduler_->submit(std::move(r), 1000);
  }
  // The sequences of the step whose encoders run.
  std::vector<SequenceId> step() {
    const Step step = scheduler_->schedule(1000);
    scheduler_->ran(step);
    std::vector<SequenceId> encoded;
    for (const StepItem& item : step.items) {
      if (item.encodes) encoded.push_back(item.sequence);
      const int32_t seven = 7;
      scheduler_->commit(item.sequence, {&seven, 1});
    }
    EXPECT_TRUE(scheduler_->check().ok()) << scheduler_->check().message();
    return encoded;
  }
  const std::vector<int32_t>& blocks_of(SequenceId id) const {
    return scheduler_->sequence(id).request->encoder_blocks;
  }
  Scheduler* operator->() { return scheduler_.get(); }

 private:
  kv_cache::BlockCache cache_;
  std::unique_ptr<Scheduler> scheduler_;
  RequestId requests_ = 0;
};

using Encoded = std::vector<SequenceId>;

TEST(SharedEncoder, ASecondRequestDoesNotRunIt) {
  EncoderRig rig(30);
  const SequenceId first = rig.submit("sound");
  EXPECT_EQ(rig.step(), Encoded{first});
  const SequenceId second = rig.submit("sound"), other = rig.submit("noise");
  EXPECT_EQ(rig.step(), Encoded{other});
  EXPECT_EQ(rig.blocks_of(second), rig.blocks_of(first));
  EXPECT_NE(rig.blocks_of(other), rig.blocks_of(first));
  rig->finish(first);
  rig->finish(second);
  rig->finish(other);
  rig.submit("noise");
  EXPECT_TRUE(rig.step().empty());  // nobody holds it, but it is there
  EXPECT_EQ(rig->stats().encoder_queries, 4);
  EXPECT_EQ(rig->stats().encoder_hits, 2);
}

TEST(SharedEncoder, RequestsOfOneStepRunItOnce) {
  EncoderRig rig(3);  // room for one output
  const SequenceId first = rig.submit("sound"), second = rig.submit("sound");
  EXPECT_EQ(rig.step(), Encoded{first});
  EXPECT_EQ(rig.blocks_of(second), rig.blocks_of(first));
  EXPECT_EQ(rig->stats().running, 2);
  EXPECT_EQ(rig->stats().encoder_usage, 1.0);
}

TEST(SharedEncoder, SaltsAndContentsAreKeptApart) {
  EncoderRig rig(30);
  const SequenceId a = rig.submit("sound", "alice"), b = rig.submit("sound", "bob"),
                   c = rig.submit("esound", "alic"), d = rig.submit(""), e = rig.submit("");
  EXPECT_EQ(rig.step(), Encoded({a, b, c, d, e}));
  EncoderRig alone(30, false);
  const SequenceId f = alone.submit("sound"), g = alone.submit("sound");
  EXPECT_EQ(alone.step(), Encoded({f, g}));
}

TEST(SharedEncoder, IdleOutputsMakeRoom) {
  EncoderRig rig(6);
  const SequenceId a = rig.submit("a"), b = rig.submit("b");
  EXPECT_EQ(rig.step(), Encoded({a, b}));
  const SequenceId c = rig.submit("c");
  EXPECT_TRUE(rig.step().empty());  // all outputs are held: it waits
  rig->finish(a);
  EXPECT_EQ(rig.step(), Encoded{c});
  rig->finish(b);
  const SequenceId b2 = rig.submit("b"), a2 = rig.submit("a");
  EXPECT_TRUE(rig.step().empty());  // b is there; a was evicted, and waits
  rig->finish(c);
  EXPECT_EQ(rig.step(), Encoded{a2});
  EXPECT_EQ(rig->sequence(b2).request->encoder_found, true);
}

// A preempted request keeps its output: preempting it would not make room for another one.
TEST(SharedEncoder, ABetterPriorityWaitsForBlocks) {
  EncoderRig rig(3, true, 1);
  const SequenceId a = rig.submit("a", "", 1);
  EXPECT_EQ(rig.step(), Encoded{a});
  const SequenceId b = rig.submit("b");
  EXPECT_TRUE(rig.step().empty());
  EXPECT_EQ(rig->stats().preemptions, 0);
  rig->finish(a);
  EXPECT_EQ(rig.step(), Encoded{b});
}

// It keeps its place: those behind it wait, too, but those with better priorities do not.
TEST(Prepared, ARequestStartsWhenItIsReady) {
  EncoderRig rig(30, true, 3);
  EXPECT_EQ(rig->next_unready(), nullptr);
  const SequenceId a = rig.submit("a"), b = rig.submit("b", "", 0, true), c = rig.submit("c");
  EXPECT_EQ(rig.step(), Encoded{a});
  EXPECT_EQ(rig->next_unready()->id, b);
  EXPECT_FALSE(rig->has_encoder_output(*rig->sequence(b).request));
  EXPECT_TRUE(rig->has_encoder_output(*rig->sequence(a).request));
  const SequenceId d = rig.submit("d", "", -1);
  EXPECT_EQ(rig.step(), Encoded{d});
  EXPECT_TRUE(rig.step().empty());
  EXPECT_EQ(rig->stats().running, 2);
  rig->set_ready(2);
  EXPECT_EQ(rig->next_unready(), nullptr);
  EXPECT_EQ(rig.step(), Encoded{b});
  EXPECT_EQ(rig->sequence(c).state, State::kWaiting);  // no slot is free
}

// A request that is not ready preempts nobody; one that was preempted is made ready again.
TEST(Prepared, PreemptionStartsAnew) {
  EncoderRig rig(30, true, 1);
  const SequenceId a = rig.submit("a", "", 1, true);
  rig->set_ready(1);
  EXPECT_EQ(rig.step(), Encoded{a});
  rig.submit("b", "", 0, true);
  EXPECT_TRUE(rig.step().empty());
  EXPECT_EQ(rig->stats().preemptions, 0);
  rig->set_ready(2);
  EXPECT_EQ(rig.step().size(), 1u);
  EXPECT_EQ(rig->stats().preemptions, 1);
  EXPECT_EQ(rig->next_unready()->id, a);
}

TEST(SharedEncoder, CancelledRequestsLeaveTheOutput) {
  EncoderRig rig(3);
  const SequenceId a = rig.submit("a");
  EXPECT_EQ(rig.step(), Encoded{a});
  EXPECT_TRUE(rig->cancel(1));
  rig.submit("a");
  EXPECT_TRUE(rig.step().empty());
}

}  // namespace
}  // namespace freshet::scheduler
