// Small models with each of SentencePiece's options, against SentencePiece itself
// (tools/golden_sentencepiece.py writes models and cases).
#include <gtest/gtest.h>

#include "base/json.h"
#include "tokenizer/base64.h"
#include "tokenizer/protobuf.h"
#include "tokenizer/tokenizer.h"

namespace freshet::tokenizer {
namespace {

const std::string kData = FRESHET_UNPACKED_DATA "/tokenizers/";

std::vector<int32_t> ids_of(const json::Value& list) {
  std::vector<int32_t> ids;
  for (const json::Value& id : list.as_array()) ids.push_back(static_cast<int32_t>(*id.as_int64()));
  return ids;
}

class SentencePieceOptions : public testing::TestWithParam<const char*> {};

TEST_P(SentencePieceOptions, EqualSentencePiece) {
  const auto tokenizer = Tokenizer::load(kData + "spm_" + GetParam() + ".model");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const auto file = json::parse_file(kData + "sentencepiece.json");
  ASSERT_TRUE(file.ok()) << file.status().message();
  const json::Value* cases = file->find(GetParam());
  ASSERT_NE(cases, nullptr);
  for (const json::Value& one : cases->as_array()) {
    SCOPED_TRACE(json::write(one, {.ascii = true}));
    const std::vector<int32_t> ids = ids_of(*one.find("ids"));
    if (one.find("text") != nullptr) {
      EXPECT_EQ(tokenizer->encode(one.find("text")->as_string()), ids);
    }
    if (one.find("bytes") != nullptr) {
      EXPECT_EQ(tokenizer->encode(*decode_base64(one.find("bytes")->as_string())), ids);
    }
    if (one.find("decoded") == nullptr) continue;
    EXPECT_EQ(tokenizer->decode(ids), one.find("decoded")->as_string());
    StreamDecoder stream(*tokenizer);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream.push(id);
    EXPECT_EQ(streamed + stream.finish(), one.find("decoded")->as_string());
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SentencePieceOptions,
                         testing::Values("unigram", "unigram_bytes", "unigram_nfkc", "bpe",
                                         "bpe_bytes", "bpe_user", "bpe_suffix", "bpe_plain"),
                         [](const auto& test) { return std::string(test.param); });

TEST(SentencePieceModel, NamesItsSpecialTokens) {
  const auto tokenizer = Tokenizer::load(kData + "spm_bpe.model");
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ(tokenizer->unk(), 0);
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(tokenizer->eos(), 2);
  EXPECT_TRUE(tokenizer->is_special(1));
  EXPECT_TRUE(tokenizer->is_end_of_generation(2));
  EXPECT_FALSE(tokenizer->is_end_of_generation(1));
}

// Numbers computed by hand from the specification of the encoding.
TEST(ProtoReader, ReadsFields) {
  const std::string bytes("\x08\x96\x01\x12\x02hi\x1d\x00\x00\x80\x3f", 12);
  ProtoReader reader(bytes);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.field(), 1u);
  EXPECT_EQ(reader.integer(), 150u);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.field(), 2u);
  EXPECT_EQ(reader.data(), "hi");
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.number(), 1.0f);
  EXPECT_FALSE(reader.next());
  EXPECT_TRUE(reader.ok());
}

TEST(ProtoReader, StopsAtMalformedFields) {
  for (const std::string_view bytes :
       {std::string_view("\x08"), std::string_view("\x12\x05hi"), std::string_view("\x0f\x01"),
        std::string_view("\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        std::string_view("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")}) {
    ProtoReader reader(bytes);
    while (reader.next()) {
    }
    EXPECT_FALSE(reader.ok());
  }
}

}  // namespace
}  // namespace freshet::tokenizer
