// Measures the tiers below the KV cache on a GPU: copies of blocks against plain copies, and the
// time to the first token of a prompt from the host tier against computing it.
//
// usage: freshet_tier_bench CONFIG.json FORMAT[+TYPE] [TOKENS [TURNS]]
//   FORMAT of random weights; TYPE of keys and values (f16): bf16+int8
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <sstream>
#include <thread>

#include "base/json.h"
#include "engine/step_loop.h"
#include "engine/tiers.h"
#include "models/dummy.h"
#include "models/registry.h"
#include "ops/device.h"
#include "runtime/loaded_model.h"

namespace freshet {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}
double median(std::vector<double> v) {
  std::ranges::sort(v);
  return v[v.size() / 2];
}
template <class F>
double median_of(int times, const F& body) {
  std::vector<double> seconds;
  for (int i = 0; i <= times; ++i) {
    const auto begin = Clock::now();
    body();
    if (i > 0) seconds.push_back(seconds_since(begin));
  }
  return median(std::move(seconds));
}

struct Rig {
  std::shared_ptr<runtime::Compute> compute;
  ops::Device* device = nullptr;
  ModelSpec spec;
  quant::Format format = quant::Format::kBF16;
  ops::KvType type = ops::KvType::kF16;
  int tokens = 8192, turns = 5;
};

Status open(Rig& rig, int argc, char** argv) {
  if (argc < 3)
    return invalid_argument("usage: freshet_tier_bench CONFIG.json FORMAT[+TYPE] [TOKENS [TURNS]]");
  std::ifstream file(argv[1]);
  std::ostringstream text;
  text << file.rdbuf();
  FRESHET_ASSIGN_OR_RETURN(const json::Value parsed, json::parse(text.str()));
  FRESHET_ASSIGN_OR_RETURN(rig.spec, models::read_spec(parsed));
  const std::string_view types = argv[2];
  const size_t plus = types.find('+');
  const auto format = quant::format_by_name(types.substr(0, plus));
  if (!format) return invalid_argument("unknown format {}", types.substr(0, plus));
  rig.format = *format;
  if (plus != types.npos) {
    FRESHET_ASSIGN_OR_RETURN(rig.type, ops::kv_type_by_name(types.substr(plus + 1)));
  }
  if (argc > 3) rig.tokens = std::max(64, std::atoi(argv[3]));
  if (argc > 4) rig.turns = std::max(1, std::atoi(argv[4]));
  FRESHET_ASSIGN_OR_RETURN(rig.compute, runtime::Compute::open({.device = "cuda"}));
  rig.device = rig.compute->ops().device();
  return {};
}

// Rates in bytes a second: from the host to the device, and back.
struct Rates {
  double to_device = 0.0, to_host = 0.0;
};

Result<Rates> plain_rates(Rig& rig, size_t bytes) {
  FRESHET_ASSIGN_OR_RETURN(Buffer host, Buffer::allocate(bytes, &rig.device->host_memory()));
  FRESHET_ASSIGN_OR_RETURN(Buffer there, Buffer::allocate(bytes, rig.device));
  Status written;
  const auto size = static_cast<double>(bytes);
  Rates rates;
  rates.to_device = size / median_of(rig.turns, [&] {
                      written = rig.device->write(there.data(), host.data(), bytes);
                    });
  FRESHET_RETURN_IF_ERROR(written);
  rates.to_host = size / median_of(rig.turns, [&] {
                    rig.device->fetch(host.data(), there.data(), bytes);
                    rig.device->wait();
                  });
  return rates;
}

// Blocks of TOKENS tokens, scattered over a cache of twice as many.
Result<Rates> lane_rates(Rig& rig, size_t& bytes) {
  const KvCacheSpec kv = kv_cache_spec(rig.spec, rig.type);
  const auto blocks = static_cast<int32_t>(rig.tokens / ops::kBlockTokens);
  FRESHET_ASSIGN_OR_RETURN(
      const KvStorage cache,
      KvStorage::allocate(kv, std::vector<int32_t>(kv.groups.size(), 2 * blocks), rig.device));
  const kv_cache::BlockPlaces places(cache);
  const size_t unit = places.unit_bytes()[0];
  bytes = unit * static_cast<size_t>(blocks);
  FRESHET_ASSIGN_OR_RETURN(Buffer host, Buffer::allocate(bytes, &rig.device->host_memory()));
  const auto lane = rig.device->copy_lane(places.lane_layers());
  std::vector<ops::LaneUnit> units;
  for (int32_t i = 0; i < blocks; ++i)
    units.push_back({host.data() + unit * static_cast<size_t>(i), int64_t{i} * 37 % (2 * blocks)});
  const auto run = [&](bool to_device) {
    lane->follow();
    lane->copy(0, units, to_device);
    lane->wait();
  };
  const auto size = static_cast<double>(bytes);
  return Rates{size / median_of(rig.turns, [&] { run(true); }),
               size / median_of(rig.turns, [&] { run(false); })};
}

struct First {
  double seconds = 0.0;
  int cached = 0;
  std::vector<uint32_t> logprobs;
};

Result<First> first_token(engine::StepLoop& loop, const std::vector<int32_t>& prompt) {
  Request r;
  r.prompt = prompt;
  r.params.max_tokens = 1;
  r.params.ignore_eos = true;
  r.params.temperature = 0.0f;
  r.params.logprobs = 1;
  First first;
  std::promise<void> done;
  const auto begin = Clock::now();
  r.on_delta = [&](const Delta& d) {
    if (first.seconds == 0.0) first.seconds = seconds_since(begin);
    for (const auto& list : d.logprobs) {
      for (const TokenLogprob& t : list)
        first.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
    }
  };
  r.on_done = [&](const Usage& u) {
    first.cached = u.cached_tokens;
    done.set_value();
  };
  FRESHET_RETURN_IF_ERROR(loop.submit(std::move(r)).status());
  done.get_future().wait();
  return first;
}

// The median seconds to the first token of prompts that nobody has seen and, with `tiers`, of the
// same prompts from the host tier.
struct Times {
  double computed = 0.0, loaded = 0.0;
};
Result<Times> time_first_tokens(Rig& rig, runtime::LoadedModel& loaded, size_t host_bytes) {
  engine::StepLoopOptions options;
  const int longest = rig.tokens + 32;
  options.scheduler.max_num_seqs = 4;
  options.scheduler.max_num_batched_tokens = rig.tokens;
  options.scheduler.max_model_len = longest;
  const KvCacheSpec kv = kv_cache_spec(rig.spec, rig.type);
  options.blocks.assign(kv.groups.size(), 2 * longest / ops::kBlockTokens + 8);
  FRESHET_ASSIGN_OR_RETURN(KvStorage cache, loaded.make_cache(rig.type, options.blocks));
  FRESHET_RETURN_IF_ERROR(loaded.reserve({rig.tokens, options.scheduler.max_logit_rows, longest}));
  std::unique_ptr<kv_cache::TierStore> tiers;
  if (host_bytes > 0) {
    kv_cache::TierConfig config;
    config.host_bytes = host_bytes;
    FRESHET_ASSIGN_OR_RETURN(tiers, engine::open_tiers(config, "bench", cache, rig.device));
    options.tiers = tiers.get();
  }
  FRESHET_ASSIGN_OR_RETURN(
      const auto loop,
      engine::StepLoop::start(options, loaded.model(), std::move(cache), nullptr,
                              rig.compute->pool(), rig.compute->ops().host_memory()));
  std::vector<double> computed, from_tier;
  for (int turn = 0; turn <= rig.turns; ++turn) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < rig.tokens; ++i)
      prompt.push_back((turn * 7919 + i * 104729) % static_cast<int32_t>(rig.spec.vocab_size));
    FRESHET_ASSIGN_OR_RETURN(const First cold, first_token(*loop, prompt));
    if (turn > 0) computed.push_back(cold.seconds);
    if (tiers == nullptr) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // until all is stored
    std::promise<void> gone;
    loop->post([&] {
      loop->blocks().forget("", prompt);
      gone.set_value();
    });
    gone.get_future().wait();
    FRESHET_ASSIGN_OR_RETURN(const First warm, first_token(*loop, prompt));
    if (warm.cached < rig.tokens - ops::kBlockTokens)
      return internal_error("only {} tokens came from the host tier", warm.cached);
    if (warm.logprobs != cold.logprobs)
      return internal_error("a prompt from the host tier gave other bits");
    if (turn > 0) from_tier.push_back(warm.seconds);
  }
  return Times{median(computed), tiers == nullptr ? 0.0 : median(from_tier)};
}

Status run(int argc, char** argv) {
  Rig rig;
  FRESHET_RETURN_IF_ERROR(open(rig, argc, argv));
  size_t bytes = 0;
  FRESHET_ASSIGN_OR_RETURN(const Rates lane, lane_rates(rig, bytes));
  FRESHET_ASSIGN_OR_RETURN(const Rates plain, plain_rates(rig, bytes));
  std::printf("%s, %d tokens, %.0f MB of keys and values\n", rig.device->name().c_str(), rig.tokens,
              static_cast<double>(bytes) / 1e6);
  std::printf("host to device: blocks %.1f GB/s, plain %.1f GB/s: %.0f %%\n", lane.to_device / 1e9,
              plain.to_device / 1e9, 100.0 * lane.to_device / plain.to_device);
  std::printf("device to host: blocks %.1f GB/s, plain %.1f GB/s: %.0f %%\n", lane.to_host / 1e9,
              plain.to_host / 1e9, 100.0 * lane.to_host / plain.to_host);
  std::fflush(stdout);
  FRESHET_ASSIGN_OR_RETURN(
      auto model, models::dummy_model(
                      rig.spec, [&](models::Role, int, int64_t, bool) { return rig.format; },
                      rig.compute->ops()));
  runtime::LoadedModel loaded(rig.compute, std::move(model));
  FRESHET_ASSIGN_OR_RETURN(const Times without, time_first_tokens(rig, loaded, 0));
  FRESHET_ASSIGN_OR_RETURN(const Times with, time_first_tokens(rig, loaded, 4 * bytes));
  std::printf("first token: computed %.1f ms without a tier, %.1f ms with one (%+.1f %%)\n",
              without.computed * 1e3, with.computed * 1e3,
              100.0 * (with.computed / without.computed - 1.0));
  std::printf(
      "from the host tier %.1f ms, %.1f %% of computing, same bits; the bytes alone at the "
      "plain rate take %.1f ms\n",
      with.loaded * 1e3, 100.0 * with.loaded / without.computed,
      static_cast<double>(bytes) / plain.to_device * 1e3);
  return {};
}

}  // namespace
}  // namespace freshet

int main(int argc, char** argv) {
  const freshet::Status status = freshet::run(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "freshet_tier_bench: %s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
