// Encoder-decoders against transformers' outputs (tools/golden_seeded.py), and batch invariance:
// alone, together, in chunks.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/backend.h"
#include "backend/cuda/backend.h"
#include "base/json.h"
#include "freshet/engine.h"
#include "layers/cross_weights.h"
#include "layers/model.h"
#include "loader/checkpoint.h"
#include "loader/safetensors.h"
#include "ops/device.h"

namespace freshet {
namespace {

constexpr int kTableStride = 64;  // blocks

struct Translation {
  std::vector<int32_t> ids, decoder_ids;
  std::vector<float> features;
  int64_t frames = 0;
  std::vector<float> logits;  // [decoder_ids, vocab]
};

std::vector<int32_t> ids_of(const loader::TensorSource& t) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < t.elements(); ++i) {
    int64_t id;
    std::memcpy(&id, t.data + static_cast<size_t>(i) * sizeof id, sizeof id);
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

std::vector<float> floats_of(const loader::TensorSource& t) {
  std::vector<float> values(static_cast<size_t>(t.elements()));
  std::memcpy(values.data(), t.data, t.bytes);
  return values;
}

// exact: the weights in F32.
std::string folder_of(const std::string& name, bool exact = false) {
  return std::string(FRESHET_UNPACKED_DATA) + (exact ? "/seeded-f32/" : "/seeded/") + name;
}

std::vector<Translation> translations(const std::string& name) {
  auto file = loader::SafetensorsFile::open(folder_of(name) + "/golden.safetensors");
  FRESHET_CHECK(file.ok(), "{}", file.status().message());
  std::vector<Translation> all;
  for (int i = 0; i < 8; ++i) {
    const std::string number = std::to_string(i);
    const auto* decoder = file->find("decoder_ids_" + number);
    if (decoder == nullptr) continue;
    Translation t;
    t.decoder_ids = ids_of(*decoder);
    t.logits = floats_of(*file->find("logits_" + number));
    if (const auto* ids = file->find("ids_" + number)) t.ids = ids_of(*ids);
    if (const auto* features = file->find("input_features_" + number)) {
      t.features = floats_of(*features);
      t.frames = features->shape[1];
    }
    all.push_back(std::move(t));
  }
  return all;
}

class Seq2seqRunner {
 public:
  // device: nullptr for the host.
  Seq2seqRunner(const std::string& name, bool reference,
                std::unique_ptr<ops::Device> device = nullptr)
      : pool_(2, false) {
    ops::OpsOptions options;
    options.reference = reference;
    ops_ = device != nullptr
               ? ops::Ops::create(pool_, std::move(device))
               : std::move(ops::Ops::create(pool_, cpu::kernels(), cpu::detect(), options)).value();
    // A GPU rounds inputs to BF16 where weights are BF16, which small random models amplify.
    const auto checkpoint = loader::Checkpoint::open(folder_of(name, ops_->device() != nullptr));
    FRESHET_CHECK(checkpoint.ok(), "{}", checkpoint.status().message());
    auto model = load_model(*checkpoint, *ops_, {});
    FRESHET_CHECK(model.ok(), "{}", model.status().message());
    model_ = std::move(*model);
    const Status reserved = model_->reserve(256, 256, 64);
    FRESHET_CHECK(reserved.ok(), "{}", reserved.message());
    type_ = reference ? ops::KvType::kF32 : ops::KvType::kF16;
  }

  // The logits of all positions of each, in steps of `chunk` tokens of every sequence.
  std::vector<std::vector<float>> run(const std::vector<Translation>& all, int chunk) {
    const KvCacheSpec spec = kv_cache_spec(model_->spec(), type_);
    const auto blocks = static_cast<int32_t>(all.size()) * kTableStride;
    const KvStorage cache =
        std::move(KvStorage::allocate(spec, std::vector<int32_t>(spec.groups.size(), blocks),
                                      ops_->memory()))
            .value();
    const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
    std::vector<std::vector<float>> logits(all.size());
    for (int32_t done = 0; done < std::ssize(all.front().decoder_ids); done += chunk) {
      ForwardBatch batch = batch_of(all, spec, done, chunk);
      std::vector<float> rows(batch.logit_rows.size() * vocab);
      model_->forward(batch, cache, {rows.data()});
      const float* row = rows.data();
      for (size_t s = 0; s < all.size(); ++s) {
        const auto count =
            static_cast<size_t>(batch.query_start[s + 1] - batch.query_start[s]) * vocab;
        logits[s].insert(logits[s].end(), row, row + count);
        row += count;
      }
    }
    return logits;
  }

 private:
  ForwardBatch batch_of(const std::vector<Translation>& all, const KvCacheSpec& spec, int32_t done,
                        int chunk) {
    ForwardBatch b;
    b.query_start.push_back(0);
    b.tables.resize(spec.groups.size());
    for (BlockTables& table : b.tables) table.stride = kTableStride;
    for (size_t s = 0; s < all.size(); ++s) {
      const Translation& t = all[s];
      const auto end = std::min<int32_t>(done + chunk, static_cast<int32_t>(t.decoder_ids.size()));
      for (int32_t p = done; p < end; ++p) {
        b.logit_rows.push_back(static_cast<int32_t>(b.token_ids.size()));
        b.token_ids.push_back(t.decoder_ids[static_cast<size_t>(p)]);
        b.positions.push_back(p);
      }
      b.query_start.push_back(static_cast<int32_t>(b.token_ids.size()));
      b.context_len.push_back(end);
      EncoderInput input;
      input.sequence = static_cast<int>(s);
      input.ids = t.ids;
      input.features = t.features.data();
      input.frames = t.frames;
      if (done == 0) b.encoder_inputs.push_back(input);
      for (size_t g = 0; g < spec.groups.size(); ++g) {
        for (int32_t i = 0; i < kTableStride; ++i)
          b.tables[g].ids.push_back(static_cast<int32_t>(s) * kTableStride + i);
        if (spec.groups[g].cross == 0) continue;
        const int64_t length = t.ids.empty() ? (t.frames + 1) / 2 : std::ssize(t.ids);
        b.tables[g].context_len.push_back(static_cast<int32_t>(length));
      }
    }
    return b;
  }

  ThreadPool pool_;
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<Model> model_;
  ops::KvType type_ = ops::KvType::kF32;
};

class Seq2seqGolden : public ::testing::TestWithParam<const char*> {
 protected:
  static void expect_logits(Seq2seqRunner& runner, float tolerance) {
    const std::vector<Translation> all = translations(GetParam());
    ASSERT_FALSE(all.empty());
    for (const Translation& t : all) {
      const std::vector<float> got = runner.run({t}, 64)[0];
      ASSERT_EQ(got.size(), t.logits.size());
      float largest = 0, worst = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        largest = std::max(largest, std::fabs(t.logits[i]));
        const float off = std::fabs(got[i] - t.logits[i]);
        if (!(off <= worst)) worst = off;
      }
      EXPECT_LE(worst, tolerance * largest);
    }
  }
  static void expect_batch_changes_no_bit(Seq2seqRunner& runner) {
    std::vector<Translation> all = translations(GetParam());
    all.push_back(all.front());
    std::reverse(all.back().decoder_ids.begin() + 1, all.back().decoder_ids.end());
    if (!all.back().ids.empty()) all.back().ids.resize(all.back().ids.size() - 2);
    for (const int chunk : {64, 1, 5}) {
      const auto together = runner.run(all, chunk);
      for (size_t s = 0; s < all.size(); ++s) {
        const std::vector<float> alone = runner.run({all[s]}, 64)[0];
        ASSERT_EQ(together[s].size(), alone.size());
        EXPECT_EQ(std::memcmp(together[s].data(), alone.data(), alone.size() * sizeof(float)), 0)
            << "sequence " << s << " in chunks of " << chunk;
      }
    }
  }
};

TEST_P(Seq2seqGolden, LogitsAreThoseOfTransformers) {
  for (const bool reference : {true, false}) {
    Seq2seqRunner runner(GetParam(), reference);
    SCOPED_TRACE(reference ? "reference" : "fast");
    expect_logits(runner, reference ? 2e-4f : 1e-2f);
  }
}

// On a GPU, if there is one; its heads are multiples of eight features.
class Seq2seqCuda : public Seq2seqGolden {};
TEST_P(Seq2seqCuda, IsNearTransformersInAnyBatch) {
  auto device = cuda::open(std::string("auto"));
  ASSERT_TRUE(device.ok()) << device.status().message();
  if (*device == nullptr) GTEST_SKIP() << "no GPU here";
  Seq2seqRunner runner(GetParam(), false, std::move(*device));
  expect_logits(runner, 1e-2f);
  expect_batch_changes_no_bit(runner);
}

TEST_P(Seq2seqGolden, TheBatchChangesNoBit) {
  for (const bool reference : {true, false}) {
    Seq2seqRunner runner(GetParam(), reference);
    SCOPED_TRACE(reference ? "reference" : "fast");
    expect_batch_changes_no_bit(runner);
  }
}

// The engine: the greedy texts of transformers, for requests that run together, with several
// samples, and with so little cache that they wait for and preempt each other.
// "t5", or "t5@cuda" on a GPU, if there is one.
class Seq2seqEngine : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (model() == GetParam()) return;
    const auto opened = cuda::open(std::string("auto"));
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    if (*opened == nullptr) GTEST_SKIP() << "no GPU here";
  }
  static std::string model() {
    const std::string param = GetParam();
    return param.substr(0, param.find('@'));
  }
  struct Written {
    std::vector<std::vector<int32_t>> samples;
    std::vector<uint32_t> logprobs;  // of the first sample: bits, if they were asked for
    int cached_tokens = 0;
    int prompt_tokens = 0;
    int preemptions = 0;
  };
  std::unique_ptr<Engine> load(const EngineOptions& changes) {
    EngineOptions options = changes;
    options.model = folder_of(model());
    if (model() != GetParam()) options.device = "cuda";
    options.threads = 2;
    options.max_model_len = 64;
    auto engine = Engine::load(options);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }
  static Request request_of(const Translation& t, int samples, int tokens) {
    Request r;
    r.prompt = t.features.empty() ? t.ids : std::vector<int32_t>{t.decoder_ids.front()};
    r.features = t.features;
    r.frames = t.frames;
    r.params.temperature = samples > 1 ? 1.0f : 0.0f;
    r.params.n = samples;
    r.params.seed = 5;
    r.params.max_tokens = tokens;
    r.params.ignore_eos = true;
    return r;
  }
  // What all of them write, submitted at once.
  static std::vector<Written> write(Engine& engine, std::vector<Request> requests) {
    std::vector<Written> written(requests.size());
    std::vector<std::promise<void>> done(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      Request& r = requests[i];
      written[i].samples.resize(static_cast<size_t>(r.params.n));
      r.on_delta = [&, i](const Delta& d) {
        auto& ids = written[i].samples[static_cast<size_t>(d.index)];
        ids.insert(ids.end(), d.ids.begin(), d.ids.end());
        for (size_t t = 0; d.index == 0 && t < d.logprobs.size(); ++t) {
          for (const TokenLogprob& l : d.logprobs[t])
            written[i].logprobs.push_back(std::bit_cast<uint32_t>(l.logprob));
        }
      };
      r.on_done = [&, i](const Usage& usage) {
        written[i].prompt_tokens = usage.prompt_tokens;
        written[i].preemptions = usage.preemptions;
        written[i].cached_tokens = usage.cached_tokens;
        done[i].set_value();
      };
      EXPECT_TRUE(engine.submit(std::move(r)).ok());
    }
    for (auto& one : done) one.get_future().wait();
    return written;
  }
};

TEST_P(Seq2seqEngine, WritesTheSameWhateverElseRuns) {
  const std::vector<Translation> all = translations(model());
  const auto engine = load({});
  ASSERT_NE(engine, nullptr);
  std::vector<Request> requests;
  for (int i = 0; i < 12; ++i) {
    Translation t = all[static_cast<size_t>(i) % all.size()];
    if (!t.ids.empty()) t.ids.resize(t.ids.size() - static_cast<size_t>(i) / 3);
    for (float& f : t.features) f *= 1.0f - 0.02f * static_cast<float>(i);
    requests.push_back(request_of(t, 1 + i % 3, 20 + i));
  }
  std::vector<Written> alone;
  for (const Request& r : requests) alone.push_back(write(*engine, {r})[0]);
  const std::vector<Written> together = write(*engine, requests);
  EngineOptions small;
  small.max_num_seqs = 4;
  // Room for one or two of the encoder's longest outputs; T5's is 2,048 positions.
  small.kv_cache_memory = size_t{model() == "t5" ? 1100u : 96u} << 10;
  small.max_num_batched_tokens = 16;
  const auto tight = load(small);
  ASSERT_NE(tight, nullptr);
  const std::vector<Written> squeezed = write(*tight, requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(alone[i].samples[0].size(), 20 + i);
    EXPECT_EQ(together[i].samples, alone[i].samples) << "request " << i;
    EXPECT_EQ(squeezed[i].samples, alone[i].samples) << "request " << i;
  }
}

std::vector<int32_t> ids_in(const json::Value& list) {
  std::vector<int32_t> ids;
  for (const json::Value& id : list.as_array())
    ids.push_back(static_cast<int32_t>(id.as_int64().value()));
  return ids;
}

// Fields of generation_config.json, as transformers' generate() reads them.
SamplingParams params_of(const json::Value& fields) {
  SamplingParams p;
  p.temperature = 0.0f;
  p.max_tokens = 12;
  p.beam_width = static_cast<int>(fields.get_int("num_beams", 0));
  p.length_penalty = static_cast<float>(fields.get_double("length_penalty", 1.0));
  p.early_stopping = fields.get_bool("early_stopping", false);
  p.renormalize_logits = fields.get_bool("renormalize_logits", false);
  p.no_repeat_ngram_size = static_cast<int>(fields.get_int("no_repeat_ngram_size", 0));
  if (const json::Value* words = fields.find("bad_words_ids")) {
    for (const json::Value& word : words->as_array()) p.bad_words_ids.push_back(ids_in(word));
  }
  if (const json::Value* ids = fields.find("suppress_tokens")) {
    for (const int32_t id : ids_in(*ids)) p.bad_words_ids.push_back({id});
  }
  if (const json::Value* ids = fields.find("begin_suppress_tokens"))
    p.begin_suppress_tokens = ids_in(*ids);
  return p;
}

// tools/golden_generate.py
TEST_P(Seq2seqEngine, WritesWhatGenerateWritesUnderItsConfiguration) {
  const std::string path = folder_of(model()) + "/generated.json";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << "not of this model";
  const auto cases = json::parse_file(path);
  ASSERT_TRUE(cases.ok()) << cases.status().message();
  const auto engine = load({});
  ASSERT_NE(engine, nullptr);
  std::vector<Request> requests;
  for (const json::Value& one : cases->as_array()) {
    Request& r = requests.emplace_back();
    r.prompt = ids_in(*one.find("ids"));
    r.params = params_of(*one.find("fields"));
  }
  const std::vector<Written> together = write(*engine, requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    const json::Value& one = cases->as_array()[i];
    const std::string fields = json::write(*one.find("fields"));
    const Written alone = write(*engine, {requests[i]})[0];
    std::vector<int32_t> text = alone.samples[0];
    std::erase(text, 2);  // the end
    EXPECT_EQ(text, ids_in(*one.find("output"))) << fields;
    EXPECT_EQ(together[i].samples[0], alone.samples[0]) << fields;
  }
}

TEST_P(Seq2seqEngine, AnInputThatWasReadIsNotReadAgain) {
  const auto engine = load({});
  EngineOptions off;
  off.enable_prefix_caching = false;
  const auto plain = load(off);
  ASSERT_TRUE(engine != nullptr && plain != nullptr);
  Request one = request_of(translations(model()).front(), 1, 12);
  one.params.logprobs = 2;
  // A decoder's prompt of more than a block.
  Request prompted = one;
  if (prompted.frames == 0) prompted.encoder_ids = std::exchange(prompted.prompt, {2});
  for (int i = 0; i < 20; ++i) prompted.prompt.push_back(3 + i);
  Request salted = one, other = one;
  salted.cache_salt = "other";
  if (other.frames > 0) {
    other.features.front() += 0.5f;
  } else {
    other.prompt.pop_back();
  }
  std::vector<Written> alone;
  for (const Request& r : {one, prompted, other}) alone.push_back(write(*plain, {r})[0]);
  EXPECT_EQ(plain->stats().encoder.hits, 0);
  const auto expect = [&](const Request& r, const Written& want, int64_t queries, int64_t hits) {
    const Written got = write(*engine, {r})[0];
    EXPECT_EQ(got.samples, want.samples);
    EXPECT_EQ(got.logprobs, want.logprobs);
    EXPECT_FALSE(got.logprobs.empty());
    EXPECT_EQ(engine->stats().encoder.queries, queries);
    EXPECT_EQ(engine->stats().encoder.hits, hits);
    return got.cached_tokens;
  };
  expect(one, alone[0], 1, 0);
  expect(one, alone[0], 2, 1);
  expect(salted, alone[0], 3, 1);
  expect(other, alone[2], 4, 1);
  EXPECT_EQ(expect(prompted, alone[1], 5, 2), 0);
  // The decoder's prompt is cached too, behind the same input only.
  EXPECT_GE(expect(prompted, alone[1], 6, 3), ops::kBlockTokens);
  Request elsewhere = prompted;
  if (elsewhere.frames > 0) {
    elsewhere.features = other.features;
  } else {
    elsewhere.encoder_ids = other.prompt;
  }
  const Written want = write(*plain, {elsewhere})[0];
  EXPECT_EQ(expect(elsewhere, want, 7, 4), 0);
  EXPECT_EQ(engine->stats().encoder.sounds, one.frames > 0 ? 7 : 0);
  EXPECT_EQ(engine->stats().encoder.sounds_cached, one.frames > 0 ? 4 : 0);
}

// Sound is encoded between the steps of others: their tokens do not wait for all of its layers.
TEST_P(Seq2seqEngine, StepsRunBetweenLayersOfTheEncoder) {
  const auto engine = load({}), fresh = load({});
  ASSERT_TRUE(engine != nullptr && fresh != nullptr);
  const Translation t = translations(model()).front();
  Request one = request_of(t, 1, 30), other = one;
  if (one.frames == 0 || model() != GetParam()) GTEST_SKIP() << "for sound, on hosts";
  other.features.front() += 0.5f;
  other.params.max_tokens = 6;
  const Written first = write(*engine, {one})[0], second = write(*engine, {other})[0];
  EXPECT_EQ(engine->stats().encoder.steps_between, 0);
  std::vector<int32_t> ids, later;
  std::promise<void> done, later_done;
  one.on_delta = [&](const Delta& d) {
    const bool begins = ids.empty();
    ids.insert(ids.end(), d.ids.begin(), d.ids.end());
    if (!begins) return;
    other.on_delta = [&](const Delta& e) { later.insert(later.end(), e.ids.begin(), e.ids.end()); };
    other.on_done = [&](const Usage&) { later_done.set_value(); };
    EXPECT_TRUE(fresh->submit(std::move(other)).ok());
  };
  one.on_done = [&](const Usage&) { done.set_value(); };
  ASSERT_TRUE(fresh->submit(std::move(one)).ok());
  done.get_future().wait();
  later_done.get_future().wait();
  EXPECT_EQ(ids, first.samples[0]);
  EXPECT_EQ(later, second.samples[0]);
  EXPECT_GT(fresh->stats().encoder.steps_between, 0);
}

TEST_P(Seq2seqEngine, RefusesWhatItCannotRead) {
  const std::vector<Translation> all = translations(model());
  const auto engine = load({});
  ASSERT_NE(engine, nullptr);
  Request embed = request_of(all.front(), 1, 4);
  embed.pooling = Pooling::kMean;
  EXPECT_TRUE(engine->check(embed).has_value());
  Request other = request_of(all.front(), 1, 4);
  if (other.frames > 0) {
    other.frames = 0;
    other.features.clear();
  } else {
    other.frames = 4;
    other.features.assign(4 * 80, 0.0f);
  }
  EXPECT_TRUE(engine->check(other).has_value());
  Request longer = request_of(all.front(), 1, 4);
  if (longer.frames > 0) {
    longer.frames = 1 << 12;
    longer.features.assign(static_cast<size_t>(longer.frames) * 80, 0.0f);
  } else {
    longer.prompt.assign(1 << 12, 5);
  }
  EXPECT_TRUE(engine->check(longer).has_value());
  Request times = request_of(all.front(), 1, 4);
  times.cross_weights = std::make_shared<CrossWeights>();
  EXPECT_EQ(engine->check(times).has_value(), model() != GetParam());  // keys on GPUs are not read
  times.params.n = 2;
  EXPECT_TRUE(engine->check(times).has_value());
}

const auto kModels = ::testing::Values("t5", "bart", "mbart", "marian", "m2m-100", "whisper");

std::string name_of_model(const ::testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  for (char& c : name) c = c == '-' || c == '@' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, Seq2seqEngine, kModels, name_of_model);
INSTANTIATE_TEST_SUITE_P(Models, Seq2seqGolden, kModels, name_of_model);
INSTANTIATE_TEST_SUITE_P(Cuda, Seq2seqEngine,
                         ::testing::Values("t5@cuda", "bart-wide@cuda", "whisper-wide@cuda"),
                         name_of_model);
INSTANTIATE_TEST_SUITE_P(Models, Seq2seqCuda, ::testing::Values("t5", "bart-wide", "whisper-wide"),
                         name_of_model);

}  // namespace
}  // namespace freshet
