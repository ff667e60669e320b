#include "cli/markdown.h"

#include <string>
#include <string_view>

#include <gtest/gtest.h>

namespace freshet::cli {
namespace {

// The output with readable styles: {b} bold, {i} italic, {c} code, {d} dim, {} none.
std::string shown(std::string_view text, size_t piece = std::string_view::npos, int columns = 0) {
  std::string out;
  WordWrap wrap([columns] { return columns; }, [&out](std::string_view s) { out += s; });
  Markdown markdown(wrap);
  while (!text.empty()) {
    const size_t n = std::min(piece, text.size());
    markdown.feed(text.substr(0, n));
    text.remove_prefix(n);
  }
  markdown.finish();
  std::string readable;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] != '\x1b') {
      readable += out[i];
      continue;
    }
    const size_t end = out.find('m', i);
    const std::string codes = out.substr(i + 2, end - i - 2);
    readable += '{';
    if (codes.find(";1") != std::string::npos) readable += 'b';
    if (codes.find(";2") != std::string::npos) readable += 'd';
    if (codes.ends_with(";3") || codes.find(";3;") != std::string::npos) readable += 'i';
    if (codes.find(";36") != std::string::npos) readable += 'c';
    readable += '}';
    i = end;
  }
  return readable;
}

TEST(Markdown, Emphasis) {
  EXPECT_EQ(shown("a **bold** word"), "a {b}bold{} word");
  EXPECT_EQ(shown("an *italic* and _another_ one"), "an {i}italic{} and {i}another{} one");
  EXPECT_EQ(shown("***both***"), "{bi}both{}");
  EXPECT_EQ(shown("**bold with *italic* in it**"), "{b}bold with {bi}italic{b} in it{}");
  EXPECT_EQ(shown("这是**重点**内容"), "这是{b}重点{}内容");
}

TEST(Markdown, WhatIsNoEmphasisStaysAsItIs) {
  for (const char* text :
       {"5 * 3 = 15 and 2 * 2", "2*3*4", "snake_case_name", "use **kwargs here", "a * b",
        "unclosed *star", "**", "_", "a lone ` tick", "x **y", "f(*args)"})
    EXPECT_EQ(shown(text), text);
  EXPECT_EQ(shown("\\*not italic\\*"), "*not italic*");
  EXPECT_EQ(shown("C:\\temp"), "C:\\temp");
}

TEST(Markdown, Code) {
  EXPECT_EQ(shown("call `f(*a, **b)` now"), "call {c}f(*a, **b){} now");
  EXPECT_EQ(shown("``a ` b``"), "{c}a ` b{}");
  EXPECT_EQ(shown("Look:\n```python\nx = 1 * 2\n\n  y = **z\n```\nDone."),
            "Look:\n{d}```python{}\n{c}x = 1 * 2\n\n  y = **z\n{d}```{}\nDone.");
  // A fence inside a longer one is code; a block that is never closed still ends its style.
  EXPECT_EQ(shown("````\n```\n````"), "{d}````{}\n{c}```\n{d}````{}");
  EXPECT_EQ(shown("```\nx"), "{d}```{}\n{c}x{}");
}

TEST(Markdown, CodeIsNotWrapped) {
  EXPECT_EQ(shown("```\naaaa bbbb cccc\n```", std::string_view::npos, 6),
            "{d}```{}\n{c}aaaa bbbb cccc\n{d}```{}");
}

TEST(Markdown, Blocks) {
  EXPECT_EQ(shown("# Title\ntext"), "{b}Title{}\ntext");
  EXPECT_EQ(shown("#hashtag"), "#hashtag");
  EXPECT_EQ(shown("- one\n* two\n  + three"), "• one\n• two\n  • three");
  EXPECT_EQ(shown("1. **One**: x\n2) two"), "1. {b}One{}: x\n2) two");
  EXPECT_EQ(shown("**Bold** begins"), "{b}Bold{} begins");
  EXPECT_EQ(shown("> said"), "{d}│ said{}");
  EXPECT_EQ(shown("a\n---\nb"), "a\n{d}────────────────────{}\nb");
  EXPECT_EQ(shown("-5 degrees\n2024 was warm\n--flag"), "-5 degrees\n2024 was warm\n--flag");
  EXPECT_EQ(shown("| a | b |\n|---|---|"), "| a | b |\n|---|---|");
}

TEST(Markdown, ListsHang) {
  EXPECT_EQ(shown("- aaa bbb ccc", std::string_view::npos, 9), "• aaa bbb\n  ccc");
  EXPECT_EQ(shown("10. aaa bbb", std::string_view::npos, 8), "10. aaa\n    bbb");
}

TEST(Markdown, DoesNotDependOnPieces) {
  const std::string text =
      "# Head *one*\n\n1. **A** and `b*`: _c_\n- x **y** z\n\n```c\nint *p = **q;\n```\n> "
      "q\n\n***\n"
      "2 * 3, a_b_c, \\*, unclosed **bold\nlast ``code`` _line";
  const std::string whole = shown(text, std::string_view::npos, 12);
  for (size_t piece = 1; piece < 9; ++piece) EXPECT_EQ(shown(text, piece, 12), whole) << piece;
}

TEST(Markdown, LongUnclosedMarkupIsNotHeldBack) {
  std::string out;
  WordWrap wrap([] { return 0; }, [&out](std::string_view s) { out += s; });
  Markdown markdown(wrap);
  std::string text = "**";
  while (text.size() < Markdown::kLongestHeld + 20) text += "word ";
  markdown.feed(text);
  EXPECT_TRUE(out.starts_with("**word word")) << out;
}

}  // namespace
}  // namespace freshet::cli
