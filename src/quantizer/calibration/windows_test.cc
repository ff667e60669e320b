#include "quantizer/calibration/windows.h"

#include <fstream>

#include <gtest/gtest.h>

#include "tokenizer/tokenizer.h"

namespace freshet::quantizer {
namespace {

std::string model_folder() {
  return std::string(FRESHET_SOURCE_DIR) + "/models/default.gguf";
}

std::string text_file(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

constexpr int64_t kVocab = 1 << 20;

TEST(CalibrationWindows, TextIsCutIntoWholeWindowsThatBeginWithBos) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "The river rose and the river fell. ";
  const std::string file = text_file("windows.txt", text);
  const auto tokenizer = tokenizer::Tokenizer::load(model_folder());
  ASSERT_TRUE(tokenizer.ok());
  const auto all = tokenizer->encode(text, {.add_special = false});
  const auto got = read_windows(file, model_folder(), kVocab, {.samples = 1000, .length = 64});
  ASSERT_TRUE(got.ok()) << got.status().message();
  const int64_t own = tokenizer->adds_bos() ? 63 : 64;
  EXPECT_EQ(std::ssize(got->windows), std::ssize(all) / own);
  std::vector<int32_t> joined;
  for (const auto& window : got->windows) {
    EXPECT_EQ(window.size(), 64u);
    if (tokenizer->adds_bos()) {
      EXPECT_EQ(window.front(), *tokenizer->bos());
    }
    joined.insert(joined.end(), window.end() - own, window.end());
  }
  EXPECT_TRUE(std::equal(joined.begin(), joined.end(), all.begin()));
  const auto three = read_windows(file, model_folder(), kVocab, {.samples = 3, .length = 64});
  ASSERT_TRUE(three.ok());
  EXPECT_EQ(three->windows.size(), 3u);
  EXPECT_NE(three->hash, got->hash);
}

TEST(CalibrationWindows, LinesAndListsAreTheirOwnWindows) {
  const auto lines = read_windows(text_file("windows.jsonl",
                                            "{\"text\": \"One river.\"}\n\n"
                                            "{\"input_ids\": [1, 2, 3]}\n"),
                                  model_folder(), kVocab, {});
  ASSERT_TRUE(lines.ok()) << lines.status().message();
  ASSERT_EQ(lines->windows.size(), 2u);
  EXPECT_EQ(lines->windows[1], (std::vector<int32_t>{1, 2, 3}));
  const auto lists = read_windows(text_file("windows.json", "[[1, 2], [3, 4, 5, 6]]"),
                                  model_folder(), kVocab, {.length = 3});
  ASSERT_TRUE(lists.ok());
  EXPECT_EQ(lists->windows, (Windows{{1, 2}, {3, 4, 5}}));
}

TEST(CalibrationWindows, WhatIsWrongIsNamed) {
  const auto message = [](const std::string& name, const std::string& text) {
    const auto got = read_windows(text_file(name, text), model_folder(), 100, {});
    return got.ok() ? "no error" : got.status().message();
  };
  EXPECT_NE(message("a.jsonl", "{\"text\": \"a\"}\n{\"txt\": 1}\n").find("line 2"),
            std::string::npos);
  EXPECT_NE(message("b.jsonl", "{\"input_ids\": [1, 100]}\n").find("line 1"), std::string::npos);
  EXPECT_NE(message("c.json", "[[1], [-1]]").find("list 1"), std::string::npos);
  EXPECT_NE(message("d.txt", " \n").find("is empty"), std::string::npos);
  EXPECT_NE(message("e.jsonl", "{\"text\": \"a\"}\n{\"text\": \n").find("line 2"),
            std::string::npos);
}

}  // namespace
}  // namespace freshet::quantizer
