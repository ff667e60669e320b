#include "base/utf8.h"

#include <gtest/gtest.h>

namespace freshet {
namespace {

TEST(Utf8, EveryScalarValueRoundTrips) {
  std::string s;
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    s.clear();
    append_utf8(s, c);
    const Utf8Char d = decode_utf8(s);
    ASSERT_TRUE(d.valid && d.code == c && d.size == s.size()) << static_cast<uint32_t>(c);
    for (size_t n = 1; n < s.size(); ++n) {
      const Utf8Char cut = decode_utf8(std::string_view(s).substr(0, n));
      ASSERT_TRUE(!cut.valid && cut.size == n);
    }
  }
}

// Table 3-8 of the Unicode standard: each maximal ill-formed part becomes one replacement
// character.
TEST(Utf8, IllFormedPartsAreMaximal) {
  const std::string s = "\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64";
  std::u32string out;
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = decode_utf8(std::string_view(s).substr(i));
    out.push_back(c.code);
    i += c.size;
  }
  EXPECT_EQ(out, U"\x61\xFFFD\xFFFD\xFFFD\x62\xFFFD\x63\xFFFD\xFFFD\x64");
}

TEST(Utf8, FindsTheFirstBadByte) {
  EXPECT_EQ(find_invalid_utf8("na\xc3\xafve"), std::string_view::npos);
  EXPECT_EQ(find_invalid_utf8("ab\xc0\xaf"), 2U);
  EXPECT_EQ(find_invalid_utf8("ab\xf0\x9f\x99"), 2U);
  EXPECT_EQ(find_invalid_utf8(""), std::string_view::npos);
}

}  // namespace
}  // namespace freshet
