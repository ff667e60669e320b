#include "base/units.h"

#include <vector>

#include <gtest/gtest.h>

#include "base/nearest.h"

namespace freshet {
namespace {

constexpr size_t kOneMiB = size_t{1} << 20;

TEST(Units, AmountsAreBinary) {
  EXPECT_EQ(format_bytes(0), "0 bytes");
  EXPECT_EQ(format_bytes(1), "1 byte");
  EXPECT_EQ(format_bytes(512), "512 bytes");
  EXPECT_EQ(format_bytes(2048), "2 KiB");
  EXPECT_EQ(format_bytes(kOneMiB * 3 / 2), "1.5 MiB");
  EXPECT_EQ(format_bytes(41 * kOneMiB), "41 MiB");
  EXPECT_EQ(format_bytes(size_t{9} << 30), "9.0 GiB");
}

TEST(Nearest, DistancesCountSwapsOnce) {
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("flaw", "lawn"), 2u);
  EXPECT_EQ(edit_distance("sevre", "serve"), 1u);
}

TEST(Nearest, FindsMisspellingsAndBeginnings) {
  const std::vector<std::string> words = {"run", "chat", "serve", "tokenize", "convert"};
  EXPECT_EQ(nearest("srve", words), "serve");
  EXPECT_EQ(nearest("tokenise", words), "tokenize");
  EXPECT_EQ(nearest("rn", words), "run");
  EXPECT_EQ(nearest("tok", words), "tokenize");
  EXPECT_EQ(nearest("perplexity", words), "");
  EXPECT_EQ(nearest("", words), "");
}

}  // namespace
}  // namespace freshet
