// Requests with pictures, through the engine: a request's tokens and log-probabilities are the
// same, bit for bit, alone, in a batch, from the cache, in chunks, after preemption, with drafts
// and as one of several samples; the prefix cache tells pictures apart; a picture's rows are
// computed once.
#include <algorithm>
#include <bit>
#include <filesystem>
#include <future>
#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "backend/cuda/backend.h"
#include "engine/picture_text.h"
#include "freshet/engine.h"
#include "kv_cache/block_cache.h"
#include "layers/model.h"
#include "media/image_input.h"
#include "ops/device.h"

namespace freshet {
namespace {

constexpr int kContext = 400;
constexpr int kNew = 8;

struct Outcome {
  std::vector<std::vector<int32_t>> ids;  // [samples]
  std::vector<uint32_t> logprobs;         // bits
  int cached = 0;
  int preemptions = 0;
  Status error;
};

void expect_same(const Outcome& a, const Outcome& b, const std::string& how) {
  EXPECT_EQ(a.ids, b.ids) << how;
  EXPECT_EQ(a.logprobs, b.logprobs) << how;
}

// A picture of noise.
media::Picture noise(int width, int height, uint32_t seed) {
  media::Picture picture(width, height);
  for (uint8_t& value : picture.rgb) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<uint8_t>(seed >> 24);
  }
  return picture;
}

// "llava", or "llava@cuda" on a GPU, if there is one.
class VisionEngine : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!on_gpu()) return;
    const auto opened = cuda::open(std::string("auto"));
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    if (*opened == nullptr) GTEST_SKIP() << "no GPU here";
  }
  static bool on_gpu() { return std::string(GetParam()).ends_with("@cuda"); }
  static std::string folder() {
    const std::string name = GetParam();
    return FRESHET_UNPACKED_DATA "/seeded/" + name.substr(0, name.find('@'));
  }

  static std::unique_ptr<Engine> load(EngineOptions o = {}) {
    o.model = folder();
    if (on_gpu()) o.device = "cuda";
    o.threads = 2;
    o.max_model_len = kContext;
    auto engine = Engine::load(o);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }

  // Text, a picture, text; every third request has a second picture.
  static Request request_of(const Engine& engine, int which, uint32_t pictures) {
    const PictureReading& reading = *engine.pictures();
    Request r;
    const int plain = engine.model().spec().vocab_size < 96 ? 17 : 70;  // tokens of text
    const auto say = [&](int words) {
      for (int i = 0; i < words; ++i) r.prompt.push_back(3 + (i * 37 + which % 2 * 11) % plain);
    };
    const auto show = [&](int width, int height, uint32_t seed) {
      auto input = media::image_input(noise(width, height, seed), reading.settings);
      ASSERT_TRUE(input.ok()) << input.status().message();
      if (engine.model().spec().vision->cross) r.prompt.push_back(reading.token);
      for (const media::PromptPiece& piece : input->prompt) {
        if (piece.rows == 0) say(2);
        r.prompt.insert(r.prompt.end(), static_cast<size_t>(piece.rows), reading.token);
      }
      r.pictures.push_back(std::make_shared<const media::ImageInput>(*std::move(input)));
    };
    say(5 + which * 3);
    show(40 + which, 60, pictures);
    say(7);
    if (which % 3 == 0) {
      show(64, 40, pictures + 1);
      say(4);
    }
    r.params.max_tokens = kNew;
    r.params.ignore_eos = true;
    r.params.logprobs = 1;
    r.params.seed = static_cast<uint64_t>(which);
    r.params.temperature = which % 2 == 0 ? 0.0f : 0.8f;
    return r;
  }

  static std::vector<Outcome> run(Engine& engine, std::vector<Request> requests, bool together) {
    std::vector<Outcome> outcomes(requests.size());
    std::vector<std::promise<void>> done(requests.size());
    // Together: the first one runs when the others come, and its first token waits for them, so
    // that they can push it out.
    std::promise<void> submitted, begun;
    bool first = together;
    const std::shared_future<void> all_submitted = submitted.get_future().share();
    for (size_t i = 0; i < requests.size(); ++i) {
      Outcome& o = outcomes[i];
      Request& r = requests[i];
      o.ids.resize(static_cast<size_t>(r.params.n));
      r.on_delta = [&o, &begun, &first, together, all_submitted](const Delta& d) {
        if (std::exchange(first, false)) begun.set_value();
        if (together) all_submitted.wait();
        std::vector<int32_t>& ids = o.ids[static_cast<size_t>(d.index)];
        ids.insert(ids.end(), d.ids.begin(), d.ids.end());
        if (!d.error.ok()) o.error = d.error;
        if (d.index > 0) return;
        for (const auto& list : d.logprobs) {
          for (const TokenLogprob& t : list)
            o.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
        }
      };
      r.on_done = [&o, &finished = done[i]](const Usage& u) {
        o.cached = u.cached_tokens;
        o.preemptions = u.preemptions;
        finished.set_value();
      };
      const auto id = engine.submit(std::move(r));
      EXPECT_TRUE(id.ok()) << id.status().message();
      if (!id.ok()) done[i].set_value();
      if (!together) done[i].get_future().wait();
      if (together && i == 0 && id.ok()) begun.get_future().wait();
    }
    submitted.set_value();
    for (size_t i = 0; together && i < done.size(); ++i) done[i].get_future().wait();
    return outcomes;
  }

  static std::vector<Request> all(const Engine& engine) {
    std::vector<Request> requests;
    for (int which = 0; which < 8; ++which)
      requests.push_back(request_of(engine, which, 1 + static_cast<uint32_t>(which % 3)));
    return requests;
  }

  static void expect_all(Engine& engine, const std::vector<Outcome>& alone, bool together,
                         const std::string& how) {
    const std::vector<Outcome> got = run(engine, all(engine), together);
    ASSERT_EQ(got.size(), alone.size());
    for (size_t i = 0; i < got.size(); ++i)
      expect_same(got[i], alone[i], fmt::format("{}: request {}", how, i));
  }
};

TEST_P(VisionEngine, KeepsTheLaw) {
  EngineOptions plain;
  plain.enable_prefix_caching = false;
  const auto first = load(plain);
  ASSERT_NE(first, nullptr);
  ASSERT_NE(first->pictures(), nullptr);
  const std::vector<Outcome> alone = run(*first, all(*first), false);
  for (const Outcome& o : alone) {
    EXPECT_TRUE(o.error.ok()) << o.error.message();
    EXPECT_EQ(o.ids[0].size(), static_cast<size_t>(kNew));
  }
  expect_all(*first, alone, true, "together");

  const auto cached = load();
  expect_all(*cached, alone, true, "sharing prefixes");
  expect_all(*cached, alone, false, "from the cache");

  for (const int step : {64, 96}) {  // a picture whose rows see one another runs in one step
    EngineOptions chunked;
    chunked.max_num_batched_tokens = step;
    chunked.picture_cache_bytes = 0;
    expect_all(*load(chunked), alone, true, fmt::format("in steps of {}", step));
  }

  EngineOptions drafting;
  drafting.speculative_config =
      R"({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1})";
  const auto drafts = load(drafting);
  ASSERT_NE(drafts, nullptr);
  expect_all(*drafts, alone, true, "with drafts");
  EXPECT_GT(drafts->stats().speculation.draft_tokens, 0);
}

TEST_P(VisionEngine, KeepsTheLawAfterPreemption) {
  EngineOptions plain;
  plain.enable_prefix_caching = false;
  const auto first = load(plain);
  ASSERT_NE(first, nullptr);
  // Long enough to be running when requests with better priorities come.
  const auto long_ones = [](const Engine& engine) {
    std::vector<Request> requests = all(engine);
    for (size_t i = 0; i < requests.size(); ++i) {
      // Without rows of pictures, prompts take few blocks.
      requests[i].params.max_tokens = engine.model().spec().vision->cross ? 200 : 100;
      requests[i].priority = -static_cast<int>(i);
    }
    return requests;
  };
  const std::vector<Outcome> alone = run(*first, long_ones(*first), false);
  EngineOptions tight = plain;
  tight.max_num_batched_tokens = 96;
  const KvCacheSpec kv = kv_cache_spec(first->model().spec(), ops::KvType::kF16);
  for (size_t g = 0; g < kv.groups.size(); ++g) {
    int32_t most = kv_cache::BlockCache::most_blocks(kv.groups[g], kContext, 96);
    if (kv.groups[g].cross > 0) most *= 8;  // all requests may hold their pictures
    tight.kv_cache_memory += kv.block_bytes(static_cast<int>(g)) * static_cast<size_t>(most + 2);
  }
  const auto crowded = load(tight);
  ASSERT_NE(crowded, nullptr);
  const std::vector<Outcome> got = run(*crowded, long_ones(*crowded), true);
  int preempted = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    expect_same(got[i], alone[i], fmt::format("preempted: request {}", i));
    preempted += got[i].preemptions;
  }
  EXPECT_GT(preempted, 0) << crowded->cache_info().blocks << " blocks";
}

TEST_P(VisionEngine, SamplesShareThePicture) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  Request several = request_of(*engine, 1, 5);
  several.params.n = 3;
  const Outcome together = run(*engine, {several}, false).front();
  EXPECT_EQ(engine->stats().pictures.computed, 1);
  EXPECT_NE(together.ids[0], together.ids[1]);
  EngineOptions fresh;
  fresh.enable_prefix_caching = false;
  const auto other = load(fresh);
  EXPECT_EQ(run(*other, {request_of(*other, 1, 5)}, false).front().ids[0], together.ids[0]);
}

TEST_P(VisionEngine, TheCacheTellsPicturesApart) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  const Request one = request_of(*engine, 0, 1), other = request_of(*engine, 0, 7);
  ASSERT_EQ(one.prompt, other.prompt);  // the ids alone are equal
  const auto before = static_cast<int>(std::ranges::find(one.prompt, engine->pictures()->token) -
                                       one.prompt.begin());
  const auto size = static_cast<int>(one.prompt.size());
  const Outcome a = run(*engine, {one}, false).front();
  EXPECT_EQ(a.cached, 0);
  const Outcome b = run(*engine, {other}, false).front();
  EXPECT_LE(b.cached, before);
  EXPECT_NE(a.logprobs, b.logprobs);
  EXPECT_EQ(engine->stats().pictures.computed, 4);

  // The same again: all but the last token is cached, as far as blocks were filled, and no row is
  // needed. States are kept at the ends of blocks: the last rows are needed again.
  const ModelSpec& spec = engine->model().spec();
  const bool cross = spec.vision->cross;
  const bool states = kv_cache_spec(spec, ops::KvType::kF16).state_group() >= 0;
  const auto filled = [](int tokens) { return tokens / ops::kBlockTokens * ops::kBlockTokens; };
  const Outcome again = run(*engine, {one}, false).front();
  EXPECT_EQ(again.cached, cross    ? filled(size)
                          : states ? filled(size - 1)
                                   : std::min(size - 1, filled(size + kNew - 1)));
  expect_same(again, a, "again");
  // Under another salt nothing is cached but what the tower made.
  Request salted = one;
  salted.cache_salt = "other";
  const Outcome apart = run(*engine, {salted}, false).front();
  EXPECT_EQ(apart.cached, 0);
  expect_same(apart, a, "under another salt");
  EXPECT_EQ(engine->stats().pictures.computed, 4);
  // With cross-attention the pictures of the third request were in the KV cache.
  EXPECT_EQ(engine->stats().pictures.cached, cross ? 4 : states ? 3 : 2);
  EXPECT_EQ(engine->stats().encoder.queries, cross ? 4 : 0);
  EXPECT_EQ(engine->stats().encoder.hits, cross ? 1 : 0);
  EXPECT_GT(engine->stats().pictures.cache_bytes, 0);
}

// With cross-attention, keys and values stay in the KV cache: the tower's cache isn't needed.
TEST_P(VisionEngine, CrossAttentionReadsAPictureOnce) {
  EngineOptions no_rows;
  no_rows.picture_cache_bytes = 0;
  const auto engine = load(no_rows);
  ASSERT_NE(engine, nullptr);
  if (!engine->model().spec().vision->cross) GTEST_SKIP() << "its pictures are rows of the prompt";
  const Request one = request_of(*engine, 0, 1);
  const Outcome first = run(*engine, {one}, false).front();
  EXPECT_EQ(engine->stats().pictures.computed, 2);
  expect_same(run(*engine, {one}, false).front(), first, "again");
  EXPECT_EQ(engine->stats().pictures.computed, 2);
  EXPECT_EQ(engine->stats().encoder.hits, 1);
  // Another text about them.
  Request asked = one;
  asked.prompt.push_back(9);
  run(*engine, {asked}, false);
  EXPECT_EQ(engine->stats().pictures.computed, 2);
  asked.cache_salt = "other";
  run(*engine, {asked}, false);
  EXPECT_EQ(engine->stats().pictures.computed, 4);
}

// A text that runs gets tokens between the layers of the tower, and nobody's bits change.
TEST_P(VisionEngine, StepsRunBetweenLayersOfTheTower) {
  if (on_gpu()) GTEST_SKIP() << "on a GPU the tower runs at once";
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  Request text;
  for (int i = 0; i < 9; ++i) text.prompt.push_back(3 + i);
  text.params.max_tokens = 60;
  text.params.temperature = 0.0f;
  text.params.ignore_eos = true;
  text.params.logprobs = 1;
  const Outcome text_alone = run(*engine, {text}, false).front();
  const Request seen = request_of(*engine, 1, 5);
  const Outcome seen_alone = run(*engine, {seen}, false).front();
  EXPECT_EQ(engine->stats().encoder.steps_between, 0);

  // Further pictures arrive while the text runs; the third is cancelled between layers.
  for (const bool cancels : {false, true}) {
    const auto fresh = load();
    std::promise<void> text_done, seen_done;
    Outcome got, picture;
    got.ids.resize(1);
    picture.ids.resize(1);
    const auto add = [](Outcome& to, const Delta& d) {
      to.ids[0].insert(to.ids[0].end(), d.ids.begin(), d.ids.end());
      for (const auto& list : d.logprobs) {
        for (const TokenLogprob& t : list)
          to.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
      }
    };
    uint64_t id = 0;
    int deltas = 0;
    Request both = text;
    both.on_delta = [&](const Delta& d) {
      add(got, d);
      if (++deltas == 1) {
        Request shown = seen;
        shown.on_delta = [&](const Delta& e) { add(picture, e); };
        shown.on_done = [&](const Usage&) { seen_done.set_value(); };
        id = fresh->submit(std::move(shown)).value();
      } else if (deltas == 2 && cancels) {
        fresh->cancel(id);
      }
    };
    both.on_done = [&](const Usage&) { text_done.set_value(); };
    ASSERT_TRUE(fresh->submit(std::move(both)).ok());
    text_done.get_future().wait();
    seen_done.get_future().wait();
    expect_same(got, text_alone, "the text");
    EXPECT_GT(fresh->stats().encoder.steps_between, 0);
    EXPECT_EQ(fresh->stats().pictures.computed, cancels ? 0 : 1);
    if (!cancels) expect_same(picture, seen_alone, "the picture");
  }
}

// A text whose keys are evicted, in the same steps as a picture. It is refused where tokens of a
// picture see later ones, and where there are states or an encoder.
TEST_P(VisionEngine, TextsThatEvictRunBesidePictures) {
  const std::string param = GetParam(), name = param.substr(0, param.find('@'));
  EngineOptions o;
  if (!on_gpu()) o.kv_cache_dtype = "f32";  // small heads gain nothing from 4 bits beside 16
  const auto engine = load(o);
  ASSERT_NE(engine, nullptr);
  for (const char* policy : {R"({"policy": "mikv", "budget": 24, "interval": 8})",
                             R"({"policy": "h2o", "budget": 24, "interval": 8})"}) {
    Request text;
    for (int i = 0; i < 60; ++i) text.prompt.push_back(4 + i * 7 % 13);
    text.params.max_tokens = 40;
    text.params.ignore_eos = true;
    text.params.logprobs = 1;
    text.params.temperature = 0.0f;
    text.kv_eviction = policy;
    const bool refused = engine->check(text).has_value();
    const bool recodes = std::string_view(policy).find("mikv") != std::string_view::npos;
    EXPECT_EQ(refused, name == "gemma3-vision" || name == "qwen3-5-vision" || name == "mllama" ||
                           (recodes && on_gpu()))
        << policy << (refused ? engine->check(text)->message : "");
    if (refused) continue;
    const std::vector<Outcome> alone = run(*engine, {text}, false);
    const Request picture = request_of(*engine, 2, 1);
    const std::vector<Outcome> seen = run(*engine, {picture}, false);
    const std::vector<Outcome> both = run(*engine, {text, picture}, true);
    expect_same(both[0], alone[0], policy);
    expect_same(both[1], seen[0], policy);
    EXPECT_GT(engine->stats().kv_evictions, 2);
  }
}

TEST_P(VisionEngine, RefusesWhatDoesNotFit) {
  const auto engine = load();
  ASSERT_NE(engine, nullptr);
  const auto error_of = [&](const Request& r) {
    const auto error = engine->check(r);
    return error ? error->message : std::string();
  };
  const Request good = request_of(*engine, 1, 1);
  EXPECT_EQ(error_of(good), "");
  Request bad = good;
  bad.pictures.push_back(bad.pictures.front());
  EXPECT_NE(error_of(bad).find("image tokens"), std::string::npos) << error_of(bad);
  bad = good;
  bad.prompt.push_back(engine->pictures()->token);
  EXPECT_NE(error_of(bad).find("image tokens"), std::string::npos) << error_of(bad);
  bad = good;
  bad.pooling = Pooling::kMean;
  EXPECT_NE(error_of(bad), "");
}

INSTANTIATE_TEST_SUITE_P(Models, VisionEngine,
                         ::testing::Values("llava", "llava-next", "pixtral", "mistral3",
                                           "qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe",
                                           "qwen3-5-vision", "gemma3-vision", "idefics3", "mllama"),
                         [](const auto& of) {
                           std::string name = of.param;
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

INSTANTIATE_TEST_SUITE_P(Cuda, VisionEngine,
                         ::testing::Values("llava@cuda", "qwen2-5-vl@cuda", "qwen3-vl@cuda",
                                           "gemma3-vision@cuda", "idefics3@cuda"),
                         [](const auto& of) {
                           std::string name = of.param;
                           std::ranges::replace(name, '-', '_');
                           std::ranges::replace(name, '@', '_');
                           return name;
                         });

}  // namespace
}  // namespace freshet
