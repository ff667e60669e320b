// GPTQ, AWQ and pack-quantized checkpoints of 2 to 8 bits mean their numbers: a model of them gives
// the logits of one of the same numbers in F32, which are computed here from the published
// definition alone.
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
  bool whole_words = false;  // as compressed-tensors packed until 2025
  bool one_scale = false;    // for all of a matrix
  bool other_zeros = false;  // those of the other version of GPTQ's format

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
    if (p.one_scale) scale.assign(scale.size(), scale[0]);
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

// `lines` runs of n numbers, each packed into words by itself; number(i, k): number k of run i. The
// words of a run lie in a row, or (`down`) in a column. Numbers are added, so that -1 borrows.
template <class Number>
Tensor runs(int64_t lines, int64_t n, const Packing& p, bool down, const Number& number) {
  const int64_t per = 32 / p.bits;
  const int64_t size = p.whole_words ? (n + per - 1) / per : (n * p.bits + 31) / 32;
  std::vector<uint32_t> all(static_cast<size_t>(lines * size));
  for (int64_t i = 0; i < lines; ++i) {
    const auto word = [&](int64_t w) -> uint32_t& {
      return all[static_cast<size_t>(down ? w * lines + i : i * size + w)];
    };
    for (int64_t k = 0; k < n; ++k) {
      const int64_t bit = k * p.bits;
      const int64_t at = p.whole_words ? k / per : bit / 32;
      const int64_t shift = p.whole_words ? k % per * p.bits : bit % 32;
      auto v = static_cast<uint32_t>(number(i, k));
      if (32 % p.bits != 0) v &= (1u << p.bits) - 1;
      word(at) += v << shift;
      if (shift + p.bits > 32) word(at + 1) += v >> (32 - shift);
    }
  }
  Tensor t{"I32", {down ? size : lines, down ? lines : size}, {}};
  for (const uint32_t w : all) append(t.bytes, w);
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
  Tensor scales{p.scales, {}, {}};
  put_scales(scales, m, p.is(kPack));
  if (p.one_scale) {
    scales.shape = {1};
    scales.bytes.resize(scales.dtype == "F32" ? 4 : 2);
  }
  const auto q = [&](int64_t r, int64_t c) { return m.q[m.at(r, c)]; };
  const auto zero = [&](int64_t g, int64_t r) { return m.zero[m.of(r, g)]; };
  if (p.is(kPack)) {
    t[stem + ".weight_packed"] = runs(m.rows, m.cols, p, false, q);
    t[stem + ".weight_scale"] = scales;
    t[stem + ".weight_shape"] = {"I64", {2}, std::string(16, '\0')};
    if (!p.symmetric) t[stem + ".weight_zero_point"] = runs(m.groups, m.rows, p, true, zero);
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
  const int less = p.is(kGptqV2) == p.other_zeros ? 1 : 0;
  t[stem + ".qweight"] = runs(m.rows, m.cols, p, true, q);
  t[stem + ".qzeros"] =
      runs(m.groups, m.rows, p, false, [&](int64_t g, int64_t r) { return zero(g, r) - less; });
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

void to_integer_llama(Tensors& t, json::Object& config, const Packing& p, bool packed) {
  constexpr int64_t kHidden = 128, kFf = 384;
  config["hidden_size"] = json::Value(kHidden);
  config["intermediate_size"] = json::Value(kFf);
  config["head_dim"] = json::Value(32);
  config["quantization_config"] =
      *json::parse(fmt::format(R"({{{}, "group_size": {}, "sym": {}, "num_bits": {}}})", p.config,
                               p.group, p.symmetric, p.bits));
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

using IntegerLoad = Load;

TEST_F(IntegerLoad, PackedNumbersAreThoseOfTheDefinition) {
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
      // Other widths; whether numbers straddle words or not.
      {{kGptq, 128, false, "F16", 2}, Format::kInt2G128},
      {{kGptq, 32, true, "F16", 2}, Format::kInt2G32},
      {{kGptq, 128, true, "F16", 3}, Format::kInt3G128},
      {{kGptqV2, 64, false, "F16", 3}, Format::kInt3G32},
      {{kGptq, 64, false, "F16", 5}, Format::kQ8_0},
      {{kGptq, 128, true, "F16", 6}, Format::kQ8_0},
      {{kGptqV2, 128, false, "BF16", 8}, Format::kInt8G128},
      {{kPack, 128, true, "BF16", 2}, Format::kInt2G128},
      {{kPack, 128, false, "BF16", 3}, Format::kInt3G128},
      {{kPack, 32, false, "F16", 3, 0.0005f, false, true}, Format::kInt3G32},
      {{kPack, 128, true, "F16", 5, 0.0005f, false, true}, Format::kQ8_0},
      {{kPack, 32, false, "BF16", 6, 1e-9f}, Format::kInt8G32},
      {{kPack, 128, true, "F16", 7}, Format::kQ8_0},
      {{kPack, 128, true, "F16", 7, 0.0005f, false, true}, Format::kQ8_0},
      {{kPack, 64, false, "F16", 8}, Format::kInt8G32},
      // One scale; groups that no format has.
      {{kPack, -1, true, "BF16", 4, 0.0005f, false, false, true}, Format::kInt4G128},
      {{kGptq, 16, false, "F16", 4}, Format::kF32},
      // Symmetric numbers whose zero points are those of the other version.
      {{kGptq, 128, true, "F16", 4, 0.0005f, false, false, false, true}, Format::kInt4G128},
      {{kGptqV2, 128, true, "F16", 3, 0.0005f, false, false, false, true}, Format::kInt3G128},
      // Scales that F16 does not hold.
      {{kPack, 32, true, "BF16", 4, 1e-7f}, Format::kInt4G32},
  };
  for (const auto& [packing, format] : cases) {
    const Packing& p = packing;
    std::vector<float> logits[2];
    for (const bool packed : {false, true}) {
      auto model =
          load("llama", [&](Tensors& t, json::Object& c) { to_integer_llama(t, c, p, packed); });
      ASSERT_TRUE(model.ok()) << model.status().message();
      int stored = 0;
      for (const Model::WeightInfo& w : (*model)->weights()) stored += w.format == format;
      const int others = format == Format::kF32 ? static_cast<int>((*model)->weights().size()) : 0;
      EXPECT_EQ(stored, others > 0    ? others
                        : !packed     ? 0
                        : p.symmetric ? 15
                                      : 14)
          << p.config << p.group << " of " << p.bits;
      logits[packed ? 1 : 0] = first_logits(**model);
    }
    EXPECT_EQ(logits[0], logits[1]) << p.config << p.group << p.scales << p.bits;
  }
}

TEST_F(IntegerLoad, GroupsInActOrderAreSorted) {
  for (const Packing& p : {Packing{kGptq, 32, false, "F16", 4, 0.0005f, true},
                           Packing{kGptqV2, 128, true, "F16", 4, 0.0005f, true}}) {
    std::vector<float> logits[2];
    for (const bool packed : {false, true}) {
      auto model =
          load("llama", [&](Tensors& t, json::Object& c) { to_integer_llama(t, c, p, packed); });
      ASSERT_TRUE(model.ok()) << model.status().message();
      logits[packed ? 1 : 0] = first_logits(**model);
    }
    for (size_t i = 0; i < logits[0].size(); ++i) {  // sums are of another order
      EXPECT_NEAR(logits[0][i], logits[1][i], 1e-4f * std::max(1.0f, std::abs(logits[0][i])));
    }
  }
}

TEST_F(IntegerLoad, ModulesMayDifferInBitsAndGroups) {
  const auto model = load("llama", [](Tensors& t, json::Object& c) {
    to_integer_llama(t, c, {kGptq}, true);
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

TEST_F(IntegerLoad, WhatHasNoMeaningIsRefused) {
  using Change = std::function<void(Tensors&, json::Object&)>;
  const auto of = [](const Packing& p, const Change& more) -> Change {
    return [=](Tensors& t, json::Object& c) {
      to_integer_llama(t, c, p, true);
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

TEST_F(IntegerLoad, AnIndexThatWasNeverWrittenIsNone) {
  const auto model = load("llama", [](Tensors& t, json::Object& c) {
    to_integer_llama(t, c, {kGptq, 64}, true);
    std::string& index = t[std::string(kGate) + ".g_idx"].bytes;
    index.assign(index.size(), '\0');
  });
  EXPECT_TRUE(model.ok()) << model.status().message();
}

}  // namespace
}  // namespace freshet
