// Hooks around projections (ops/hooks.h): in the golden models they see every linear layer once,
// with the input of a plain computation; a delta that they add is equivalent to changed weights;
// and hooks that change nothing change no bit.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "models/load_test.h"
#include "tests/golden_cases.h"
#include "tests/op_test_util.h"

namespace freshet::testing {
namespace {

constexpr int64_t kMostTokens = 256;

std::unique_ptr<Runner> open(const std::string& path, bool reference,
                             ops::ProjectionHooks* hooks = nullptr) {
  Runner::Options options;
  options.reference = reference;
  options.kv = reference ? ops::KvType::kF32 : ops::KvType::kF16;
  options.max_tokens = kMostTokens;
  options.context = 128;
  options.hooks = hooks;
  auto runner = Runner::open(path, options);
  EXPECT_TRUE(runner.ok()) << runner.status().message();
  return runner.ok() ? std::move(*runner) : nullptr;
}

Ids some_ids(int count, int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  Ids ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % static_cast<uint32_t>(vocab));
  return ids;
}

using Values = std::vector<float>;  // [tokens, features]
Values copy_of(const Matrix& m) {
  Values all;
  for (int64_t r = 0; r < m.rows; ++r) all.insert(all.end(), m.row(r), m.row(r) + m.cols);
  return all;
}

// Records every call.
class Observer : public ops::ProjectionHooks {
 public:
  struct Seen {
    std::string name;
    ops::Use use;
    int before = 0, after = 0;
    int64_t tokens = 0;
    Values in, out;
  };
  void before(const ops::Weight& w, const Matrix& x) override {
    EXPECT_EQ(x.cols, w.cols) << w.name;
    Seen& s = seen[w.id];
    s.name = w.name;
    s.use = w.use;
    ++s.before;
    s.tokens += x.rows;
    s.in = copy_of(x);
  }
  void after(const ops::Product& p, const Matrix& x) override {
    Seen& s = seen[p.weight->id];
    EXPECT_EQ(s.before, ++s.after) << s.name;
    EXPECT_EQ(copy_of(x), s.in) << s.name;
    EXPECT_FALSE(p.add) << s.name;
    s.out = copy_of(p.out);
  }
  const Seen& of(const std::string& name) const {
    for (const auto& [id, s] : seen) {
      if (s.name == name) return s;
    }
    ADD_FAILURE() << name << " did not come by";
    static const Seen kNone{};
    return kNone;
  }

  std::map<int32_t, Seen> seen;  // by Weight::id
};

class Hooks : public ::testing::TestWithParam<std::string> {};

TEST_P(Hooks, SeeEveryLinearLayerOnce) {
  constexpr int kTokens = 37;
  for (const bool last_only : {false, true}) {
    Observer observer;
    const auto runner = open(directory() + GetParam(), true, &observer);
    ASSERT_NE(runner, nullptr);
    const ModelSpec& spec = runner->model().spec();
    const Runner::Wanted last = [](const Ids& ids, int32_t p) { return p + 1 == std::ssize(ids); };
    runner->run({some_ids(kTokens, spec.vocab_size, 3)}, 0, 1, last_only ? last : Runner::every);
    const auto infos = runner->model().weights();
    int tables = 0;
    int64_t routed = 0;
    for (int32_t id = 0; id < std::ssize(infos); ++id) {
      const auto found = observer.seen.find(id);
      if (found == observer.seen.end()) {
        // Experts without tokens, and tables that are only used for look-ups.
        tables += infos[static_cast<size_t>(id)].name.find("expert") == std::string::npos ? 1 : 0;
        continue;
      }
      const Observer::Seen& s = found->second;
      EXPECT_EQ(s.name, infos[static_cast<size_t>(id)].name);
      EXPECT_EQ(s.before, 1) << s.name;
      EXPECT_EQ(s.after, 1) << s.name;
      if (s.use == ops::Use::kExperts) routed += s.tokens;
    }
    EXPECT_EQ(observer.seen.count(-1), 0u) << "a weight that nobody named";
    EXPECT_EQ(tables, (spec.tied_embeddings ? 0 : 1) + (spec.learned_positions > 0 ? 1 : 0));
    int64_t chosen = 0;  // each with gate and up, and with down
    for (const LayerSpec& layer : spec.layers) {
      const bool one = last_only && &layer == &spec.layers.back();
      const MoeSpec* const moe = layer.find<MoeSpec>();
      if (moe != nullptr) chosen += int64_t{2} * moe->routing.top_k * (one ? 1 : kTokens);
    }
    EXPECT_EQ(routed, chosen);
  }
}

TEST_P(Hooks, ThatChangeNothingChangeNoBit) {
  class Nothing : public ops::ProjectionHooks {};
  for (const bool reference : {true, false}) {
    Nothing nothing;
    const auto plain = open(directory() + GetParam(), reference);
    const auto hooked = open(directory() + GetParam(), reference, &nothing);
    ASSERT_TRUE(plain != nullptr && hooked != nullptr);
    const int vocab = plain->vocab();
    const std::vector<Ids> all = {some_ids(100, vocab, 1), some_ids(40, vocab, 2), {5}};
    for (const int chunk : {0, 1, 30}) {
      const auto want = plain->run(all, chunk), got = hooked->run(all, chunk);
      for (size_t s = 0; s < all.size(); ++s) {
        expect_same_bits(got[s], want[s], fmt::format("{} in chunks of {}", s, chunk));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Hooks, ::testing::ValuesIn(models(directory())), test_name);

// Rows of a tensor that is stored in BF16 or F32.
Values tensor_of(const Tensors& tensors, const std::string& name) {
  const Tensor& t = tensors.at(name);
  const size_t size = t.dtype == "F32" ? 4 : 2;
  Values all(t.bytes.size() / size);
  for (size_t i = 0; i < all.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<uint8_t*>(&bits) + (4 - size), t.bytes.data() + i * size, size);
    std::memcpy(&all[i], &bits, 4);
  }
  return all;
}

void expect_near(const Values& got, const Values& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], 1e-4 * (1.0 + std::fabs(want[i]))) << what << " at " << i;
  }
}

Values normed(const Values& x, const Values& weight, double eps) {
  const size_t n = weight.size();
  Values out(x.size());
  for (size_t t = 0; t < x.size() / n; ++t) {
    double sum = 0.0;
    for (size_t i = 0; i < n; ++i) sum += double{x[t * n + i]} * x[t * n + i];
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(n) + eps);
    for (size_t i = 0; i < n; ++i) {
      out[t * n + i] = static_cast<float>(x[t * n + i] * scale * weight[i]);
    }
  }
  return out;
}

// Llama's forward pass, spelled out between its projections.
TEST(HooksOfLlama, SeeTheInputsOfAPlainComputation) {
  Observer observer;
  const auto runner = open(directory() + "llama", true, &observer);
  ASSERT_NE(runner, nullptr);
  const ModelSpec& spec = runner->model().spec();
  const Tensors tensors = read_tensors("llama");
  const auto config = json::parse_file(golden("llama") + "/config.json");
  const double eps = config->get_double("rms_norm_eps", 0.0);
  const auto normed_by = [&](const Values& x, const std::string& tensor) {
    return normed(x, tensor_of(tensors, tensor), eps);
  };
  const Ids ids = some_ids(19, spec.vocab_size, 4);
  const Values logits = runner->run({ids}, 0)[0];
  const Values table = tensor_of(tensors, "model.embed_tokens.weight");
  const auto hidden = static_cast<size_t>(spec.hidden_size);
  Values stream;
  for (const int32_t id : ids) {
    const auto row = table.begin() + static_cast<int64_t>(static_cast<size_t>(id) * hidden);
    stream.insert(stream.end(), row, row + static_cast<int64_t>(hidden));
  }
  const auto add = [&](const Values& branch) {
    for (size_t i = 0; i < stream.size(); ++i) stream[i] += branch[i];
  };
  for (size_t l = 0; l < spec.layers.size(); ++l) {
    const std::string layer = fmt::format("model.layers.{}.", l);
    const Values in = normed_by(stream, layer + "input_layernorm.weight");
    for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
      expect_near(observer.of(layer + "self_attn." + name + ".weight").in, in, layer + name);
    }
    add(observer.of(layer + "self_attn.o_proj.weight").out);
    const Values mlp = normed_by(stream, layer + "post_attention_layernorm.weight");
    const Observer::Seen& gate = observer.of(layer + "mlp.gate_proj.weight");
    const Observer::Seen& up = observer.of(layer + "mlp.up_proj.weight");
    expect_near(gate.in, mlp, layer + "gate");
    expect_near(up.in, mlp, layer + "up");
    Values inner = gate.out;
    for (size_t i = 0; i < inner.size(); ++i) {
      inner[i] = static_cast<float>(inner[i] / (1.0 + std::exp(-double{inner[i]})) * up.out[i]);
    }
    const Observer::Seen& down = observer.of(layer + "mlp.down_proj.weight");
    expect_near(down.in, inner, layer + "down");
    add(down.out);
  }
  const Observer::Seen& head = observer.of("lm_head.weight");
  expect_near(head.in, normed_by(stream, "model.norm.weight"), "head");
  EXPECT_EQ(head.out, logits);
  // Each output is the product with the tensor that the weight refers to.
  for (const auto& [id, s] : observer.seen) {
    const Values w = tensor_of(tensors, s.name);
    const size_t cols = s.in.size() / ids.size(), rows = w.size() / cols;
    Values want(ids.size() * rows);
    for (size_t t = 0; t < ids.size(); ++t) {
      for (size_t r = 0; r < rows; ++r) {
        double sum = 0.0;
        for (size_t c = 0; c < cols; ++c) sum += double{s.in[t * cols + c]} * w[r * cols + c];
        want[t * rows + r] = static_cast<float>(sum);
      }
    }
    expect_near(s.out, want, s.name);
  }
}

// A low-rank delta of a tensor: B A.
struct Delta {
  static constexpr int64_t kRank = 3;
  Values a, b;  // [rank, cols], [rows, rank]
};
Delta delta_of(const std::string& tensor, int64_t rows, int64_t cols) {
  const auto seed = static_cast<uint32_t>(std::hash<std::string>()(tensor));
  return {test::random_floats(static_cast<size_t>(Delta::kRank * cols), seed, 0.1f),
          test::random_floats(static_cast<size_t>(rows * Delta::kRank), seed + 1, 0.1f)};
}

// Adds each weight's delta, using operations of the same Ops.
class Adapter : public ops::ProjectionHooks {
 public:
  void after(const ops::Product& p, const Matrix& x) override {
    const ops::Weight& w = *p.weight;
    if (w.use == ops::Use::kTable) return;  // a head tied to the embedding, which stays unchanged
    // The gate and up of an expert are two tensors in the file.
    const size_t up = w.name.find(".w3.");
    if (w.use == ops::Use::kExperts && up != std::string::npos) {
      const int64_t ff = w.rows / 2;
      add(w.name.substr(0, up) + ".w1.weight", x, p.out.slice_cols(0, ff), p.scale);
      return add(w.name, x, p.out.slice_cols(ff, ff), p.scale);
    }
    add(w.name, x, p.out, p.scale);
  }

  ops::Ops* ops = nullptr;

 private:
  ops::Weight pack(const Values& values, int64_t cols) {
    std::vector<const uint8_t*> rows;
    for (size_t i = 0; i < values.size(); i += static_cast<size_t>(cols)) {
      rows.push_back(reinterpret_cast<const uint8_t*>(&values[i]));
    }
    return std::move(ops->pack(quant::Format::kF32, rows, cols)).value();
  }
  void add(const std::string& tensor, const Matrix& x, const Matrix& out, float scale) {
    const Delta delta = delta_of(tensor, out.cols, x.cols);
    const ops::Weight a = pack(delta.a, x.cols), b = pack(delta.b, Delta::kRank);
    Values inner(static_cast<size_t>(x.rows * Delta::kRank));
    const Matrix between{inner.data(), x.rows, Delta::kRank, Delta::kRank};
    const ops::Product down{&a, between}, up{&b, out, nullptr, scale, true};
    ops->matmul(x, {&down, 1});
    ops->matmul(between, {&up, 1});
  }
};

// The model with every delta added to its tensor, in F32.
void write_merged(const std::string& name, const std::filesystem::path& folder) {
  Tensors tensors = read_tensors(name);
  for (auto& [tensor, t] : tensors) {
    if (t.shape.size() != 2 || tensor.find("embed") != std::string::npos) continue;
    Values w = tensor_of(tensors, tensor);
    const int64_t rows = t.shape[0], cols = t.shape[1];
    const Delta delta = delta_of(tensor, rows, cols);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        double sum = 0.0;
        for (int64_t k = 0; k < Delta::kRank; ++k) {
          sum += double{delta.b[static_cast<size_t>(r * Delta::kRank + k)]} *
                 delta.a[static_cast<size_t>(k * cols + c)];
        }
        w[static_cast<size_t>(r * cols + c)] += static_cast<float>(sum);
      }
    }
    t.dtype = "F32";
    t.bytes.assign(reinterpret_cast<const char*>(w.data()), w.size() * sizeof(float));
  }
  std::filesystem::create_directories(folder);
  write_tensors((folder / "model.safetensors").string(), tensors);
  std::filesystem::copy_file(golden(name) + "/config.json", folder / "config.json");
}

class HooksThatAdd : public ::testing::TestWithParam<std::string> {};

TEST_P(HooksThatAdd, ActLikeMergedWeights) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() /
      fmt::format("freshet-hooks-{}-{}", GetParam(), static_cast<const void*>(this));
  write_merged(GetParam(), folder);
  Adapter adapter;
  const auto base = open(directory() + GetParam(), true);
  const auto merged = open(folder.string(), true);
  const auto adapted = open(directory() + GetParam(), true, &adapter);
  ASSERT_TRUE(base != nullptr && merged != nullptr && adapted != nullptr);
  adapter.ops = &adapted->ops();
  const Ids ids = some_ids(29, base->vocab(), 6);
  for (const int chunk : {0, 1}) {
    const Values want = merged->run({ids}, chunk)[0], got = adapted->run({ids}, chunk)[0];
    const Values without = base->run({ids}, chunk)[0];
    double off = 0.0, apart = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
      off = std::max(off, double{std::fabs(got[i] - want[i])});
      apart = std::max(apart, double{std::fabs(without[i] - want[i])});
    }
    EXPECT_LT(off, 1e-3 * apart) << "where the deltas make " << apart;
  }
  std::filesystem::remove_all(folder);
}

INSTANTIATE_TEST_SUITE_P(Models, HooksThatAdd,
                         ::testing::Values("llama", "granite", "mixtral", "qwen3", "gemma2"),
                         test_name);

}  // namespace
}  // namespace freshet::testing
