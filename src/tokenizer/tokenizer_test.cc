// Properties that hold for any text, and invalid input of every kind.
#include "tokenizer/tokenizer.h"

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/test_clock.h"
#include "base/utf8.h"
#include "tokenizer/tokenizer_parts.h"
#include "tokenizer/unicode.h"

namespace freshet::tokenizer {
namespace {

namespace fs = std::filesystem;

const std::string kData = FRESHET_UNPACKED_DATA "/tokenizers/";

Tokenizer load(const std::string& name) {
  auto tokenizer = Tokenizer::load(kData + name);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return *tokenizer;
}

Result<Tokenizer> from_json(std::string_view text) {
  auto parts = parse_tokenizer_json(text, "test.json");
  if (!parts.ok()) return parts.status();
  FRESHET_RETURN_IF_ERROR(finish_parts(**parts));
  return Tokenizer(*parts);
}

std::string random_utf8(std::mt19937& rng, size_t chars) {
  std::string text;
  for (size_t i = 0; i < chars; ++i) {
    const uint32_t kind = rng() % 8;
    char32_t code = kind < 5 ? rng() % 0x80 : kind < 7 ? rng() % 0x3000 : rng() % 0x110000;
    if (code >= 0xD800 && code < 0xE000) code = 'x';
    append_utf8(text, code);
  }
  return text;
}

std::string random_bytes(std::mt19937& rng, size_t size) {
  std::string bytes;
  for (size_t i = 0; i < size; ++i) bytes.push_back(static_cast<char>(rng()));
  return bytes;
}

// Lossless vocabularies.
TEST(Tokenizer, RoundTripsAnyText) {
  std::mt19937 rng(3);
  for (const char* name : {"gpt2.json", "llama3.tiktoken", "o200k_base.tiktoken"}) {
    const Tokenizer tokenizer = load(name);
    for (int i = 0; i < 300; ++i) {
      const std::string text = random_utf8(rng, rng() % 200);
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text, {.add_special = false})), text);
    }
  }
}

TEST(Tokenizer, ReadsBadBytesAsReplacementCharacters) {
  std::mt19937 rng(4);
  const Tokenizer gpt2 = load("gpt2.json");
  // As with Python's errors="replace".
  EXPECT_EQ(gpt2.decode(gpt2.encode("a\xFFz\xE2\x82zz\xF0\x9F\x98")), "a\uFFFDz\uFFFDzz\uFFFD");
  for (const char* name :
       {"gpt2.json", "spm_bpe_bytes.model", "t5-small.json", "spm_unigram_nfkc.model"}) {
    const Tokenizer tokenizer = load(name);
    for (int i = 0; i < 200; ++i) {
      const auto ids = tokenizer.encode(random_bytes(rng, rng() % 100));
      EXPECT_EQ(find_invalid_utf8(tokenizer.decode(ids)), std::string::npos);
    }
  }
}

TEST(Tokenizer, StreamsWhatItDecodes) {
  std::mt19937 rng(5);
  for (const auto& entry : fs::directory_iterator(kData)) {
    const std::string name = entry.path().filename().string();
    const bool vocabulary = name.ends_with(".model") || name.ends_with(".gguf") ||
                            name.ends_with(".tiktoken") ||
                            (name.ends_with(".json") && name.find("expected") == name.npos &&
                             name != "mechanisms.json" && name != "sentencepiece.json");
    if (!vocabulary) continue;
    SCOPED_TRACE(name);
    const Tokenizer tokenizer = load(name);
    for (int i = 0; i < 200; ++i) {
      std::vector<int32_t> ids;
      for (size_t n = rng() % 20; n > 0; --n) {
        ids.push_back(static_cast<int32_t>(rng() % static_cast<uint32_t>(tokenizer.vocab_size())));
      }
      for (const bool skip : {false, true}) {
        StreamDecoder stream(tokenizer, {.skip_special = skip});
        std::string text;
        for (const int32_t id : ids) {
          const std::string part = stream.push(id);
          EXPECT_EQ(find_invalid_utf8(part), std::string::npos);
          text += part;
        }
        text += stream.finish();
        EXPECT_EQ(text, tokenizer.decode(ids, {.skip_special = skip}));
      }
    }
  }
}

TEST(Tokenizer, SplitsNoCharacterWhileStreaming) {
  const Tokenizer gpt2 = load("gpt2.json");
  const auto ids = gpt2.encode("🙂");
  ASSERT_GT(ids.size(), 1u);  // the emoji's bytes are several tokens
  StreamDecoder stream(gpt2);
  for (size_t i = 0; i + 1 < ids.size(); ++i) EXPECT_EQ(stream.push(ids[i]), "");
  EXPECT_EQ(stream.push(ids.back()), "🙂");
  EXPECT_EQ(stream.finish(), "");
  StreamDecoder cut(gpt2);
  EXPECT_EQ(cut.push(ids[0]), "");
  EXPECT_EQ(cut.finish(), "\uFFFD");
}

TEST(Tokenizer, TakesMegabytesOfOneCharacter) {
  for (const char* name :
       {"gpt2.json", "spm_bpe_user.model", "t5-small.json", "llama2.model",
        "ggml-vocab-bert-bge.gguf", "ggml-vocab-deepseek-coder.gguf", "spm_unigram_bytes.model"}) {
    SCOPED_TRACE(name);
    const Tokenizer tokenizer = load(name);
    for (const std::string_view c : {"a", " ", "\n", "1", "^", "é", "你", "\u0301\u0323", "▁"}) {
      std::string text;
      while (text.size() < 1'000'000) text += c;
      const double start = cpu_seconds();
      const auto ids = tokenizer.encode(text);
      EXPECT_FALSE(ids.empty() && c == "a");
      EXPECT_LT(cpu_seconds() - start, kSlowBuild ? 60.0 : 2.0) << c;
    }
  }
}

TEST(Tokenizer, IsSafeToShareBetweenThreads) {
  const Tokenizer tokenizer = load("gpt2.json"), other = load("gpt2.json");
  std::mt19937 rng(6);
  std::vector<std::string> texts;
  std::vector<std::vector<int32_t>> expected;
  for (int i = 0; i < 100; ++i) {
    texts.push_back("some words that recur " + random_utf8(rng, 80));
    expected.push_back(other.encode(texts.back()));
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (size_t i = 0; i < texts.size(); ++i) EXPECT_EQ(tokenizer.encode(texts[i]), expected[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Tokenizer, TellsTokensApart) {
  const Tokenizer gpt2 = load("gpt2.json");
  EXPECT_EQ(gpt2.vocab_size(), 50257);
  EXPECT_EQ(gpt2.token_to_id("Ġthe"), 262);
  EXPECT_EQ(gpt2.token_text(262), "Ġthe");
  EXPECT_EQ(gpt2.token_bytes(262), " the");
  EXPECT_EQ(gpt2.token_to_id("no such token"), std::nullopt);
  EXPECT_EQ(gpt2.token_bytes(-1), "");
  EXPECT_EQ(gpt2.token_bytes(50257), "");
  EXPECT_EQ(gpt2.eos(), 50256);
  EXPECT_TRUE(gpt2.is_special(50256));
  EXPECT_TRUE(gpt2.is_end_of_generation(50256));
  EXPECT_FALSE(gpt2.is_special(262));
  EXPECT_EQ(gpt2.decode(std::vector<int32_t>{262, -5, 1 << 30, 50256}), " the<|endoftext|>");
  EXPECT_EQ(gpt2.decode(std::vector<int32_t>{262, 50256}, {.skip_special = true}), " the");
  EXPECT_EQ(gpt2.encode("a<|endoftext|>").back(), 50256);
  EXPECT_NE(gpt2.encode("a<|endoftext|>", {.parse_special = false}).back(), 50256);
}

// The concatenated bytes of the tokens are the decoded text.
TEST(Tokenizer, BytesOfTokensMakeTheText) {
  const Tokenizer t5 = load("t5-small.json"), mistral = load("spm_bpe_bytes.model");
  for (const Tokenizer& tokenizer : {load("gpt2.json"), t5, mistral}) {
    const auto ids = tokenizer.encode("hello there", {.add_special = false});
    std::string bytes;
    for (const int32_t id : ids) bytes += tokenizer.token_bytes(id);
    EXPECT_TRUE(bytes == "hello there" || bytes == " hello there") << bytes;
  }
}

class Directory : public testing::Test {
 protected:
  Directory() {
    root_ = fs::path(testing::TempDir()) / ("tokenizer_" + std::to_string(::getpid()));
    fs::create_directories(root_);
  }
  ~Directory() override { fs::remove_all(root_); }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(root_ / name, std::ios::binary) << text;
  }
  fs::path root_;
};

TEST_F(Directory, ReadsTheConfigurationBeside) {
  fs::copy_file(kData + "gpt2.json", root_ / "tokenizer.json");
  write("tokenizer_config.json", R"({"bos_token": {"content": "!"}, "eos_token": "<|endoftext|>",
    "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]})");
  write("generation_config.json", R"({"eos_token_id": [50256, 11, 999999]})");
  const auto tokenizer = Tokenizer::load(root_.string());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(tokenizer->bos(), 0);
  EXPECT_EQ(tokenizer->eos(), 50256);
  EXPECT_EQ(tokenizer->chat_template(), "D");
  ASSERT_NE(tokenizer->chat_template("tool_use"), nullptr);
  EXPECT_EQ(*tokenizer->chat_template("tool_use"), "T");
  EXPECT_EQ(tokenizer->chat_template("none"), nullptr);
  EXPECT_EQ(tokenizer->end_of_generation(), (std::vector<int32_t>{11, 50256}));
  write("chat_template.jinja", "J");
  EXPECT_EQ(Tokenizer::load(root_.string())->chat_template(), "J");
}

// As in transformers' LlamaTokenizerFast: the configuration overrides the file's template.
TEST_F(Directory, PutsBosWhereTheClassSays) {
  fs::copy_file(kData + "gpt2.json", root_ / "tokenizer.json");
  write("tokenizer_config.json", R"({"tokenizer_class": "LlamaTokenizerFast", "bos_token": "!",
    "eos_token": "<|endoftext|>", "add_eos_token": true})");
  EXPECT_EQ(Tokenizer::load(root_.string())->encode("a"), (std::vector<int32_t>{0, 64, 50256}));
  write("tokenizer_config.json", R"({"tokenizer_class": "GPT2Tokenizer", "bos_token": "!",
    "add_bos_token": true})");
  EXPECT_EQ(Tokenizer::load(root_.string())->encode("a"), (std::vector<int32_t>{64}));
}

TEST_F(Directory, ParsesSpecialTokensOfSentencePieceModels) {
  fs::copy_file(kData + "spm_bpe_bytes.model", root_ / "tokenizer.model");
  write("tokenizer_config.json", R"({"add_bos_token": true, "bos_token": "<s>", "eos_token": "</s>",
    "added_tokens_decoder": {"400": {"content": "<|user|>", "special": true}}})");
  const auto tokenizer = Tokenizer::load(root_.string());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const auto ids = tokenizer->encode("<|user|></s>");
  EXPECT_EQ(ids, (std::vector<int32_t>{1, 400, 2}));
  EXPECT_TRUE(tokenizer->adds_bos());
  EXPECT_EQ(tokenizer->decode(ids), "<s><|user|></s>");
  EXPECT_EQ(tokenizer->decode(ids, {.skip_special = true}), "");
}

TEST_F(Directory, ReadsTheVocabularyOfBert) {
  write("vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nun\n##aff\n##able\n!\n");
  const auto tokenizer = Tokenizer::load(root_.string());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const auto ids = tokenizer->encode("Unaffable! what");
  EXPECT_EQ(ids, (std::vector<int32_t>{2, 4, 5, 6, 7, 1, 3}));
  EXPECT_EQ(tokenizer->decode(ids, {.skip_special = true}), "unaffable!");
}

TEST_F(Directory, SaysWhatIsMissing) {
  const auto empty = Tokenizer::load(root_.string());
  ASSERT_FALSE(empty.ok());
  EXPECT_EQ(empty.status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(Tokenizer::load((root_ / "none").string()).ok());
  write("tokenizer.json", "");
  EXPECT_FALSE(Tokenizer::load(root_.string()).ok());
  write("tokenizer.json", R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})");
  write("tokenizer_config.json", "{");
  EXPECT_FALSE(Tokenizer::load(root_.string()).ok());
}

void expect_one_clear_line(const Result<Tokenizer>& result, std::string_view input) {
  ASSERT_FALSE(result.ok()) << input;
  EXPECT_FALSE(result.status().message().empty());
  EXPECT_EQ(result.status().message().find('\n'), std::string::npos);
  EXPECT_LT(result.status().message().size(), 500u);
}

TEST(HostileJson, GivesOneClearError) {
  for (
      const std::string_view text : {
          "",
          "{",
          "[]",
          "null",
          "{}",
          R"({"model": 1})",
          R"({"model": {}})",
          R"({"model": {"type": "Magic", "vocab": {}}})",
          R"({"model": {"type": "BPE", "vocab": [], "merges": []}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0}}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [1]}})",
          R"({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0.5}, "merges": []}})",
          R"({"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 2147483647}, "merges": []}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 99999999999999999999}, "merges": []}})",
          R"({"model": {"type": "BPE", "vocab": {}, "merges": []}})",
          R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"}})",
          R"({"model": {"type": "Unigram", "vocab": [["a"]]}})",
          R"({"model": {"type": "Unigram", "vocab": [["a", "b"]]}})",
          R"({"model": {"type": "Unigram", "vocab": [["a", 0]], "unk_id": 7}})",
          R"({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]"}})",
          R"({"normalizer": {"type": "Magic"}, "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"normalizer": {"type": "Sequence"}, "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
               "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "????"},
               "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
               "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Magic"},
               "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"pre_tokenizer": {"type": "Split"}, "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"pre_tokenizer": {"type": "FixedLength", "length": 0},
               "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"decoder": {"type": "Magic"}, "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"decoder": 5, "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"post_processor": {"type": "TemplateProcessing"}, "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x"}}]},
               "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"post_processor": {"type": "BertProcessing", "cls": ["a", 77], "sep": ["a", 0]},
               "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
          R"({"added_tokens": 3, "model": {"type": "WordLevel", "vocab": {"a": 0}}})",
      }) {
    expect_one_clear_line(from_json(text), text);
  }
}

// Expected ids are those of the tokenizers library, cut "longest first".
TEST(Tokenizer, JoinsPairsAsThePostProcessorSays) {
  using V = std::vector<int32_t>;
  const auto with = [](const std::string& post) {
    auto made = from_json(R"({"post_processor": )" + post +
                          R"(, "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "<s>": 1,
            "</s>": 2, "a": 3, "b": 4, "c": 5, "d": 6, "e": 7, "f": 8}}})");
    FRESHET_CHECK(made.ok(), "{}", made.status().message());
    return *made;
  };
  const auto pair = [](const Tokenizer& t, size_t most) {
    return t.encode_pair("a b c", "d e f a b c d", most);
  };
  const Tokenizer bert =
      with(R"({"type": "BertProcessing", "cls": ["<s>", 1], "sep": ["</s>", 2]})");
  EXPECT_EQ(pair(bert, 0).ids, (V{1, 3, 4, 5, 2, 6, 7, 8, 3, 4, 5, 6, 2}));
  EXPECT_EQ(pair(bert, 0).types, (V{0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(pair(bert, 11).ids, (V{1, 3, 4, 5, 2, 6, 7, 8, 3, 4, 2}));
  EXPECT_EQ(pair(bert, 7).ids, (V{1, 3, 4, 2, 6, 7, 2}));
  EXPECT_EQ(pair(bert, 7).types, (V{0, 0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(pair(bert, 4).ids, (V{1, 2, 6, 2}));
  const Tokenizer roberta =
      with(R"({"type": "RobertaProcessing", "cls": ["<s>", 1], "sep": ["</s>", 2]})");
  EXPECT_EQ(pair(roberta, 0).ids, (V{1, 3, 4, 5, 2, 2, 6, 7, 8, 3, 4, 5, 6, 2}));
  EXPECT_EQ(pair(roberta, 0).types, V(14, 0));
  EXPECT_EQ(pair(roberta, 9).ids, (V{1, 3, 4, 2, 2, 6, 7, 8, 2}));
  EXPECT_EQ(pair(roberta, 5).ids, (V{1, 2, 2, 6, 2}));
  EXPECT_EQ(pair(roberta, 4).ids, (V{1, 2, 2, 2}));
  const Tokenizer made = with(R"({"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
               {"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}},
               {"SpecialToken": {"id": "</s>", "type_id": 1}}],
      "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                         "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}})");
  EXPECT_EQ(pair(made, 0).ids, pair(bert, 0).ids);
  EXPECT_EQ(pair(made, 0).types, pair(bert, 0).types);
  EXPECT_EQ(made.encode_up_to("a b c d", 3), (V{1, 3, 4}));
  EXPECT_EQ(bert.encode_up_to("a b c d", 4), (V{1, 3, 4, 2}));
  EXPECT_EQ(with("null").encode_pair("a b", "c").ids, (V{3, 4, 5}));
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(HostileJson, TruncationIsAnError) {
  const std::string text = read_file(kData + "gpt2.json");
  for (size_t size = 1; size + 3 < text.size(); size = size * 2 + 1) {
    expect_one_clear_line(from_json(std::string_view(text).substr(0, size)), "a truncated file");
  }
}

// Steps that multiply the length of the text again and again.
TEST(HostileJson, CannotFillTheMemory) {
  std::string steps;
  for (int i = 0; i < 60; ++i) {
    steps += std::string(i == 0 ? "" : ",") +
             R"({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaa"})";
  }
  const auto tokenizer =
      from_json(R"({"normalizer": {"type": "Sequence", "normalizers": [)" + steps +
                R"(]}, "model": {"type": "WordLevel", "vocab": {"a": 0}}})");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_TRUE(tokenizer->encode(std::string(1000, 'a')).empty());
  expect_one_clear_line(
      from_json(R"({"normalizer": {"type": "Sequence", "normalizers": [)" + steps + "," + steps +
                R"(]}, "model": {"type": "WordLevel", "vocab": {"a": 0}}})"),
      "too many steps");
}

TEST(HostileModel, GivesOneClearErrorOrWorks) {
  const std::string good = read_file(kData + "spm_bpe_bytes.model");
  std::mt19937 rng(8);
  for (size_t size = 0; size < good.size(); size += 97) {
    const auto parts = parse_sentencepiece(good.substr(0, size), "test.model");
    if (!parts.ok()) {
      EXPECT_EQ(parts.status().message().find('\n'), std::string::npos);
    }
  }
  for (int i = 0; i < 300; ++i) {
    std::string bytes = good;
    for (int k = 0; k < 8; ++k) bytes[rng() % bytes.size()] = static_cast<char>(rng());
    const auto parts = parse_sentencepiece(bytes, "test.model");
    if (!parts.ok() || !finish_parts(**parts).ok()) continue;
    const Tokenizer tokenizer(*parts);
    (void)tokenizer.decode(tokenizer.encode("hello 123 你好 </s>"));
  }
  EXPECT_FALSE(parse_sentencepiece("", "test.model").ok());
}

TEST(HostileTiktoken, GivesOneClearError) {
  for (const std::string_view text : {"", "YQ==", "YQ== x", "YQ== -1", "YQ== 99999999999", "*** 1",
                                      "YQ== 0\nYQ== 1\n", "YQ== 0\nYg== 0\n", "YQ== 0\n", " 0\n"}) {
    const auto parts = parse_tiktoken(text, "test.tiktoken");
    ASSERT_FALSE(parts.ok()) << text;
    EXPECT_EQ(parts.status().message().find('\n'), std::string::npos);
  }
}

// From the definition of the normalisation forms (Unicode Standard Annex 15).
TEST(Unicode, Normalises) {
  EXPECT_EQ(normalize("e\u0301", NormalForm::kNfc), "é");
  EXPECT_EQ(normalize("é", NormalForm::kNfd), "e\u0301");
  EXPECT_EQ(normalize("ﬁ①", NormalForm::kNfkc), "fi1");
  EXPECT_EQ(normalize("각", NormalForm::kNfd), "\u1100\u1161\u11A8");
  EXPECT_EQ(normalize("a\u0301\u0323", NormalForm::kNfd), "a\u0323\u0301");
  EXPECT_EQ(to_lower("ÀİΣ"), "ài\u0307σ");
}

TEST(Unicode, SortsLongRunsOfMarksInTime) {
  std::string text = "a";
  for (int i = 0; i < 300'000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0323";
  const double start = cpu_seconds();
  EXPECT_EQ(normalize(text, NormalForm::kNfd).size(), text.size());
  EXPECT_LT(cpu_seconds() - start, kSlowBuild ? 30.0 : 1.0);
}

}  // namespace
}  // namespace freshet::tokenizer
