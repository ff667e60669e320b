// Every component of a tokenizer.json against Hugging Face tokenizers (tools/golden_mechanisms.py
// writes the cases).
#include <gtest/gtest.h>

#include "base/json.h"
#include "base/utf8.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::tokenizer {
namespace {

std::vector<int32_t> ids_of(const json::Value& list) {
  std::vector<int32_t> ids;
  for (const json::Value& id : list.as_array()) ids.push_back(static_cast<int32_t>(*id.as_int64()));
  return ids;
}

TEST(Mechanisms, EqualHuggingFace) {
  const auto file = json::parse_file(FRESHET_UNPACKED_DATA "/tokenizers/mechanisms.json");
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_GT(file->as_array().size(), 80u);
  for (const json::Value& entry : file->as_array()) {
    SCOPED_TRACE(entry.find("name")->as_string());
    auto parts = build_tokenizer_json(*entry.find("tokenizer"), "test");
    ASSERT_TRUE(parts.ok()) << parts.status().message();
    ASSERT_TRUE(finish_parts(**parts).ok());
    const Tokenizer tokenizer(*parts);
    for (const json::Value& one : entry.find("cases")->as_array()) {
      const std::string& text = one.find("text")->as_string();
      SCOPED_TRACE(json::write(json::Value(text), {.ascii = true}));
      const std::vector<int32_t> ids = ids_of(*one.find("ids"));
      EXPECT_EQ(tokenizer.encode(text, {.add_special = false}), ids);
      EXPECT_EQ(tokenizer.encode(text), ids_of(*one.find("ids_with_special")));
      EXPECT_EQ(tokenizer.decode(ids), one.find("decoded")->as_string());
      EXPECT_EQ(tokenizer.decode(ids, {.skip_special = true}),
                one.find("decoded_without_special")->as_string());
      StreamDecoder stream(tokenizer);
      std::string streamed;
      for (const int32_t id : ids) {
        const std::string part = stream.push(id);
        EXPECT_EQ(find_invalid_utf8(part), std::string::npos);
        streamed += part;
      }
      EXPECT_EQ(streamed + stream.finish(), one.find("decoded")->as_string());
    }
  }
}

}  // namespace
}  // namespace freshet::tokenizer
