// The simulated world of simulator.h: clients, a cache with hashes for contents, and what a step
// must have done. simulator.cc lets time pass, simulation_steps.cc plays the model. Used by one
// thread.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "scheduler/scheduler.h"
#include "scheduler/simulator.h"
#include "scheduler/tool/simulated.h"
#include "scheduler/tool/simulated_store.h"

namespace freshet::scheduler {

using kv_cache::BlockCache;
using kv_cache::BlockTable;
using kv_cache::kBlockTokens;
using kv_cache::kNoBlock;

// A simulated client and its request.
struct Client {
  std::vector<int32_t> prompt;
  int32_t max_tokens = 0;
  int32_t samples = 1;
  bool beams = false;
  bool drafts = false;
  uint64_t arrival_step = 0;
  std::map<SequenceId, uint64_t> stream;  // which sample a sequence is
  bool split = false;                     // samples were forked
  std::vector<PictureSpan> pictures;      // a name is a content
  uint64_t encoded = 0;                   // what its encoder makes of its input
};

class Simulation {
 public:
  explicit Simulation(uint64_t seed) : seed_(seed), random_(seed), states_(seed % 3 == 0) {
    if (seed % 5 == 1) pictures_.emplace(seed ^ 0x91C7);
    if (seed % 7 == 2) encoders_.emplace(seed ^ 0xE7C0);
  }
  SimulationReport run();

 private:
  static constexpr int32_t kVocab = 5;

  void configure();
  void add_store();
  void end_store();
  void evict(const Eviction& e);
  void arrive();
  void add_pictures(NewRequest& request);
  void add_encoder();
  uint64_t add_input(NewRequest& request);
  bool check_encoded(const Sequence& s);
  bool check_coarse(const Sequence& s, const StepItem& item, int group,
                    std::span<const uint64_t> coarse);
  std::vector<int32_t> what_is_read(const Sequence& s) const;
  void meddle();
  void rob();
  bool step();
  bool check_admissions(const std::vector<std::pair<SequenceId, Rank>>& waiting_before,
                        const Step& step);
  bool check_step(const Step& step);
  bool run_item(const StepItem& item);
  bool run_scores(const Sequence& s, const StepItem& item, std::span<const uint64_t> hashes);
  bool run_state(const Sequence& s, const StepItem& item, std::span<const uint64_t> hashes);
  bool check_state(const Sequence& s, const StepItem& item, std::span<const uint64_t> hashes);
  std::vector<int32_t> follow(const Sequence& q, const StepItem& item, uint64_t stream,
                              int32_t room);
  bool advance(const StepItem& item);
  bool advance_beams(Client& client, RequestId id);
  bool end_sequence(SequenceId id, const Client& client);
  int32_t next_token(const Sequence& s, uint64_t stream, std::span<const int32_t> more) const;
  uint64_t* slots(int group, int32_t block) {
    return contents_[static_cast<size_t>(group)].data() + static_cast<size_t>(block) * kBlockTokens;
  }
  bool fail(std::string what) {
    if (report_.failure.empty()) report_.failure = fmt::format("step {}: {}", report_.steps, what);
    return false;
  }

  const uint64_t seed_;
  Random random_;
  std::optional<Random> pictures_;  // of their own, so that the other choices of a seed stay
  std::optional<Random> encoders_;  // likewise: the model is an encoder-decoder
  std::vector<uint64_t> encoded_;   // [blocks of encoders] what they hold
  const bool states_;               // the model has a group of states
  SimulationReport report_;
  BlockCache::Options cache_options_;
  SchedulerOptions options_;
  std::optional<BlockCache> cache_;
  std::unique_ptr<SimulatedStore> store_;  // in half of the seeds without states
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<std::vector<uint64_t>> contents_;  // [groups][blocks * kBlockTokens]
  std::vector<BlockTable> thief_;
  std::map<RequestId, Client> clients_;
  std::vector<std::vector<int32_t>> families_;  // prefixes that prompts share
  RequestId next_request_ = 1;
  int64_t now_ = 1'000'000;
  int64_t idle_steps_ = 0;
  bool clock_jumps_ = false;
};

}  // namespace freshet::scheduler
