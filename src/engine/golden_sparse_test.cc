// Reading the cache selectively keeps the law of the batch: a request's tokens and
// log-probabilities are the same, bit for bit, alone, in a batch, in chunks, with a cached prefix,
// after preemption and with drafts. And it acts: other keys give other numbers, and nothing
// computed with them is shared.
#include <algorithm>
#include <bit>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "freshet/engine.h"
#include "kv_cache/block_cache.h"
#include "layers/model.h"

namespace freshet {
namespace {

constexpr int kReading = 12;         // requests
constexpr int kMostPositions = 128;  // of the golden models

struct Sparse {
  const char* model;
  const char* type;
  const char* json;
};
constexpr Sparse kSparse[] = {
    {"llama", "auto", R"({"policy": "quest", "budget": 64, "dense_layers": 0})"},
    {"llama", "int8", R"({"policy": "quest", "budget": 64, "dense_layers": 1})"},
    {"llama", "int4", R"({"policy": "quest", "budget": 64, "dense_layers": 0})"},
    {"gemma2", "auto", R"({"policy": "quest", "budget": 64, "dense_layers": 0})"},
    {"gpt-oss", "fp8", R"({"policy": "quest", "budget": 64, "dense_layers": 0})"},
    {"llama", "auto", R"({"policy": "sparq", "budget": 64, "dense_layers": 0, "components": 8})"},
    {"gpt-oss", "int8", R"({"policy": "sparq", "budget": 64, "dense_layers": 0})"},
    {"gemma2", "auto", R"({"policy": "sparq", "budget": 64, "dense_layers": 0})"},
};

struct Answered {
  std::vector<int32_t> ids;
  std::vector<uint32_t> logprobs;
  bool operator==(const Answered&) const = default;
};

Request reading_request(int which, int vocab) {
  Request r;
  const int length = 24 + which * 29 % 60;
  for (int i = 0; i < length; ++i) {
    r.prompt.push_back((i * 37 + (i < 18 ? 0 : which * 11) + 3) % vocab);
  }
  r.params.max_tokens = std::min(60, kMostPositions - 2 - length);
  r.params.ignore_eos = true;
  r.params.logprobs = 1;
  r.params.seed = static_cast<uint64_t>(which);
  r.params.temperature = which % 2 == 0 ? 0.0f : 0.8f;
  r.params.n = which == 5 ? 3 : 1;
  return r;
}

class SparseAttention : public ::testing::TestWithParam<Sparse> {
 protected:
  static void keep_the_law();

  static std::unique_ptr<Engine> open(EngineOptions o) {
    o.model = std::string(FRESHET_UNPACKED_DATA) + "/golden/" + GetParam().model;
    o.kv_cache_dtype = GetParam().type;
    o.threads = 2;
    o.max_model_len = kMostPositions;
    auto engine = Engine::load(o);
    EXPECT_TRUE(engine.ok()) << engine.status().message();
    return engine.ok() ? std::move(*engine) : nullptr;
  }

  static EngineOptions selecting() {
    EngineOptions o;
    o.sparse_attention = GetParam().json;
    return o;
  }

  static std::vector<Answered> run(Engine& engine, bool together, int* preempted = nullptr,
                                   const std::string& sparse = "") {
    std::vector<Answered> all(kReading * 3);
    std::vector<std::promise<void>> done(kReading);
    std::promise<void> submitted;
    const std::shared_future<void> everyone = submitted.get_future().share();
    for (int i = 0; i < kReading; ++i) {
      Request r = reading_request(i, engine.model().spec().vocab_size);
      r.sparse_attention = sparse;
      r.priority = preempted != nullptr && i < kReading / 2 ? 1 : 0;
      r.on_delta = [&all, i, together, everyone](const Delta& d) {
        Answered& answer = all[static_cast<size_t>(i * 3 + d.index)];
        if (together && answer.ids.empty()) everyone.wait();
        answer.ids.insert(answer.ids.end(), d.ids.begin(), d.ids.end());
        for (const auto& list : d.logprobs) {
          for (const TokenLogprob& t : list)
            answer.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
        }
      };
      r.on_done = [&, i](const Usage& u) {
        if (preempted != nullptr) *preempted += u.preemptions;
        done[static_cast<size_t>(i)].set_value();
      };
      const auto id = engine.submit(std::move(r));
      EXPECT_TRUE(id.ok()) << id.status().message();
      if (!together) done[static_cast<size_t>(i)].get_future().wait();
    }
    submitted.set_value();
    for (int i = 0; together && i < kReading; ++i) done[static_cast<size_t>(i)].get_future().wait();
    return all;
  }

  static void expect_equal(const std::vector<Answered>& run, const std::vector<Answered>& alone,
                           const char* how) {
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_EQ(run[i].ids, alone[i].ids) << how << ": request " << i / 3;
      EXPECT_EQ(run[i].logprobs, alone[i].logprobs) << how << ": request " << i / 3;
    }
  }

  // Little room beside the longest sequence, so that requests are preempted.
  static size_t little_memory(const Engine& engine) {
    const std::string_view type = GetParam().type;
    const ops::KvType kept = *ops::kv_type_by_name(type == "auto" ? "f16" : type);
    const KvCacheSpec kv = with_bounds(kv_cache_spec(engine.model().spec(), kept));
    size_t bytes = 0;
    for (size_t g = 0; g < kv.groups.size(); ++g) {
      const int32_t blocks =
          kv_cache::BlockCache::most_blocks(kv.groups[g].window, kMostPositions, 64);
      bytes += kv.block_bytes(static_cast<int>(g)) * static_cast<size_t>(blocks);
    }
    return bytes;
  }

  // One request to its end.
  static Answered answer(Engine& engine, Request r, Usage& usage) {
    Answered answer;
    std::promise<void> done;
    r.on_delta = [&](const Delta& d) {
      answer.ids.insert(answer.ids.end(), d.ids.begin(), d.ids.end());
      for (const auto& list : d.logprobs) {
        for (const TokenLogprob& t : list)
          answer.logprobs.push_back(std::bit_cast<uint32_t>(t.logprob));
      }
    };
    r.on_done = [&](const Usage& u) {
      usage = u;
      done.set_value();
    };
    EXPECT_TRUE(engine.submit(std::move(r)).ok());
    done.get_future().wait();
    return answer;
  }
};

void SparseAttention::keep_the_law() {
  EngineOptions plain = selecting();
  plain.enable_prefix_caching = false;
  const auto first = open(plain);
  ASSERT_NE(first, nullptr);
  const std::vector<Answered> alone = run(*first, false);
  expect_equal(run(*first, true), alone, "batched");

  const auto cached = open(selecting());
  ASSERT_NE(cached, nullptr);
  expect_equal(run(*cached, true), alone, "sharing prefixes");
  const int64_t shared = cached->stats().cached_tokens;
  expect_equal(run(*cached, true), alone, "from the cache");
  EXPECT_GT(cached->stats().cached_tokens, shared);

  EngineOptions narrow = selecting();
  narrow.max_num_batched_tokens = 16;
  const auto chunked = open(narrow);
  ASSERT_NE(chunked, nullptr);
  expect_equal(run(*chunked, true), alone, "in steps of 16 tokens");

  EngineOptions tight = selecting();
  tight.max_num_batched_tokens = 64;
  tight.kv_cache_memory = little_memory(*first);
  const auto crowded = open(tight);
  ASSERT_NE(crowded, nullptr);
  int preempted = 0;
  expect_equal(run(*crowded, true, &preempted), alone, "preempted");
  EXPECT_GE(preempted, 1);

  tight.kv_offloading_bytes = size_t{1} << 24;
  const auto swapped = open(tight);
  ASSERT_NE(swapped, nullptr);
  expect_equal(run(*swapped, true, &preempted), alone, "preempted, with a host tier");
  expect_equal(run(*swapped, true, &preempted), alone, "from the host tier");

  EngineOptions drafting = selecting();
  drafting.speculative_config = R"({"method": "ngram", "num_speculative_tokens": 3})";
  const auto speculating = open(drafting);
  ASSERT_NE(speculating, nullptr);
  expect_equal(run(*speculating, true), alone, "with drafts");
  EXPECT_GT(speculating->stats().speculation.draft_tokens, 0);
}

TEST_P(SparseAttention, KeepsTheLaw) {
  keep_the_law();
}

TEST_P(SparseAttention, ActsBehindItsBudgetOnly) {
  const auto full = open({});
  const auto selects = open(selecting());
  EngineOptions wide = selecting();
  wide.sparse_attention.replace(wide.sparse_attention.find("64"), 2, "128");
  const auto whole = open(wide);
  ASSERT_TRUE(full != nullptr && selects != nullptr && whole != nullptr);
  const std::vector<Answered> want = run(*full, true);
  expect_equal(run(*whole, true), want, "a budget of the whole length");
  expect_equal(run(*selects, true, nullptr, R"({"policy": "none"})"), want, "switched off");
  EXPECT_NE(run(*selects, true), want);

  Usage usage;
  Request r = reading_request(0, full->model().spec().vocab_size);  // 24 tokens of prompt
  const Answered all = answer(*full, r, usage), some = answer(*selects, r, usage);
  const std::ptrdiff_t same = 64 - 24;  // the query in slot 63 reads four blocks
  EXPECT_TRUE(std::equal(all.ids.begin(), all.ids.begin() + same, some.ids.begin()));
  EXPECT_TRUE(std::equal(all.logprobs.begin(), all.logprobs.begin() + same, some.logprobs.begin()));
  EXPECT_NE(all.logprobs, some.logprobs);
}

TEST_P(SparseAttention, SharesThePromptAlone) {
  const auto cached = open(selecting());
  EngineOptions plain = selecting();
  plain.enable_prefix_caching = false;
  const auto fresh = open(plain);
  ASSERT_TRUE(cached != nullptr && fresh != nullptr);
  Usage usage;
  Request first = reading_request(2, cached->model().spec().vocab_size);
  first.params.max_tokens = 30;
  Request second = first;
  const Answered said = answer(*cached, first, usage);
  second.prompt.insert(second.prompt.end(), said.ids.begin(), said.ids.end());
  second.params.max_tokens = 8;
  ASSERT_GE(first.prompt.size(), 64) << "generated tokens select";
  const Answered again = answer(*cached, second, usage);
  EXPECT_EQ(usage.cached_tokens, static_cast<int>(first.prompt.size()) / 16 * 16);
  EXPECT_EQ(again, answer(*fresh, second, usage));
}

TEST_P(SparseAttention, NeedsAnEngineThatBoundsKeys) {
  const auto full = open({});
  ASSERT_NE(full, nullptr);
  Request r = reading_request(0, full->model().spec().vocab_size);
  r.sparse_attention = R"({"policy": "quest", "budget": 64})";
  const auto error = full->check(r);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->field, "sparse_attention");
  EXPECT_NE(error->message.find("--sparse-attention"), std::string::npos) << error->message;
  r.sparse_attention = R"({"policy": "none"})";
  EXPECT_FALSE(full->check(r).has_value());
}

// Fixed patterns, which the prompt's queries follow too.
class SparsePattern : public SparseAttention {};

TEST_P(SparsePattern, KeepsTheLaw) {
  keep_the_law();
}

TEST_P(SparsePattern, ActsAndIsFullAttentionWhereItCoversAll) {
  const auto full = open({});
  const auto selects = open(selecting());
  EngineOptions wide;
  wide.sparse_attention = R"({"policy": "static", "window": 128})";
  const auto whole = open(wide);
  ASSERT_TRUE(full != nullptr && selects != nullptr && whole != nullptr);
  const std::vector<Answered> want = run(*full, true);
  expect_equal(run(*whole, true), want, "a window of the whole length");
  expect_equal(run(*selects, true, nullptr, R"({"policy": "none"})"), want, "switched off");
  EXPECT_NE(run(*selects, true), want);
}

// Keys and values of a prompt depend on the pattern: another pattern, or none, does not find them.
TEST_P(SparsePattern, SharesWithTheSamePatternAlone) {
  const auto cached = open(selecting());
  EngineOptions plain = selecting();
  plain.enable_prefix_caching = false;
  const auto fresh = open(plain);
  ASSERT_TRUE(cached != nullptr && fresh != nullptr);
  Usage usage;
  Request r = reading_request(2, cached->model().spec().vocab_size);  // 82 tokens of prompt
  r.params.max_tokens = 8;
  Request dense = r, longer = r;
  dense.sparse_attention = R"({"policy": "none"})";
  longer.prompt.insert(longer.prompt.end(), {5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16});
  const Answered first = answer(*cached, r, usage);
  EXPECT_EQ(usage.cached_tokens, 0);
  EXPECT_EQ(answer(*cached, dense, usage), answer(*fresh, dense, usage));
  EXPECT_EQ(answer(*cached, r, usage), first);
  EXPECT_GE(usage.cached_tokens, 48) << "all but what its last tokens may read in full";
  EXPECT_EQ(answer(*cached, longer, usage), answer(*fresh, longer, usage));
  answer(*cached, longer, usage);
  EXPECT_GE(usage.cached_tokens, 48);
  EXPECT_EQ(answer(*cached, longer, usage), answer(*fresh, longer, usage));
}

// What cannot be combined is refused in one line.
TEST(SparseAttentionChecks, RefuseWhatCannotSelect) {
  const std::string quest = R"({"policy": "quest", "budget": 64})";
  const std::string golden = FRESHET_UNPACKED_DATA "/golden/";
  const std::string seeded = std::string(FRESHET_UNPACKED_DATA) + "/seeded/";
  const auto error = [&](const std::string& model,
                         const std::function<void(EngineOptions&)>& change) {
    EngineOptions o;
    o.model = model;
    o.threads = 1;
    o.sparse_attention = quest;
    change(o);
    return Engine::load(o).status().message();
  };
  const auto none = [](EngineOptions&) {};
  const std::pair<std::string, const char*> models[] = {
      {golden + "deepseek-v3", "latent attention (MLA)"},
      {seeded + "bloom", "a bias by distance"},
      {seeded + "bart", "encoder-decoders"},
      {seeded + "bert", "read both ways"},
      {seeded + "mamba2", "models with states"},
      {seeded + "gemma3-vision", "models that read pictures"},
      {seeded + "qwen2-vl", "models that read pictures"},
      {seeded + "mllama", "models that read pictures"},
  };
  for (const auto& [model, says] : models) {
    const std::string message = error(model, none);
    EXPECT_NE(message.find("--sparse-attention does not go with"), std::string::npos) << message;
    EXPECT_NE(message.find(says), std::string::npos) << model << ": " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
  EXPECT_NE(error(golden + "llama",
                  [](EngineOptions& o) { o.kv_eviction = R"({"policy": "snapkv", "budget": 64})"; })
                .find("--kv-eviction"),
            std::string::npos);
  EXPECT_NE(error(golden + "llama",
                  [](EngineOptions& o) { o.sparse_attention = R"({"policy": "quest"})"; })
                .find("budget"),
            std::string::npos);

  EngineOptions o;
  o.model = golden + "llama";
  o.threads = 1;
  o.sparse_attention = quest;
  auto engine = Engine::load(o);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  Request r = reading_request(0, (*engine)->model().spec().vocab_size);
  EXPECT_FALSE((*engine)->check(r).has_value());
  Request beams = r;
  beams.params.beam_width = 2;
  beams.params.logprobs = -1;
  EXPECT_EQ((*engine)->check(beams).value_or(RequestError{}).field, "sparse_attention");
  Request evicts = r;
  evicts.kv_eviction = R"({"policy": "snapkv", "budget": 64})";
  EXPECT_EQ((*engine)->check(evicts).value_or(RequestError{}).field, "sparse_attention");
  evicts.sparse_attention = R"({"policy": "none"})";
  EXPECT_FALSE((*engine)->check(evicts).has_value());
}

std::string sparse_name(const ::testing::TestParamInfo<Sparse>& info) {
  const std::string json = info.param.json;
  const size_t policy = json.find(": \"") + 3;
  std::string name = info.param.model + std::string("_") + info.param.type + "_" +
                     json.substr(policy, json.find('"', policy) - policy);
  std::ranges::replace(name, '-', '_');
  return name;
}

constexpr Sparse kPatterns[] = {
    {"llama", "auto", R"({"policy": "static", "window": 16, "sinks": 16, "stride": 48})"},
    {"llama", "int4",
     R"({"policy": "static", "window": 16, "sinks": 0, "rows": "prompt", "dense_last": 24})"},
    {"gemma2", "int8", R"({"policy": "static", "window": 32, "dense_last": 20, "sinks": 0})"},
    {"gpt-oss", "auto", R"({"policy": "static", "window": 16, "sinks": 16, "dense_layers": 1})"},
};

INSTANTIATE_TEST_SUITE_P(Sparse, SparseAttention, ::testing::ValuesIn(kSparse), sparse_name);
INSTANTIATE_TEST_SUITE_P(Sparse, SparsePattern, ::testing::ValuesIn(kPatterns), sparse_name);

}  // namespace
}  // namespace freshet
