// GPTQ, AWQ and pack-quantized checkpoints mean their numbers: a model of them gives the logits of
// one of the same numbers in F32, which are computed here from the published definition alone.
#include <cmath>
#include <cstring>

#include "models/load_test.h"
#include "tensor/dtype.h"

namespace freshet {
namespace {

constexpr const char* kGate = "model.layers.1.mlp.gate_proj";

// quantization_config without its group size.
constexpr const char* kGptq = R"("quant_method": "gptq", "bits": 4, "desc_act": false)";
constexpr const char* kGptqV2 =
    R"("quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2")";
constexpr const char* kAwq = R"("quant_method": "awq", "bits": 4, "version": "gemm")";
constexpr const char* kPack = R"("quant_method": "compressed-tensors", "format": "pack-quantized")";

struct Packing {
  const char* config;
  int64_t group = 128;  // -1: rows
  bool symmetric = false;
  const char* scales = "F16";
  int bits = 4;
  float scale_unit = 0.0005f;
  bool act_order = false;

  bool is(const char* what) const { return std::strcmp(config, what) == 0; }
};

// A matrix of whole numbers q, zero points and scales of groups.
struct Matrix4 {
  int64_t rows, cols, group, groups;
  std::vector<int> q, zero;
  std::vector<float> scale;
  std::vector<int64_t> group_of;  // each column's

  Matrix4(const std::string& name, int64_t n, int64_t k, const Packing& p)
      : rows(n), cols(k), group(p.group < 0 ? k : p.group), groups(k / group) {
    auto state = static_cast<uint32_t>(name.size() * 977 + static_cast<size_t>(n));
    const auto random = [&](int below) {
      state = state * 1664525 + 1013904223;
      return static_cast<int>((state >> 16) % static_cast<uint32_t>(below));
    };
    const int all = 1 << p.bits;
    for (int64_t i = 0; i < n * k; ++i) q.push_back(random(all));
    for (int64_t i = 0; i < n * groups; ++i) {
      zero.push_back(p.symmetric ? all / 2 : random(all));
      const float d = p.scale_unit * static_cast<float>(3 + random(11)) / static_cast<float>(all);
      scale.push_back(std::strcmp(p.scales, "F16") == 0 ? f16_to_f32(f32_to_f16(d))
                                                        : bf16_to_f32(f32_to_bf16(d)));
    }
    for (int64_t c = 0; c < k; ++c) group_of.push_back(c / group);
    for (int64_t c = k - 1; p.act_order && c > 0; --c) {
      std::swap(group_of[static_cast<size_t>(c)],
                group_of[static_cast<size_t>(random(static_cast<int>(c)))]);
    }
  }
  size_t at(int64_t r, int64_t c) const { return static_cast<size_t>(r * cols + c); }
  size_t of(int64_t r, int64_t g) const { return static_cast<size_t>(r * groups + g); }
};

// Words [down, across] of `per` numbers each; number(i, j, k): number k of word (i, j).
template <class Number>
Tensor words(int64_t down, int64_t across, int bits, const Number& number) {
  Tensor t{"I32", {down, across}, {}};
  for (int64_t i = 0; i < down; ++i) {
    for (int64_t j = 0; j < across; ++j) {
      uint32_t word = 0;
      for (int k = 0; k < 32 / bits; ++k) {
        word += static_cast<uint32_t>(number(i, j, k)) << (bits * k);
      }
      append(t.bytes, word);
    }
  }
  return t;
}

void put_scales(Tensor& t, const Matrix4& m, bool by_row) {
  const auto put = [&](float d) {
    if (t.dtype == "F32") return append(t.bytes, d);
    append(t.bytes, t.dtype == "F16" ? f32_to_f16(d) : f32_to_bf16(d));
  };
  t.shape = by_row ? std::vector{m.rows, m.groups} : std::vector{m.groups, m.rows};
  for (int64_t i = 0; i < t.shape[0]; ++i) {
    for (int64_t j = 0; j < t.shape[1]; ++j) put(m.scale[by_row ? m.of(i, j) : m.of(j, i)]);
  }
}

void put_packed(Tensors& t, const std::string& stem, const Matrix4& m, const Packing& p) {
  const int n = 32 / p.bits;
  Tensor scales{p.scales, {}, {}};
  put_scales(scales, m, p.is(kPack));
  if (p.is(kPack)) {
    t[stem + ".weight_packed"] = words(
        m.rows, m.cols / n, p.bits, [&](auto i, auto j, int k) { return m.q[m.at(i, j * n + k)]; });
    t[stem + ".weight_scale"] = scales;
    t[stem + ".weight_shape"] = {"I64", {2}, std::string(16, '\0')};
    if (p.symmetric) return;
    t[stem + ".weight_zero_point"] =
        words(m.rows / n, m.groups, p.bits,
              [&](auto i, auto j, int k) { return m.zero[m.of(i * n + k, j)]; });
    return;
  }
  t[stem + ".scales"] = scales;
  if (p.is(kAwq)) {
    // As AutoAWQ packs: numbers 0, 2, 4, 6, 1, 3, 5, 7 of eight, from the lowest bits on.
    constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    t[stem + ".qweight"] = words(m.cols, m.rows / 8, 4, [&](auto i, auto j, int k) {
      return m.q[m.at(j * 8 + kOrder[k], i)];
    });
    t[stem + ".qzeros"] = words(m.groups, m.rows / 8, 4, [&](auto i, auto j, int k) {
      return m.zero[m.of(j * 8 + kOrder[k], i)];
    });
    return;
  }
  const int less = p.is(kGptq) ? 1 : 0;
  t[stem + ".qweight"] = words(m.cols / n, m.rows, p.bits,
                               [&](auto i, auto j, int k) { return m.q[m.at(j, i * n + k)]; });
  t[stem + ".qzeros"] = words(m.groups, m.rows / n, p.bits, [&](auto i, auto j, int k) {
    return m.zero[m.of(j * n + k, i)] - less;
  });
  Tensor index{"I32", {m.cols}, {}};
  for (int64_t c = 0; c < m.cols; ++c) {
    append(index.bytes, static_cast<int32_t>(m.group_of[static_cast<size_t>(c)]));
  }
  t[stem + ".g_idx"] = index;
}

void put(Tensors& t, const std::string& stem, int64_t rows, int64_t cols, const Packing& p,
         bool packed) {
  const Matrix4 m(stem, rows, cols, p);
  t.erase(stem + ".weight");
  if (packed) return put_packed(t, stem, m, p);
  Tensor plain{"F32", {rows, cols}, {}};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const size_t g = m.of(r, m.group_of[static_cast<size_t>(c)]);
      append(plain.bytes, m.scale[g] * static_cast<float>(m.q[m.at(r, c)] - m.zero[g]));
    }
  }
  t[stem + ".weight"] = plain;
}

void to_int4_llama(Tensors& t, json::Object& config, const Packing& p, bool packed) {
  constexpr int64_t kHidden = 128, kFf = 384;
  config["hidden_size"] = json::Value(kHidden);
  config["intermediate_size"] = json::Value(kFf);
  config["head_dim"] = json::Value(32);
  config["quantization_config"] =
      *json::parse(fmt::format(R"({{{}, "group_size": {}}})", p.config, p.group));
  for (auto& [name, tensor] : t) {
    if (!name.ends_with("norm.weight")) continue;
    tensor = {"F32", {kHidden}, {}};
    for (int64_t i = 0; i < kHidden; ++i) append(tensor.bytes, 1.0f);
  }
  put(t, "model.embed_tokens", 288, kHidden, p, false);
  put(t, "lm_head", 288, kHidden, p, packed && p.symmetric);
  for (int l = 0; l < 2; ++l) {
    const std::string at = fmt::format("model.layers.{}.", l);
    put(t, at + "self_attn.q_proj", 128, kHidden, p, packed);
    put(t, at + "self_attn.k_proj", 64, kHidden, p, packed);
    put(t, at + "self_attn.v_proj", 64, kHidden, p, packed);
    put(t, at + "self_attn.o_proj", kHidden, 128, p, packed);
    put(t, at + "mlp.gate_proj", kFf, kHidden, p, packed);
    put(t, at + "mlp.up_proj", kFf, kHidden, p, packed);
    put(t, at + "mlp.down_proj", kHidden, kFf, p, packed);
  }
}

using Int4Load = Load;

TEST_F(Int4Load, PackedNumbersAreThoseOfTheDefinition) {
  using quant::Format;
  const std::pair<Packing, Format> cases[] = {
      {{kGptq}, Format::kInt4G128},
      {{kGptq, 128, true}, Format::kInt4G128},
      {{kGptq, 64}, Format::kInt4G32},
      {{kGptq, 32, true}, Format::kQ4_0},
      {{kGptq, 128, true, "F16", 8}, Format::kQ8_0},
      {{kGptqV2}, Format::kInt4G128},
      {{kGptqV2, -1, true, "BF16"}, Format::kInt4G128},
      {{kAwq}, Format::kInt4G128},
      {{kAwq, 64, false, "BF16"}, Format::kInt4G32},
      {{kAwq, 32}, Format::kInt4G32},
      {{kPack}, Format::kInt4G128},
      {{kPack, 128, true, "BF16"}, Format::kInt4G128},
      {{kPack, 32, true, "BF16"}, Format::kInt4G32},
      {{kPack, -1, false, "F32"}, Format::kInt4G128},
      {{kPack, 64, true, "F16", 8}, Format::kQ8_0},
      // Scales that F16 does not hold.
      {{kPack, 32, true, "BF16", 4, 1e-7f}, Format::kInt4G32},
  };
  for (const auto& [packing, format] : cases) {
    const Packing& p = packing;
    std::vector<float> logits[2];
    for (const bool packed : {false, true}) {
      auto model =
          load("llama", [&](Tensors& t, json::Object& c) { to_int4_llama(t, c, p, packed); });
      ASSERT_TRUE(model.ok()) << model.status().message();
      int stored = 0;
      for (const Model::WeightInfo& w : (*model)->weights()) stored += w.format == format;
      EXPECT_EQ(stored, !packed ? 0 : p.symmetric ? 15 : 14) << p.config << p.group;
      logits[packed ? 1 : 0] = first_logits(**model);
    }
    EXPECT_EQ(logits[0], logits[1]) << p.config << p.group << p.scales;
  }
}

TEST_F(Int4Load, GroupsInActOrderAreSorted) {
  for (const Packing& p : {Packing{kGptq, 32, false, "F16", 4, 0.0005f, true},
                           Packing{kGptqV2, 128, true, "F16", 4, 0.0005f, true}}) {
    std::vector<float> logits[2];
    for (const bool packed : {false, true}) {
      auto model =
          load("llama", [&](Tensors& t, json::Object& c) { to_int4_llama(t, c, p, packed); });
      ASSERT_TRUE(model.ok()) << model.status().message();
      logits[packed ? 1 : 0] = first_logits(**model);
    }
    for (size_t i = 0; i < logits[0].size(); ++i) {  // sums are of another order
      EXPECT_NEAR(logits[0][i], logits[1][i], 1e-4f * std::max(1.0f, std::abs(logits[0][i])));
    }
  }
}

TEST_F(Int4Load, ModulesMayDifferInBitsAndGroups) {
  const auto model = load("llama", [](Tensors& t, json::Object& c) {
    to_int4_llama(t, c, {kGptq}, true);
    const Packing finer{kGptq, 32, true, "F16", 8};
    put(t, kGate, 384, 128, finer, true);
    auto& q = c["quantization_config"];
    q = *json::parse(R"({"quant_method": "gptq", "bits": 4, "group_size": 128,
                         "dynamic": {"+:.*gate.*": {"bits": 8, "group_size": 32}}})");
  });
  ASSERT_TRUE(model.ok()) << model.status().message();
  int bytes = 0;
  for (const Model::WeightInfo& w : (*model)->weights()) bytes += w.format == quant::Format::kQ8_0;
  EXPECT_EQ(bytes, 1);
}

TEST_F(Int4Load, WhatHasNoMeaningIsRefused) {
  using Change = std::function<void(Tensors&, json::Object&)>;
  const auto of = [](const Packing& p, const Change& more) -> Change {
    return [=](Tensors& t, json::Object& c) {
      to_int4_llama(t, c, p, true);
      more(t, c);
    };
  };
  const std::string gate = kGate;
  const auto set = [](const char* text) -> Change {
    return [=](Tensors&, json::Object& c) { c["quantization_config"] = *json::parse(text); };
  };
  const auto erase = [&](const char* part) -> Change {
    return [=](Tensors& t, json::Object&) { t.erase(gate + part); };
  };
  const auto shape = [&](const char* part, const std::vector<int64_t>& dims) -> Change {
    return [=](Tensors& t, json::Object&) { t[gate + part].shape = dims; };
  };
  for (const char* missing : {".scales", ".qzeros"}) {
    expect_error("llama", of({kGptq}, erase(missing)), {"gate_proj", missing, "missing"});
  }
  expect_error("llama", of({kPack}, erase(".weight_scale")), {"weight_scale", "missing"});
  expect_error("llama",
               of({kGptq}, [](Tensors&, json::Object& c) { c.erase("quantization_config"); }),
               {"qweight", "no quantization_config"});
  expect_error("llama", of({kGptq}, set(R"({"quant_method": "hqq"})")), {"hqq", "gptq, awq"});
  expect_error("llama", of({kGptq}, set(R"({"quant_method": 4})")), {"quant_method ''"});
  expect_error("llama", of({kAwq}, set(R"({"quant_method": "awq", "version": "GEMV"})")),
               {"'gemv'", "gemm"});
  expect_error("llama",
               of({kGptq}, set(R"({"quant_method": "gptq", "checkpoint_format": "marlin"})")),
               {"'marlin'", "gptq_v2"});
  expect_error("llama", of({kPack}, set(R"({"quant_method": "compressed-tensors",
                                            "format": "marlin-24"})")),
               {"'marlin-24'", "pack-quantized"});
  expect_error("llama", of({kGptq}, set(R"({"quant_method": "gptq", "group_size": 64})")),
               {"scales", "1 groups"});
  expect_error("llama", of({kGptq}, shape(".qweight", {384, 16})), {"[384, 16]", "[384, 128]"});
  expect_error("llama", of({kAwq}, shape(".qweight", {64, 96})), {"[64, 96]", "awq"});
  expect_error("llama", of({kGptq}, shape(".qzeros", {48, 1})), {"qzeros", "[48, 1]", "[1, 48]"});
  expect_error("llama", of({kGptq}, shape(".scales", {384, 1})), {"scales", "384 columns"});
  expect_error("llama", of({kGptq}, shape(".scales", {384})), {"scales", "384 columns"});
  expect_error("llama", of({kGptq, 128, false, "F16", 8}, [](Tensors&, json::Object&) {}),
               {"8 bits", "128"});
  const auto type = [&](const char* part, const char* dtype) -> Change {
    return [=](Tensors& t, json::Object&) { t[gate + part].dtype = dtype; };
  };
  expect_error("llama", of({kGptq}, type(".qweight", "F32")), {"qweight", "F32", "I32"});
  expect_error("llama", of({kGptq}, type(".qzeros", "F32")), {"qzeros", "F32", "I32"});
  expect_error("llama", of({kGptq}, type(".g_idx", "F32")), {"g_idx", "F32", "I32"});
  expect_error(
      "llama",
      of({kAwq}, [&](Tensors& t,
                     json::Object&) { t[gate + ".scales"].bytes.replace(0, 2, "\x00\x7e", 2); }),
      {"scales", "NaN"});
  const auto first_group = [&](char group) -> Change {
    return [=](Tensors& t, json::Object&) { t[gate + ".g_idx"].bytes[0] = group; };
  };
  expect_error("llama", of({kGptq, 64}, first_group(1)), {"g_idx", "in group 1", "2 groups of 64"});
  expect_error("llama", of({kGptq, 64}, first_group(2)), {"g_idx", "in group 2", "2 groups of 64"});
  expect_error("llama", of({kGptq, 64}, first_group(-1)), {"g_idx", "in group"});
}

TEST_F(Int4Load, AnIndexThatWasNeverWrittenIsNone) {
  const auto model = load("llama", [](Tensors& t, json::Object& c) {
    to_int4_llama(t, c, {kGptq, 64}, true);
    std::string& index = t[std::string(kGate) + ".g_idx"].bytes;
    index.assign(index.size(), '\0');
  });
  EXPECT_TRUE(model.ok()) << model.status().message();
}

}  // namespace
}  // namespace freshet
