#include "engine/text_assembler.h"

#include <gtest/gtest.h>

namespace freshet::engine {
namespace {

const tokenizer::Tokenizer& vocabulary() {
  static const auto loaded =
      tokenizer::Tokenizer::load(std::string(FRESHET_SOURCE_DIR) + "/models/default.gguf");
  FRESHET_CHECK(loaded.ok(), "{}", loaded.status().message());
  return *loaded;
}

struct Shown {
  std::string text;
  std::vector<std::string> pieces;
  std::string stop;
};

// Token by token, as they come.
Shown show(const std::string& text, std::vector<std::string> stops, bool include = false,
           size_t may_stop_after = 0) {
  const std::vector<int32_t> ids = vocabulary().encode(text, {.add_special = false});
  TextAssembler assembler(&vocabulary(), true, std::move(stops), include);
  Shown shown;
  for (size_t i = 0; i < ids.size(); ++i) {
    shown.pieces.push_back(assembler.push(ids[i], i >= may_stop_after));
    if (assembler.stopped_by() == nullptr) continue;
    shown.stop = *assembler.stopped_by();
    break;
  }
  shown.pieces.push_back(assembler.finish());
  for (const std::string& piece : shown.pieces) shown.text += piece;
  return shown;
}

TEST(TextAssembler, ShowsEverythingWithoutStops) {
  for (const char* text : {"It is not far to the river.", "naïve 日本 🙂 end", ""}) {
    EXPECT_EQ(show(text, {}).text,
              vocabulary().decode(vocabulary().encode(text, {.add_special = false})));
  }
}

TEST(TextAssembler, CutsBeforeAStop) {
  EXPECT_EQ(show("one two three four", {" three"}).text, "one two");
  EXPECT_EQ(show("one two three four", {" three"}, true).text, "one two three");
  EXPECT_EQ(show("one two three four", {"absent"}).text, "one two three four");
  EXPECT_EQ(show("one two three four", {"four", "two"}).stop, "two");  // the first to occur
  EXPECT_EQ(show("naïve 日本 🙂 end", {"本"}).text, "naïve 日");
}

TEST(TextAssembler, HoldsBackWhatMayBecomeAStop) {
  const Shown shown = show("ab\n\nc and then ab\n\nd, the end", {"\n\nd,"});
  EXPECT_EQ(shown.text, "ab\n\nc and then ab");
  EXPECT_EQ(shown.stop, "\n\nd,");
  // What is never a stop comes at the end at the latest.
  EXPECT_EQ(show("almost STO", {"STOP"}).text, "almost STO");
  // Nothing that is shown is ever taken back: each piece appears as soon as it is safe.
  const Shown early = show("one two three", {"xyz"});
  EXPECT_GT(early.pieces.size(), 2u);
  EXPECT_FALSE(early.pieces[0].empty());
}

TEST(TextAssembler, StopsWithinOneToken) {
  const std::vector<int32_t> ids = vocabulary().encode(" river", {.add_special = false});
  EXPECT_EQ(show("the river bank", {"ive"}).text, "the r");
  EXPECT_LE(ids.size(), 3u);
}

TEST(TextAssembler, StopsCountOnlyWhenTheyMay) {
  const std::string text = "stop stop stop";
  const size_t tokens = vocabulary().encode(text, {.add_special = false}).size();
  EXPECT_EQ(show(text, {"stop"}).text, "");
  EXPECT_EQ(show(text, {"stop"}, false, tokens).text, text);
}

TEST(TextAssembler, WithoutAVocabularyThereIsNoText) {
  TextAssembler assembler(nullptr, true, {}, false);
  EXPECT_EQ(assembler.push(5, true), "");
  EXPECT_EQ(assembler.finish(), "");
}

}  // namespace
}  // namespace freshet::engine
