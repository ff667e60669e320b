// Weights that several layers share (Zamba2): a file may name them after any of the layers, and
// they are in memory once.
#include "models/load_test.h"

namespace freshet {
namespace {

const std::string kZamba = FRESHET_UNPACKED_DATA "/seeded/zamba2";

void leave(Tensors&, json::Object&) {}

// The shared tensors of one layer under the name of another.
void rename(Tensors& tensors, const std::string& from, const std::string& to) {
  const std::string prefix = "model.layers." + from + ".shared_transformer.";
  Tensors renamed;
  for (auto it = tensors.begin(); it != tensors.end();) {
    if (!it->first.starts_with(prefix)) {
      ++it;
      continue;
    }
    const std::string rest = it->first.substr(prefix.size());
    renamed["model.layers." + to + ".shared_transformer." + rest] = it->second;
    it = tensors.erase(it);
  }
  ASSERT_FALSE(renamed.empty());
  tensors.merge(renamed);
}

TEST_F(Load, SharedWeightsHaveTheNameOfAnyOfTheirLayers) {
  const auto plain = load(kZamba, leave);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  const std::vector<float> want = first_logits(**plain);
  const auto renamed = load(kZamba, [](Tensors& t, json::Object&) {
    rename(t, "1", "4");
    rename(t, "2", "5");
  });
  ASSERT_TRUE(renamed.ok()) << renamed.status().message();
  EXPECT_EQ(first_logits(**renamed), want);
  // The two blocks are not the same.
  const auto swapped = load(kZamba, [](Tensors& t, json::Object&) {
    for (auto& [name, tensor] : t) {
      if (name == "model.layers.1.shared_transformer.self_attn.v_proj.weight")
        std::swap(tensor, t["model.layers.2.shared_transformer.self_attn.v_proj.weight"]);
    }
  });
  ASSERT_TRUE(swapped.ok()) << swapped.status().message();
  EXPECT_NE(first_logits(**swapped), want);
  expect_error(kZamba, [](Tensors& t, json::Object&) { rename(t, "1", "3"); },
               {"model.layers.1.shared_transformer.input_layernorm.weight", "is missing"});
}

TEST_F(Load, SharedWeightsAreLoadedOnce) {
  const auto model = load(kZamba, leave);
  ASSERT_TRUE(model.ok()) << model.status().message();
  std::map<std::string, int> times;
  for (const Model::WeightInfo& w : (*model)->weights()) ++times[w.name];
  const std::string block = "model.layers.1.shared_transformer.";
  EXPECT_EQ(times[block + "self_attn.q_proj.weight"], 1);
  EXPECT_EQ(times[block + "feed_forward.gate_up_proj.weight"], 2);  // gate and up
  EXPECT_EQ(times[block + "self_attn.linear_q_adapter_list.0.1.weight"], 1);
  EXPECT_EQ(times[block + "self_attn.linear_q_adapter_list.2.1.weight"], 1);
  EXPECT_EQ(times["model.layers.4.linear.weight"], 1);
}

TEST_F(Load, LayersOfZamba2AreCheckedAgainstTheirNumber) {
  expect_error(kZamba,
               [](Tensors&, json::Object& c) {
                 c["layers_block_type"] = json::Value(json::Array{json::Value("hybrid")});
               },
               {"'layers_block_type' lists 1 of 6 layers"});
  expect_error(kZamba,
               [](Tensors&, json::Object& c) {
                 json::Array kinds(6, json::Value("moe"));
                 c["layers_block_type"] = json::Value(std::move(kinds));
               },
               {"unsupported kind of layer 'moe'"});
}

}  // namespace
}  // namespace freshet
