// Tokens of one vocabulary as tokens of another: the same bytes.
#include "speculative/vocabulary_map.h"

#include <string>

#include <gtest/gtest.h>

#include "base/utf8.h"

namespace freshet::speculative {
namespace {

using tokenizer::Tokenizer;

Tokenizer load(const std::string& name) {
  auto loaded = Tokenizer::load(std::string(FRESHET_UNPACKED_DATA) + "/tokenizers/" + name);
  FRESHET_CHECK(loaded.ok(), "{}", loaded.status().message());
  return std::move(*loaded);
}

TEST(VocabularyMap, KeepsTheBytesOfEveryToken) {
  const Tokenizer target = load("gpt2.json"), draft = load("falcon.json");
  const auto map = VocabularyMap::make(target, target.vocab_size(), draft, draft.vocab_size());
  ASSERT_TRUE(map.ok()) << map.status().message();
  int translated = 0;
  for (int32_t id = 0; id < target.vocab_size(); ++id) {
    if (target.is_special(id)) continue;
    std::vector<int32_t> ids;
    map->translate(id, ids);
    if (find_invalid_utf8(target.token_bytes(id)) != std::string_view::npos) {
      ASSERT_LE(ids.size(), 1u);  // a part of a character: one token or none
      continue;
    }
    if (ids.empty()) continue;  // this short vocabulary lacks the byte
    std::string bytes;
    for (const int32_t part : ids) bytes += draft.token_bytes(part);
    ASSERT_EQ(bytes, target.token_bytes(id)) << id;
    ++translated;
  }
  EXPECT_GT(translated, 500);
  int shared = 0;
  for (int32_t id = 0; id < draft.vocab_size(); ++id) {
    const int32_t back = map->target_ids()[static_cast<size_t>(id)];
    if (back < 0 || draft.is_special(id)) continue;
    ASSERT_EQ(target.token_bytes(back), draft.token_bytes(id)) << id;
    ++shared;
  }
  EXPECT_GT(shared, 500);
}

TEST(VocabularyMap, RefusesVocabulariesWithLittleInCommon) {
  const Tokenizer target = load("gpt2.json"), draft = load("falcon.json");
  const auto map = VocabularyMap::make(target, 50, draft, draft.vocab_size());
  ASSERT_FALSE(map.ok());
  EXPECT_NE(map.status().message().find("share"), std::string::npos);
}

}  // namespace
}  // namespace freshet::speculative
