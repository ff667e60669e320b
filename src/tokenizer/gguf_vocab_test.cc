// GGUF vocabularies that golden_test.cc does not cover with files.
#include "tokenizer/gguf_vocab.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/json.h"
#include "tokenizer/pre_tokenizer.h"

namespace freshet::tokenizer {
namespace {

using testing::ElementsAre;
const std::string kData = FRESHET_UNPACKED_DATA "/tokenizers/";

std::vector<int32_t> ids_of(const json::Value& list) {
  std::vector<int32_t> ids;
  for (const json::Value& id : list.as_array()) ids.push_back(static_cast<int32_t>(*id.as_int64()));
  return ids;
}

// SentencePiece's own ids for its vocabularies in GGUF.
TEST(GgufVocab, SentencePieceVocabulariesEqualSentencePiece) {
  const auto file = json::parse_file(kData + "sentencepiece.json");
  ASSERT_TRUE(file.ok());
  for (const std::string name : {"unigram", "bpe_bytes"}) {
    SCOPED_TRACE(name);
    const auto tokenizer = Tokenizer::load(kData + "spm_" + name + ".gguf");
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    for (const json::Value& one : file->find(name)->as_array()) {
      const json::Value* text = one.find("text");
      if (text == nullptr) continue;
      SCOPED_TRACE(json::write(*text, {.ascii = true}));
      EXPECT_EQ(
          tokenizer->encode(text->as_string(), {.add_special = false, .parse_special = false}),
          ids_of(*one.find("ids")));
    }
  }
}

// Byte-level: the letters of "hello" and space, two merges, and tokens of several kinds.
GgufVocab small_vocab() {
  GgufVocab vocab;
  vocab.model = "gpt2";
  vocab.pre = "gpt-2";
  vocab.tokens = {"h",          "e",      "l",     "o", "Ġ", "he", "ll", "<|im_start|>",
                  "<|im_end|>", "<tool>", "<0x41>"};
  vocab.types = {1, 1, 1, 1, 1, 1, 1, 3, 3, 4, 6};
  vocab.merges = {"h e", "l l", "Ġ zz"};
  vocab.bos = 7;
  vocab.eos = 8;
  return vocab;
}

TEST(GgufVocab, FindsSpecialTokensInText) {
  const auto tokenizer = tokenizer_from_gguf(small_vocab());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_THAT(tokenizer->encode("hello"), ElementsAre(5, 6, 3));
  EXPECT_THAT(tokenizer->encode("<|im_start|>o<tool>"), ElementsAre(7, 3, 9));
  // Unknown bytes are dropped; user-defined tokens are always found.
  EXPECT_THAT(tokenizer->encode("<|im_end|>o<tool>", {.parse_special = false}),
              ElementsAre(1, 3, 9));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{7, 5, 6, 3, 4, 9}), "<|im_start|>hello <tool>");
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{7, 5, 9}, {.skip_special = true}), "he<tool>");
  EXPECT_EQ(tokenizer->token_bytes(10), "A");
  EXPECT_THAT(tokenizer->end_of_generation(), ElementsAre(8));
  EXPECT_FALSE(tokenizer->adds_bos());
}

TEST(GgufVocab, AddsWhatTheFileAsksFor) {
  GgufVocab vocab = small_vocab();
  vocab.add_bos = true;
  vocab.add_eos = true;
  vocab.chat_template = "{{ messages }}";
  const auto tokenizer = tokenizer_from_gguf(vocab);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_THAT(tokenizer->encode("o"), ElementsAre(7, 3, 8));
  EXPECT_THAT(tokenizer->encode("o", {.add_special = false}), ElementsAre(3));
  EXPECT_TRUE(tokenizer->adds_bos());
  EXPECT_EQ(tokenizer->chat_template(), "{{ messages }}");
  vocab.pre = "llama-bpe";  // adds BOS by default, and takes whole words
  vocab.add_bos = vocab.add_eos = std::nullopt;
  vocab.tokens.push_back("hello");
  EXPECT_THAT(tokenizer_from_gguf(vocab)->encode("hello"), ElementsAre(7, 11));
}

TEST(GgufVocab, KnowsHowMessagesEnd) {
  GgufVocab vocab = small_vocab();
  vocab.eot = 9;
  vocab.tokens.insert(vocab.tokens.end(), {"<|return|>", "<|call|>", "<|end|>"});
  const auto tokenizer = tokenizer_from_gguf(vocab);
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_THAT(tokenizer->end_of_generation(), ElementsAre(8, 9, 11, 12));
}

TEST(GgufVocab, MarksSpacesForGemma) {
  GgufVocab vocab;
  vocab.model = "gemma4";
  vocab.tokens = {"<pad>", "<eos>",  "<bos>",  "▁",      "a",   "▁a",
                  "\n",    "\n\n\n", "<0xC3>", "<0xA9>", "▁a▁a"};
  vocab.types = {3, 3, 3, 1, 1, 1, 1, 1, 6, 6, 1};
  vocab.merges = {"▁ a", "▁a ▁a"};
  vocab.bos = 2;
  vocab.eos = 1;
  vocab.add_bos = false;  // as in some files; ignored
  const auto tokenizer = tokenizer_from_gguf(vocab);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_THAT(tokenizer->encode(" a a\n\n\né"), ElementsAre(2, 10, 7, 8, 9));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{10, 7, 8, 9}), " a a\n\n\né");
}

TEST(GgufVocab, RefusesWhatItCannotUse) {
  const auto message = [](auto&& change) {
    GgufVocab vocab = small_vocab();
    change(vocab);
    const auto tokenizer = tokenizer_from_gguf(vocab);
    EXPECT_FALSE(tokenizer.ok());
    return tokenizer.ok() ? std::string() : tokenizer.status().message();
  };
  using testing::HasSubstr;
  EXPECT_THAT(message([](GgufVocab& v) { v.model = "rwkv"; }), HasSubstr("rwkv"));
  EXPECT_THAT(message([](GgufVocab& v) { v.pre = "no-such"; }), HasSubstr("no-such"));
  EXPECT_THAT(message([](GgufVocab& v) { v.tokens.clear(); }), HasSubstr("tokens"));
  EXPECT_THAT(message([](GgufVocab& v) { v.merges.clear(); }), HasSubstr("merges"));
  EXPECT_THAT(message([](GgufVocab& v) { v.tokens[0] = "\xFF"; }), HasSubstr("UTF-8"));
  EXPECT_THAT(message([](GgufVocab& v) { v.model = "llama"; }), HasSubstr("scores"));
  EXPECT_THAT(message([](GgufVocab& v) {
                v.bos = 1000;
                v.add_bos = true;
              }),
              HasSubstr("first"));
}

// Short lists and invalid values do no harm.
TEST(GgufVocab, ToleratesOddMetadata) {
  GgufVocab vocab = small_vocab();
  vocab.types = {77, -3};
  vocab.merges = {"h e", "he", "", " ", "h  e", "e h"};
  vocab.eos = -7;
  vocab.unk = int64_t{1} << 40;
  vocab.tokens[1] = "h";  // twice
  const auto tokenizer = tokenizer_from_gguf(vocab);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(tokenizer->eos(), std::nullopt);
  EXPECT_THAT(tokenizer->encode("hh"), ElementsAre(0, 0));
}

// The names that llama.cpp writes.
TEST(GgufPre, KnowsEveryName) {
  for (const std::string_view name : {"default",
                                      "llama3",
                                      "llama-v3",
                                      "llama-bpe",
                                      "falcon3",
                                      "falcon-h1",
                                      "pixtral",
                                      "midm-2.0",
                                      "lfm2",
                                      "jina-v5-nano",
                                      "deepseek-llm",
                                      "deepseek-coder",
                                      "deepseek-v3",
                                      "spark2_5",
                                      "youtu",
                                      "falcon",
                                      "mpt",
                                      "starcoder",
                                      "gpt-2",
                                      "phi-2",
                                      "jina-es",
                                      "jina-de",
                                      "gigachat",
                                      "jina-v2-es",
                                      "jina-v2-de",
                                      "a.x-4.0",
                                      "mellum",
                                      "modern-bert",
                                      "jais-2",
                                      "gemma4",
                                      "granite-embed-multi-311m",
                                      "sarvam-moe",
                                      "jina-v1-en",
                                      "jina-v2-code",
                                      "roberta-bpe",
                                      "refact",
                                      "command-r",
                                      "qwen2",
                                      "deepseek-r1-qwen",
                                      "kormo",
                                      "f2llmv2",
                                      "qwen35",
                                      "stablelm2",
                                      "olmo",
                                      "dbrx",
                                      "smaug-bpe",
                                      "poro-chat",
                                      "glm4",
                                      "chatglm-bpe",
                                      "viking",
                                      "jais",
                                      "tekken",
                                      "smollm",
                                      "codeshell",
                                      "bloom",
                                      "gpt3-finnish",
                                      "exaone",
                                      "exaone4",
                                      "exaone-moe",
                                      "chameleon",
                                      "minerva-7b",
                                      "megrez",
                                      "gpt-4o",
                                      "llama4",
                                      "kanana2",
                                      "talkie",
                                      "granite-embed-multi-97m",
                                      "tiny_aya",
                                      "cohere2moe",
                                      "superbpe",
                                      "trillion",
                                      "granite-docling",
                                      "bailingmoe",
                                      "bailingmoe2",
                                      "llada-moe",
                                      "seed-coder",
                                      "hunyuan",
                                      "hunyuan-dense",
                                      "hy_v4",
                                      "joyai-llm",
                                      "kimi-k2",
                                      "ufakzeka",
                                      "grok-2",
                                      "afmoe",
                                      "laguna",
                                      "minimax-m2",
                                      "solar-open",
                                      "mellum2",
                                      "minicpm5"}) {
    const auto pre = find_gguf_pre(name);
    ASSERT_TRUE(pre) << name;
    PreTokenizer words;
    for (const std::string& pattern : pre->patterns) {
      auto step = make_split(pattern, RegexDialect::kOniguruma);
      ASSERT_TRUE(step.ok()) << name << ": " << step.status().message();
      words.add(std::move(*step));
    }
    // Splitting loses nothing.
    const std::string text =
        "Hello, I'm 1234567 naïve   «你好世界»\r\n\n\tdon't_stop 한국어 ｱｲ $x+=1; 🙂";
    std::string joined;
    words.run(text, true, [&](std::string_view word) { joined += word; });
    EXPECT_EQ(joined, text) << name;
  }
  EXPECT_FALSE(find_gguf_pre("nonsense"));
}

// Runs of digits, grouped as in the vocabularies' own expressions.
TEST(GgufPre, GroupsDigits) {
  const auto split = [](std::string_view name, std::string_view text) {
    PreTokenizer words;
    const auto pre = find_gguf_pre(name);
    for (const std::string& pattern : pre->patterns) {
      words.add(*make_split(pattern, RegexDialect::kOniguruma));
    }
    std::vector<std::string> out;
    words.run(text, true, [&](std::string_view word) { out.emplace_back(word); });
    return out;
  };
  EXPECT_THAT(split("llama-bpe", "12345"), ElementsAre("123", "45"));
  EXPECT_THAT(split("qwen2", "123"), ElementsAre("1", "2", "3"));
  EXPECT_THAT(split("gpt-2", "12345"), ElementsAre("12345"));
  EXPECT_THAT(split("afmoe", "12345"), ElementsAre("12", "345"));
  EXPECT_THAT(split("superbpe", "12345"), ElementsAre("12", "345"));
  EXPECT_THAT(split("starcoder", "123"), ElementsAre("1", "2", "3"));
}

}  // namespace
}  // namespace freshet::tokenizer
