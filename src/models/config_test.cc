// Published configurations against transformers' reading of them (configs/expected.json,
// made by tools/golden_configs.py).
#include <cmath>

#include <gtest/gtest.h>

#include "layers/rope.h"
#include "models/registry.h"

namespace freshet::models {
namespace {

std::string directory() {
  return FRESHET_UNPACKED_DATA "/configs/";
}

json::Value read(const std::string& name) {
  auto value = json::parse_file(directory() + name);
  FRESHET_CHECK(value.ok(), "{}", value.status().message());
  return std::move(*value);
}

Result<ModelSpec> spec_of(std::string_view text) {
  auto value = json::parse(text);
  FRESHET_CHECK(value.ok(), "{}", value.status().message());
  return read_spec(*value);
}

void expect_rope(const RopeSpec& rope, const json::Value& want) {
  const std::vector<float> got = rope_frequencies(rope, 1);
  ASSERT_EQ(static_cast<int64_t>(got.size()), want.get_int("count", -1));
  const json::Array& ends = want.find("ends")->as_array();
  const size_t places[] = {0, got.size() / 2, got.size() - 1};
  for (size_t i = 0; i < 3; ++i) {
    const double expected = ends[i].as_double();
    EXPECT_NEAR(got[places[i]], expected, 1e-6 * expected) << "frequency " << places[i];
  }
  EXPECT_NEAR(rope.attention_factor, want.get_double("factor", 0), 1e-6);
}

// A layer's attention; of latent attention what both kinds have.
AttentionSpec attention_of(const LayerSpec& layer) {
  const MlaSpec* const mla = layer.find<MlaSpec>();
  if (mla == nullptr) return layer.attention();
  AttentionSpec a;
  a.heads = a.kv_heads = mla->heads;
  a.head_dim = mla->head_dim();
  a.value_dim = mla->value_dim;
  a.window = mla->window;
  return a;
}

void expect_facts(const ModelSpec& spec, const json::Value& want) {
  const AttentionSpec a = attention_of(spec.layers.front());
  EXPECT_EQ(static_cast<int64_t>(spec.layers.size()), want.get_int("layers", -1));
  EXPECT_EQ(spec.hidden_size, want.get_int("hidden", -1));
  EXPECT_EQ(spec.vocab_size, want.get_int("vocab", -1));
  EXPECT_EQ(a.heads, want.get_int("heads", -1));
  EXPECT_EQ(a.kv_heads, want.get_int("kv_heads", -1));
  EXPECT_EQ(a.head_dim, want.get_int("head_dim", -1));
  EXPECT_EQ(a.value_dim, want.get_int("value_dim", -1));
  EXPECT_EQ(spec.max_context, want.get_int("context", -1));
  EXPECT_EQ(spec.tied_embeddings, want.get_bool("tied", false));
  const json::Array& windows = want.find("windows")->as_array();
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    EXPECT_EQ(attention_of(spec.layers[i]).window, *windows[i].as_int64()) << "layer " << i;
  }
  if (const json::Value* ropes = want.find("ropes")) {
    ASSERT_EQ(spec.ropes.size(), ropes->as_array().size());
    for (size_t r = 0; r < spec.ropes.size(); ++r) expect_rope(spec.ropes[r], ropes->as_array()[r]);
  } else {
    EXPECT_TRUE(spec.ropes.empty());
  }
  const MoeSpec* const moe = spec.layers.back().find<MoeSpec>();
  EXPECT_EQ(moe != nullptr, want.find("experts") != nullptr);
  if (moe != nullptr) {
    EXPECT_EQ(moe->routing.experts, want.get_int("experts", -1));
    EXPECT_EQ(moe->routing.top_k, want.get_int("experts_per_token", -1));
  }
}

TEST(Config, PublishedOnesReadAsTransformersReadsThem) {
  const json::Value expected = read("expected.json");
  int supported = 0;
  for (const auto& [name, want] : expected.as_object()) {
    SCOPED_TRACE(name);
    const Result<ModelSpec> spec = read_spec(read(name));
    if (want.is_string()) {
      ASSERT_FALSE(spec.ok());
      EXPECT_EQ(spec.status().code(), StatusCode::kUnsupported);
      EXPECT_NE(spec.status().message().find("unsupported architecture '"), std::string::npos);
      continue;
    }
    ASSERT_TRUE(spec.ok()) << spec.status().message();
    expect_facts(*spec, want);
    ++supported;
  }
  EXPECT_EQ(supported, 106);
}

// Their layers differ, so expected.json has no facts of them.
TEST(Config, PublishedHybridsAreRead) {
  const auto next = read_spec(read("Qwen--Qwen3-Next-80B-A3B-Thinking_config.json"));
  ASSERT_TRUE(next.ok()) << next.status().message();
  ASSERT_EQ(next->layers.size(), 48u);
  for (size_t i = 0; i < 48; ++i) {
    EXPECT_EQ(next->layers[i].find<AttentionSpec>() != nullptr, i % 4 == 3) << i;
    EXPECT_NE(next->layers[i].find<MoeSpec>(), nullptr) << i;
  }
  const auto nano = read_spec(read("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json"));
  ASSERT_FALSE(nano.ok());
  EXPECT_NE(nano.status().message().find("experts without gates"), std::string::npos)
      << nano.status().message();
}

TEST(Config, DefaultsFillWhatIsLeftOut) {
  const auto mistral = spec_of(R"({"model_type": "mistral"})");
  ASSERT_TRUE(mistral.ok()) << mistral.status().message();
  EXPECT_EQ(mistral->layers.front().attention().kv_heads, 8);
  EXPECT_EQ(mistral->layers.front().attention().window, 4096);
  const auto no_window = spec_of(R"({"model_type": "mistral", "sliding_window": null})");
  ASSERT_TRUE(no_window.ok());
  EXPECT_EQ(no_window->layers.front().attention().window, 0);
  for (const Architecture& architecture : architectures()) {
    json::Object object;
    object["model_type"] = json::Value(architecture.type);
    // It has no usual sequence of layers.
    if (architecture.type == "nemotron_h") object["hybrid_override_pattern"] = "M-*-";
    const auto spec = read_spec(json::Value(std::move(object)));
    EXPECT_TRUE(spec.ok()) << architecture.type << ": " << spec.status().message();
  }
}

TEST(Config, TooManyLayersAreRefusedByEveryArchitecture) {
  for (const Architecture& architecture : architectures()) {
    for (const char* key : {"num_hidden_layers", "n_layer"}) {
      json::Object object;
      object["model_type"] = json::Value(architecture.type);
      object[key] = 4097;
      // Of encoder-decoders.
      for (const char* side : {"num_layers", "encoder_layers", "decoder_layers"})
        object[side] = 4097;
      const auto spec = read_spec(json::Value(std::move(object)));
      ASSERT_FALSE(spec.ok()) << architecture.type;
      EXPECT_NE(spec.status().message().find("4097 layers"), std::string::npos)
          << architecture.type << ": " << spec.status().message();
    }
  }
}

TEST(Config, Llama4HasChunksAndLayersWithoutRope) {
  const json::Value config = read("meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json");
  const auto spec = read_spec(*config.find("text_config"));
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  ASSERT_EQ(spec->layers.size(), 48u);
  EXPECT_EQ(spec->layers[0].mlp().ff, 16384);
  EXPECT_EQ(spec->layers[0].attention().chunk, 8192);
  EXPECT_EQ(spec->layers[0].attention().rope, 0);
  const MoeSpec* const moe = spec->layers[3].find<MoeSpec>();
  ASSERT_NE(moe, nullptr);
  EXPECT_EQ(moe->routing.experts, 128);
  EXPECT_EQ(moe->expert_ff, 8192);
  EXPECT_TRUE(moe->weight_before);
  EXPECT_EQ(spec->layers[3].attention().chunk, 0);
  EXPECT_FALSE(spec->layers[3].attention().rotates_keys);
  const RopeSpec& temperature = spec->ropes[static_cast<size_t>(spec->layers[3].attention().rope)];
  EXPECT_EQ(temperature.scaling, RopeSpec::Scaling::kTemperature);
  EXPECT_EQ(temperature.original_context, 8192);
}

TEST(Config, Zamba2SharesItsBlocksInTurns) {
  const auto spec = spec_of(
      R"({"model_type": "zamba2", "num_mem_blocks": 2, "use_mem_rope": true, "use_long_context": true,
          "use_shared_attention_adapter": true})");
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  ASSERT_EQ(spec->layers.size(), 54u);
  std::vector<int> hybrid;
  for (size_t i = 0; i < 54; ++i) {
    EXPECT_NE(spec->layers[i].find<Mamba2Spec>(), nullptr) << i;
    if (spec->layers[i].find<AttentionSpec>() != nullptr) hybrid.push_back(static_cast<int>(i));
  }
  EXPECT_EQ(hybrid, (std::vector<int>{6, 12, 18, 24, 30, 36, 42, 47, 51}));
  const AttentionSpec& a = spec->layers[12].attention();
  EXPECT_EQ(a.input_size, 5120);
  EXPECT_EQ(a.head_dim, 160);
  EXPECT_EQ(a.adapter_rank, 128);
  EXPECT_FLOAT_EQ(a.scale, 1.0f / std::sqrt(80.0f));
  EXPECT_EQ(spec->layers[12].branches[0].sharers, (std::vector<int>{12, 24, 36, 47}));
  EXPECT_EQ(spec->layers[24].branches[1].use, 3);
  EXPECT_EQ(spec->max_context, 16384);
  EXPECT_NEAR(spec->ropes.front().theta, 1e4 * std::pow(8.0, 160.0 / 158.0), 1e-3);
}

TEST(Config, SizesOfStatesThatNoNumberHolds) {
  for (const char* config :
       {R"({"model_type": "zamba2", "hidden_size": 1048576, "mamba_expand": 1048576})",
        R"({"model_type": "bamba", "hidden_size": 1048576, "mamba_expand": 1048576})"}) {
    EXPECT_FALSE(spec_of(config).ok()) << config;
  }
  // More blocks than uses are as many blocks.
  const auto spec = spec_of(R"({"model_type": "zamba2", "num_mem_blocks": 16777216})");
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->layers[12].branches[0].sharers, (std::vector<int>{12}));
}

// rope_scaling of Hunyuan's files: "dynamic" with an alpha is a base, whatever the context.
TEST(Config, HunyuansAlphaIsABase) {
  const auto spec = spec_of(
      R"({"model_type": "hunyuan_v1_dense", "hidden_size": 4096, "num_attention_heads": 32,
          "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}})");
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  EXPECT_EQ(spec->ropes.front().scaling, RopeSpec::Scaling::kNone);
  EXPECT_NEAR(spec->ropes.front().theta, 1e4 * std::pow(1000.0, 128.0 / 126.0), 1e-3);
}

TEST(Config, OldAndNewSpellingsOfRopeAgree) {
  const auto before = spec_of(
      R"({"model_type": "llama", "rope_theta": 5e5, "rope_scaling":
          {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}})");
  const auto after = spec_of(
      R"({"model_type": "llama", "rope_parameters":
          {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 512}})");
  ASSERT_TRUE(before.ok() && after.ok());
  EXPECT_EQ(before->ropes, after->ropes);
  EXPECT_EQ(before->ropes.front().original_context, 512);
}

TEST(Config, ErrorsNameTheKey) {
  const std::pair<const char*, const char*> cases[] = {
      {R"([1])", "not a JSON object"},
      {R"({"hidden_size": 64})", "'model_type'"},
      {R"({"model_type": "rwkv7"})", "unsupported architecture 'rwkv7'"},
      {R"({"model_type": "llama", "hidden_size": "big"})", "'hidden_size'"},
      {R"({"model_type": "llama", "hidden_size": -4})", "'hidden_size'"},
      {R"({"model_type": "llama", "num_hidden_layers": 1e300})", "'num_hidden_layers'"},
      {R"({"model_type": "llama", "num_hidden_layers": 100000})", "layers"},
      {R"({"model_type": "llama", "num_attention_heads": 30, "num_key_value_heads": 8})", "30"},
      {R"({"model_type": "llama", "num_attention_heads": 8192})", "heads"},
      {R"({"model_type": "llama", "hidden_act": "sine"})", "'sine'"},
      {R"({"model_type": "llama", "rms_norm_eps": "small"})", "'rms_norm_eps'"},
      {R"({"model_type": "llama", "rope_scaling": {"type": "spiral"}})", "'spiral'"},
      {R"({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 0}})", "factor 0"},
      {R"({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": []}})",
       "factors"},
      {R"({"model_type": "gemma2", "layer_types": ["full_attention"]})", "'layer_types'"},
      {R"({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["linear_attention"]})",
       "'linear_attention'"},
      {R"({"model_type": "mixtral", "num_experts_per_tok": 9})", "9 of 8 experts"},
      {R"({"model_type": "deepseek_v3", "n_group": 7})", "groups"},
      {R"({"model_type": "llama", "hidden_act": "xielu"})", "xIELU"},
      {R"({"model_type": "mpt", "attn_config": {"clip_qkv": 8}})", "clip_qkv"},
      {R"({"model_type": "bloom", "apply_residual_connection_post_layernorm": true})",
       "post_layernorm"},
      {R"({"model_type": "marian", "decoder_vocab_size": 5})", "each side"},
      {R"({"model_type": "olmoe", "clip_qkv": 8.0})", "'clip_qkv'"},
      {R"({"model_type": "ernie4_5_moe", "use_bias": true})", "'use_bias'"},
      {R"({"model_type": "smollm3", "no_rope_layers": [1, 0]})", "'no_rope_layers'"},
      {R"({"model_type": "phimoe", "rope_scaling": {"type": "longrope", "short_mscale": 1.0,
          "long_mscale": 1.2, "short_factor": [1], "long_factor": [1]}})",
       "long_mscale"},
  };
  for (const auto& [text, part] : cases) {
    const auto spec = spec_of(text);
    ASSERT_FALSE(spec.ok()) << text;
    EXPECT_NE(spec.status().message().find(part), std::string::npos)
        << text << ": " << spec.status().message();
    EXPECT_EQ(spec.status().message().find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace freshet::models
