#include "eval/session.h"

#include <gtest/gtest.h>

namespace freshet::eval {
namespace {

SessionOptions options_of(const char* model) {
  SessionOptions options;
  options.model = std::string(FRESHET_UNPACKED_DATA) + "/seeded/" + model;
  options.threads = 1;
  options.context = 32;
  return options;
}

// Whoever gives pieces of text alone is told before a step runs.
TEST(Session, OpensOnlyWhatItsUserCanFeed) {
  for (const char* model : {"t5", "whisper"}) {
    SessionOptions options = options_of(model);
    const auto refused = Session::open(options);
    ASSERT_FALSE(refused.ok()) << model;
    EXPECT_NE(refused.status().message().find("encoder-decoder"), std::string::npos);
    options.encodes = true;
    EXPECT_TRUE(Session::open(options).ok()) << model;
  }
  SessionOptions options = options_of("bert");
  EXPECT_FALSE(Session::open(options).ok());
  options.states = true;
  EXPECT_TRUE(Session::open(options).ok());
}

}  // namespace
}  // namespace freshet::eval
