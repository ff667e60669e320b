// The forms in which draft heads are published: the same weights give the same logits, and what a
// form adds (norms, row orders, lists of ids) is compared with its definition.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "models/draft_heads.h"
#include "speculative/draft_runner.h"

namespace freshet::speculative {
namespace {

constexpr int kTokens = 9;

struct Tensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
using Tensors = std::map<std::string, Tensor>;

Tensor random_tensor(std::vector<int64_t> shape, unsigned seed, float around = 0.0f) {
  std::mt19937 random(seed);
  Tensor t{std::move(shape), {}};
  int64_t count = 1;
  for (const int64_t n : t.shape) count *= n;
  for (int64_t i = 0; i < count; ++i)
    t.values.push_back(around + static_cast<float>(random() % 2001) * 2e-4f - 0.2f);
  return t;
}

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

// d2t: as I64, where the head has one.
void write_safetensors(const std::string& path, const Tensors& tensors,
                       const std::vector<int64_t>& d2t = {}) {
  json::Object header;
  std::string data;
  const auto add = [&](const std::string& name, const char* type, json::Array shape, size_t from) {
    json::Object t;
    t["dtype"] = json::Value(type);
    t["shape"] = std::move(shape);
    t["data_offsets"] = json::Array{json::Value(static_cast<int64_t>(from)),
                                    json::Value(static_cast<int64_t>(data.size()))};
    header[name] = std::move(t);
  };
  if (!d2t.empty()) {
    for (const int64_t id : d2t) put(data, id);
    add("d2t", "I64", {json::Value(std::ssize(d2t))}, 0);
  }
  for (const auto& [name, t] : tensors) {
    const size_t from = data.size();
    for (const float v : t.values) put(data, v);
    json::Array shape;
    for (const int64_t n : t.shape) shape.emplace_back(n);
    add(name, "F32", std::move(shape), from);
  }
  const std::string text = json::write(json::Value(std::move(header)));
  std::string bytes;
  put(bytes, static_cast<uint64_t>(text.size()));
  write_file(path, bytes + text + data);
}

// The parts of a GGUF file that a head needs: whole numbers, floats, lists of whole numbers.
class GgufWriter {
 public:
  void text(const std::string& key, const std::string& value) {
    begin(key, 8);
    string(keys_, value);
  }
  void number(const std::string& key, uint32_t value) {
    begin(key, 4);
    put(keys_, value);
  }
  void real(const std::string& key, float value) {
    begin(key, 6);
    put(keys_, value);
  }
  void list(const std::string& key, const std::vector<int32_t>& values) {
    begin(key, 9);
    put(keys_, uint32_t{5});
    put(keys_, static_cast<uint64_t>(values.size()));
    for (const int32_t v : values) put(keys_, v);
  }
  void tensor(const std::string& name, const Tensor& t) {
    describe(name, t.shape, 0);
    for (const float v : t.values) put(data_, v);
  }
  void ids(const std::string& name, const std::vector<int64_t>& ids) {
    describe(name, {std::ssize(ids)}, 27);
    for (const int64_t id : ids) put(data_, id);
  }
  void write(const std::string& path) const {
    std::string bytes = "GGUF";
    put(bytes, uint32_t{3});
    put(bytes, tensors_);
    put(bytes, count_);
    bytes += keys_ + infos_;
    bytes.resize((bytes.size() + 31) / 32 * 32);
    write_file(path, bytes + data_);
  }

 private:
  static void string(std::string& out, const std::string& value) {
    put(out, static_cast<uint64_t>(value.size()));
    out += value;
  }
  void begin(const std::string& key, uint32_t type) {
    ++count_;
    string(keys_, key);
    put(keys_, type);
  }
  void describe(const std::string& name, const std::vector<int64_t>& shape, uint32_t type) {
    ++tensors_;
    string(infos_, name);
    put(infos_, static_cast<uint32_t>(shape.size()));
    for (size_t i = shape.size(); i-- > 0;) put(infos_, static_cast<uint64_t>(shape[i]));
    put(infos_, type);
    data_.resize((data_.size() + 31) / 32 * 32);
    put(infos_, static_cast<uint64_t>(data_.size()));
  }
  std::string keys_, infos_, data_;
  uint64_t count_ = 0, tensors_ = 0;
};

class HeadFormats : public ::testing::Test {
 protected:
  void open_target(const std::string& path) {
    runtime::LoadOptions loading;
    loading.model = path;
    loading.threads = 1;
    loading.reference = true;
    auto compute = runtime::Compute::open(loading);
    ASSERT_TRUE(compute.ok());
    compute_ = *compute;
    auto target = runtime::LoadedModel::load(compute_, loading);
    ASSERT_TRUE(target.ok()) << target.status().message();
    target_ = std::move(*target);
    hidden_ = target_->spec().hidden_size;
    std::filesystem::create_directories(folder("."));
  }
  static std::string folder(const std::string& name) {
    return ::testing::TempDir() + "head_formats/" + name;
  }

  struct Outcome {
    std::vector<float> logits;  // of the last token
    std::vector<int32_t> target_ids;
  };
  // Runs a head over some tokens with these features, [tokens, width].
  Outcome run(models::HeadKind kind, const std::string& path, std::span<const int32_t> ids,
              const std::vector<float>& features) {
    Outcome outcome;
    const auto opened = path.ends_with(".safetensors") ? loader::Checkpoint::open_bare(path)
                                                       : loader::Checkpoint::open(path);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    if (!opened.ok()) return outcome;
    auto head = models::load_head(kind, *opened, target_->model(), compute_->ops());
    EXPECT_TRUE(head.ok()) << head.status().message();
    if (!head.ok()) return outcome;
    outcome.target_ids = head->target_ids;
    const DraftRunnerLimits limits{.max_model_len = 64,
                                   .max_tokens = 64,
                                   .max_rows = 1,
                                   .cache_tokens = 64,
                                   .kv_type = ops::KvType::kF32};
    auto runner = DraftRunner::create(
        std::make_unique<runtime::LoadedModel>(compute_, std::move(head->model)), limits);
    EXPECT_TRUE(runner.ok()) << runner.status().message();
    if (!runner.ok()) return outcome;
    DraftSequence sequence;
    DraftRunner::Work work{.sequence = &sequence,
                           .ids = ids,
                           .features = features.data(),
                           .wants_token = true,
                           .wants_logits = true};
    (*runner)->run({&work, 1}, false);
    outcome.logits.assign(work.logits.begin(), work.logits.end());
    return outcome;
  }

  static void expect_near(const std::vector<float>& a, const std::vector<float>& b, float most) {
    ASSERT_EQ(a.size(), b.size());
    ASSERT_FALSE(a.empty());
    float largest = 0.0f;
    for (const float v : a) largest = std::max(largest, std::abs(v));
    ASSERT_GT(largest, 0.0f);
    for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], most * largest) << i;
  }
  static float difference(const std::vector<float>& a, const std::vector<float>& b) {
    float most = 0.0f;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
      most = std::max(most, std::abs(a[i] - b[i]));
    return most;
  }

  std::shared_ptr<runtime::Compute> compute_;
  std::unique_ptr<runtime::LoadedModel> target_;
  int64_t hidden_ = 0;
};

class Eagle3Formats : public HeadFormats {
 protected:
  static constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 16, kFf = 48, kList = 20;

  void SetUp() override {
    open_target(FRESHET_UNPACKED_DATA "/golden/llama");
    if (target_ == nullptr) return;
    const int64_t h = hidden_, q = kHeads * kHeadDim, k = kKvHeads * kHeadDim;
    const std::string m = "midlayer.";
    head_ = {{"fc.weight", random_tensor({h, 2 * h}, 1)},
             {m + "hidden_norm.weight", random_tensor({h}, 2, 1.0f)},
             {m + "input_layernorm.weight", random_tensor({h}, 3, 1.0f)},
             {m + "post_attention_layernorm.weight", random_tensor({h}, 4, 1.0f)},
             {m + "self_attn.q_proj.weight", random_tensor({q, 2 * h}, 5)},
             {m + "self_attn.k_proj.weight", random_tensor({k, 2 * h}, 6)},
             {m + "self_attn.v_proj.weight", random_tensor({k, 2 * h}, 7)},
             {m + "self_attn.o_proj.weight", random_tensor({h, q}, 8)},
             {m + "mlp.gate_proj.weight", random_tensor({kFf, h}, 9)},
             {m + "mlp.up_proj.weight", random_tensor({kFf, h}, 10)},
             {m + "mlp.down_proj.weight", random_tensor({h, kFf}, 11)},
             {"norm.weight", random_tensor({h}, 12, 1.0f)},
             {"lm_head.weight", random_tensor({kList, h}, 13)}};
    for (int i = 0; i < kList; ++i) offsets_.push_back(i / 3);
    ids_ = {3, 1, 4, 1, 5, 9, 2, 6, 5};
    features_ = random_tensor({kTokens, 2 * h}, 14).values;
  }

  json::Object layer_config() const {
    json::Object c;
    c["model_type"] = json::Value("llama");
    c["hidden_size"] = json::Value(hidden_);
    c["intermediate_size"] = json::Value(kFf);
    c["num_hidden_layers"] = json::Value(1);
    c["num_attention_heads"] = json::Value(kHeads);
    c["num_key_value_heads"] = json::Value(kKvHeads);
    c["head_dim"] = json::Value(kHeadDim);
    c["vocab_size"] = json::Value(target_->spec().vocab_size);
    c["max_position_embeddings"] = json::Value(512);
    c["rms_norm_eps"] = json::Value(1e-5);
    return c;
  }
  static json::Array layer_ids() { return {json::Value(0), json::Value(1)}; }

  // Returns the folder.
  std::string save(const std::string& name, const json::Object& config, const Tensors& tensors) {
    const std::string path = folder(name);
    std::filesystem::create_directories(path);
    write_file(path + "/config.json", json::write(json::Value(config)));
    write_safetensors(path + "/model.safetensors", tensors, offsets_);
    return path;
  }
  std::string save_plain(const std::string& name, const Tensors& tensors) {
    json::Object config = layer_config();
    config["eagle_aux_hidden_state_layer_ids"] = layer_ids();
    return save(name, config, tensors);
  }
  Outcome run_eagle3(const std::string& path) { return run_eagle3(path, features_); }
  Outcome run_eagle3(const std::string& path, const std::vector<float>& features) {
    return run(models::HeadKind::kEagle3, path, ids_, features);
  }

  Tensors head_;
  std::vector<int64_t> offsets_;
  std::vector<int32_t> ids_;
  std::vector<float> features_;
};

// Two norms, each over the states behind one layer: EAGLE 3.1.
TEST_F(Eagle3Formats, FcNormNormalisesEachFeatureByItself) {
  const auto plain = run_eagle3(save_plain("plain", head_));
  Tensors normed = head_;
  normed["fc_norm.0.weight"] = random_tensor({hidden_}, 20, 1.0f);
  normed["fc_norm.1.weight"] = random_tensor({hidden_}, 21, 0.5f);
  const auto got = run_eagle3(save_plain("fc_norm", normed));
  std::vector<float> features = features_;
  for (int64_t part = 0; part < 2 * kTokens; ++part) {
    const auto& weight = normed[fmt::format("fc_norm.{}.weight", part % 2)].values;
    double sum = 0.0;
    for (int64_t i = 0; i < hidden_; ++i) {
      const double v = features[static_cast<size_t>(part * hidden_ + i)];
      sum += v * v;
    }
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(hidden_) + 1e-5);
    for (int64_t i = 0; i < hidden_; ++i) {
      float& v = features[static_cast<size_t>(part * hidden_ + i)];
      v = static_cast<float>(v * scale * weight[static_cast<size_t>(i)]);
    }
  }
  const auto want = run_eagle3(save_plain("plain", head_), features);
  expect_near(want.logits, got.logits, 1e-5f);
  EXPECT_GT(difference(plain.logits, got.logits), 0.01f);

  normed.erase("fc_norm.1.weight");
  const auto opened = loader::Checkpoint::open(save_plain("fc_norm_short", normed));
  ASSERT_TRUE(opened.ok());
  const auto head =
      models::load_head(models::HeadKind::kEagle3, *opened, target_->model(), compute_->ops());
  ASSERT_FALSE(head.ok());
  EXPECT_NE(head.status().message().find("fc_norm.1"), std::string::npos);
}

// The layer's keys in an object of their own, and tensors under layers.0: "speculators".
TEST_F(Eagle3Formats, SpeculatorsFoldersAreTheSameHead) {
  const auto want = run_eagle3(save_plain("plain", head_));
  json::Object config;
  config["speculators_model_type"] = json::Value("eagle3");
  config["transformer_layer_config"] = layer_config();
  config["eagle_aux_hidden_state_layer_ids"] = layer_ids();
  Tensors renamed;
  for (const auto& [name, t] : head_) {
    const std::string prefix = "midlayer.";
    renamed[name.starts_with(prefix) ? "layers.0." + name.substr(prefix.size()) : name] = t;
  }
  const auto got = run_eagle3(save("speculators", config, renamed));
  EXPECT_EQ(want.logits, got.logits);
  EXPECT_EQ(want.target_ids, got.target_ids);
}

// llama.cpp's order of a projection's rows: pairs that rotate together are neighbours.
Tensor interleaved(const Tensor& t, int heads, int head_dim) {
  Tensor out = t;
  const auto cols = static_cast<size_t>(t.shape[1]);
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < head_dim; ++i) {
      const int to = h * head_dim + (i < head_dim / 2 ? 2 * i : 2 * (i - head_dim / 2) + 1);
      std::copy_n(t.values.begin() + static_cast<std::ptrdiff_t>((h * head_dim + i) * cols), cols,
                  out.values.begin() + static_cast<std::ptrdiff_t>(to * cols));
    }
  }
  return out;
}

TEST_F(Eagle3Formats, GgufFilesAreTheSameHead) {
  const auto want = run_eagle3(save_plain("plain", head_));
  const std::map<std::string, std::string> names = {
      {"fc", "fc"},
      {"norm", "output_norm"},
      {"lm_head", "output"},
      {"midlayer.hidden_norm", "blk.0.attn_norm_2"},
      {"midlayer.input_layernorm", "blk.0.attn_norm"},
      {"midlayer.post_attention_layernorm", "blk.0.ffn_norm"},
      {"midlayer.self_attn.q_proj", "blk.0.attn_q"},
      {"midlayer.self_attn.k_proj", "blk.0.attn_k"},
      {"midlayer.self_attn.v_proj", "blk.0.attn_v"},
      {"midlayer.self_attn.o_proj", "blk.0.attn_output"},
      {"midlayer.mlp.gate_proj", "blk.0.ffn_gate"},
      {"midlayer.mlp.up_proj", "blk.0.ffn_up"},
      {"midlayer.mlp.down_proj", "blk.0.ffn_down"}};
  for (const bool absolute : {true, false}) {
    GgufWriter gguf;
    gguf.text("general.architecture", "eagle3");
    gguf.number("eagle3.block_count", 1);
    gguf.number("eagle3.context_length", 512);
    gguf.number("eagle3.embedding_length", static_cast<uint32_t>(hidden_));
    gguf.number("eagle3.feed_forward_length", kFf);
    gguf.number("eagle3.attention.head_count", kHeads);
    gguf.number("eagle3.attention.head_count_kv", kKvHeads);
    gguf.number("eagle3.attention.key_length", kHeadDim);
    gguf.number("eagle3.attention.value_length", kHeadDim);
    gguf.real("eagle3.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf.real("eagle3.rope.freq_base", 10000.0f);
    gguf.number("eagle3.target_hidden_size", static_cast<uint32_t>(hidden_));
    gguf.list(absolute ? "eagle3.target_layers" : "eagle3.extract_layers", {0, 1});
    for (const auto& [name, t] : head_) {
      const std::string stem = name.substr(0, name.size() - 7);  // without .weight
      const bool query = stem.ends_with("q_proj");
      gguf.tensor(names.at(stem) + ".weight",
                  query || stem.ends_with("k_proj")
                      ? interleaved(t, query ? kHeads : kKvHeads, kHeadDim)
                      : t);
    }
    std::vector<int64_t> ids = offsets_;
    for (int i = 0; absolute && i < kList; ++i) ids[static_cast<size_t>(i)] += i;
    gguf.ids("d2t", ids);
    const std::string path = folder("head.gguf");
    gguf.write(path);
    const auto got = run_eagle3(path);
    expect_near(want.logits, got.logits, 1e-6f);
    EXPECT_EQ(want.target_ids, got.target_ids);
  }
  // Other files and other heads are refused.
  GgufWriter other;
  other.text("general.architecture", "llama");
  other.number("llama.block_count", 1);
  other.tensor("fc.weight", head_["fc.weight"]);
  other.write(folder("other.gguf"));
  const auto opened = loader::Checkpoint::open(folder("other.gguf"));
  ASSERT_TRUE(opened.ok());
  for (const auto kind : {models::HeadKind::kEagle3, models::HeadKind::kEagle}) {
    const auto plan = models::plan_head(kind, *opened, target_->spec());
    ASSERT_FALSE(plan.ok());
    EXPECT_NE(plan.status().message().find("EAGLE-3"), std::string::npos);
  }
}

// ---- MTP -------------------------------------------------------------------------------------

class Qwen3NextMtp : public HeadFormats {
 protected:
  void SetUp() override {
    open_target(std::string(FRESHET_UNPACKED_DATA) + "/seeded/qwen3-next");
    if (target_ == nullptr) return;
    // The sizes of its config.json.
    const int64_t h = hidden_, q = 4 * 32, k = 2 * 32, ff = 48;
    const std::string m = "mtp.layers.0.";
    head_ = {{"mtp.fc.weight", random_tensor({h, 2 * h}, 1)},
             {"mtp.pre_fc_norm_embedding.weight", random_tensor({h}, 2)},
             {"mtp.pre_fc_norm_hidden.weight", random_tensor({h}, 3)},
             {"mtp.norm.weight", random_tensor({h}, 4)},
             {m + "input_layernorm.weight", random_tensor({h}, 5)},
             {m + "post_attention_layernorm.weight", random_tensor({h}, 6)},
             {m + "self_attn.q_proj.weight", random_tensor({2 * q, h}, 7)},
             {m + "self_attn.k_proj.weight", random_tensor({k, h}, 8)},
             {m + "self_attn.v_proj.weight", random_tensor({k, h}, 9)},
             {m + "self_attn.o_proj.weight", random_tensor({h, q}, 10)},
             {m + "self_attn.q_norm.weight", random_tensor({32}, 11)},
             {m + "self_attn.k_norm.weight", random_tensor({32}, 12)},
             {m + "mlp.gate.weight", random_tensor({8, h}, 13)},
             {m + "mlp.shared_expert.gate_proj.weight", random_tensor({ff, h}, 14)},
             {m + "mlp.shared_expert.up_proj.weight", random_tensor({ff, h}, 15)},
             {m + "mlp.shared_expert.down_proj.weight", random_tensor({h, ff}, 16)},
             {m + "mlp.shared_expert_gate.weight", random_tensor({1, h}, 17)}};
    for (int e = 0; e < 8; ++e) {
      const std::string expert = fmt::format("{}mlp.experts.{}.", m, e);
      const auto seed = static_cast<unsigned>(20 + 3 * e);
      head_[expert + "gate_proj.weight"] = random_tensor({ff, h}, seed);
      head_[expert + "up_proj.weight"] = random_tensor({ff, h}, seed + 1);
      head_[expert + "down_proj.weight"] = random_tensor({h, ff}, seed + 2);
    }
    features_ = random_tensor({kTokens, h}, 50).values;
  }

  Outcome run_mtp(const Tensors& head, std::span<const int32_t> ids,
                  const std::vector<float>& features) {
    write_safetensors(folder("mtp.safetensors"), head);
    return run(models::HeadKind::kMtp, folder("mtp.safetensors"), ids, features);
  }

  Tensors head_;
  std::vector<float> features_;
  const std::vector<int32_t> ids_ = {3, 1, 4, 1, 5, 9, 2, 6, 5};
};

// The projection's first half reads the embedding, its second half the target's states.
TEST_F(Qwen3NextMtp, TheEmbeddingComesFirst) {
  const auto all = run_mtp(head_, ids_, features_);
  const std::vector<int32_t> other_ids = {7, 7, 7, 7, 7, 7, 7, 7, 7};
  const std::vector<float> other_features = random_tensor({kTokens, hidden_}, 51).values;
  for (const bool first : {true, false}) {
    Tensors half = head_;
    auto& fc = half["mtp.fc.weight"].values;
    for (size_t i = 0; i < fc.size(); ++i) {
      const bool left = static_cast<int64_t>(i) % (2 * hidden_) < hidden_;
      if (left != first) fc[i] = 0.0f;
    }
    const auto same = run_mtp(half, ids_, features_);
    const auto tokens = run_mtp(half, other_ids, features_);
    const auto states = run_mtp(half, ids_, other_features);
    const float by_token = difference(same.logits, tokens.logits);
    const float by_state = difference(same.logits, states.logits);
    EXPECT_GT(first ? by_token : by_state, 1e-3f);
    EXPECT_EQ(first ? by_state : by_token, 0.0f);
    EXPECT_GT(difference(all.logits, same.logits), 1e-3f);
  }
}

// Norms are stored less one: with zeros they only normalise. Where layer and experts give nothing,
// the logits are the head's of the normalised embedding.
TEST_F(Qwen3NextMtp, NormsAreStoredLessOne) {
  Tensors bare = head_;
  for (auto& [name, t] : bare) {
    const bool silent = name.find("norm") != std::string::npos || name.ends_with("o_proj.weight") ||
                        name.ends_with("down_proj.weight");
    if (silent) std::ranges::fill(t.values, 0.0f);
  }
  auto& fc = bare["mtp.fc.weight"].values;
  std::ranges::fill(fc, 0.0f);
  for (int64_t i = 0; i < hidden_; ++i)
    fc[static_cast<size_t>(i * 2 * hidden_ + hidden_ + i)] = 1.0f;  // the states pass
  std::vector<float> features = features_;
  const auto once = run_mtp(bare, ids_, features);
  for (float& v : features) v *= 3.0f;
  const auto scaled = run_mtp(bare, ids_, features);
  expect_near(once.logits, scaled.logits, 1e-4f);
  for (float& v : features) v = -v;
  const auto turned = run_mtp(bare, ids_, features);
  for (float& v : features) v = 0.0f;
  std::vector<float> negative = turned.logits;
  for (float& v : negative) v = -v;
  expect_near(once.logits, negative, 1e-4f);
}

TEST_F(Qwen3NextMtp, MissingTensorsAreNamed) {
  head_.erase("mtp.layers.0.self_attn.k_proj.weight");
  write_safetensors(folder("mtp.safetensors"), head_);
  const auto opened = loader::Checkpoint::open_bare(folder("mtp.safetensors"));
  ASSERT_TRUE(opened.ok());
  const auto head =
      models::load_head(models::HeadKind::kMtp, *opened, target_->model(), compute_->ops());
  ASSERT_FALSE(head.ok());
  EXPECT_NE(head.status().message().find("mtp.layers.0.self_attn.k_proj"), std::string::npos);
}

}  // namespace
}  // namespace freshet::speculative
