#include "scheduler/waiting_queue.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace freshet::scheduler {

Rank WaitingQueue::rank_of(const Request& request, SequenceId sequence) const {
  // Both requests age alike, so their order by aged priority never changes with time.
  if (ageing_us_ > 0) return {request.arrival + request.priority * ageing_us_, 0, sequence};
  return {request.priority, request.arrival, sequence};
}

void WaitingQueue::arrive(const Request& request) {
  const auto [it, fresh] = tenants_.try_emplace(key(request));
  Tenant& tenant = it->second;
  if (tenant.requests++ > 0) return;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& [other, t] : tenants_) {
    if (t.requests > 0 && other != it->first) least = std::min(least, t.service);
  }
  if (least != std::numeric_limits<int64_t>::max())
    tenant.service = std::max(tenant.service, least);
}

void WaitingQueue::leave(const Request& request) {
  const auto it = tenants_.find(key(request));
  if (--it->second.requests == 0 && tenants_.size() > kTenantsKept) tenants_.erase(it);
}

void WaitingQueue::charge(const Request& request, int64_t tokens) {
  if (const auto it = tenants_.find(key(request)); it != tenants_.end())
    it->second.service += tokens;
}

void WaitingQueue::add(Sequence& sequence) {
  tenants_.at(key(*sequence.request)).waiting.insert(&sequence);
  arrivals_.emplace(sequence.request->arrival, sequence.id);
  ++size_;
  prompt_tokens_ += sequence.prompt_tokens;
}

void WaitingQueue::remove(Sequence& sequence) {
  const size_t erased = tenants_.at(key(*sequence.request)).waiting.erase(&sequence);
  FRESHET_CHECK(erased == 1, "sequence {} is not in the queue", sequence.id);
  arrivals_.erase({sequence.request->arrival, sequence.id});
  --size_;
  prompt_tokens_ -= sequence.prompt_tokens;
}

int64_t WaitingQueue::level(const Tenant& tenant, const Sequence& head, int64_t now) const {
  const int64_t priority = head.request->priority;
  if (ageing_us_ == 0) return priority;
  const int64_t since = std::max(head.request->arrival, tenant.last_admission);
  return priority - std::max<int64_t>(0, now - since) / ageing_us_;
}

int64_t WaitingQueue::level(const Sequence& sequence, int64_t now) const {
  return level(tenants_.at(key(*sequence.request)), sequence, now);
}

Sequence* WaitingQueue::next(int64_t now) const {
  Sequence* best = nullptr;
  std::tuple<int64_t, int64_t, Rank> best_order;
  for (const auto& [id, tenant] : tenants_) {
    if (tenant.waiting.empty()) continue;
    Sequence* head = *tenant.waiting.begin();
    const std::tuple order(level(tenant, *head, now), tenant.service, head->rank);
    if (best == nullptr || order < best_order) {
      best = head;
      best_order = order;
    }
  }
  return best;
}

void WaitingQueue::admitted(const Sequence& sequence, int64_t now) {
  tenants_.at(key(*sequence.request)).last_admission = now;
}

}  // namespace freshet::scheduler
