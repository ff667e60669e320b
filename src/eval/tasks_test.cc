#include "eval/tasks.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <unistd.h>

namespace freshet::eval {
namespace {

Extraction how(const std::string& text) {
  auto e = Extraction::parse(text);
  EXPECT_TRUE(e.ok()) << e.status().message();
  return *e;
}

TEST(Extraction, NumbersAsInGsm8k) {
  const Extraction e = how("number");
  EXPECT_EQ(e.extract("She has 16 - 3 = 13 eggs, so $1,026.50 in all."), "$1,026.50");
  EXPECT_EQ(e.extract("That is 5.\n#### 18\nQuestion 7"), "18");
  EXPECT_EQ(e.extract("#### unclear, perhaps 4"), "4");
  EXPECT_EQ(e.extract("minus: -7."), "-7");
  EXPECT_EQ(e.extract("none"), "");
  EXPECT_TRUE(e.equal("$1,200", "1200"));
  EXPECT_TRUE(e.equal("18.00", "18"));
  EXPECT_FALSE(e.equal("18", "180"));
  EXPECT_FALSE(e.equal("", ""));
}

TEST(Extraction, PatternsAndTexts) {
  EXPECT_EQ(how("text").extract("  Paris \n"), "Paris");
  EXPECT_TRUE(how("text").equal("Paris", " Paris"));
  EXPECT_FALSE(how("text").equal("", ""));
  EXPECT_EQ(how(R"(answer is \(?\K[A-D])").extract("The answer is (B). No, the answer is C"), "C");
  EXPECT_EQ(how("x+").extract("abc"), "");
  EXPECT_FALSE(Extraction::parse("(").ok());
}

class TaskFiles : public ::testing::Test {
 protected:
  Result<TaskFile> read(const std::string& text, const TaskDefaults& defaults = {}) {
    const auto path =
        std::filesystem::temp_directory_path() / fmt::format("freshet-tasks-{}.jsonl", getpid());
    std::ofstream(path, std::ios::binary) << text;
    auto file = read_task_file(path.string(), defaults);
    std::filesystem::remove(path);
    return file;
  }
};

TEST_F(TaskFiles, LinesOfGsm8k) {
  const auto file = read(
      R"({"question": "A robe takes 2 bolts. How many?", "answer": "It takes 2/2=<<2/2=1>>1.\n#### 3"})");
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_FALSE(file->choices);
  const TaskItem& item = file->items.front();
  EXPECT_EQ(item.prompt, "Question: A robe takes 2 bolts. How many?\nAnswer:");
  EXPECT_EQ(item.answers, std::vector<std::string>{"3"});
  EXPECT_EQ(item.extraction.kind, Extraction::Kind::kNumber);
  EXPECT_EQ(item.stop.front(), "Question:");
}

TEST_F(TaskFiles, DefaultsAndFields) {
  TaskDefaults defaults;
  defaults.preamble = "Examples. ";
  defaults.stop = {"\n"};
  defaults.max_tokens = 7;
  defaults.extract = "number";
  const auto file = read(
      "{\"prompt\": \"a\", \"answer\": \"1\"}\n\n"
      "{\"id\": 5, \"prompt\": \"b\", \"answer\": [\"x\", \"y\"], \"stop\": \"z\", "
      "\"extract\": \"text\", \"max_tokens\": 2}\n",
      defaults);
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_EQ(file->items.size(), 2u);
  EXPECT_EQ(file->items[0].prompt, "Examples. a");
  EXPECT_EQ(file->items[0].id, "1");
  EXPECT_EQ(file->items[0].stop, std::vector<std::string>{"\n"});
  EXPECT_EQ(file->items[0].max_tokens, 7);
  EXPECT_EQ(file->items[0].extraction.kind, Extraction::Kind::kNumber);
  EXPECT_EQ(file->items[1].id, "5");
  EXPECT_EQ(file->items[1].stop, std::vector<std::string>{"z"});
  EXPECT_EQ(file->items[1].answers.size(), 2u);
  EXPECT_EQ(file->items[1].max_tokens, 2);
  EXPECT_EQ(file->items[1].extraction.kind, Extraction::Kind::kText);
}

}  // namespace
}  // namespace freshet::eval
