#include "base/status.h"

#include <memory>

#include <gtest/gtest.h>

namespace freshet {
namespace {

Result<int> half(int n) {
  if (n % 2 != 0) return invalid_argument("{} is odd", n);
  return n / 2;
}
Status quarter(int n, int& out) {
  FRESHET_ASSIGN_OR_RETURN(const int h, half(n));
  FRESHET_ASSIGN_OR_RETURN(out, half(h));
  FRESHET_RETURN_IF_ERROR(Status());
  return {};
}

TEST(Status, TravelsThroughTheMacros) {
  int out = 0;
  EXPECT_TRUE(quarter(12, out).ok());
  EXPECT_EQ(out, 3);
  const Status status = quarter(6, out);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.with_context("model.gguf").message(), "model.gguf: 3 is odd");
  EXPECT_EQ(status.with_context("x").code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Status().with_context("x").message().empty());
}

TEST(Status, MakersCarryTheirCode) {
  EXPECT_EQ(not_found("{}", 1).code(), StatusCode::kNotFound);
  EXPECT_EQ(unsupported("{}", 1).code(), StatusCode::kUnsupported);
  EXPECT_EQ(resource_exhausted("{}", 1).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(io_error("{}", 1).code(), StatusCode::kIo);
  EXPECT_EQ(cancelled("{}", 1).code(), StatusCode::kCancelled);
  EXPECT_EQ(internal_error("{}", 1).code(), StatusCode::kInternal);
}

TEST(Result, HoldsMoveOnlyValues) {
  Result<std::unique_ptr<int>> r(std::make_unique<int>(5));
  ASSERT_TRUE(r.ok());
  EXPECT_TRUE(r.status().ok());
  const std::unique_ptr<int> taken = std::move(r).value();
  EXPECT_EQ(*taken, 5);
}

TEST(ResultDeathTest, ValueOfAnErrorIsAFailedCheck) {
  EXPECT_DEATH(half(3).value(), "CHECK failed: ok\\(\\): 3 is odd");
  EXPECT_DEATH((void)Result<int>(Status()), "an ok Status holds no value");
  EXPECT_DEATH(FRESHET_CHECK(1 + 1 == 3, "sum of {}", 2),
               "status_test.cc:.*1 \\+ 1 == 3: sum of 2");
}

}  // namespace
}  // namespace freshet
