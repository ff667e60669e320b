// What the containers pack, Freshet reads: a model of packed matrices gives the logits of one with
// the same numbers in F32.
#include <cmath>

#include "models/load_test.h"
#include "quantizer/containers/container.h"
#include "quantizer/containers/scheme.h"
#include "tensor/dtype.h"

namespace freshet::quantizer {
namespace {

class ReadBack : public Load {
 protected:
  // A matrix of integers with scales that F16 and BF16 hold.
  static CodedMatrix random_matrix(const std::string& name, int64_t rows, int64_t cols,
                                   const Scheme& s) {
    CodedMatrix m;
    m.rows = rows;
    m.cols = cols;
    auto state = static_cast<uint32_t>(name.size() * 977 + static_cast<size_t>(rows));
    const auto random = [&](uint32_t below) {
      state = state * 1664525 + 1013904223;
      return (state >> 16) % below;
    };
    const uint32_t all = 1u << s.bits;
    const int64_t groups = s.group > 0 ? cols / s.group : 1;
    for (int64_t i = 0; i < rows * cols; ++i) m.codes.push_back(static_cast<uint8_t>(random(all)));
    for (int64_t i = 0; i < rows * groups; ++i) {
      m.scales.push_back(0x1p-14f * static_cast<float>(random(100) + 20) /
                         static_cast<float>(all >> 2));
      if (!s.symmetric) m.zeros.push_back(static_cast<uint8_t>(random(all)));
    }
    return m;
  }

  static void put(Tensors& t, const std::string& stem, int64_t rows, int64_t cols,
                  const Container& c, const Scheme& s, bool packed) {
    CodedMatrix m = random_matrix(stem, rows, cols, s);
    ASSERT_TRUE(c.settle(m, s).ok());
    t.erase(stem + ".weight");
    if (packed) {
      const auto tensors = c.pack(stem, m, s, {});
      ASSERT_TRUE(tensors.ok()) << tensors.status().message();
      for (const StoredTensor& x : *tensors) {
        t[x.name] = {x.dtype, x.shape, std::string(x.bytes.begin(), x.bytes.end())};
      }
      return;
    }
    Tensor plain{"F32", {rows, cols}, {}};
    const int64_t group = s.group > 0 ? s.group : cols;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < cols; ++k) {
        const auto at = static_cast<size_t>(r * (cols / group) + k / group);
        const int zero = s.symmetric ? 1 << (s.bits - 1) : m.zeros[at];
        const int code = m.codes[static_cast<size_t>(r * cols + k)];
        append(plain.bytes, m.scales[at] * static_cast<float>(code - zero));
      }
    }
    t[stem + ".weight"] = plain;
  }

  std::vector<float> logits(const Container& c, const Scheme& s, bool packed) {
    auto model = load("llama", [&](Tensors& t, json::Object& config) {
      constexpr int64_t kHidden = 128, kFf = 384;
      config["hidden_size"] = kHidden;
      config["intermediate_size"] = kFf;
      config["head_dim"] = 32;
      ConfigRequest request;
      request.groups = {{s, {}}};
      request.ignore = {"lm_head"};
      if (packed) config["quantization_config"] = *c.quantization_config(request);
      for (auto& [name, tensor] : t) {
        if (!name.ends_with("norm.weight")) continue;
        tensor = {"F32", {kHidden}, {}};
        for (int64_t i = 0; i < kHidden; ++i) append(tensor.bytes, 1.0f);
      }
      put(t, "model.embed_tokens", 288, kHidden, c, s, false);
      put(t, "lm_head", 288, kHidden, c, s, false);
      for (int l = 0; l < 2; ++l) {
        const std::string at = fmt::format("model.layers.{}.", l);
        put(t, at + "self_attn.q_proj", 128, kHidden, c, s, packed);
        put(t, at + "self_attn.k_proj", 64, kHidden, c, s, packed);
        put(t, at + "self_attn.v_proj", 64, kHidden, c, s, packed);
        put(t, at + "self_attn.o_proj", kHidden, 128, c, s, packed);
        put(t, at + "mlp.gate_proj", kFf, kHidden, c, s, packed);
        put(t, at + "mlp.up_proj", kFf, kHidden, c, s, packed);
        put(t, at + "mlp.down_proj", kHidden, kFf, c, s, packed);
      }
    });
    if (!model.ok()) {
      ADD_FAILURE() << model.status().message();
      return {};
    }
    return first_logits(**model);
  }
};

TEST_F(ReadBack, IntegersInGroups) {
  for (const char* format : {"gptq", "awq", "compressed-tensors"}) {
    for (const char* name :
         {"W4A16", "W4A16_G32", "W4A16_ASYM", "W4A16_ASYM_G64", "W4A16_CHANNEL", "W8A16_G64"}) {
      const Container& c = **container_by_name(format);
      const Scheme s = *scheme_by_name(name);
      if (!c.supports(s).ok()) continue;
      SCOPED_TRACE(fmt::format("{} {}", format, name));
      EXPECT_EQ(logits(c, s, true), logits(c, s, false));
    }
  }
}

}  // namespace
}  // namespace freshet::quantizer
