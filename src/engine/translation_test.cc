// Languages beside a text, with a vocabulary like NLLB's.
#include "engine/translation.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

namespace freshet {
namespace {

constexpr char kVocabulary[] = R"({"version": "1.0", "truncation": null, "padding": null,
 "added_tokens": [
  {"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
  {"id": 1, "content": "</s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
  {"id": 2, "content": "eng_Latn", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
  {"id": 3, "content": "deu_Latn", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
  {"id": 4, "content": "__fr__", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
 "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
 "post_processor": {"type": "TemplateProcessing",
  "single": [{"SpecialToken": {"id": "eng_Latn", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
  "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
  "special_tokens": {"eng_Latn": {"id": "eng_Latn", "ids": [2], "tokens": ["eng_Latn"]}, "</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}},
 "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
 "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": false,
  "vocab": {"<s>": 0, "</s>": 1, "eng_Latn": 2, "deu_Latn": 3, "__fr__": 4, "a": 5, "b": 6}, "merges": []}})";

TEST(Translation, LanguagesAreTokensBesideTheText) {
  const std::filesystem::path folder = ::testing::TempDir() + "/translation_test";
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "tokenizer.json") << kVocabulary;
  std::ofstream(folder / "tokenizer_config.json") << R"({"bos_token": "<s>", "eos_token": "</s>"})";
  const auto tokenizer = tokenizer::Tokenizer::load(folder.string());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  using Ids = std::vector<int32_t>;
  const Ids start{1, 3};  // decoder_start_token_id, forced_bos_token_id
  auto plain = translation_prompt(*tokenizer, start, "ab", "", "");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(plain->encoder_ids, (Ids{2, 5, 6, 1}));
  EXPECT_EQ(plain->prompt, start);
  auto chosen = translation_prompt(*tokenizer, start, "ab", "deu_Latn", "fr");
  ASSERT_TRUE(chosen.ok()) << chosen.status().message();
  EXPECT_EQ(chosen->encoder_ids, (Ids{3, 5, 6, 1}));
  EXPECT_EQ(chosen->prompt, (Ids{1, 4}));
  for (const char* wrong : {"xyz_Latn", "a"}) {
    EXPECT_FALSE(translation_prompt(*tokenizer, start, "ab", wrong, "").ok()) << wrong;
    EXPECT_FALSE(translation_prompt(*tokenizer, start, "ab", "", wrong).ok()) << wrong;
  }
}

}  // namespace
}  // namespace freshet
