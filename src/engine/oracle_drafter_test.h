// A drafter for tests: it has seen the outputs before, and spoils some of its proposals.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/philox.h"
#include "engine/step_loop_rig_test.h"
#include "speculative/drafter.h"

namespace freshet::engine {

class OracleDrafter final : public speculative::Drafter {
 public:
  // `wrong`: share of the drafts of which one token is spoiled.
  OracleDrafter(int most, double wrong) : most_(most), wrong_(wrong) {}

  void learn(const Request& request, const Outcome& outcome) {
    for (const std::vector<int32_t>& ids : outcome.ids) {
      known_.push_back(request.prompt);
      known_.back().insert(known_.back().end(), ids.begin(), ids.end());
    }
  }
  int64_t proposed() const { return proposed_; }  // once the loop has stopped

  void propose(std::span<speculative::DraftRequest> requests) override {
    for (speculative::DraftRequest& r : requests) {
      EXPECT_GT(r.limit, 0);
      EXPECT_TRUE(std::ranges::none_of(r.tokens, [](int32_t id) { return id < 0; }));
      std::vector<const std::vector<int32_t>*> fitting;
      for (const auto& k : known_) {
        if (k.size() > r.tokens.size() && std::equal(r.tokens.begin(), r.tokens.end(), k.begin()))
          fitting.push_back(&k);
      }
      if (fitting.empty()) continue;
      const auto random = [&](uint64_t what) {
        return philox_uniform(r.sequence, r.tokens.size(), static_cast<uint32_t>(what));
      };
      const auto& k = *fitting[r.sequence % fitting.size()];
      const auto from = static_cast<std::ptrdiff_t>(r.tokens.size());
      const auto count = std::min<std::ptrdiff_t>(std::ssize(k) - from, most_);
      r.draft.assign(k.begin() + from, k.begin() + from + count);
      // Some drafts go on beyond the end that the output will have.
      for (int i = 0; i < 2 && std::ssize(r.draft) < most_; ++i) r.draft.push_back(i);
      if (random(0) < wrong_) {
        int32_t& id = r.draft[static_cast<size_t>(random(1) * static_cast<double>(r.draft.size()))];
        id = (id + 1) % FakeModel::kVocab;
      }
      proposed_ += std::ssize(r.draft);
    }
  }

 private:
  const int most_;
  const double wrong_;
  std::vector<std::vector<int32_t>> known_;
  int64_t proposed_ = 0;
};

}  // namespace freshet::engine
