// Token ids and decoded texts against those of the vocabularies' own libraries: Hugging Face
// tokenizers, SentencePiece, tiktoken, and llama.cpp's test pairs.
#include <filesystem>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "base/json.h"
#include "base/utf8.h"
#include "tokenizer/tokenizer.h"

#ifndef FRESHET_EXTRA_DATA
#define FRESHET_EXTRA_DATA ""
#endif

namespace freshet::tokenizer {
namespace {

namespace fs = std::filesystem;

const std::string kData = FRESHET_UNPACKED_DATA "/tokenizers/";
const std::string kExtra = FRESHET_EXTRA_DATA;

// A vocabulary may be in the repository (often without the tokens that no test needs) and,
// complete, in the folder with extra data.
std::vector<std::string> paths_of(const std::string& name) {
  std::vector<std::string> paths;
  for (const std::string& path :
       {kData + name, kExtra + "/tokenizers/" + name, kExtra + "/gguf-vocab/" + name}) {
    if (fs::is_regular_file(path)) paths.push_back(path);
  }
  return paths;
}

std::vector<Tokenizer> load_all(const std::string& name) {
  std::vector<Tokenizer> all;
  for (const std::string& path : paths_of(name)) {
    auto tokenizer = Tokenizer::load(path);
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    if (tokenizer.ok()) all.push_back(std::move(*tokenizer));
  }
  return all;
}

std::vector<int32_t> ids_of(const json::Value& list) {
  std::vector<int32_t> ids;
  for (const json::Value& id : list.as_array()) ids.push_back(static_cast<int32_t>(*id.as_int64()));
  return ids;
}

void expect_stream_equals(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                          const std::string& text) {
  StreamDecoder stream(tokenizer);
  std::string out;
  for (const int32_t id : ids) {
    const std::string part = stream.push(id);
    EXPECT_EQ(find_invalid_utf8(part), std::string::npos);
    out += part;
  }
  EXPECT_EQ(out + stream.finish(), text);
}

void check_case(const Tokenizer& tokenizer, const json::Value& expected) {
  const std::string text = expected.find("text")->as_string();
  SCOPED_TRACE(text);
  const std::vector<int32_t> ids = ids_of(*expected.find("ids"));
  EXPECT_EQ(tokenizer.encode(text, {.add_special = false}), ids);
  if (const json::Value* special = expected.find("ids_with_special")) {
    EXPECT_EQ(tokenizer.encode(text), ids_of(*special));
  } else {
    EXPECT_EQ(tokenizer.encode(text), ids);
  }
  const std::string decoded = expected.find("decoded")->as_string();
  EXPECT_EQ(tokenizer.decode(ids), decoded);
  expect_stream_equals(tokenizer, ids, decoded);
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, EqualsTheReference) {
  const std::vector<Tokenizer> all = load_all(GetParam());
  ASSERT_FALSE(all.empty());
  const auto expected = json::parse_file(kData + GetParam() + ".expected.json");
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  const json::Value* cases = expected->is_array() ? &*expected : expected->find("cases");
  ASSERT_NE(cases, nullptr);
  ASSERT_GT(cases->as_array().size(), 50u);
  for (const Tokenizer& tokenizer : all) {
    for (const json::Value& one : cases->as_array()) check_case(tokenizer, one);
  }
}

// mistral-v1.model, of the same kind as llama2.model; needs FRESHET_EXTRA_DATA.
std::vector<std::string> tokenizers() {
  std::vector<std::string> all = {"clip.json",           "falcon.json",     "gpt2.json",
                                  "llama2.model",        "llama3.tiktoken", "mistral.json",
                                  "o200k_base.tiktoken", "phi2.json",       "phi3.json",
                                  "qwen.tiktoken",       "roberta.json",    "t5-small.json"};
  if (!paths_of("mistral-v1.model").empty()) all.emplace_back("mistral-v1.model");
  return all;
}

INSTANTIATE_TEST_SUITE_P(Tokenizers, Golden, testing::ValuesIn(tokenizers()), [](const auto& test) {
  std::string name = test.param;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The inputs are separated by a marker line; the ids have one line per input.
void check_pair(const Tokenizer& tokenizer, const std::string& prefix) {
  const std::string inputs = read_file(prefix + ".inp");
  std::istringstream outputs(read_file(prefix + ".out"));
  const std::string marker = "\n__ggml_vocab_test__\n";
  size_t count = 0;
  for (size_t at = 0; at < inputs.size(); ++count) {
    const size_t end = std::min(inputs.find(marker, at), inputs.size());
    const std::string text = inputs.substr(at, end - at);
    at = end + marker.size();
    std::string line;
    if (!std::getline(outputs, line)) break;
    std::istringstream numbers(line);
    const std::vector<int32_t> ids{std::istream_iterator<int32_t>(numbers), {}};
    SCOPED_TRACE(text);
    EXPECT_EQ(tokenizer.encode(text, {.add_special = false, .parse_special = false}), ids);
    expect_stream_equals(tokenizer, ids, tokenizer.decode(ids));
  }
  EXPECT_GT(count, 40u);
}

struct Pair {
  std::string pair;        // of .inp and .out
  std::string vocabulary;  // the file with the same vocabulary
};
class LlamaCppPair : public testing::TestWithParam<Pair> {};

TEST_P(LlamaCppPair, EqualsTheReference) {
  const std::vector<Tokenizer> all = load_all(GetParam().vocabulary);
  ASSERT_FALSE(all.empty());
  for (const Tokenizer& tokenizer : all) {
    check_pair(tokenizer, kData + "ggml-vocab-" + GetParam().pair + ".gguf");
  }
}

// The pairs whose vocabulary is in the repository; five more with FRESHET_EXTRA_DATA.
std::vector<Pair> pairs() {
  std::vector<Pair> all = {Pair{"bert-bge", "ggml-vocab-bert-bge.gguf"},
                           Pair{"deepseek-coder", "ggml-vocab-deepseek-coder.gguf"},
                           Pair{"deepseek-llm", "ggml-vocab-deepseek-llm.gguf"},
                           Pair{"falcon", "ggml-vocab-falcon.gguf"},
                           Pair{"gpt-2", "ggml-vocab-gpt-2.gguf"},
                           Pair{"llama-spm", "ggml-vocab-llama-spm.gguf"},
                           Pair{"mpt", "ggml-vocab-mpt.gguf"},
                           Pair{"phi-3", "ggml-vocab-phi-3.gguf"},
                           Pair{"refact", "ggml-vocab-refact.gguf"},
                           Pair{"starcoder", "ggml-vocab-starcoder.gguf"},
                           Pair{"gpt-2", "gpt2.json"},
                           Pair{"llama-bpe", "llama3.tiktoken"},
                           Pair{"qwen2", "qwen.tiktoken"}};
  std::erase_if(all, [](const Pair& p) { return paths_of(p.vocabulary).empty(); });
  return all;
}

INSTANTIATE_TEST_SUITE_P(Pairs, LlamaCppPair, testing::ValuesIn(pairs()), [](const auto& test) {
  std::string name = test.param.pair + "_in_" + test.param.vocabulary;
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
});

}  // namespace
}  // namespace freshet::tokenizer
