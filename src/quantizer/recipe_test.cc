// Recipes against the files that llama-quantize writes, and the user's own types for tensors.
#include "quantizer/recipe.h"

#include <fstream>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/json.h"

namespace freshet::quantizer {
namespace {

using quant::Format;
using testing::HasSubstr;

const json::Value& table() {
  static const json::Value v = [] {
    std::ifstream file(FRESHET_UNPACKED_DATA "/quant/recipes.json");
    std::stringstream text;
    text << file.rdbuf();
    return json::parse(text.str()).value();
  }();
  return v;
}

struct Case {
  RecipeModel model;
  std::vector<RecipeTensor> tensors;
};

Case read_case(const json::Value& v) {
  Case c;
  c.model.layers = static_cast<int>(v.get_int("layers", 0));
  c.model.heads_per_kv_head = static_cast<int>(v.get_int("heads_per_kv_head", 0));
  c.model.experts = static_cast<int>(v.get_int("experts", 0));
  c.model.tied = v.get_bool("tied", false);
  for (const json::Value& t : v.find("tensors")->as_array()) {
    RecipeTensor tensor{t.get_string("name", ""), {}};
    for (const json::Value& n : t.find("shape")->as_array())
      tensor.shape.push_back(n.as_int64().value());
    c.tensors.push_back(std::move(tensor));
  }
  return c;
}

std::string upper(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return out;
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

// The table was made with ik_llama.cpp, which differs from llama.cpp in these places.
bool ik_differs(const std::string& model, const std::string& key, const std::string& name,
                const std::string& ik) {
  for (const char* own : {"Q6_0", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K"}) {
    if (ik == own) return true;  // its own formats
  }
  if (model == "gqa4" || model == "80layers") return has(name, "attn_v");
  if (model == "narrow")  // rows that do not fit Q2_K, Q3_K or IQ3_S
    return ik == "IQ4_NL" || (key.starts_with("IQ3") && has(name, "attn_v"));
  if (model == "experts8") return key[0] == 'I' && key[2] < '3' && has(name, "attn_q");
  return model == "experts4" &&
         (has(name, "attn_k") || has(name, "attn_v") || has(name, "attn_output"));
}

const char* const kModels[] = {"gqa4", "tied", "narrow", "80layers", "experts8", "experts4"};

class LlamaQuantize : public testing::TestWithParam<const char*> {};

// tools/llama_quantize_types.py made the table.
TEST_P(LlamaQuantize, WritesTheSameTypes) {
  const json::Value& model = *table().find("models")->find(GetParam());
  const json::Value& letters = *table().find("letters");
  Case c = read_case(model);
  int compared = 0;
  for (const auto& [key, types] : model.find("types")->as_object()) {
    const std::string name = key.substr(0, key.find(' '));
    const auto recipe = Recipe::by_name(name);
    if (!recipe.ok()) {
      EXPECT_THAT(recipe.status().message(), HasSubstr("which this build cannot write"));
      continue;
    }
    c.model.importance = key.ends_with(" imatrix");
    const auto formats = recipe->formats(c.model, c.tensors);
    ASSERT_TRUE(formats.ok()) << formats.status().message();
    const std::string row = types.as_string();
    ASSERT_EQ(row.size(), c.tensors.size());
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string& tensor = c.tensors[i].name;
      const std::string want = letters.get_string(std::string(1, row[i]), "");
      if (ik_differs(GetParam(), key, tensor, want)) continue;
      EXPECT_EQ(upper(quant::info((*formats)[i]).name), want) << key << " " << tensor;
      ++compared;
    }
  }
  EXPECT_GE(compared, 30 * c.model.layers * 4);
}

INSTANTIATE_TEST_SUITE_P(Models, LlamaQuantize, testing::ValuesIn(kModels),
                         [](const auto& p) { return std::string(p.param); });

// Where the table says nothing: what llama.cpp's rules give.
TEST(RecipeTest, RulesOfLlamaCppWhereIkDiffers) {
  const struct {
    const char *model, *recipe, *tensor, *format;
  } cases[] = {
      {"gqa4", "q3_k_s", "blk.0.attn_v.weight", "q3_k"},
      {"gqa4", "q2_k", "blk.9.attn_v.weight", "q4_k"},
      {"gqa4", "q2_k_s", "blk.9.attn_v.weight", "q4_k"},
      {"gqa4", "q3_k_m", "blk.1.attn_v.weight", "q5_k"},
      {"gqa4", "q3_k_m", "blk.2.attn_v.weight", "q4_k"},
      {"gqa4", "q4_k_s", "blk.3.attn_v.weight", "q5_k"},
      {"gqa4", "q4_k_s", "blk.4.attn_v.weight", "q4_k"},
      {"gqa4", "q4_k_m", "blk.1.attn_v.weight", "q6_k"},
      {"gqa4", "q4_k_m", "blk.2.attn_v.weight", "q4_k"},
      {"gqa4", "q4_k_m", "blk.4.attn_v.weight", "q6_k"},
      {"gqa4", "q4_k_m", "blk.13.attn_v.weight", "q6_k"},
      {"gqa4", "q5_k_m", "blk.3.attn_v.weight", "q5_k"},
      {"gqa4", "iq4_xs", "blk.3.attn_v.weight", "q5_k"},
      {"gqa4", "iq4_nl", "blk.3.attn_v.weight", "q5_k"},
      {"80layers", "q2_k", "blk.3.attn_v.weight", "q5_k"},
      {"80layers", "q3_k_m", "blk.40.attn_v.weight", "q5_k"},
      {"80layers", "q4_k_s", "blk.40.attn_v.weight", "q5_k"},
      {"80layers", "q4_k_m", "blk.12.attn_v.weight", "q6_k"},
      {"80layers", "q4_k_m", "blk.13.attn_v.weight", "q5_k"},
      {"80layers", "q6_k", "blk.13.attn_v.weight", "q6_k"},
      {"experts4", "q4_k_s", "blk.5.attn_k.weight", "q4_k"},
      {"experts4", "q4_k_s", "blk.5.attn_v.weight", "q4_k"},
      {"experts4", "q2_k", "blk.5.attn_output.weight", "q3_k"},
      {"narrow", "q3_k_s", "blk.5.attn_q.weight", "q4_0"},
      {"narrow", "q5_k_s", "blk.5.attn_q.weight", "q5_1"},
      {"tied", "iq4_xs", "token_embd.weight", "q6_k"},
  };
  for (const auto& c : cases) {
    const Case model = read_case(*table().find("models")->find(c.model));
    const auto formats = Recipe::by_name(c.recipe)->formats(model.model, model.tensors);
    ASSERT_TRUE(formats.ok());
    bool found = false;
    for (size_t i = 0; i < model.tensors.size(); ++i) {
      if (model.tensors[i].name != c.tensor) continue;
      found = true;
      EXPECT_EQ(quant::info((*formats)[i]).name, c.format) << c.model << " " << c.recipe;
    }
    EXPECT_TRUE(found) << c.tensor;
  }
}

std::vector<RecipeTensor> small_model() {
  return {{"token_embd.weight", {512, 256}},         {"output.weight", {512, 256}},
          {"blk.0.attn_q.weight", {256, 256}},       {"blk.0.attn_v.weight", {64, 256}},
          {"blk.0.ffn_down.weight", {256, 512}},     {"blk.0.ffn_gate_inp.weight", {4, 256}},
          {"blk.0.attn_q_norm.weight", {8, 32}},     {"blk.0.attn_q.bias", {256}},
          {"blk.0.ffn_up_exps.weight", {4, 64, 256}}};
}

std::vector<std::string> chosen(const char* recipe, const RecipeOverrides& o, bool tied = false) {
  RecipeModel model;
  model.layers = 8;
  model.tied = tied;
  const auto formats = Recipe::by_name(recipe)->formats(model, small_model(), o);
  if (!formats.ok()) return {formats.status().message()};
  std::vector<std::string> names;
  for (const Format f : *formats) names.emplace_back(quant::info(f).name);
  return names;
}

RecipeOverrides with_types(std::initializer_list<const char*> types) {
  RecipeOverrides o;
  for (const char* t : types) EXPECT_TRUE(o.add_tensor_type(t).ok()) << t;
  return o;
}

TEST(RecipeOverridesTest, FirstPatternFoundInANameDecides) {
  const auto got = chosen("q4_k_m", with_types({"blk\\.0\\.attn_(q|k)=q8_0", "attn=q5_k"}));
  EXPECT_THAT(got, testing::ElementsAre("q4_k", "q6_k", "q8_0", "q5_k", "q6_k", "f32", "f32", "f32",
                                        "q4_k"));
}

TEST(RecipeOverridesTest, EmbeddingAndOutputGoFirst) {
  RecipeOverrides o = with_types({"weight=q5_0"});
  o.embedding = Format::kF16;
  o.output = Format::kQ8_0;
  EXPECT_THAT(chosen("q4_k_m", o), testing::ElementsAre("f16", "q8_0", "q5_0", "q5_0", "q5_0",
                                                        "f32", "f32", "f32", "q5_0"));
  RecipeOverrides output_only;
  output_only.output = Format::kF16;
  EXPECT_EQ(chosen("q4_k_m", output_only, true)[0], "f16");
  EXPECT_EQ(chosen("q4_k_m", output_only, false)[0], "q4_k");
}

TEST(RecipeOverridesTest, PureIsOneFormat) {
  RecipeOverrides o;
  o.pure = true;
  EXPECT_THAT(chosen("q4_k_m", o), testing::ElementsAre("q4_k", "q4_k", "q4_k", "q4_k", "q4_k",
                                                        "f32", "f32", "f32", "q4_k"));
}

TEST(RecipeOverridesTest, MistakesAreNamed) {
  RecipeOverrides o;
  EXPECT_THAT(o.add_tensor_type("attn_v").message(), HasSubstr("PATTERN=TYPE"));
  EXPECT_THAT(o.add_tensor_type("attn_v=q9").message(), HasSubstr("q8_0"));
  EXPECT_THAT(o.add_tensor_type("attn_v=int4g128").message(), HasSubstr("unknown type"));
  EXPECT_FALSE(o.add_tensor_type("attn_(v=q8_0").ok());
  EXPECT_THAT(chosen("q4_k_m", with_types({"attn_x=q8_0"}))[0],
              HasSubstr("applies to no quantised tensor"));
  EXPECT_THAT(chosen("q4_k_m", with_types({"ffn_gate_inp=q8_0"}))[0],
              HasSubstr("applies to no quantised tensor"));
  RecipeModel model;
  o.output = Format::kQ4_K;
  const std::vector<RecipeTensor> odd = {{"output.weight", {10, 96}}};
  EXPECT_THAT(Recipe::by_name("q8_0")->formats(model, odd, o).status().message(),
              HasSubstr("rows of 96 numbers"));
}

TEST(RecipeOverridesTest, RowsThatDoNotFitAreTold) {
  std::vector<std::string> lines;
  const std::vector<RecipeTensor> odd = {{"blk.0.attn_q.weight", {10, 96}},
                                         {"blk.0.attn_k.weight", {10, 96}},
                                         {"blk.0.attn_v.weight", {10, 20}}};
  RecipeModel model;
  model.layers = 1;
  const auto got = Recipe::by_name("q4_k_s")->formats(
      model, odd, {}, [&](const std::string& line) { lines.push_back(line); });
  ASSERT_TRUE(got.ok());
  EXPECT_THAT(*got, testing::ElementsAre(Format::kQ5_0, Format::kQ5_0, Format::kF16));
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_THAT(lines[0], HasSubstr("'blk.0.attn_q.weight', rows of 96 numbers, is written in q5_0"));
  EXPECT_THAT(lines[0], HasSubstr("2 more"));
}

TEST(RecipeTest, NamesAndAliases) {
  EXPECT_EQ(Recipe::by_name("Q4_K")->name(), "q4_k_m");
  EXPECT_EQ(Recipe::by_name("q3_k")->file_type(), 12U);
  EXPECT_EQ(Recipe::by_name("q4_k_s")->file_type(), 14U);
  EXPECT_THAT(Recipe::by_name("q9").status().message(), HasSubstr("q5_k_m (or q5_k)"));
}

TEST(RecipeTest, ExpertsInMxfp4) {
  const auto got = chosen("mxfp4_moe", {});
  EXPECT_THAT(got, testing::ElementsAre("q8_0", "q8_0", "q8_0", "q8_0", "q8_0", "f32", "f32", "f32",
                                        "mxfp4"));
}

TEST(RecipeTest, WeightsOfTheImportanceMatrix) {
  RecipeOverrides o;
  o.exclude_weights = {"attn"};
  EXPECT_FALSE(o.uses_importance("blk.0.attn_v.weight"));
  EXPECT_TRUE(o.uses_importance("blk.0.ffn_up.weight"));
  RecipeOverrides only;
  only.include_weights = {"blk.1.", "ffn_up"};
  EXPECT_TRUE(only.uses_importance("blk.0.ffn_up.weight"));
  EXPECT_FALSE(only.uses_importance("blk.0.attn_v.weight"));
}

}  // namespace
}  // namespace freshet::quantizer
