#include "bench_client/dataset.h"

#include <algorithm>
#include <fstream>
#include <set>

#include <gtest/gtest.h>

#include "base/json.h"
#include "base/mapped_file.h"
#include "bench_client/dataset_files.h"
#include "bench_client/random.h"

namespace freshet::bench_client {
namespace {

const std::string kData = FRESHET_SOURCE_DIR "/tests/data/bench_client/";

std::string read(const std::string& name) {
  const MappedFile file = MappedFile::open(kData + name).value();
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// One token per byte; ids from 256 on are pairs, which are tokenized again as two tokens.
class ByteVocabulary final : public Vocabulary {
 public:
  Result<Ids> encode(const std::string& text) override {
    ++encoded;
    Ids ids;
    for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
    return ids;
  }
  Result<std::string> decode(const Ids& ids) override {
    std::string text;
    for (const int32_t id : ids) {
      if (id >= 256) text += 'z';
      text += static_cast<char>(id < 256 ? id : 'y');
    }
    return text;
  }
  Result<Ids> usable_ids() override { return usable; }

  Ids usable = {65, 66, 67, 68, 300};
  int encoded = 0;
};

TEST(DatasetFiles, AzureAgreesWithPython) {
  const json::Value wanted = json::parse(read("expected.json")).value();
  const auto rows = parse_azure(read("azure.csv"));
  ASSERT_TRUE(rows.ok()) << rows.status().message();
  const json::Value& azure = *wanted.find("azure");
  ASSERT_EQ(rows->size(), azure.find("times")->as_array().size());
  for (size_t i = 0; i < rows->size(); ++i) {
    EXPECT_NEAR((*rows)[i].time, azure.find("times")->as_array()[i].as_double(), 1e-6);
    EXPECT_EQ((*rows)[i].input_tokens, azure.find("inputs")->as_array()[i].as_int64());
    EXPECT_EQ((*rows)[i].output_tokens, azure.find("outputs")->as_array()[i].as_int64());
  }
}

TEST(DatasetFiles, AzureCrossesMidnightAndLeapDays) {
  const std::string head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  const auto rows = parse_azure(head +
                                "2024-02-28 23:59:59.5,1,2\r\n"
                                "2024-02-29T00:00:01,3,4\n"
                                "2024-03-01 00:00:00.250+00:00,0,5\n");
  ASSERT_TRUE(rows.ok()) << rows.status().message();
  EXPECT_NEAR((*rows)[1].time, 1.5, 1e-9);
  EXPECT_NEAR((*rows)[2].time, 86400.75, 1e-6);
  EXPECT_EQ((*rows)[2].input_tokens, 1);  // an empty prompt is not possible
}

TEST(DatasetFiles, RefuseBadRows) {
  const std::string head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  for (const char* bad :
       {"", "2023-11-16 18:15:46", "2023-11-16 18:15:46,1", "2023-11-16 18:15:46,1,",
        "2023-11-16 18:15:46,-1,2", "2023-11-16 18:15:46,1,99999999999",
        "2023-11-16 18:15:46,1,2,3", "2023-13-16 18:15:46,1,2", "2023-11-16 25:15:46,1,2",
        "2023-11-16 18:15:46.,1,2", "2023-11-16 18:15:46.x,1,2", "18:15:46,1,2", ",,",
        "2023-11-16 18:15:46,4194305,1"}) {
    EXPECT_FALSE(parse_azure(head + bad).ok()) << bad;
  }
  EXPECT_FALSE(parse_azure("").ok());
  EXPECT_FALSE(parse_azure("a,b,c\n2023-11-16 18:15:46,1,2\n").ok());
  EXPECT_NE(parse_azure(head + "\n2023-11-16,1,2").status().message().find("line 3"),
            std::string::npos);
  for (const char* bad :
       {"", "{", "[]", "{}", R"({"timestamp":0,"input_length":1,"output_length":1})",
        R"({"timestamp":-1,"input_length":1,"output_length":1,"hash_ids":[]})",
        R"({"timestamp":"0","input_length":1,"output_length":1,"hash_ids":[]})",
        R"({"timestamp":0,"input_length":0,"output_length":1,"hash_ids":[]})",
        R"({"timestamp":0,"input_length":1e12,"output_length":1,"hash_ids":[]})",
        R"({"timestamp":0,"input_length":1.5,"output_length":1,"hash_ids":[]})",
        R"({"timestamp":0,"input_length":1,"output_length":1,"hash_ids":["a"]})"}) {
    EXPECT_FALSE(parse_mooncake(bad).ok()) << bad;
  }
  for (const char* bad :
       {"", "{}", "[1]", "[{\"conversations\":1}]", "[]", "[{\"conversations\":[]}]"})
    EXPECT_FALSE(parse_sharegpt(bad).ok()) << bad;
  for (const char* bad : {"", "{}", "{\"prompt\":1}", "{\"prompt\":\"a\",\"output_tokens\":0}"})
    EXPECT_FALSE(parse_custom(bad).ok()) << bad;
  EXPECT_FALSE(parse_lines("\n \n").ok());
}

// Randomly changed bytes: a result or an error, never a crash.
TEST(DatasetFiles, SurviveDamage) {
  Random random(3, Stream::kTokens);
  for (const char* name : {"azure.csv", "mooncake.jsonl", "sharegpt.json", "sonnet.txt"}) {
    const std::string whole = read(name);
    for (int i = 0; i < 300; ++i) {
      std::string text = whole.substr(0, random.below(whole.size() + 1));
      for (int k = 0; k < 3 && !text.empty(); ++k)
        text[random.below(text.size())] = static_cast<char>(random.below(256));
      (void)parse_azure(text);
      (void)parse_mooncake(text);
      (void)parse_sharegpt(text);
      (void)parse_custom(text);
      (void)parse_lines(text);
    }
  }
}

Dataset make(const DatasetOptions& o, ByteVocabulary& vocabulary) {
  auto made = make_dataset(o, vocabulary);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? std::move(made).value() : Dataset{};
}

TEST(Dataset, RandomKeepsLengthsAndSeeds) {
  ByteVocabulary vocabulary;
  DatasetOptions o;
  o.num_prompts = 200;
  o.random_input_len = 40;
  o.random_output_len = 10;
  o.random_range_ratio = 0.5;
  o.random_prefix_len = 7;
  const Dataset a = make(o, vocabulary);
  ASSERT_EQ(a.samples.size(), 200u);
  std::set<int> inputs;
  const Ids& first = std::get<Ids>(a.samples.front().prompt);
  for (const Sample& s : a.samples) {
    const Ids& ids = std::get<Ids>(s.prompt);
    ASSERT_EQ(static_cast<size_t>(s.input_tokens), ids.size());
    EXPECT_TRUE(s.input_tokens >= 27 && s.input_tokens <= 67) << s.input_tokens;
    EXPECT_TRUE(s.output_tokens >= 5 && s.output_tokens <= 15) << s.output_tokens;
    EXPECT_TRUE(std::equal(ids.begin(), ids.begin() + 7, first.begin()));
    inputs.insert(s.input_tokens);
  }
  EXPECT_GT(inputs.size(), 30u);
  const Dataset b = make(o, vocabulary);
  EXPECT_EQ(b.samples[150].prompt, a.samples[150].prompt);
  o.seed = 1;
  EXPECT_NE(make(o, vocabulary).samples[150].prompt, a.samples[150].prompt);
}

TEST(Dataset, RandomTextHasTheTokensAskedFor) {
  ByteVocabulary vocabulary;
  DatasetOptions o;
  o.num_prompts = 20;
  o.random_input_len = 64;
  o.as_text = true;
  for (const Sample& s : make(o, vocabulary).samples) {
    EXPECT_EQ(s.input_tokens, 64);
    EXPECT_EQ(std::get<std::string>(s.prompt).size(), 64u);
  }
}

TEST(Dataset, SonnetSharesItsPrefix) {
  ByteVocabulary vocabulary;
  DatasetOptions o;
  o.kind = DatasetKind::kSonnet;
  o.path = kData + "sonnet.txt";
  o.num_prompts = 10;
  o.sonnet_input_len = 1500;
  o.sonnet_prefix_len = 600;
  const Dataset d = make(o, vocabulary);
  const std::string& first = std::get<std::string>(d.samples[0].prompt);
  for (const Sample& s : d.samples) {
    const std::string& text = std::get<std::string>(s.prompt);
    EXPECT_NEAR(s.input_tokens, 1500, 120);
    EXPECT_EQ(text.substr(0, 500), first.substr(0, 500));
  }
  EXPECT_NE(first, std::get<std::string>(d.samples[1].prompt));
  o.sonnet_input_len = 20;
  EXPECT_FALSE(make_dataset(o, vocabulary).ok());
}

TEST(Dataset, ShareGptFiltersAndRepeats) {
  ByteVocabulary vocabulary;
  DatasetOptions o;
  o.kind = DatasetKind::kShareGpt;
  o.path = kData + "sharegpt.json";
  o.num_prompts = 30;
  const Dataset d = make(o, vocabulary);
  EXPECT_EQ(d.samples.size(), 30u);
  const auto rows = parse_sharegpt(read("sharegpt.json")).value();
  for (const Sample& s : d.samples) {
    const auto row = std::find_if(rows.begin(), rows.end(), [&](const TextRow& r) {
      return r.prompt == std::get<std::string>(s.prompt) &&
             static_cast<int>(r.completion.size()) == s.output_tokens;
    });
    EXPECT_NE(row, rows.end());
  }
  o.max_model_len = 5;
  EXPECT_FALSE(make_dataset(o, vocabulary).ok());
}

TEST(Dataset, MooncakeSharesBlocks) {
  ByteVocabulary vocabulary;
  vocabulary.usable.clear();
  for (int32_t id = 0; id < 250; ++id) vocabulary.usable.push_back(id);
  DatasetOptions o;
  o.kind = DatasetKind::kMooncake;
  o.path = kData + "mooncake.jsonl";
  o.trace_speed = 2.0;
  const Dataset d = make(o, vocabulary);
  ASSERT_EQ(d.samples.size(), 8u);  // the whole file, not repeated
  EXPECT_TRUE(d.timed);
  EXPECT_NEAR(d.samples[3].time, 5.999 / 2, 1e-9);
  const Ids& a = std::get<Ids>(d.samples[0].prompt);
  const Ids& b = std::get<Ids>(d.samples[1].prompt);
  EXPECT_EQ(a.size(), 2290u);
  // All rows begin with block 0 and differ after it.
  EXPECT_TRUE(std::equal(a.begin(), a.begin() + kMooncakeBlock, b.begin()));
  EXPECT_FALSE(std::equal(a.begin() + kMooncakeBlock, a.begin() + 2 * kMooncakeBlock,
                          b.begin() + kMooncakeBlock));
  o.max_model_len = 1300;
  const Dataset less = make(o, vocabulary);
  EXPECT_EQ(less.samples.size(), 2u);
  EXPECT_EQ(less.left_out, 6u);
}

TEST(Dataset, RefusesNonsense) {
  ByteVocabulary vocabulary;
  const auto refused = [&](auto change) {
    DatasetOptions o;
    change(o);
    const auto made = make_dataset(o, vocabulary);
    EXPECT_FALSE(made.ok());
    return made.ok() ? "" : made.status().message();
  };
  refused([](DatasetOptions& o) { o.num_prompts = 0; });
  refused([](DatasetOptions& o) { o.random_input_len = 0; });
  refused([](DatasetOptions& o) { o.random_output_len = 1 << 30; });
  refused([](DatasetOptions& o) { o.random_range_ratio = 1.0; });
  refused([](DatasetOptions& o) { o.path = "x"; });
  refused([](DatasetOptions& o) { o.kind = DatasetKind::kSonnet; });
  refused([](DatasetOptions& o) { o.trace_speed = 0.0; });
  // Excessive memory is an error; it is not allocated first.
  refused([](DatasetOptions& o) {
    o.num_prompts = 1 << 30;
    o.random_input_len = 1 << 22;
  });
  const std::string missing = refused([](DatasetOptions& o) {
    o.kind = DatasetKind::kAzure;
    o.path = kData + "nothing.csv";
  });
  EXPECT_NE(missing.find("nothing.csv"), std::string::npos);
}

}  // namespace
}  // namespace freshet::bench_client
