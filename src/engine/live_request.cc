#include "engine/live_request.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/philox.h"

namespace freshet::engine {
namespace {

// FNV-1a: the scheduler tells tenants apart by number.
uint64_t tenant_number(const std::string& name) {
  uint64_t h = 0xCBF29CE484222325;
  for (const char c : name) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3;
  return h;
}

}  // namespace

std::unique_ptr<LiveRequest> make_live_request(uint64_t id, Request request,
                                               const RequestDefaults& defaults,
                                               const OutputServices& services) {
  auto live = std::make_unique<LiveRequest>();
  LiveRequest& r = *live;
  r.id = id;
  const SamplingParams& p = request.params;
  const auto prompt = static_cast<int>(request.prompt.size());
  r.max_tokens = std::min(p.max_tokens, defaults.max_model_len - prompt);
  r.seed = p.seed ? *p.seed : static_cast<uint64_t>(philox_uniform(defaults.seed, id, 0) * 0x1p53);
  r.usage.prompt_tokens =
      request.encoder_ids.empty() ? prompt : static_cast<int>(request.encoder_ids.size());
  r.usage.seed = r.seed;
  r.end_ids = p.stop_token_ids;
  if (!p.ignore_eos) r.end_ids.insert(r.end_ids.end(), defaults.eos.begin(), defaults.eos.end());
  std::ranges::sort(r.end_ids);
  r.retention = *retention_of(request, defaults.retention);
  if (r.retention != nullptr) {
    r.eviction = std::make_shared<const kv_cache::EvictionSchedule>(
        *eviction_schedule(*r.retention, *defaults.cache));
  }
  r.sparse = *sparse_of(request, defaults.sparse);
  r.request = std::move(request);
  r.outputs = make_outputs(r, services);
  return live;
}

scheduler::NewRequest order_of(const LiveRequest& live, int64_t now) {
  const Request& r = live.request;
  scheduler::NewRequest order;
  order.id = live.id;
  order.prompt = r.prompt;
  order.token_types = r.token_type_ids;
  order.encoder_tokens = static_cast<int32_t>(
      r.frames > 0 ? (r.frames + 1) / 2 : static_cast<int64_t>(r.encoder_ids.size()));
  order.max_tokens = live.max_tokens;
  order.pin_tokens = r.pin_tokens;
  order.priority = r.priority;
  order.tenant = tenant_number(r.tenant);
  order.salt = r.cache_salt + live.sparse.salt();
  order.eviction = live.eviction;
  order.sparse = live.sparse;
  order.cross_weights = r.cross_weights.get();
  if (r.deadline_s > 0)
    order.deadline = now + std::max<int64_t>(1, std::llround(r.deadline_s * 1e6));
  for (const auto& output : live.outputs) output->announce(order);
  return order;
}

void record_usage(LiveRequest& live, const scheduler::Scheduler& scheduler) {
  const scheduler::Request* request = scheduler.request(live.id);
  if (request == nullptr) return;
  live.usage.cached_tokens = request->cached_tokens;
  live.usage.preemptions = request->preemptions;
  const scheduler::WaitTimes times = scheduler.waits(live.id, 0);
  for (size_t i = 0; i < times.size(); ++i) {
    if (times[i] <= 0) continue;
    live.usage.waited.emplace_back(name_of(static_cast<scheduler::WaitReason>(i)),
                                   static_cast<double>(times[i]) * 1e-6);
  }
}

}  // namespace freshet::engine
