// Loading: what a checkpoint may spell differently, and what must be refused with one clear line.
#include "models/load_test.h"

#include <cmath>
#include <cstring>

#include "models/finite.h"
#include "tensor/dtype.h"

namespace freshet {
namespace {

constexpr const char* kGate = "model.layers.1.mlp.gate_proj.weight";

TEST_F(Load, UntouchedCheckpointLoads) {
  const auto model = load("llama", [](Tensors&, json::Object&) {});
  ASSERT_TRUE(model.ok()) << model.status().message();
  size_t bytes = 0;
  for (const Model::WeightInfo& w : (*model)->weights()) bytes += w.bytes;
  EXPECT_GT(bytes, 200'000u);
}

TEST_F(Load, HiddenStatesAreWhatTheHeadReads) {
  Tensors tensors;
  auto model = load("llama", [&](Tensors& t, json::Object&) { tensors = t; });
  ASSERT_TRUE(model.ok()) << model.status().message();
  const ModelSpec& spec = (*model)->spec();
  const KvCacheSpec cache_spec = kv_cache_spec(spec, ops::KvType::kF32);
  auto cache = KvStorage::allocate(cache_spec, {1});
  ASSERT_TRUE(cache.ok() && (*model)->reserve(3, 1, 16).ok());
  const ForwardBatch batch{{5, 9, 7}, {}, {0, 1, 2}, {0, 3}, {3}, {{{0}, 1}}, {1}};
  std::vector<float> logits(static_cast<size_t>(spec.vocab_size));
  std::vector<float> hidden(static_cast<size_t>(3 * spec.hidden_size));
  (*model)->forward(batch, *cache, {logits.data(), hidden.data()});
  const std::string& head = tensors["lm_head.weight"].bytes;
  for (int row = 0; row < spec.vocab_size; ++row) {
    double sum = 0;
    for (int c = 0; c < spec.hidden_size; ++c) {
      uint16_t bits;
      std::memcpy(&bits, head.data() + (row * spec.hidden_size + c) * 2, 2);
      sum += double{bf16_to_f32(bits)} * hidden[static_cast<size_t>(spec.hidden_size + c)];
    }
    EXPECT_NEAR(logits[static_cast<size_t>(row)], sum, 1e-4);
  }
}

// What is in the file counts, not what tie_word_embeddings says; each time with one warning.
TEST_F(Load, TheHeadInTheFileCounts) {
  const auto logits = [&](const std::function<void(Tensors&, json::Object&)>& change,
                          int warnings) {
    auto model = load("llama", change);
    EXPECT_TRUE(model.ok()) << model.status().message();
    int lines = 0;
    set_log_sink(LogLevel::kWarning, [&](LogLevel, std::string_view) { ++lines; });
    const auto checkpoint = loader::Checkpoint::open(folder_.string());
    const auto again = load_model(*checkpoint, *ops_, {});
    set_log_sink(LogLevel::kOff, {});
    EXPECT_TRUE(again.ok());
    EXPECT_EQ(lines, warnings);
    return model.ok() ? first_logits(**model) : std::vector<float>();
  };
  const auto untied = logits([](Tensors&, json::Object&) {}, 0);
  EXPECT_EQ(logits([](Tensors&, json::Object& c) { c["tie_word_embeddings"] = true; }, 1), untied);
  const auto same = [](Tensors& t, json::Object& c) {
    t["lm_head.weight"] = t["model.embed_tokens.weight"];
    c["tie_word_embeddings"] = true;
  };
  const auto tied = logits(same, 0);
  EXPECT_NE(tied, untied);
  for (const char* flag : {"false", "null", "true"}) {
    const auto without = [&](const char* name) {
      return [flag, name](Tensors& t, json::Object& c) {
        t["lm_head.weight"] = t["model.embed_tokens.weight"];
        t.erase(name);
        c["tie_word_embeddings"] = json::parse(flag).value();
      };
    };
    const bool overruled = std::string_view(flag) != "true";
    EXPECT_EQ(logits(without("lm_head.weight"), overruled ? 1 : 0), tied) << flag;
    EXPECT_EQ(logits(without("model.embed_tokens.weight"), overruled ? 1 : 0), tied) << flag;
  }
}

TEST_F(Load, ConfigurationsMaySayTheSameInOtherWords) {
  const auto logits = [&](const std::function<void(json::Object&)>& change) {
    auto model = load("llama", [&](Tensors&, json::Object& c) { change(c); });
    EXPECT_TRUE(model.ok()) << model.status().message();
    return model.ok() ? first_logits(**model) : std::vector<float>();
  };
  const auto want = logits([](json::Object&) {});
  EXPECT_EQ(logits([](json::Object& c) {
              c.erase("model_type");
              c["architectures"] = json::Array{"LlamaForCausalLM"};
            }),
            want);
  EXPECT_EQ(logits([](json::Object& c) {
              json::Object whole;
              whole["model_type"] = "some_pictures";
              whole["text_config"] = c;
              c = std::move(whole);
            }),
            want);
  EXPECT_EQ(logits([](json::Object& c) { c["rope_scaling"] = nullptr; }), want);
  EXPECT_EQ(logits([](json::Object& c) { c["rope_scaling"] = json::Object(); }), want);
  EXPECT_EQ(logits([](json::Object& c) { c["architectures"] = json::Array{"SomethingElse"}; }),
            want);
}

TEST_F(Load, OtherPrefixesAreTheSameModel) {
  auto plain = load("llama", [](Tensors&, json::Object&) {});
  ASSERT_TRUE(plain.ok());
  const std::vector<float> want = first_logits(**plain);
  for (const std::string prefix : {"", "language_model.model.", "model.language_model."}) {
    auto model = load("llama", [&](Tensors& t, json::Object&) {
      Tensors renamed;
      for (const auto& [name, tensor] : t) {
        const bool base = name.starts_with("model.");
        const std::string head = prefix.starts_with("language") ? "language_model." + name : name;
        renamed[base ? prefix + name.substr(6) : head] = tensor;
      }
      t = std::move(renamed);
    });
    ASSERT_TRUE(model.ok()) << prefix << ": " << model.status().message();
    EXPECT_EQ(first_logits(**model), want) << prefix;
  }
}

TEST_F(Load, StackedExpertsAreTheSameModel) {
  auto plain = load("mixtral", [](Tensors&, json::Object&) {});
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  const auto stacked = [](Tensors& t, json::Object&) {
    for (int layer = 0; layer < 2; ++layer) {
      const std::string to = fmt::format("model.layers.{}.mlp.experts.", layer);
      Tensor gate_up{"BF16", {4, 320, 64}, {}};
      Tensor down{"BF16", {4, 64, 160}, {}};
      for (int e = 0; e < 4; ++e) {
        const std::string from =
            fmt::format("model.layers.{}.block_sparse_moe.experts.{}.", layer, e);
        gate_up.bytes += t[from + "w1.weight"].bytes + t[from + "w3.weight"].bytes;
        down.bytes += t[from + "w2.weight"].bytes;
        for (const char* w : {"w1", "w2", "w3"}) t.erase(from + w + ".weight");
      }
      t[to + "gate_up_proj"] = gate_up;
      t[to + "down_proj"] = down;
    }
  };
  auto model = load("mixtral", stacked);
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(first_logits(**model), first_logits(**plain));
}

// The published form of GPT-OSS: a byte holds numbers 2i and 2i + 1, the scales lie apart.
void to_mxfp4(Tensors& t, const std::string& name, int64_t rows, int64_t cols,
              float (*value)(int)) {
  constexpr int kLevels[] = {0, 1, 2, 3, 4, 6, 8, 12};  // doubled
  const auto count = static_cast<size_t>(4 * rows * cols);
  Tensor blocks{"U8", {4, rows, cols / 32, 16}, std::string(count / 2, '\0')};
  Tensor scales{"U8", {4, rows, cols / 32}, std::string(count / 32, static_cast<char>(126))};
  Tensor plain{"F32", {4, cols, rows}, std::string(count * 4, '\0')};
  for (size_t i = 0; i < count; ++i) {
    const int code = static_cast<int>(i * 7 + i / 13) & 15;
    blocks.bytes[i / 2] = static_cast<char>(blocks.bytes[i / 2] | code << (i % 2 * 4));
    const float v = value(code < 8 ? kLevels[code] : -kLevels[code - 8]);
    const auto r = static_cast<int64_t>(i) / cols;  // over all experts
    const auto c = static_cast<int64_t>(i) % cols;
    const auto at = static_cast<size_t>((r / rows * cols + c) * rows + r % rows);
    std::memcpy(plain.bytes.data() + at * 4, &v, 4);
  }
  t.erase(name);
  t[name + "_blocks"] = blocks;
  t[name + "_scales"] = scales;
  t[name] = plain;
}

TEST_F(Load, FourBitExpertsMeanWhatTheirDefinitionSays) {
  std::vector<float> logits[2];
  for (const bool four_bit : {false, true}) {
    auto model = load("gpt-oss", [&](Tensors& t, json::Object&) {
      for (int layer = 0; layer < 2; ++layer) {
        const std::string stem = fmt::format("model.layers.{}.mlp.experts.", layer);
        // A level of E2M1 times 2^(126 - 127), from the doubled level.
        const auto value = [](int doubled) { return static_cast<float>(doubled) / 4; };
        to_mxfp4(t, stem + "gate_up_proj", 320, 64, value);
        to_mxfp4(t, stem + "down_proj", 64, 160, value);
        for (const char* part : {"gate_up_proj", "down_proj"}) {
          if (four_bit) {
            t.erase(stem + part);
          } else {
            t.erase(stem + part + "_blocks");
            t.erase(stem + part + "_scales");
          }
        }
      }
    });
    ASSERT_TRUE(model.ok()) << model.status().message();
    logits[four_bit ? 1 : 0] = first_logits(**model);
  }
  for (size_t i = 0; i < logits[0].size(); ++i) {
    EXPECT_NEAR(logits[0][i], logits[1][i], 1e-4f * std::max(1.0f, std::abs(logits[0][i])));
  }
}

// A llama of 128 columns whose linear layers are E4M3 or INT8 with scales of `kind`, or the F32
// numbers that these stand for.
enum class Codes { kE4M3, kInt8 };
enum class Scales { kTensor, kRow, kRowColumn, kBlock };

float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double v =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return static_cast<float>(code & 0x80 ? -v : v);
}

void to_codes(Tensors& t, const std::string& name, int64_t rows, int64_t cols, Codes type,
              Scales kind, bool coded) {
  const int64_t across = (cols + 127) / 128;
  const auto scale_of = [&](int64_t r, int64_t c) {
    const int64_t i = kind == Scales::kTensor  ? 0
                      : kind == Scales::kBlock ? r / 128 * across + c / 128
                                               : r;
    return bf16_to_f32(f32_to_bf16(0.0005f * static_cast<float>(3 + i % 11)));
  };
  const bool fp8 = type == Codes::kE4M3;
  Tensor codes{fp8 ? "F8_E4M3" : "I8", {rows, cols}, {}}, plain{"F32", {rows, cols}, {}};
  uint32_t state = static_cast<uint32_t>(name.size() * 977 + static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows * cols; ++i) {
    state = state * 1664525 + 1013904223;
    auto code = static_cast<uint8_t>(state >> 24);
    if (fp8 && (code & 0x7f) > 0x70) code &= 0xbf;  // no NaN, few large ones
    append(codes.bytes, code);
    const float number = fp8 ? e4m3(code) : static_cast<float>(static_cast<int8_t>(code));
    append(plain.bytes, number * scale_of(i / cols, i % cols));
  }
  t[name] = coded ? codes : plain;
  if (!coded) return;
  const bool blocks = kind == Scales::kBlock, bf16 = kind == Scales::kRowColumn;
  Tensor scales{bf16 ? "BF16" : "F32", {}, {}};
  const int64_t down = kind == Scales::kTensor ? 1 : blocks ? (rows + 127) / 128 : rows;
  if (kind != Scales::kTensor) scales.shape = {down};
  if (bf16) scales.shape.push_back(1);
  if (blocks) scales.shape.push_back(across);
  for (int64_t r = 0; r < down; ++r) {
    for (int64_t c = 0; c < (blocks ? across : 1); ++c) {
      const float scale = scale_of(blocks ? r * 128 : r, c * 128);
      if (bf16) {
        append(scales.bytes, f32_to_bf16(scale));
      } else {
        append(scales.bytes, scale);
      }
    }
  }
  t[name + (blocks ? "_scale_inv" : "_scale")] = scales;
}

void to_codes_llama(Tensors& t, json::Object& config, Codes type, Scales kind, bool coded) {
  constexpr int64_t kHidden = 128, kFf = 384, kVocab = 288;
  config["hidden_size"] = json::Value(kHidden);
  config["intermediate_size"] = json::Value(kFf);
  config["head_dim"] = json::Value(32);
  if (coded) {
    config["quantization_config"] = *json::parse(
        type == Codes::kE4M3 ? R"({"quant_method": "fp8", "weight_block_size": [128, 128]})"
                             : R"({"quant_method": "compressed-tensors", "format": "int-quantized",
                               "ignore": ["lm_head"], "config_groups": {"group_0": {
                                 "targets": ["Linear"],
                                 "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
                                 "input_activations": {"num_bits": 8, "dynamic": true}}}})");
  }
  for (auto& [name, tensor] : t) {
    if (!name.ends_with("norm.weight")) continue;
    tensor = {"F32", {kHidden}, {}};
    for (int64_t i = 0; i < kHidden; ++i) append(tensor.bytes, 1.0f);
  }
  to_codes(t, "model.embed_tokens.weight", kVocab, kHidden, type, kind, false);
  to_codes(t, "lm_head.weight", kVocab, kHidden, type, kind, false);
  for (int l = 0; l < 2; ++l) {
    const std::string at = fmt::format("model.layers.{}.", l);
    to_codes(t, at + "self_attn.q_proj.weight", 128, kHidden, type, kind, coded);
    to_codes(t, at + "self_attn.k_proj.weight", 64, kHidden, type, kind, coded);
    to_codes(t, at + "self_attn.v_proj.weight", 64, kHidden, type, kind, coded);
    to_codes(t, at + "self_attn.o_proj.weight", kHidden, 128, type, kind, coded);
    to_codes(t, at + "mlp.gate_proj.weight", kFf, kHidden, type, kind, coded);
    to_codes(t, at + "mlp.up_proj.weight", kFf, kHidden, type, kind, coded);
    to_codes(t, at + "mlp.down_proj.weight", kHidden, kFf, type, kind, coded);
  }
}

TEST_F(Load, Fp8MeansItsNumbersTimesItsScales) {
  for (const Scales kind : {Scales::kTensor, Scales::kRow, Scales::kRowColumn, Scales::kBlock}) {
    std::vector<float> logits[2];
    for (const bool fp8 : {false, true}) {
      auto model = load("llama", [&](Tensors& t, json::Object& c) {
        to_codes_llama(t, c, Codes::kE4M3, kind, fp8);
      });
      ASSERT_TRUE(model.ok()) << model.status().message();
      int stored = 0;
      for (const Model::WeightInfo& w : (*model)->weights())
        stored += w.format == quant::Format::kFP8;
      EXPECT_EQ(stored, fp8 ? 14 : 0);
      logits[fp8 ? 1 : 0] = first_logits(**model);
    }
    EXPECT_EQ(logits[0], logits[1]);
  }
}

TEST_F(Load, Fp8WithoutItsScalesIsRefused) {
  const std::string scales = std::string(kGate) + "_scale_inv";
  const auto change = [&](const std::function<void(Tensors&, json::Object&)>& more) {
    return [=](Tensors& t, json::Object& c) {
      to_codes_llama(t, c, Codes::kE4M3, Scales::kBlock, true);
      more(t, c);
    };
  };
  expect_error("llama", change([&](Tensors& t, json::Object&) { t.erase(scales); }),
               {kGate, "no scale", "missing"});
  expect_error("llama", change([&](Tensors& t, json::Object&) { t[scales].shape = {1, 3}; }),
               {scales.c_str(), "[1, 3]", "[384, 128]"});
  expect_error("llama", change([&](Tensors& t, json::Object&) {
                 t[scales].bytes = std::string("\0\0\xc0\x7f", 4) + t[scales].bytes.substr(4);
               }),
               {scales.c_str(), "NaN"});
  expect_error("llama", change([&](Tensors& t, json::Object&) { t[kGate].bytes[77] = '\x7f'; }),
               {kGate, "NaN"});
  expect_error("llama", change([&](Tensors&, json::Object& c) {
                 c["quantization_config"] = *json::parse(R"({"weight_block_size": [128, 64]})");
               }),
               {"128 by 64", "[3, 1]"});
  expect_error("llama",
               [&](Tensors& t, json::Object&) {
                 t[kGate].dtype = "F8_E4M3";
                 t[kGate].bytes.resize(t[kGate].bytes.size() / 2);
               },
               {kGate, "F8_E4M3", "no scale"});
}

TEST_F(Load, Int8MeansItsNumbersTimesItsScales) {
  for (const Scales kind : {Scales::kTensor, Scales::kRow, Scales::kRowColumn}) {
    std::vector<float> logits[2];
    for (const bool coded : {false, true}) {
      auto model = load("llama", [&](Tensors& t, json::Object& c) {
        to_codes_llama(t, c, Codes::kInt8, kind, coded);
        // What a symmetric checkpoint may have besides, and what is not read.
        t[std::string(kGate) + "_zero_point"] = {"I8", {384, 1}, std::string(384, '\0')};
        t["model.layers.1.mlp.gate_proj.input_scale"] = {"F32", {1}, std::string(4, 'x')};
      });
      ASSERT_TRUE(model.ok()) << model.status().message();
      int stored = 0;
      for (const Model::WeightInfo& w : (*model)->weights())
        stored += w.format == quant::Format::kINT8;
      EXPECT_EQ(stored, coded ? 14 : 0);
      logits[coded ? 1 : 0] = first_logits(**model);
    }
    EXPECT_EQ(logits[0], logits[1]);
  }
}

TEST_F(Load, StackedInt8ExpertsTakeTheirOwnScales) {
  std::vector<float> logits[2];
  for (const bool coded : {false, true}) {
    auto model = load("mixtral", [&](Tensors& t, json::Object&) {
      for (int layer = 0; layer < 2; ++layer) {
        const std::string to = fmt::format("model.layers.{}.mlp.experts.", layer);
        for (int e = 0; e < 4; ++e) {
          for (const char* w : {"w1", "w2", "w3"}) {
            t.erase(
                fmt::format("model.layers.{}.block_sparse_moe.experts.{}.{}.weight", layer, e, w));
          }
        }
        to_codes(t, to + "gate_up_proj", 4 * 320, 64, Codes::kInt8, Scales::kRowColumn, coded);
        to_codes(t, to + "down_proj", 4 * 64, 160, Codes::kInt8, Scales::kRow, coded);
        t[to + "gate_up_proj"].shape = {4, 320, 64};
        t[to + "down_proj"].shape = {4, 64, 160};
        if (!coded) continue;
        t[to + "gate_up_proj_scale"].shape = {4, 320, 1};
        t[to + "down_proj_scale"].shape = {4, 64};
      }
    });
    ASSERT_TRUE(model.ok()) << model.status().message();
    logits[coded ? 1 : 0] = first_logits(**model);
  }
  EXPECT_EQ(logits[0], logits[1]);
}

TEST_F(Load, Int8ThatMeansSomethingElseIsRefused) {
  const std::string scales = std::string(kGate) + "_scale";
  const std::string zero = std::string(kGate) + "_zero_point";
  const auto change = [&](const std::function<void(Tensors&, json::Object&)>& more) {
    return [=](Tensors& t, json::Object& c) {
      to_codes_llama(t, c, Codes::kInt8, Scales::kRow, true);
      more(t, c);
    };
  };
  expect_error("llama", change([&](Tensors& t, json::Object&) { t.erase(scales); }),
               {kGate, "I8", "no scale"});
  expect_error("llama", change([&](Tensors& t, json::Object&) { t[scales].shape = {192, 2}; }),
               {scales.c_str(), "[192, 2]", "[384, 128]", "group of columns"});
  expect_error("llama", change([&](Tensors& t, json::Object&) { t[scales].shape = {1, 384}; }),
               {scales.c_str(), "[1, 384]"});
  expect_error("llama", change([&](Tensors& t, json::Object&) { t[scales] = {"F32", {0}, {}}; }),
               {scales.c_str(), "[0]"});
  expect_error("llama", change([&](Tensors& t, json::Object&) { t[scales].dtype = "I32"; }),
               {scales.c_str(), "I32"});
  expect_error("llama", change([&](Tensors& t, json::Object&) {
                 t[scales].bytes = std::string("\0\0\x80\x7f", 4) + t[scales].bytes.substr(4);
               }),
               {scales.c_str(), "infinity"});
  expect_error("llama", change([&](Tensors& t, json::Object&) {
                 const float large = 3e38f;  // times 127 is none
                 std::memcpy(t[scales].bytes.data(), &large, sizeof large);
               }),
               {kGate, "infinity"});
  expect_error("llama", change([&](Tensors& t, json::Object&) {
                 t[zero] = {"I32", {96, 1}, std::string(384, '\3')};
               }),
               {zero.c_str(), "I32 [96, 1]", "I8 [384]"});
}

// Where quantization_config leaves activations as they are (W8A16), products of int8 would round
// them; zero points are no part of int8.
TEST_F(Load, Int8WithZeroPointsOrPlainActivationsBecomesGroups) {
  using quant::Format;
  const std::string scales = std::string(kGate) + "_scale",
                    zero = std::string(kGate) + "_zero_point";
  for (const bool zeros : {false, true}) {
    std::vector<float> logits[2];
    for (const bool coded : {false, true}) {
      auto model = load("llama", [&](Tensors& t, json::Object& c) {
        to_codes_llama(t, c, Codes::kInt8, Scales::kRow, coded);
        if (coded) {
          c["quantization_config"] = *json::parse(R"({"quant_method": "compressed-tensors",
              "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"},
                                      "input_activations": null}}})");
        }
        if (coded && zeros) t[zero] = {"I8", {384, 1}, std::string(384, '\xfd')};
        if (coded || !zeros) return;
        Tensors same;
        to_codes(same, kGate, 384, 128, Codes::kInt8, Scales::kRow, true);
        t[kGate].bytes.clear();
        for (size_t i = 0; i < 384 * 128; ++i) {
          float scale;
          std::memcpy(&scale, same[scales].bytes.data() + i / 128 * 4, 4);
          const auto code = static_cast<int8_t>(same[kGate].bytes[i]);
          append(t[kGate].bytes, static_cast<float>(code + 3) * scale);
        }
      });
      ASSERT_TRUE(model.ok()) << model.status().message();
      int halves = 0, groups = 0;
      for (const Model::WeightInfo& w : (*model)->weights()) {
        halves += w.format == Format::kQ8_0;
        groups += w.format == Format::kInt8G128;
      }
      EXPECT_EQ(groups, coded && zeros ? 1 : 0);
      EXPECT_EQ(halves, coded ? 14 - groups : 0);
      logits[coded ? 1 : 0] = first_logits(**model);
    }
    EXPECT_EQ(logits[0], logits[1]);
  }
}

// bitsandbytes stores the largest magnitude of a row, which is not rounded here: one bit may
// differ.
TEST_F(Load, Int8OfBitsandbytesKeepsItsActivations) {
  std::vector<float> logits[2];
  for (const bool coded : {false, true}) {
    auto model = load("llama", [&](Tensors& t, json::Object& c) {
      to_codes_llama(t, c, Codes::kInt8, Scales::kRow, coded);
      c.erase("quantization_config");
      for (const std::string& name : {std::string(kGate)}) {
        if (!coded) return;
        Tensor scb = t[name + "_scale"];
        for (size_t i = 0; i < 384; ++i) {
          float scale;
          std::memcpy(&scale, scb.bytes.data() + 4 * i, 4);
          scale *= 127.0f;
          std::memcpy(scb.bytes.data() + 4 * i, &scale, 4);
        }
        t.erase(name + "_scale");
        t["model.layers.1.mlp.gate_proj.SCB"] = scb;
      }
    });
    ASSERT_TRUE(model.ok()) << model.status().message();
    int groups = 0;
    for (const Model::WeightInfo& w : (*model)->weights()) {
      groups += w.format == quant::Format::kInt8G128 || w.format == quant::Format::kQ8_0;
    }
    EXPECT_EQ(groups, coded ? 1 : 0);
    logits[coded ? 1 : 0] = first_logits(**model);
  }
  for (size_t i = 0; i < logits[0].size(); ++i) {
    EXPECT_NEAR(logits[0][i], logits[1][i], 1e-4f * std::max(1.0f, std::abs(logits[0][i])));
  }
}

// Outlier columns take the place of what INT8 holds there; a list without columns makes plain INT8
// of a weight of bitsandbytes.
TEST_F(Load, OutlierColumnsTakeThePlaceOfInt8) {
  const std::string stem = "model.layers.1.mlp.gate_proj.";
  const std::vector<int32_t> columns = {0, 5, 127};
  std::vector<float> logits[2];
  for (const bool apart : {false, true}) {
    auto model = load("llama", [&](Tensors& t, json::Object& c) {
      to_codes_llama(t, c, Codes::kInt8, Scales::kRow, apart);
      Tensor list{"I32", {3}, {}}, values{"BF16", {384, 3}, {}};
      for (const int32_t column : columns) append(list.bytes, column);
      for (int r = 0; r < 384; ++r) {
        for (int i = 0; i < 3; ++i) {
          const float v = static_cast<float>((r * 7 + i * 5) % 64 - 32) / 256.0f;
          append(values.bytes, f32_to_bf16(v));
          const auto at = static_cast<size_t>(r * 128 + columns[static_cast<size_t>(i)]);
          if (!apart) std::memcpy(t[kGate].bytes.data() + at * sizeof v, &v, sizeof v);
        }
      }
      if (!apart) return;
      t[stem + "outlier_columns"] = list;
      t[stem + "outlier_weight"] = values;
    });
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ((*model)->spec().split_cols, apart ? 131 : 0);
    int halves = 0;
    for (const Model::WeightInfo& w : (*model)->weights())
      halves += w.format == quant::Format::kBF16 && w.cols == 3;
    EXPECT_EQ(halves, apart ? 1 : 0);
    logits[apart ? 1 : 0] = first_logits(**model);
  }
  for (size_t i = 0; i < logits[0].size(); ++i) {  // sums are of another order
    EXPECT_NEAR(logits[0][i], logits[1][i], 1e-4f * std::max(1.0f, std::abs(logits[0][i])));
  }
}

TEST_F(Load, OutlierColumnsThatAreNoneAreRefused) {
  const std::string list = "model.layers.1.mlp.gate_proj.outlier_columns";
  const std::string values = "model.layers.1.mlp.gate_proj.outlier_weight";
  const auto with = [&](std::vector<int32_t> columns, const std::vector<int64_t>& shape) {
    return [=](Tensors& t, json::Object& c) {
      to_codes_llama(t, c, Codes::kInt8, Scales::kRow, true);
      Tensor l{"I32", {std::ssize(columns)}, {}};
      for (const int32_t column : columns) append(l.bytes, column);
      t[list] = l;
      if (shape.empty()) return;
      t[values] = {"BF16", shape, std::string(static_cast<size_t>(shape[0] * shape[1] * 2), 'x')};
    };
  };
  expect_error("llama", with({3, 3}, {384, 2}), {list.c_str(), "lists column 3"});
  expect_error("llama", with({3, 128}, {384, 2}), {list.c_str(), "lists column 128", "127"});
  expect_error("llama", with({-1}, {384, 1}), {list.c_str(), "lists column -1"});
  expect_error("llama", with({3, 4}, {384, 1}), {values.c_str(), "[384, 1]", "[384, 2]"});
  expect_error("llama", with({3}, {}), {values.c_str(), "missing"});
  const auto none = load("llama", with({}, {}));
  EXPECT_TRUE(none.ok()) << none.status().message();
}

TEST_F(Load, MissingTensorIsNamed) {
  expect_error("llama", [](Tensors& t, json::Object&) { t.erase(kGate); }, {kGate, "missing"});
  expect_error(
      "deepseek-v3",
      [](Tensors& t, json::Object&) { t.erase("model.layers.1.mlp.experts.5.up_proj.weight"); },
      {"model.layers.1.mlp.experts.5.up_proj.weight", "missing"});
  expect_error("llama", [](Tensors&, json::Object& c) { c["attention_bias"] = json::Value(true); },
               {"model.layers.0.self_attn.q_proj.bias", "missing"});
}

TEST_F(Load, WrongShapesAreShown) {
  expect_error("llama", [](Tensors& t, json::Object&) { t[kGate].shape = {64, 160}; },
               {kGate, "[64, 160]", "[160, 64]"});
  expect_error("llama", [](Tensors&, json::Object& c) { c["vocab_size"] = json::Value(300); },
               {"model.embed_tokens.weight", "[288, 64]", "[300, 64]"});
  expect_error("llama",
               [](Tensors&, json::Object& c) { c["num_key_value_heads"] = json::Value(1); },
               {"k_proj.weight", "[32, 64]", "[16, 64]"});
  expect_error("gpt-oss",
               [](Tensors&, json::Object& c) { c["num_local_experts"] = json::Value(8); },
               {"router.weight", "[4, 64]", "[8, 64]"});
}

TEST_F(Load, NumbersThatAreNoneAreRefused) {
  const auto poison = [](const char* name, uint16_t bits) {
    return [=](Tensors& t, json::Object&) {
      std::memcpy(t[name].bytes.data() + t[name].bytes.size() - 2, &bits, 2);
    };
  };
  expect_error("llama", poison(kGate, 0x7fc0), {kGate, "NaN"});
  expect_error("llama", poison(kGate, 0xff80), {kGate, "infinity"});
  expect_error("llama", poison("model.norm.weight", 0x7f80), {"model.norm.weight", "infinity"});
  expect_error("qwen2", poison("model.layers.0.self_attn.k_proj.bias", 0x7fc0),
               {"model.layers.0.self_attn.k_proj.bias", "NaN"});
}

TEST_F(Load, UnknownTypesAreNamed) {
  expect_error("llama",
               [](Tensors& t, json::Object&) {
                 t[kGate].dtype = "F8_E5M2";
                 t[kGate].bytes.resize(t[kGate].bytes.size() / 2);
               },
               {kGate, "F8_E5M2", "not supported"});
  expect_error("llama", [](Tensors&, json::Object& c) { c["model_type"] = json::Value("mamba9"); },
               {"unsupported architecture 'mamba9'"});
}

TEST(Finite, FindsTheScalesOfEveryFormat) {
  for (const quant::FormatInfo& info : quant::all_formats()) {
    const auto block = static_cast<size_t>(info.block_bytes);
    const auto head = static_cast<size_t>(info.head_bytes);
    const int64_t n = 3 * info.block_size;
    std::vector<uint8_t> row(quant::row_bytes(info.format, n), 0);
    EXPECT_TRUE(models::all_finite(info.format, row.data(), n)) << info.name;
    // Whatever two bytes are set to all ones: refused exactly when a number decodes to none.
    for (size_t at = head > 0 ? 0 : block; at + 2 <= head + 2 * block; ++at) {
      std::fill(row.begin(), row.end(), 0);
      row[at] = row[at + 1] = 0xff;
      std::vector<float> values(static_cast<size_t>(n));
      info.decode(row.data(), values.data(), n);
      EXPECT_EQ(models::all_finite(info.format, row.data(), n), models::all_finite(values))
          << info.name << " at byte " << at;
    }
  }
}

}  // namespace
}  // namespace freshet
