// The queue of requests that have not started: priority with ageing, and fair shares for tenants.
//
// Each tenant's sequences wait in order of Rank. Between tenants, the head with the lowest aged
// priority goes first: priority improves by one level for every `ageing_us` of waiting, counted
// from its tenant's last admission, so that a long queue is no advantage. Ties go to the tenant
// that was served least. Service is counted in weighted tokens. A tenant that returns after an idle
// time starts with the count of the least served tenant that is present. This is the virtual token
// counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Not
// synchronised.
#pragma once

#include <cstdint>
#include <map>
#include <set>

#include "scheduler/sequence.h"

namespace freshet::scheduler {

class WaitingQueue {
 public:
  WaitingQueue(int64_t ageing_us, bool fair_share)
      : ageing_us_(ageing_us), fair_share_(fair_share) {}

  // Ageing turns priority into time: a level is worth ageing_us of waiting. 0: priorities are
  // strict.
  Rank rank_of(const Request& request, SequenceId sequence) const;

  void add(Sequence& sequence);  // REQUIRES: started is false
  void remove(Sequence& sequence);
  Sequence* next(int64_t now) const;                     // nullptr when empty; stays in the queue
  void admitted(const Sequence& sequence, int64_t now);  // its tenant was served now

  // Tenants: a request arrived (call before add) or left; tokens of a request have run.
  void arrive(const Request& request);
  void leave(const Request& request);
  void charge(const Request& request, int64_t tokens);

  int32_t size() const { return size_; }
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t oldest_arrival() const { return arrivals_.empty() ? 0 : arrivals_.begin()->first; }
  // The aged priority that next() compares; for tests.
  int64_t level(const Sequence& sequence, int64_t now) const;

 private:
  struct ByRank {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->rank < b->rank; }
  };
  struct Tenant {
    std::set<Sequence*, ByRank> waiting;
    int64_t service = 0;
    int64_t last_admission = 0;
    int32_t requests = 0;  // waiting or running
  };
  static constexpr size_t kTenantsKept = 4096;

  uint64_t key(const Request& request) const { return fair_share_ ? request.tenant : 0; }
  int64_t level(const Tenant& tenant, const Sequence& head, int64_t now) const;

  int64_t ageing_us_;
  bool fair_share_;
  std::map<uint64_t, Tenant> tenants_;
  std::set<std::pair<int64_t, SequenceId>> arrivals_;
  int32_t size_ = 0;
  int64_t prompt_tokens_ = 0;
};

}  // namespace freshet::scheduler
