// NVFP4, MXFP4, MXFP8, NF4 and FP4 as published mean their numbers: a model of them gives the
// logits of one of the same numbers in F32, which are computed here from the published definition
// alone.
#include <cmath>
#include <cstring>

#include "models/load_test.h"

namespace freshet {
namespace {

constexpr const char* kStem = "model.layers.1.mlp.gate_proj";
constexpr int64_t kRows = 160, kCols = 64;

constexpr float kE2M1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
constexpr float kNormal[16] = {-1.0f,        -0.6961928f,  -0.52507305f,  -0.3949175f,
                               -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
                               0.0795803f,   0.1609302f,   0.2461123f,    0.33791524f,
                               0.44070983f,  0.562617f,    0.72295684f,   1.0f};

class Random {
 public:
  int below(int n) {
    state_ = state_ * 1664525 + 1013904223;
    return static_cast<int>((state_ >> 16) % static_cast<uint32_t>(n));
  }

 private:
  uint32_t state_ = 12345;
};

float e2m1(int code) {
  return code & 8 ? -kE2M1[code & 7] : kE2M1[code & 7];
}
// Of the codes from 2^-2 to 1.875.
float e4m3_scale(int code) {
  return std::ldexp(static_cast<float>(8 + (code & 7)), (code >> 3) - 10);
}

enum class Fp4 { kDivisor, kFactor, kPowers };

// The gate of layer 1 as codes with scales, or as the F32 that they stand for.
void put_fp4(Tensors& t, Fp4 kind, bool coded) {
  Random random;
  const bool powers = kind == Fp4::kPowers;
  const int64_t block = powers ? 32 : 16;
  const float whole = powers ? 1.0f : 0x1p-6f;
  Tensor codes{"U8", {kRows, kCols / 2}, {}}, plain{"F32", {kRows, kCols}, {}};
  Tensor scales{powers ? "U8" : "F8_E4M3", {kRows, kCols / block}, {}};
  float scale = 0.0f;
  for (int64_t i = 0; i < kRows * kCols; i += 2) {
    if (i % block == 0) {
      const int code = powers ? 118 + random.below(8) : 40 + random.below(24);
      append(scales.bytes, static_cast<uint8_t>(code));
      scale = powers ? std::ldexp(1.0f, code - 127) : e4m3_scale(code);
    }
    const int even = random.below(16), odd = random.below(16);
    append(codes.bytes, static_cast<uint8_t>(even | odd << 4));
    append(plain.bytes, e2m1(even) * scale * whole);
    append(plain.bytes, e2m1(odd) * scale * whole);
  }
  const std::string stem = kStem;
  t[stem + ".weight"] = plain;
  if (!coded) return;
  t.erase(stem + ".weight");
  t[stem + (kind == Fp4::kFactor ? ".weight" : ".weight_packed")] = codes;
  t[stem + ".weight_scale"] = scales;
  if (powers) return;
  Tensor of_all{"F32", {}, {}};
  append(of_all.bytes, kind == Fp4::kFactor ? whole : 1.0f / whole);
  t[stem + (kind == Fp4::kFactor ? ".weight_scale_2" : ".weight_global_scale")] = of_all;
  t[stem + ".input_scale"] = of_all;  // not read
}

void put_mxfp8(Tensors& t, bool coded) {
  Random random;
  Tensor codes{"F8_E4M3", {kRows, kCols}, {}}, plain{"F32", {kRows, kCols}, {}};
  Tensor scales{"U8", {kRows, kCols / 32}, {}};
  int power = 0;
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    if (i % 32 == 0) append(scales.bytes, static_cast<uint8_t>(power = 116 + random.below(8)));
    const int code = 40 + random.below(24);
    append(codes.bytes, static_cast<uint8_t>(code));
    append(plain.bytes, std::ldexp(e4m3_scale(code), power - 127));
  }
  const std::string name = std::string(kStem) + ".weight";
  t[name] = coded ? codes : plain;
  if (coded) t[name + "_scale"] = scales;
}

// `twice`: the scales are quantised, too.
void put_nf4(Tensors& t, bool twice, bool coded) {
  Random random;
  const std::string name = std::string(kStem) + ".weight";
  constexpr int64_t kBlocks = kRows * kCols / 64;
  Tensor codes{"U8", {kRows * kCols / 2, 1}, {}}, plain{"F32", {kRows, kCols}, {}};
  Tensor absmax{twice ? "U8" : "F32", {kBlocks}, {}}, levels{"F32", {16}, {}};
  Tensor map{"F32", {256}, {}}, outer{"F32", {(kBlocks + 255) / 256}, {}};
  for (const float v : kNormal) append(levels.bytes, v);
  for (int i = 0; i < 256; ++i) append(map.bytes, static_cast<float>(i - 128) / 128.0f);
  for (int64_t i = 0; i < outer.shape[0]; ++i) append(outer.bytes, 0.0625f);
  float scale = 0.0f;
  for (int64_t i = 0; i < kRows * kCols; i += 2) {
    if (i % 64 == 0) {
      const int code = random.below(256);
      scale = static_cast<float>(code - 128) / 128.0f * 0.0625f + 0.125f;
      if (twice) {
        append(absmax.bytes, static_cast<uint8_t>(code));
      } else {
        append(absmax.bytes, scale);
      }
    }
    const int even = random.below(16), odd = random.below(16);
    append(codes.bytes, static_cast<uint8_t>(even << 4 | odd));
    append(plain.bytes, kNormal[even] * scale);
    append(plain.bytes, kNormal[odd] * scale);
  }
  t[name] = coded ? codes : plain;
  if (!coded) return;
  const std::string state =
      R"({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [160, 64])" +
      std::string(twice ? R"(, "nested_blocksize": 256, "nested_offset": 0.125})" : "}");
  t[name + ".absmax"] = absmax;
  t[name + ".quant_map"] = levels;
  t[name + ".quant_state.bitsandbytes__nf4"] = {"U8", {static_cast<int64_t>(state.size())}, state};
  if (!twice) return;
  t[name + ".nested_absmax"] = outer;
  t[name + ".nested_quant_map"] = map;
}

using PublishedLoad = Load;
using Put = std::function<void(Tensors&, bool)>;

TEST_F(PublishedLoad, CodesMeanTheirNumbers) {
  using quant::Format;
  const std::pair<Put, Format> cases[] = {
      {[](Tensors& t, bool coded) { put_fp4(t, Fp4::kDivisor, coded); }, Format::kNVFP4},
      {[](Tensors& t, bool coded) { put_fp4(t, Fp4::kFactor, coded); }, Format::kNVFP4},
      {[](Tensors& t, bool coded) { put_fp4(t, Fp4::kPowers, coded); }, Format::kMXFP4},
      {put_mxfp8, Format::kMXFP8},
      {[](Tensors& t, bool coded) { put_nf4(t, false, coded); }, Format::kNF4},
      {[](Tensors& t, bool coded) { put_nf4(t, true, coded); }, Format::kNF4},
  };
  for (const auto& [put, format] : cases) {
    std::vector<float> logits[2];
    for (const bool coded : {false, true}) {
      auto model = load("llama", [&](Tensors& t, json::Object&) { put(t, coded); });
      ASSERT_TRUE(model.ok()) << model.status().message();
      int stored = 0;
      for (const Model::WeightInfo& w : (*model)->weights()) stored += w.format == format;
      EXPECT_EQ(stored, coded ? 1 : 0) << quant::info(format).name;
      logits[coded ? 1 : 0] = first_logits(**model);
    }
    EXPECT_EQ(logits[0], logits[1]) << quant::info(format).name;
  }
}

TEST_F(PublishedLoad, WhatHasNoMeaningIsRefused) {
  const std::string stem = kStem, weight = stem + ".weight";
  using Change = std::function<void(Tensors&)>;
  const auto fp4 = [&](Fp4 kind, const Change& more) {
    return [=](Tensors& t, json::Object&) {
      put_fp4(t, kind, true);
      more(t);
    };
  };
  expect_error("llama", fp4(Fp4::kDivisor, [&](Tensors& t) { t.erase(stem + ".weight_scale"); }),
               {"gate_proj.weight_scale", "missing"});
  expect_error("llama",
               fp4(Fp4::kDivisor, [&](Tensors& t) { t.erase(stem + ".weight_global_scale"); }),
               {"weight_global_scale", "weight_scale_2", "missing"});
  expect_error("llama",
               fp4(Fp4::kFactor,
                   [&](Tensors& t) { t[stem + ".weight_scale_2"].bytes = std::string(4, '\0'); }),
               {"weight_scale_2", "other than 0"});
  expect_error("llama",
               fp4(Fp4::kFactor, [&](Tensors& t) { t[weight].shape = {kCols / 2, kRows}; }),
               {"gate_proj.weight", "[32, 160]", "[160, 32]"});
  expect_error("llama",
               fp4(Fp4::kDivisor, [&](Tensors& t) { t[stem + ".weight_scale"].shape = {4, 160}; }),
               {"weight_scale", "[4, 160]", "[160, 4]"});
  expect_error("llama",
               fp4(Fp4::kDivisor, [&](Tensors& t) { t[stem + ".weight_scale"].bytes[9] = '\x7f'; }),
               {"gate_proj", "NaN"});
  expect_error("llama",
               fp4(Fp4::kPowers, [&](Tensors& t) { t[stem + ".weight_scale"].bytes[9] = '\xff'; }),
               {"weight_scale", "NaN"});
  expect_error("llama",
               fp4(Fp4::kPowers, [&](Tensors& t) { t[stem + ".weight_scale"].dtype = "I8"; }),
               {"weight_scale", "I8", "NVFP4"});
  const auto nf4 = [&](bool twice, const Change& more) {
    return [=](Tensors& t, json::Object&) {
      put_nf4(t, twice, true);
      more(t);
    };
  };
  const std::string state = weight + ".quant_state.bitsandbytes__nf4";
  expect_error("llama", nf4(false, [&](Tensors& t) { t.erase(state); }),
               {"quant_state", "missing"});
  expect_error("llama", nf4(false, [&](Tensors& t) { t[state].bytes[0] = 'x'; }),
               {"quant_state", "JSON"});
  expect_error("llama",
               nf4(false,
                   [&](Tensors& t) {
                     std::string& text = t[state].bytes;
                     text.replace(text.find("[160"), 4, "[161");
                   }),
               {"quant_state", "[160, 64]"});
  expect_error("llama", nf4(false, [&](Tensors& t) { t[weight + ".quant_map"].bytes[5] ^= 1; }),
               {"quant_map", "levels", "nf4"});
  expect_error("llama",
               nf4(false,
                   [&](Tensors& t) {
                     t[weight + ".absmax"].shape = {159};
                     t[weight + ".absmax"].bytes.resize(159 * 4);
                   }),
               {"absmax", "159", "160"});
  expect_error("llama", nf4(true, [&](Tensors& t) { t.erase(weight + ".nested_absmax"); }),
               {"nested_absmax", "missing"});
  expect_error("llama",
               [&](Tensors& t, json::Object& c) {
                 put_fp4(t, Fp4::kFactor, true);
                 t.erase(stem + ".weight_scale");
                 c["quantization_config"] = *json::parse(R"({"quant_method": "eetq"})");
               },
               {"gate_proj.weight", "'eetq'", "gptq, awq", "bitsandbytes"});
}

}  // namespace
}  // namespace freshet
