// The law of the batch on quantised models with linear attention or side streams: a request's
// tokens and log-probabilities are the same, bit for bit, alone, together with others, in chunks
// and from the cache. src/engine/golden_law_test.cc has the same models before they are quantised.
#include <bit>
#include <filesystem>
#include <future>
#include <numeric>

#include <gtest/gtest.h>

#include "freshet/engine.h"
#include "quantizer/containers/scheme.h"
#include "quantizer/quantize.h"
#include "runtime/compute.h"

namespace freshet {
namespace {

struct Case {
  std::string model, scheme, method, container;
};

constexpr int kRequests = 12, kNewTokens = 10, kMaxLen = 128;

quantizer::Windows some_windows(int vocab) {
  quantizer::Windows windows;
  for (const int length : {48, 7, 64, 33}) {
    auto& w = windows.emplace_back();
    for (int i = 0; i < length; ++i) w.push_back((i * 29 + length * 13) % vocab);
  }
  return windows;
}

// Quantises a seeded model and returns the folder.
std::string quantised(const Case& c) {
  runtime::ComputeOptions two;
  two.threads = 2;
  auto compute = runtime::Compute::open(two);
  FRESHET_CHECK(compute.ok());
  const std::string model = FRESHET_UNPACKED_DATA "/seeded/" + c.model;
  auto working = quantizer::WorkingModel::open(model, *compute);
  FRESHET_CHECK(working.ok(), "{}", working.status().message());
  quantizer::QuantizeOptions o;
  o.output = testing::TempDir() + "law-" + c.model + "-" + c.scheme;
  o.container = *quantizer::container_by_name(c.container);
  o.scheme = *quantizer::scheme_by_name(c.scheme);
  o.method = *quantizer::MethodSet::parse(c.method);
  o.calibration.windows = some_windows((*working)->model().spec.vocab_size);
  o.calibration.hash = "law";
  o.force = true;
  o.producer = "test";
  o.note = [](const std::string&) {};
  const auto report = quantizer::quantize(**working, o);
  FRESHET_CHECK(report.ok(), "{}", report.status().message());
  return o.output;
}

struct Outcome {
  std::vector<int32_t> ids;
  std::vector<uint32_t> logprobs;  // bits
  bool operator==(const Outcome&) const = default;
};

Request request_of(int which, int vocab) {
  Request r;
  const int length = 3 + which * 29 % 90;
  for (int i = 0; i < length; ++i)
    r.prompt.push_back((i * 37 + (i < 40 ? 0 : which * 11) + 3) % vocab);
  SamplingParams& p = r.params;
  p.max_tokens = kNewTokens;
  p.ignore_eos = true;
  p.logprobs = 1;
  p.seed = static_cast<uint64_t>(which);
  p.temperature = which % 2 == 0 ? 0.0f : 0.8f;
  return r;
}

std::vector<Outcome> run(Engine& engine, bool together) {
  std::vector<Outcome> outcomes(kRequests);
  std::vector<std::promise<void>> done(kRequests);
  std::promise<void> all_submitted;
  const std::shared_future<void> submitted = all_submitted.get_future().share();
  for (size_t i = 0; i < outcomes.size(); ++i) {
    Request r = request_of(static_cast<int>(i), engine.model().spec().vocab_size);
    Outcome& o = outcomes[i];
    r.on_delta = [&o, together, submitted](const Delta& d) {
      if (together) submitted.wait();  // the step loop waits until others have come
      o.ids.insert(o.ids.end(), d.ids.begin(), d.ids.end());
      for (const auto& list : d.logprobs) {
        for (const TokenLogprob& t : list) o.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
      }
    };
    r.on_done = [&mine = done[i]](const Usage&) { mine.set_value(); };
    const auto id = engine.submit(std::move(r));
    EXPECT_TRUE(id.ok()) << id.status().message();
    if (!together) done[i].get_future().wait();
  }
  all_submitted.set_value();
  for (size_t i = 0; together && i < done.size(); ++i) done[i].get_future().wait();
  return outcomes;
}

class QuantizedLaw : public ::testing::TestWithParam<Case> {};

TEST_P(QuantizedLaw, Holds) {
  EngineOptions o;
  o.model = quantised(GetParam());
  o.threads = 2;
  o.max_model_len = kMaxLen;
  o.kv_cache_dtype = "f16";
  o.enable_prefix_caching = false;
  const auto plain = Engine::load(o);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  const std::vector<Outcome> alone = run(**plain, false);
  for (const Outcome& one : alone) {
    EXPECT_EQ(one.ids.size(), static_cast<size_t>(kNewTokens));
    EXPECT_EQ(one.logprobs.size(), static_cast<size_t>(2 * kNewTokens));
  }
  EXPECT_EQ(run(**plain, true), alone) << "together";
  o.max_prefill_chunk = 16;
  const auto chunked = Engine::load(o);
  ASSERT_TRUE(chunked.ok()) << chunked.status().message();
  EXPECT_EQ(run(**chunked, true), alone) << "together, in chunks of 16";
  o.max_prefill_chunk = EngineOptions{}.max_prefill_chunk;
  o.max_num_batched_tokens = 16;
  o.enable_prefix_caching = true;
  const auto narrow = Engine::load(o);
  ASSERT_TRUE(narrow.ok()) << narrow.status().message();
  EXPECT_EQ(run(**narrow, true), alone) << "in steps of 16 tokens";
  EXPECT_EQ(run(**narrow, false), alone) << "from the cache";
  EXPECT_GT((*narrow)->stats().cached_tokens, 100);
}

INSTANTIATE_TEST_SUITE_P(
    Models, QuantizedLaw,
    ::testing::Values(Case{"qwen3-next", "W8A8", "gptq", "compressed-tensors"},
                      Case{"qwen3-5", "W4A16_G32", "awq", "compressed-tensors"},
                      Case{"minimax", "FP8_DYNAMIC", "rtn", "compressed-tensors"},
                      Case{"zamba2", "W8A8", "gptq", "compressed-tensors"},
                      Case{"zamba2-plain", "W8A16_CHANNEL", "awq", "compressed-tensors"}),
    [](const auto& info) {
      std::string name = info.param.model + "_" + info.param.scheme;
      std::ranges::replace(name, '-', '_');
      return name;
    });

}  // namespace
}  // namespace freshet
