// A BlockStore for the simulator: a host tier of random size, with loads that take a random time,
// fail now and then, and write at the worst moments.
//
// The blocks of a load hold garbage from its start to its end, and those of units that failed stay
// garbage: a scheduler that uses them too early, gives them away too early, or trusts them reads
// wrong keys. Pure function of the seed and the calls.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "base/philox.h"
#include "kv_cache/block_store.h"
#include "kv_cache/host_tier.h"
#include "kv_cache/prefix_tree.h"

namespace freshet::scheduler {

class SimulatedStore final : public kv_cache::BlockStore {
 public:
  using Unit = kv_cache::BlockUnit;
  using Contents = std::function<uint64_t*(int group, int32_t block)>;  // [kBlockTokens]
  static constexpr size_t kUnitBytes = kv_cache::kBlockTokens * sizeof(uint64_t);

  SimulatedStore(uint64_t seed, int groups, int32_t slots, Contents contents)
      : seed_(seed),
        keys_({seed, ~seed}),
        contents_(std::move(contents)),
        tier_(*kv_cache::HostTier::create(
            static_cast<size_t>(slots * groups) * kUnitBytes,
            std::vector<size_t>(static_cast<size_t>(groups), kUnitBytes),
            seed % 2 == 0 ? "lru" : "arc")) {}

  kv_cache::BlockKey root(std::string_view salt) const override { return keys_.root(salt); }
  kv_cache::BlockKey next(const kv_cache::BlockKey& parent,
                          std::span<const int32_t> tokens) const override {
    return keys_.next(parent, tokens);
  }
  bool has(const kv_cache::BlockKey& key, int group) override {
    return tier_.find(key, group) != kv_cache::kNoBlock;
  }
  void touch(std::span<const kv_cache::BlockKey> keys) override {
    for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
      for (int g = 0; g < tier_.groups(); ++g) tier_.touch(*key, g);
    }
  }
  bool pays(std::span<const Unit>, int64_t, bool) override { return !chance(10); }
  bool store(const Unit& unit, bool swap) override {
    if (tier_.contains(unit.key, unit.group)) return true;
    if (!swap && chance(5)) return false;
    const int32_t slot = tier_.take(unit.key, unit.group);
    std::memcpy(tier_.data(unit.group, slot).data(), contents_(unit.group, unit.block), kUnitBytes);
    tier_.complete(unit.group, slot);
    tier_.drop(unit.group, slot);
    ++stored_;
    swapped_ += swap;
    return true;
  }
  uint64_t load(std::vector<Unit> units) override {
    for (const Unit& unit : units) spoil(unit);
    loads_.push_back({next_ticket_, static_cast<int32_t>(draw() * 4), std::move(units)});
    return next_ticket_++;
  }
  std::vector<kv_cache::LoadResult> take_loaded() override {
    std::vector<kv_cache::LoadResult> ended;
    std::vector<Load> rest;
    for (Load& load : loads_) {
      if (load.polls-- > 0) {
        for (const Unit& unit : load.units) spoil(unit);
        rest.push_back(std::move(load));
        continue;
      }
      kv_cache::LoadResult& result = ended.emplace_back();
      result.ticket = load.ticket;
      for (const Unit& unit : load.units) result.ok.push_back(fill(unit));
    }
    loads_ = std::move(rest);
    return ended;
  }

  bool busy() const { return !loads_.empty(); }
  int64_t stored() const { return stored_; }
  int64_t swapped() const { return swapped_; }
  int64_t loaded() const { return loaded_; }
  int64_t failed() const { return failed_; }
  Status check() const { return tier_.check(); }

 private:
  struct Load {
    uint64_t ticket = 0;
    int32_t polls = 0;  // take_loaded() calls until it ends
    std::vector<Unit> units;
  };
  double draw() { return philox_uniform(seed_, next_++, 1); }
  bool chance(int percent) { return draw() * 100 < percent; }
  void spoil(const Unit& unit) {
    uint64_t* const slots = contents_(unit.group, unit.block);
    for (int i = 0; i < kv_cache::kBlockTokens; ++i) slots[i] = 0xBAD0BAD0BAD0BAD0;
  }
  // It may have been evicted since it was found.
  bool fill(const Unit& unit) {
    const int32_t slot = tier_.find(unit.key, unit.group);
    if (slot == kv_cache::kNoBlock || chance(3)) {
      ++failed_;
      return false;
    }
    std::memcpy(contents_(unit.group, unit.block), tier_.data(unit.group, slot).data(), kUnitBytes);
    ++loaded_;
    return true;
  }

  const uint64_t seed_;
  uint64_t next_ = 0;
  kv_cache::BlockKeys keys_;
  Contents contents_;
  kv_cache::HostTier tier_;
  std::vector<Load> loads_;
  uint64_t next_ticket_ = 1;
  int64_t stored_ = 0, swapped_ = 0, loaded_ = 0, failed_ = 0;
};

}  // namespace freshet::scheduler
