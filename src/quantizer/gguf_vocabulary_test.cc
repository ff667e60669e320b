// A folder's vocabulary and the GGUF file made from it tokenize identically, or the conversion is
// refused.
#include "quantizer/gguf_vocabulary.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/json.h"
#include "tokenizer/tokenizer_parts.h"

namespace freshet::quantizer {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using tokenizer::Tokenizer;
const std::string kData = FRESHET_UNPACKED_DATA "/tokenizers/";

const char* const kTexts[] = {
    "",
    " ",
    "hello",
    " Hello  World 12345 it's WE'LL",
    "A DOG e\u0301 \uFB01ne \u212B \u00BD \uFF21",
    "\t\n\r\n  x\n\n",
    "\u65E5\u672C\u8A9E \uAC00 \U0001F600 \u0E01",
    "<s>a</s> b <mask>  <unk> <|endoftext|> x<|endoftext|>  <pad>",
    "[INST] hi [/INST]<|im_start|> user",
    "aaaaaaaaaaaaa   bbbb ((((()))))",
    "f(x) = {\"a\": [1, 22, 333, 4444]}; // don't",
};

class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "freshet-vocabulary-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(file(name)).parent_path());
    std::ofstream(file(name), std::ios::binary) << text;
  }
  void write_json(const std::string& name, const json::Value& value) const {
    write(name, json::write(value));
  }
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

json::Value parse(const std::string& text) {
  auto value = json::parse(text);
  EXPECT_TRUE(value.ok()) << value.status().message();
  return std::move(value).value();
}

json::Value vocabulary(const std::string& name) {
  auto value = json::parse_file(kData + name);
  EXPECT_TRUE(value.ok()) << value.status().message();
  return std::move(value).value();
}

struct Converted {
  Status status;
  std::vector<std::string> warnings;
};

Converted convert(const Folder& folder, int rows = 0) {
  Converted c;
  if (rows == 0) {
    const auto tokenizer = Tokenizer::load(folder.path());
    if (!tokenizer.ok()) return {tokenizer.status(), {}};
    rows = tokenizer->vocab_size() + 3;  // for rows of the embedding without a token
  }
  loader::GgufWriter out;
  c.status = add_vocabulary(folder.path(), rows, out,
                            [&](const std::string& line) { c.warnings.push_back(line); });
  if (c.status.ok()) c.status = out.open(folder.file("m.gguf"));
  if (c.status.ok()) c.status = out.close();
  return c;
}

void expect_same(const Tokenizer& want, const Tokenizer& got) {
  ASSERT_EQ(got.vocab_size(), want.vocab_size());
  for (const char* text : kTexts) {
    SCOPED_TRACE(text);
    for (const bool special : {false, true}) {
      const tokenizer::EncodeOptions options{.add_special = special, .parse_special = special};
      const auto ids = want.encode(text, options);
      EXPECT_EQ(got.encode(text, options), ids);
      EXPECT_EQ(got.decode(ids), want.decode(ids));
      EXPECT_EQ(got.decode(ids, {.skip_special = true}), want.decode(ids, {.skip_special = true}));
    }
  }
  std::vector<int32_t> all;
  for (int32_t id = 0; id < want.vocab_size(); ++id) {
    all.push_back(id);
    ASSERT_EQ(got.token_bytes(id), want.token_bytes(id)) << id;
    ASSERT_EQ(got.is_special(id), want.is_special(id)) << id;
  }
  EXPECT_EQ(got.decode(all), want.decode(all));
  EXPECT_EQ(got.parts().prefix, want.parts().prefix);
  EXPECT_EQ(got.parts().suffix, want.parts().suffix);
  EXPECT_EQ(got.bos(), want.bos());
  EXPECT_EQ(got.eos(), want.eos());
  EXPECT_EQ(got.unk(), want.unk());
  EXPECT_EQ(got.pad(), want.pad());
  EXPECT_EQ(got.end_of_generation(), want.end_of_generation());
  EXPECT_EQ(json::write(got.special_tokens()), json::write(want.special_tokens()));
  EXPECT_EQ(got.chat_template(), want.chat_template());
  EXPECT_EQ(got.parts().named_templates, want.parts().named_templates);
}

// Converts and compares; returns the warnings.
std::vector<std::string> round_trip(const Folder& folder) {
  const Converted c = convert(folder);
  EXPECT_TRUE(c.status.ok()) << c.status.message();
  if (!c.status.ok()) return {};
  const auto want = Tokenizer::load(folder.path());
  const auto got = Tokenizer::load(folder.file("m.gguf"));
  EXPECT_TRUE(got.ok()) << got.status().message();
  if (want.ok() && got.ok()) expect_same(*want, *got);
  return c.warnings;
}

TEST(GgufVocabulary, PublishedVocabulariesKeepTheirLanguage) {
  int converted = 0;
  for (const auto& entry : fs::directory_iterator(kData)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".json") || name.find("expected") != name.npos) continue;
    SCOPED_TRACE(name);
    const json::Value root = vocabulary(name);
    if (root.find("model") == nullptr) continue;  // expectations
    Folder folder;
    folder.write_json("tokenizer.json", root);
    if (root.find("model")->find("merges") == nullptr) {
      EXPECT_THAT(convert(folder).status.message(), HasSubstr("only BPE vocabularies"));
    } else if (const Converted c = convert(folder); !c.status.ok()) {
      EXPECT_THAT(c.status.message(), HasSubstr("no name for"));
    } else {
      round_trip(folder);
      ++converted;
    }
  }
  EXPECT_GE(converted, 3);
}

using Change = std::function<void(json::Object&)>;
Change set(const std::string& key, const std::string& value) {
  return [=](json::Object& root) { root[key] = parse(value); };
}
json::Value template_with(const std::string& before, const std::string& after) {
  const auto pieces = [](const std::string& list) {
    std::string out;
    for (const char c : list)
      out += fmt::format(R"({{"SpecialToken": {{"id": "{}", "type_id": 0}}}},)", c);
    return out;
  };
  return parse(fmt::format(
      R"({{"type": "TemplateProcessing", "single": [{}{{"Sequence": {{"id": "A", "type_id": 0}}}}{}],
          "pair": [], "special_tokens": {{"e": {{"id": "e", "ids": [50256], "tokens": ["e"]}},
          "x": {{"id": "x", "ids": [7, 8], "tokens": ["x", "x"]}}}}}})",
      pieces(before),
      after.empty() ? "" : "," + pieces(after).substr(0, pieces(after).size() - 1)));
}

TEST(GgufVocabulary, EveryRuleIsKeptOrNamed) {
  struct Row {
    Change change;
    const char* named;  // part of the warning; "": GGUF's own keys suffice
  };
  const std::string added =
      R"([{"id": 50256, "content": "<|endoftext|>", "special": true, "normalized": false},
          {"id": 50257, "content": "<mask>", "special": true, "normalized": false, )";
  const Row rows[] = {
      {[](json::Object&) {}, ""},
      {set("normalizer", R"({"type": "Lowercase"})"), "Lowercase"},
      {set("normalizer", R"({"type": "NFC"})"), "NFC"},
      {set("normalizer", R"({"type": "NFD"})"), "NFD"},
      {set("normalizer", R"({"type": "NFKC"})"), "NFKC"},
      {set("normalizer", R"({"type": "NFKD"})"), "NFKD"},
      {set("normalizer", R"({"type": "StripAccents"})"), "StripAccents"},
      {set("normalizer", R"({"type": "Nmt"})"), "Nmt"},
      {set("normalizer", R"({"type": "Strip", "strip_left": true, "strip_right": false})"),
       "Strip"},
      {set("normalizer", R"({"type": "Prepend", "prepend": "x"})"), "Prepend"},
      {set("normalizer", R"({"type": "Replace", "pattern": {"String": "l"}, "content": "r"})"),
       "Replace"},
      {set("normalizer", R"({"type": "BertNormalizer"})"), "BertNormalizer"},
      {set("normalizer", R"({"type": "Sequence", "normalizers": [{"type": "Sequence",
            "normalizers": [{"type": "NFD"}]}, {"type": "Lowercase"}]})"),
       "Lowercase"},
      {set("normalizer", R"({"type": "Sequence", "normalizers": []})"), ""},
      {set("pre_tokenizer", R"({"type": "ByteLevel", "add_prefix_space": true})"), "prefix_space"},
      {set("pre_tokenizer", R"({"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false}]})"),
       ""},
      {set("added_tokens", added + R"("lstrip": true}])"), "lstrip"},
      {set("added_tokens", added + R"("rstrip": true}])"), "rstrip"},
      {set("added_tokens", added + R"("single_word": true}])"), "single_word"},
      {set("added_tokens", added + R"("special": false}])"), ""},
      {set("added_tokens", added + R"("normalized": true}])"), "normalized"},
      {set("added_tokens", added + "\"x\": 0}, {\"id\": 50258, \"content\": \"\u00E9\"}]"),
       "normalized"},
      {set("decoder", "null"), "decoder"},
      {set("decoder", R"({"type": "Sequence", "decoders": [{"type": "ByteLevel"},
            {"type": "Strip", "content": "h", "start": 1, "stop": 0}]})"),
       "decoder"},
      {[](json::Object& r) { r["post_processor"] = template_with("e", ""); }, ""},
      {[](json::Object& r) { r["post_processor"] = template_with("e", "e"); }, ""},
      {[](json::Object& r) { r["post_processor"] = template_with("", "e"); }, ""},
      {[](json::Object& r) { r["post_processor"] = template_with("ex", "e"); }, "post_processor"},
      {[](json::Object& r) { r["post_processor"] = template_with("", "x"); }, "post_processor"},
      {set("post_processor", R"({"type": "RobertaProcessing", "sep": ["c", 9], "cls": ["b", 50256],
            "trim_offsets": true, "add_prefix_space": false})"),
       "post_processor"},
      {set("post_processor", R"({"type": "BertProcessing", "sep": ["c", 50256],
            "cls": ["b", 50256]})"),
       ""},
      {[](json::Object& r) { r["model"].as_object()["ignore_merges"] = true; }, "ignore_merges"},
  };
  const json::Value gpt2 = vocabulary("gpt2.json");
  for (const Row& row : rows) {
    Folder folder;
    json::Value root = gpt2;
    root.as_object()["post_processor"] = nullptr;
    row.change(root.as_object());
    SCOPED_TRACE(json::write(root).substr(0, 600));
    folder.write_json("tokenizer.json", root);
    folder.write("tokenizer_config.json",
                 R"({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})");
    const auto warnings = round_trip(folder);
    if (*row.named == '\0') {
      EXPECT_TRUE(warnings.empty()) << warnings.front();
    } else {
      ASSERT_EQ(warnings.size(), 1);
      EXPECT_THAT(warnings[0], HasSubstr(row.named));
    }
  }
}

// Ways of splitting words that have no name in tokenizer.ggml.pre.
TEST(GgufVocabulary, RefusesByName) {
  const json::Value gpt2 = vocabulary("gpt2.json");
  const std::string tail = R"(, {"type": "ByteLevel", "add_prefix_space": false}]})";
  for (const std::string step :
       {R"({"type": "Punctuation"})", R"({"type": "Whitespace"})", R"({"type": "WhitespaceSplit"})",
        R"({"type": "Digits", "individual_digits": false})", R"({"type": "UnicodeScripts"})",
        R"({"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated"})",
        R"({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "MergedWithNext"})",
        R"({"type": "BertPreTokenizer"})", R"({"type": "FixedLength", "length": 3})"}) {
    SCOPED_TRACE(step);
    Folder folder;
    json::Value root = gpt2;
    root.as_object()["pre_tokenizer"] =
        parse(R"({"type": "Sequence", "pretokenizers": [)" + step + tail);
    folder.write_json("tokenizer.json", root);
    const Converted c = convert(folder);
    EXPECT_EQ(c.status.code(), StatusCode::kUnsupported);
    const std::string type = parse(step).get_string("type", "");
    EXPECT_THAT(c.status.message(), HasSubstr("pre_tokenizer " + type));
  }
  Folder folder;
  folder.write("tokenizer.model", "x");
  EXPECT_THAT(convert(folder, 9).status.message(), HasSubstr("tokenizer.model"));
}

// Files that Tokenizer::load() refuses never reach the writer.
TEST(GgufVocabulary, MalformedFilesAreOneClearLine) {
  const json::Value gpt2 = vocabulary("gpt2.json");
  const std::pair<Change, const char*> rows[] = {
      {[](json::Object& r) { r["model"].as_object()["merges"] = parse(R"(["ab"])"); }, "merge"},
      {[](json::Object& r) { r["model"].as_object()["merges"] = parse(R"([["a"]])"); }, "merge"},
      {[](json::Object& r) { r["model"].as_object()["merges"] = parse(R"([3])"); }, "merge"},
      {[](json::Object& r) { r["model"].as_object()["merges"] = parse(R"("a b")"); }, "merges"},
      {[](json::Object& r) { r["model"].as_object()["vocab"] = parse(R"({"a": -1})"); }, "\"a\""},
      {[](json::Object& r) { r["model"].as_object()["vocab"] = parse(R"(["a"])"); }, "vocab"},
      {[](json::Object& r) { r["model"] = nullptr; }, "model"},
      {set("added_tokens", "{}"), "added_tokens"},
      {set("pre_tokenizer", "[1]"), "pretokenizers"},
      {set("normalizer", R"({"type": "Replace"})"), "pattern"},
      {set("post_processor", R"({"type": "TemplateProcessing"})"), "single"},
  };
  for (const bool byte_fallback : {false, true}) {
    for (const auto& [change, named] : rows) {
      Folder folder;
      json::Value root = gpt2;
      root.as_object()["model"].as_object()["byte_fallback"] = byte_fallback;
      change(root.as_object());
      folder.write_json("tokenizer.json", root);
      const Converted c = convert(folder, 60000);
      EXPECT_FALSE(c.status.ok());
      EXPECT_THAT(c.status.message(), HasSubstr("tokenizer.json"));
      EXPECT_THAT(c.status.message(), HasSubstr(named));
    }
  }
}

// SentencePiece's way of marking spaces, with and without a space before the text.
TEST(GgufVocabulary, SentencePieceLikeVocabulariesKeepTheirLanguage) {
  const json::Value mistral = vocabulary("mistral.json");
  const std::string mark = R"({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})";
  const std::pair<Change, const char*> rows[] = {
      {[](json::Object&) {}, nullptr},
      {set("normalizer", mark), nullptr},  // like Gemma's, whose decoder strips nothing
      {set("normalizer", R"({"type": "Sequence", "normalizers": [{"type": "NFKC"},)" + mark + "]}"),
       "NFKC"},
      {[](json::Object& r) {
         r["normalizer"] = nullptr;
         r["pre_tokenizer"] = parse(R"({"type": "Metaspace", "replacement": "▁",
           "prepend_scheme": "first", "split": false})");
       },
       "first"},
      {[](json::Object& r) {
         json::Array& merges = r["model"].as_object()["merges"].as_array();
         merges.erase(merges.begin() + 5);
       },
       "order of the merges"},
  };
  for (const auto& [change, named] : rows) {
    Folder folder;
    json::Value root = mistral;
    change(root.as_object());
    folder.write_json("tokenizer.json", root);
    const auto warnings = round_trip(folder);
    if (named != nullptr) {
      ASSERT_EQ(warnings.size(), 1);
      EXPECT_THAT(warnings[0], HasSubstr(named));
    }
  }
}

// Special tokens, templates and ends of generation, from every file that may define them.
TEST(GgufVocabulary, ConfigurationsAreKept) {
  const json::Value gpt2 = vocabulary("gpt2.json");
  const std::pair<const char*, const char*> rows[] = {
      {R"({"bos_token": null, "eos_token": {"content": "<|endoftext|>", "lstrip": false},
           "pad_token": "the", "unk_token": "not in the vocabulary", "mask_token": " mask",
           "additional_special_tokens": ["a", {"content": "b"}], "image_token": "img",
           "extra_special_tokens": {"think": "t"}})",
       R"({"eos_token_id": [5, 50256, 9, 77, 8]})"},
      {R"({"chat_template": "{{ messages }}", "sep_token": "a", "cls_token": "b"})",
       R"({"eos_token_id": 7})"},
      {R"({"chat_template": [{"name": "default", "template": "D"},
           {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]})",
       "{broken"},
      {R"({"chat_template": [{"name": "tool_use", "template": "T"}]})", "null"},
      {R"({"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "add_eos_token": true,
           "bos_token": "a", "eos_token": "b"})",
       "{}"},
  };
  for (const auto& [config, generation] : rows) {
    SCOPED_TRACE(config);
    Folder folder;
    folder.write_json("tokenizer.json", gpt2);
    folder.write("tokenizer_config.json", config);
    folder.write("generation_config.json", generation);
    round_trip(folder);
    folder.write("additional_chat_templates/tool_use.jinja", "{{ tools }}");
    round_trip(folder);
    const auto got = Tokenizer::load(folder.file("m.gguf"));
    ASSERT_TRUE(got.ok());
    EXPECT_EQ(*got->chat_template_for(true), "{{ tools }}");
  }
}

}  // namespace
}  // namespace freshet::quantizer
