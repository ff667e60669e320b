// Drafters on the trained models of FRESHET_EXTRA_DATA, against chains of drafts and accepted
// tokens that transformers computed in FP32 (golden-spec/). Skipped without that folder.
#include <cstring>
#include <filesystem>
#include <future>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "freshet/engine.h"
#include "loader/checkpoint.h"
#include "runtime/loaded_model.h"
#include "speculative/registry.h"

#ifndef FRESHET_EXTRA_DATA
#define FRESHET_EXTRA_DATA ""
#endif

namespace freshet {
namespace {

constexpr int kDrafts = 5;

std::string extra(const std::string& path) {
  return std::string(FRESHET_EXTRA_DATA) + "/" + path;
}

struct Family {
  const char* method;
  const char* model;  // below models/
  const char* golden;
  int drafts;
};

void PrintTo(const Family& f, std::ostream* out) {
  *out << f.method;
}

std::vector<int64_t> numbers(const loader::Checkpoint& golden, const std::string& name) {
  for (const loader::TensorSource& t : golden.tensors()) {
    if (t.name != name && t.name != "model." + name) continue;
    EXPECT_EQ(t.dtype, "I64");
    std::vector<int64_t> out(t.bytes / sizeof(int64_t));
    std::memcpy(out.data(), t.data, t.bytes);
    return out;
  }
  ADD_FAILURE() << name << " is missing";
  return {};
}

std::vector<int32_t> ids_of(const std::vector<int64_t>& wide) {
  return {wide.begin(), wide.end()};
}

std::string config_of(const Family& f) {
  return fmt::format(R"({{"method": "{}", "model": "{}", "num_speculative_tokens": {}}})", f.method,
                     extra(std::string("models/") + f.model), f.drafts);
}

class GoldenSpec : public ::testing::TestWithParam<Family> {
 protected:
  void SetUp() override {
    const std::string path = extra(std::string("golden-spec/") + GetParam().golden);
    if (std::strlen(FRESHET_EXTRA_DATA) == 0 || !std::filesystem::exists(path))
      GTEST_SKIP() << "needs FRESHET_EXTRA_DATA";
    auto opened = loader::Checkpoint::open_bare(path);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    golden_.emplace(std::move(*opened));
  }

  std::vector<int64_t> golden(const std::string& name, int prompt) const {
    return numbers(*golden_, fmt::format("{}_{}", name, prompt));
  }

 private:
  std::optional<loader::Checkpoint> golden_;
};

INSTANTIATE_TEST_SUITE_P(
    Methods, GoldenSpec,
    ::testing::Values(Family{"eagle", "eagle.safetensors", "eagle.safetensors", kDrafts},
                      Family{"eagle3", "eagle3", "eagle3.safetensors", kDrafts},
                      Family{"medusa", "medusa.safetensors", "medusa.safetensors", 4}),
    [](const auto& test) { return std::string(test.param.method); });

// Each step of greedy decoding gives as many tokens as there.
TEST_P(GoldenSpec, StepsAcceptTheSameTokens) {
  EngineOptions options;
  options.model = extra("models/target");
  options.reference = true;
  options.max_model_len = 256;
  options.max_num_seqs = 4;
  options.kv_cache_memory = 64 << 20;
  options.speculative_config = config_of(GetParam());
  auto engine = Engine::load(options);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  for (int prompt = 0; prompt < 3; ++prompt) {
    std::vector<int64_t> steps;
    std::vector<int32_t> tokens;
    std::promise<void> done;
    Request request;
    request.prompt = ids_of(golden("ids", prompt));
    request.params.temperature = 0.0f;
    request.params.max_tokens = 60;
    request.params.ignore_eos = true;
    request.on_delta = [&](const Delta& delta) {
      if (!tokens.empty()) steps.push_back(std::ssize(delta.ids));  // the first is the prompt's
      tokens.insert(tokens.end(), delta.ids.begin(), delta.ids.end());
    };
    request.on_done = [&](const Usage&) { done.set_value(); };
    ASSERT_TRUE((*engine)->submit(std::move(request)).ok());
    done.get_future().wait();
    const auto greedy = ids_of(golden("greedy", prompt));
    tokens.resize(greedy.size());
    EXPECT_EQ(tokens, greedy);
    const auto accepted = golden("accepted", prompt);
    ASSERT_GE(steps.size(), accepted.size());
    steps.resize(accepted.size());
    EXPECT_EQ(steps, accepted) << "prompt " << prompt;
  }
}

// A target that shows a drafter the states of a prompt.
struct ShownTarget {
  std::unique_ptr<runtime::LoadedModel> model;
  std::unique_ptr<speculative::Drafter> drafter;
  KvStorage cache;

  Status open(const std::string& config_text) {
    runtime::LoadOptions loading;
    loading.model = extra("models/target");
    loading.reference = true;
    FRESHET_ASSIGN_OR_RETURN(auto compute, runtime::Compute::open(loading));
    FRESHET_ASSIGN_OR_RETURN(const auto checkpoint, loader::Checkpoint::open(loading.model));
    FRESHET_ASSIGN_OR_RETURN(model, runtime::LoadedModel::load(compute, checkpoint, loading));
    FRESHET_ASSIGN_OR_RETURN(const auto config, speculative::parse_config(config_text));
    FRESHET_ASSIGN_OR_RETURN(drafter, speculative::find_method(config.method)
                                          ->make({config, loading, checkpoint, *model, compute,
                                                  ops::KvType::kF32, 256, 4, 256, 1024}));
    FRESHET_RETURN_IF_ERROR(model->model().capture(drafter->needs().boundaries));
    FRESHET_RETURN_IF_ERROR(model->reserve({256, 16, 256}));
    FRESHET_ASSIGN_OR_RETURN(cache, model->make_cache(ops::KvType::kF32, {16}));
    return {};
  }

  // The drafts behind ids and the token after them.
  std::vector<int32_t> drafts(uint64_t sequence, std::vector<int32_t> ids, int32_t next) {
    const auto count = static_cast<int32_t>(ids.size());
    const auto hidden = static_cast<size_t>(model->spec().hidden_size);
    ForwardBatch b;
    b.token_ids = ids;
    b.positions.resize(ids.size());
    std::iota(b.positions.begin(), b.positions.end(), 0);
    b.query_start = {0, count};
    b.context_len = {count};
    b.tables.resize(1);
    b.tables[0].stride = kTablePiece;
    b.tables[0].ids.assign(kTablePiece, -1);
    std::iota(b.tables[0].ids.begin(), b.tables[0].ids.begin() + 16, 0);
    b.logit_rows = {count - 1};
    std::vector<float> logits(static_cast<size_t>(model->spec().vocab_size));
    std::vector<float> last(ids.size() * hidden);
    std::vector<std::vector<float>> states(drafter->needs().boundaries.size(), last);
    std::vector<float*> boundaries;
    for (auto& s : states) boundaries.push_back(s.data());
    model->model().forward(b, cache, {logits.data(), last.data(), nullptr, boundaries});
    ids.push_back(next);
    speculative::TargetRows rows{
        .sequence = sequence, .tokens = ids, .count = count, .last = last.data()};
    for (const auto& s : states) rows.boundaries.push_back(s.data());
    drafter->observe({&rows, 1});
    const SamplingParams greedy{.temperature = 0.0f};
    speculative::DraftRequest request{
        .sequence = sequence, .tokens = ids, .limit = kDrafts, .params = &greedy};
    drafter->propose({&request, 1});
    drafter->forget(sequence);
    return request.draft;
  }
};

TEST_P(GoldenSpec, ChainsAreTheSame) {
  if (GetParam().drafts != kDrafts) GTEST_SKIP() << "no chains";
  ShownTarget target;
  const Status opened = target.open(config_of(GetParam()));
  ASSERT_TRUE(opened.ok()) << opened.message();
  uint64_t sequence = 0;
  for (int prompt = 0; prompt < 3; ++prompt) {
    // EAGLE-3's chains start within the greedy continuation, too.
    std::vector<int32_t> path = ids_of(golden("ids", prompt));
    const std::vector<int32_t> greedy = ids_of(golden("greedy", prompt));
    path.insert(path.end(), greedy.begin(), greedy.end());
    const auto starts = golden("starts", prompt);
    const std::vector<int32_t> chains = ids_of(golden("chain", prompt));
    for (size_t i = 0; i < starts.size(); ++i) {
      const std::span chain = std::span(chains).subspan(i * (kDrafts + 1), kDrafts + 1);
      const auto drafts = target.drafts(
          ++sequence, {path.begin(), path.begin() + static_cast<std::ptrdiff_t>(starts[i]) + 1},
          chain.front());
      EXPECT_EQ(drafts, std::vector<int32_t>(chain.begin() + 1, chain.end()))
          << "prompt " << prompt << ", from " << starts[i];
    }
  }
}

}  // namespace
}  // namespace freshet
