// Encoders and classifiers through the engine, against transformers' outputs (tests/data/seeded),
// and the law of the batch for them: the same bits alone and in any batch.
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>

#include <gtest/gtest.h>

#include "backend/cuda/backend.h"
#include "freshet/engine.h"
#include "layers/model.h"
#include "layers/pooled_head.h"
#include "loader/safetensors.h"

namespace freshet {
namespace {

using Floats = std::vector<float>;
using Ids = std::vector<int32_t>;

std::string seeded(const std::string& name) {
  return FRESHET_UNPACKED_DATA "/seeded/" + name;
}

struct EncoderCase {
  Ids ids, types;
  Floats hidden, mean, score;  // hidden, mean: of encoders; score: of classifiers
};

Ids whole(const loader::TensorSource& t) {
  Ids out(static_cast<size_t>(t.shape[0]));
  for (size_t i = 0; i < out.size(); ++i) {
    int64_t v = 0;
    std::memcpy(&v, t.data + i * sizeof v, sizeof v);
    out[i] = static_cast<int32_t>(v);
  }
  return out;
}

Floats floats(const loader::TensorSource* t) {
  if (t == nullptr) return {};
  Floats out(static_cast<size_t>(t->elements()));
  std::memcpy(out.data(), t->data, t->bytes);
  return out;
}

std::vector<EncoderCase> cases_of(const std::string& name) {
  const auto file = loader::SafetensorsFile::open(seeded(name) + "/golden.safetensors");
  FRESHET_CHECK(file.ok(), "{}", file.status().message());
  std::vector<EncoderCase> cases;
  for (int i = 0; i < 4; ++i) {
    const std::string n = std::to_string(i);
    const loader::TensorSource* ids = file->find("ids_" + n);
    if (ids == nullptr) continue;
    EncoderCase c;
    c.ids = whole(*ids);
    if (const auto* types = file->find("token_type_ids_" + n)) c.types = whole(*types);
    c.hidden = floats(file->find("hidden_" + n));
    c.mean = floats(file->find("mean_" + n));
    c.score = floats(file->find("score_" + n));
    cases.push_back(std::move(c));
  }
  FRESHET_CHECK(!cases.empty(), "no cases of {}", name);
  return cases;
}

std::unique_ptr<Engine> load(const std::string& name, EngineOptions o = {}) {
  o.model = seeded(name);
  o.threads = 2;
  auto engine = Engine::load(o);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(*engine) : nullptr;
}

Request request_for(const Ids& ids, const Ids& types, Pooling pooling, Floats& to,
                    std::promise<void>& done) {
  Request r;
  r.prompt = ids;
  r.token_type_ids = types;
  r.pooling = pooling;
  r.on_embedding = [&to](const Floats& v) { to = v; };
  r.on_done = [&done](const Usage&) { done.set_value(); };
  return r;
}

Floats vector_of(Engine& engine, const Ids& ids, const Ids& types, Pooling pooling) {
  Floats out;
  std::promise<void> done;
  const auto id = engine.submit(request_for(ids, types, pooling, out, done));
  EXPECT_TRUE(id.ok()) << id.status().message();
  if (id.ok()) done.get_future().wait();
  return out;
}

float most(const Floats& values) {
  float m = 0;
  for (const float v : values) m = std::max(m, std::fabs(v));
  return m;
}

void expect_near(const Floats& got, const Floats& want, float allowed, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_NEAR(got[i], want[i], allowed) << what << ", number " << i;
}

// "bert", or "bert@cuda" on a GPU, if there is one.
class SeededEncoder : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (device().empty()) return;
    const auto opened = cuda::open(std::string("auto"));
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    if (*opened == nullptr) GTEST_SKIP() << "no GPU here";
  }
  static std::string model() {
    const std::string param = GetParam();
    return param.substr(0, param.find('@'));
  }
  static std::string device() {
    const std::string param = GetParam();
    const size_t at = param.find('@');
    return at == param.npos ? "" : param.substr(at + 1);
  }
  void expect_outputs(bool reference, float tolerance) {
    EngineOptions o;
    o.reference = reference;
    if (!device().empty()) o.device = device();
    const auto engine = load(model(), o);
    ASSERT_NE(engine, nullptr);
    for (const EncoderCase& c : cases_of(model())) {
      if (!c.score.empty()) {
        expect_near(vector_of(*engine, c.ids, c.types, Pooling::kClassify), c.score,
                    tolerance * std::max(1.0f, most(c.score)), "score");
        continue;
      }
      const float allowed = tolerance * most(c.hidden);
      const size_t width = c.hidden.size() / c.ids.size();
      const auto row = [&](size_t t) {
        const auto first = c.hidden.begin() + static_cast<std::ptrdiff_t>(t * width);
        return Floats(first, first + static_cast<std::ptrdiff_t>(width));
      };
      expect_near(vector_of(*engine, c.ids, {}, Pooling::kFirst), row(0), allowed, "first");
      expect_near(vector_of(*engine, c.ids, {}, Pooling::kLast), row(c.ids.size() - 1), allowed,
                  "last");
      Floats largest = row(0);
      for (size_t i = 0; i < c.hidden.size(); ++i)
        largest[i % width] = std::max(largest[i % width], c.hidden[i]);
      expect_near(vector_of(*engine, c.ids, {}, Pooling::kMax), largest, allowed, "max");
      Floats mean = vector_of(*engine, c.ids, {}, Pooling::kModel);
      normalize_vector(mean);
      expect_near(mean, c.mean, tolerance, "mean");
    }
  }
};

TEST_P(SeededEncoder, ReferencePathMatchesTransformers) {
  if (!device().empty()) GTEST_SKIP() << "the reference runs on the host";
  expect_outputs(true, 2e-4f);
}

TEST_P(SeededEncoder, FastPathIsNearTransformers) {
  expect_outputs(false, device().empty() ? 1e-2f : 2e-2f);
}

// Texts of all lengths, in steps that hold a few of them each.
TEST_P(SeededEncoder, TheBatchChangesNoBit) {
  EngineOptions o;
  o.max_model_len = 100;
  o.max_num_batched_tokens = 128;
  if (!device().empty()) o.device = device();
  const auto engine = load(model(), o);
  ASSERT_NE(engine, nullptr);
  const bool scores = engine->heads().classifier.has_value();
  const Pooling poolings[] = {Pooling::kMean, Pooling::kFirst, Pooling::kLast,
                              scores ? Pooling::kClassify : Pooling::kModel};
  constexpr size_t kTexts = 48;
  const int types = engine->model().spec().token_types;
  std::vector<Ids> texts(kTexts), segments(kTexts);
  for (size_t t = 0; t < kTexts; ++t) {
    const size_t length = 1 + t * 29 % 100;
    for (size_t i = 0; i < length; ++i) {
      texts[t].push_back(static_cast<int32_t>(3 + (i * 37 + t * 11) % 90));
      if (types > 1 && t % 3 != 0) segments[t].push_back(i > length / 2 ? 1 : 0);
    }
  }
  std::vector<Floats> alone(kTexts), together(kTexts);
  for (size_t t = 0; t < kTexts; ++t)
    alone[t] = vector_of(*engine, texts[t], segments[t], poolings[t % 4]);
  const int64_t steps_alone = engine->stats().steps;
  EXPECT_EQ(steps_alone, static_cast<int64_t>(kTexts)) << "a text was cut";
  std::vector<std::promise<void>> done(kTexts);
  for (size_t t = 0; t < kTexts; ++t) {
    ASSERT_TRUE(
        engine->submit(request_for(texts[t], segments[t], poolings[t % 4], together[t], done[t]))
            .ok());
  }
  for (auto& d : done) d.get_future().wait();
  EXPECT_LT(engine->stats().steps - steps_alone, static_cast<int64_t>(kTexts));
  for (size_t t = 0; t < kTexts; ++t) {
    ASSERT_EQ(alone[t].size(), together[t].size());
    ASSERT_FALSE(alone[t].empty());
    EXPECT_EQ(std::memcmp(alone[t].data(), together[t].data(), alone[t].size() * sizeof(float)), 0)
        << "text " << t;
  }
  EXPECT_EQ(engine->stats().cached_tokens, 0);
  EXPECT_EQ(engine->stats().kv_cache_usage, 0.0);
}

std::string test_name(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  for (char& c : name) c = c == '-' || c == '@' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, SeededEncoder,
                         ::testing::Values("bert", "roberta", "xlm-roberta", "nomic-bert",
                                           "modernbert", "gte", "bert-rerank", "xlm-roberta-rerank",
                                           "modernbert-rerank", "gte-rerank"),
                         test_name);

INSTANTIATE_TEST_SUITE_P(Cuda, SeededEncoder,
                         ::testing::Values("bert@cuda", "roberta@cuda", "nomic-bert@cuda",
                                           "modernbert@cuda", "gte@cuda", "bert-rerank@cuda",
                                           "modernbert-rerank@cuda"),
                         test_name);

// Decoders with a head that gives scores run in chunks and share prefixes, as all decoders do.
class SeededScore : public ::testing::TestWithParam<const char*> {};

TEST_P(SeededScore, MatchesTransformersInChunksAndFromTheCache) {
  for (const bool reference : {true, false}) {
    EngineOptions o;
    o.reference = reference;
    o.max_prefill_chunk = 16;
    const auto engine = load(GetParam(), o);
    ASSERT_NE(engine, nullptr);
    for (const EncoderCase& c : cases_of(GetParam())) {
      const Floats first = vector_of(*engine, c.ids, {}, Pooling::kClassify);
      expect_near(first, c.score, (reference ? 2e-4f : 1e-2f) * std::max(1.0f, most(c.score)),
                  "score");
      EXPECT_EQ(vector_of(*engine, c.ids, {}, Pooling::kClassify), first);
    }
    EXPECT_GT(engine->stats().cached_tokens, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SeededScore, ::testing::Values("llama-score", "qwen3-score"),
                         test_name);

TEST(Encoder, SaysInOneLineWhatItDoesNotDo) {
  const auto engine = load("bert");
  ASSERT_NE(engine, nullptr);
  Request r;
  r.prompt = {1, 5, 2};
  const auto generated = engine->check(r);
  ASSERT_TRUE(generated.has_value());
  EXPECT_NE(generated->message.find("writes no text"), std::string::npos) << generated->message;
  r.pooling = Pooling::kClassify;
  const auto classified = engine->check(r);
  ASSERT_TRUE(classified.has_value());
  EXPECT_NE(classified->message.find("no classification head"), std::string::npos);
  r.pooling = Pooling::kMean;
  EXPECT_FALSE(engine->check(r).has_value());
  r.token_type_ids = {0, 2, 0};
  EXPECT_EQ(engine->check(r)->field, "token_type_ids");
  r.token_type_ids.clear();
  r.prompt.assign(static_cast<size_t>(engine->max_model_len()), 5);
  EXPECT_FALSE(engine->check(r).has_value()) << "the longest text needs no room for a token";
  r.prompt.push_back(5);
  EXPECT_TRUE(engine->check(r).has_value());
}

TEST(Encoder, AStepHoldsTheLongestText) {
  EngineOptions o;
  o.max_num_batched_tokens = 40;
  const auto short_steps = load("bert", o);
  ASSERT_NE(short_steps, nullptr);
  EXPECT_EQ(short_steps->max_model_len(), 40);
  EXPECT_EQ(short_steps->cache_info().type, "f32");
  EXPECT_FALSE(short_steps->cache_info().prefix_caching);
  o.max_model_len = 41;
  o.model = seeded("bert");
  const auto refused = Engine::load(o);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("in one step"), std::string::npos);
  EXPECT_EQ(load("roberta")->max_model_len(), 128);  // 130 positions, two of them for padding
}

}  // namespace
}  // namespace freshet
