// A drafter for tests that proposes trees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "engine/oracle_drafter_test.h"

namespace freshet::engine {

// Takes the proposals of an oracle and hides them in trees: the right path may be the main one or
// any branch, all paths leave others at random depths, and some are hostile.
class TreeDrafter final : public speculative::Drafter {
 public:
  TreeDrafter(OracleDrafter& oracle, int branches) : oracle_(oracle), branches_(branches) {}

  int64_t trees() const { return trees_; }  // once the loop has stopped
  int64_t observed() const { return observed_; }

  void propose(std::span<speculative::DraftRequest> requests) override {
    oracle_.propose(requests);
    for (speculative::DraftRequest& r : requests) {
      if (!r.tree || r.draft.empty()) continue;
      ++trees_;
      uint32_t calls = 0;
      const auto random = [&](int32_t below) {
        return static_cast<int32_t>(philox_uniform(r.sequence, r.tokens.size(), ++calls) * below);
      };
      for (int b = 0; b < branches_; ++b) {
        std::vector<int32_t> path(r.draft.begin(),
                                  r.draft.begin() + random(static_cast<int32_t>(r.draft.size())));
        for (int n = random(5); n >= 0; --n) {
          path.push_back(random(20) > 0  ? random(FakeModel::kVocab)
                         : random(2) > 0 ? -5
                                         : FakeModel::kVocab + 3);
        }
        r.branches.push_back(std::move(path));
      }
      if (random(2) > 0) {
        std::swap(r.draft, r.branches[static_cast<size_t>(random(branches_))]);
      }
    }
  }
  speculative::StateNeeds needs() const override { return {.last = true, .boundaries = {}}; }

  // The states of the accepted path, and no others: position by position without a gap.
  void observe(std::span<const speculative::TargetRows> rows) override {
    for (const speculative::TargetRows& r : rows) {
      const auto [at, fresh] = seen_.try_emplace(r.sequence, r.first);
      EXPECT_TRUE(r.first <= at->second) << "rows were lost";
      at->second = r.first + r.count;
      states_[r.sequence].resize(static_cast<size_t>(at->second));
      std::copy_n(r.last, r.count, states_[r.sequence].begin() + r.first);
      observed_ += r.count;
    }
  }
  void forget(uint64_t sequence) override {
    ended_.push_back(std::move(states_[sequence]));
    states_.erase(sequence);
    seen_.erase(sequence);
  }
  std::vector<std::vector<float>> take_ended() { return std::exchange(ended_, {}); }

 private:
  OracleDrafter& oracle_;
  const int branches_;
  int64_t trees_ = 0, observed_ = 0;
  std::map<uint64_t, int32_t> seen_;
  std::map<uint64_t, std::vector<float>> states_;
  std::vector<std::vector<float>> ended_;
};

}  // namespace freshet::engine
