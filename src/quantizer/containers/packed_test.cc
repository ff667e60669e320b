// Tensors are, byte for byte, those that the packages make of the same codes and scales:
// compressed-tensors, AutoGPTQ, AutoAWQ and bitsandbytes (tests/peers/make_packed.py).
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include <gtest/gtest.h>

#include "loader/safetensors.h"
#include "quantizer/containers/container.h"
#include "quantizer/containers/scheme.h"

namespace freshet::quantizer {
namespace {

using loader::SafetensorsFile;
using loader::TensorSource;

template <class T>
std::vector<T> values_in(const SafetensorsFile& file, const std::string& name) {
  const TensorSource* t = file.find(name);
  if (t == nullptr) return {};
  std::vector<T> out(t->bytes / sizeof(T));
  std::memcpy(out.data(), t->data, t->bytes);
  return out;
}

Scheme scheme_of(const std::string& name, const std::string& type) {
  auto scheme = scheme_by_name(name);
  FRESHET_CHECK(scheme.ok(), "{}", scheme.status().message());
  if (type == "bfloat16") scheme->scale = ScaleType::kBF16;
  return *scheme;
}

CodedMatrix matrix_in(const SafetensorsFile& file, const std::string& at) {
  CodedMatrix m;
  const TensorSource* codes = file.find(at + "in.codes");
  FRESHET_CHECK(codes != nullptr, "{} has no codes", at);
  m.rows = codes->shape[0];
  m.cols = codes->shape[1];
  m.codes = values_in<uint8_t>(file, at + "in.codes");
  m.scales = values_in<float>(file, at + "in.scales");
  m.zeros = values_in<uint8_t>(file, at + "in.zeros");
  const auto global = values_in<float>(file, at + "in.global");
  if (!global.empty()) m.global_scale = global[0];
  m.input_scale = 0.5f;
  return m;
}

// What bitsandbytes computes from the scales, with sums in another order: equal within a unit in
// the last place of what it means. True if `name` is such a tensor.
bool expect_computed(const StoredTensor& t, const TensorSource& want) {
  const auto floats = [&](const uint8_t* from, size_t i) {
    float v;
    std::memcpy(&v, from + 4 * i, 4);
    return v;
  };
  if (t.name.ends_with(".SCB") || t.name.ends_with(".nested_absmax")) {
    // Our scales have 16 significant bits, so that their products with codes are exact.
    const float most = t.name.ends_with(".SCB") ? 0x1p-16f + 1e-6f : 1e-6f;
    for (size_t i = 0; i < t.bytes.size() / 4; ++i) {
      const float v = floats(want.data, i);
      EXPECT_NEAR(floats(t.bytes.data(), i), v, most * v) << t.name;
    }
    return true;
  }
  if (t.name.ends_with(".absmax") && t.dtype == "U8") {
    int off = 0;
    for (size_t i = 0; i < t.bytes.size(); ++i) {
      EXPECT_LE(std::abs(t.bytes[i] - want.data[i]), 1) << i;
      off += t.bytes[i] != want.data[i];
    }
    EXPECT_LE(off, 3) << "codes differ only where a scale lies between two numbers of the map";
    return true;
  }
  if (t.name.find("quant_state") == std::string::npos) return false;
  const auto parsed = [](const uint8_t* from, size_t size) {
    return *json::parse({reinterpret_cast<const char*>(from), size});
  };
  const json::Value ours = parsed(t.bytes.data(), t.bytes.size());
  const json::Value theirs = parsed(want.data, want.bytes);
  EXPECT_EQ(ours.as_object().size(), theirs.as_object().size());
  for (const auto& [key, value] : theirs.as_object()) {
    if (ours.find(key) == nullptr) {
      ADD_FAILURE() << key << " is missing";
      continue;
    }
    if (key == "nested_offset") {
      EXPECT_NEAR(ours.find(key)->as_double(), value.as_double(), 1e-6 * value.as_double());
    } else {
      EXPECT_EQ(json::write(*ours.find(key)), json::write(value)) << key;
    }
  }
  return true;
}

void expect_tensor(const SafetensorsFile& file, const std::string& at, const StoredTensor& t) {
  const std::string name = at + "out." + t.name.substr(2);  // without "x."
  const TensorSource* want = file.find(name);
  if (want == nullptr) {
    // The package's file has no activations here.
    EXPECT_TRUE(t.name == "x.input_scale") << name << " is not in the package's tensors";
    return;
  }
  EXPECT_EQ(t.dtype, want->dtype) << name;
  if (t.name.find("quant_state") == std::string::npos) {
    EXPECT_EQ(t.shape, want->shape) << name;
    ASSERT_EQ(t.bytes.size(), want->bytes) << name;
  }
  if (expect_computed(t, *want)) return;
  EXPECT_EQ(std::memcmp(t.bytes.data(), want->data, want->bytes), 0) << name;
}

TEST(Packed, TensorsAreThoseOfThePackages) {
  auto file = SafetensorsFile::open(FRESHET_UNPACKED_DATA "/packed/packed.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().message();
  std::set<std::string> cases;
  for (const TensorSource& t : file->tensors()) {
    cases.insert(t.name.substr(0, t.name.rfind('/') + 1));
  }
  EXPECT_EQ(cases.size(), 30u);
  for (const std::string& at : cases) {
    SCOPED_TRACE(at);
    const size_t first = at.find('/'), second = at.find('/', first + 1);
    const auto container = container_by_name(at.substr(0, first));
    ASSERT_TRUE(container.ok());
    const Container& c = **container;
    const Scheme scheme = scheme_of(at.substr(first + 1, second - first - 1),
                                    at.substr(second + 1, at.size() - second - 2));
    ASSERT_TRUE(c.supports(scheme).ok());
    CodedMatrix m = matrix_in(*file, at);
    if (scheme.levels == Levels::kE2M1) {  // the package stores -0 as 0
      std::ranges::replace(m.codes, uint8_t{8}, uint8_t{0});
    }
    ASSERT_TRUE(c.settle(m, scheme).ok());
    ModelFacts facts;
    facts.dtype = "float32";  // of the packages' weights
    const auto tensors = c.pack("x", m, scheme, facts);
    ASSERT_TRUE(tensors.ok()) << tensors.status().message();
    std::set<std::string> made;
    for (const StoredTensor& t : *tensors) {
      made.insert(at + "out." + t.name.substr(2));
      expect_tensor(*file, at, t);
    }
    for (const TensorSource& t : file->tensors()) {
      EXPECT_TRUE(!t.name.starts_with(at + "out.") || made.contains(t.name)) << t.name;
    }
  }
}

TEST(Packed, ScalesThatAreNotStoredExactlyAreRefused) {
  CodedMatrix m;
  m.rows = 32, m.cols = 128;
  m.codes.assign(32 * 128, 3);
  m.scales.assign(32, 0.1f);
  for (const char* name : {"compressed-tensors", "gptq", "awq"}) {
    const auto tensors =
        (*container_by_name(name))->pack("x", m, scheme_of("W4A16", "float16"), {});
    ASSERT_FALSE(tensors.ok());
    EXPECT_NE(tensors.status().message().find("F16"), std::string::npos);
  }
}

TEST(Packed, GroupsInActOrderAreStoredByGptqAlone) {
  CodedMatrix m;
  m.rows = 32, m.cols = 64;
  m.codes.assign(32 * 64, 3);
  m.scales.assign(64, 0.5f);
  for (int32_t c = 0; c < 64; ++c) m.group_of_column.push_back(c % 2);
  const Scheme scheme = scheme_of("W4A16_G32", "float16");
  for (const char* name : {"compressed-tensors", "awq"}) {
    const auto tensors = (*container_by_name(name))->pack("x", m, scheme, {});
    ASSERT_FALSE(tensors.ok());
    EXPECT_NE(tensors.status().message().find("gptq"), std::string::npos);
  }
  const auto tensors = (*container_by_name("gptq"))->pack("x", m, scheme, {});
  ASSERT_TRUE(tensors.ok());
  ASSERT_EQ(tensors->back().name, "x.g_idx");
  EXPECT_EQ(tensors->back().bytes[4], 1);
  EXPECT_EQ((*container_for(scheme_of("LLM_INT8", "")))->name, "bitsandbytes");
}

TEST(Packed, MatricesThatDoNotFitAreOneLine) {
  CodedMatrix m;
  m.rows = 32, m.cols = 160;
  m.codes.assign(32 * 160, 3);
  m.scales.assign(64, 0.5f);
  const Container& c = **container_by_name("compressed-tensors");
  auto tensors = c.pack("x", m, scheme_of("W4A16", "float16"), {});
  ASSERT_FALSE(tensors.ok());
  EXPECT_EQ(tensors.status().message(),
            "matrix 'x' has rows of 160 numbers, which are not whole groups of 128: choose a group "
            "that divides them, or leave this matrix as it is");
  m.cols = 16;
  m.codes.assign(32 * 16, 3);
  m.scales.assign(32, 1.0f);
  tensors = c.pack("x", m, scheme_of("NVFP4", "float32"), {});
  ASSERT_FALSE(tensors.ok());
  EXPECT_NE(tensors.status().message().find("calibration"), std::string::npos);
}

TEST(Packed, EachSchemeHasAContainerAndEachContainerSaysWhatItHolds) {
  for (const std::string& name : scheme_names()) {
    const Scheme scheme = scheme_of(name, "");
    EXPECT_TRUE(container_for(scheme).ok()) << name;
    for (const Container& c : containers()) {
      const Status status = c.supports(scheme);
      if (!status.ok()) {
        EXPECT_NE(status.message().find(name), std::string::npos) << status.message();
        continue;
      }
      ConfigRequest request;
      request.groups = {{scheme, {}}};
      request.ignore = {"lm_head"};
      request.producer = "freshet 1";
      const auto config = c.quantization_config(request);
      ASSERT_TRUE(config.ok()) << c.name << name;
      EXPECT_EQ(config->get_string("quant_method", ""), c.name);
      EXPECT_EQ(c.loaders(scheme, {}).size(), 5u);
    }
  }
}

TEST(Packed, LoadersNameTheMatrixThatDoesNotFit) {
  ModelFacts facts;
  facts.layers = {{"model.layers.0.mlp.down_proj", 128, 8256}};
  const Container& c = **container_by_name("compressed-tensors");
  const auto line = [&](const char* scheme) {
    return describe(c.loaders(scheme_of(scheme, ""), facts)[1]);
  };
  EXPECT_EQ(line("W4A16_G64"),
            "vLLM: does not load: its kernels take rows in multiples of 64 and columns of 128: "
            "model.layers.0.mlp.down_proj [128, 8256]");
  EXPECT_NE(line("W3A16").find("does not load: its kernels take 4 or 8 bits"), std::string::npos);
  facts.layers = {{"x", 128, 8192}};
  EXPECT_EQ(line("W4A16"),
            "vLLM: loads (rounds the F16 scales to bfloat16 unless it runs with --dtype float16)");
}

TEST(Packed, SeveralSchemesAreGroupsOfCompressedTensors) {
  ConfigRequest request;
  request.groups = {{scheme_of("W4A16", ""), {}},
                    {scheme_of("FP8_DYNAMIC", ""), {"model.layers.0.mlp.down_proj"}}};
  const auto config = (*container_by_name("compressed-tensors"))->quantization_config(request);
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->get_string("format", ""), "mixed-precision");
  const json::Value& first = *config->find("config_groups")->find("group_0");
  EXPECT_EQ(first.get_string("format", ""), "float-quantized");
  EXPECT_EQ(first.find("targets")->as_array()[0].as_string(), "model.layers.0.mlp.down_proj");
  EXPECT_FALSE((*container_by_name("awq"))->quantization_config(request).ok());
}

TEST(SchemeByName, FormsOfPresets) {
  EXPECT_EQ(scheme_of("w4a16", "").group, 128);
  EXPECT_EQ(scheme_of("W3A16_G32", "").group, 32);
  EXPECT_FALSE(scheme_of("W4A16-ASYM_G64", "").symmetric);
  EXPECT_EQ(scheme_of("W4A16_CHANNEL", "").group, 0);
  EXPECT_EQ(scheme_of("INT8", "").name, "W8A8");
  EXPECT_TRUE(scheme_of("NF4", "").double_quantised);
  EXPECT_FALSE(scheme_of("NF4_PLAIN", "").double_quantised);
  const auto unknown = scheme_by_name("W4A61");
  ASSERT_FALSE(unknown.ok());
  EXPECT_NE(unknown.status().message().find("did you mean W4A16?"), std::string::npos);
  EXPECT_NE(unknown.status().message().find("MXFP8A16"), std::string::npos);
  EXPECT_FALSE(scheme_by_name("FP8_G32").ok());
  EXPECT_FALSE(scheme_by_name("W4A16_G7").ok());
}

}  // namespace
}  // namespace freshet::quantizer
