#include "eval/divergence.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace freshet::eval {
namespace {

using Row = std::vector<float>;

TEST(Divergence, OfSmallDistributions) {
  const auto logs = [](std::initializer_list<double> p) {
    Row row;
    for (const double v : p) row.push_back(static_cast<float>(std::log(v)));
    return row;
  };
  // p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL = 1/2 ln 2 - 1/4 ln 2.
  const Row p = logs({0.5, 0.25, 0.25}), q = logs({0.25, 0.25, 0.5});
  const Divergence d = divergence(p, q, 2);
  EXPECT_NEAR(d.kl, 0.25 * std::log(2.0), 1e-7);
  EXPECT_NEAR(d.base_nats, std::log(4.0), 1e-7);
  EXPECT_NEAR(d.model_nats, std::log(2.0), 1e-7);
  EXPECT_FALSE(d.same_top);
}

TEST(Divergence, EqualRowsDivergeByExactlyZero) {
  Row row;
  for (int i = 0; i < 1000; ++i) row.push_back(std::sin(static_cast<float>(i)) * 20.0f);
  const Divergence d = divergence(row, row, 17);
  EXPECT_EQ(d.kl, 0.0);
  EXPECT_EQ(d.base_nats, d.model_nats);
  EXPECT_TRUE(d.same_top);
}

TEST(Divergence, AShiftOfAllLogitsChangesNothing) {
  const Row p = {1.0f, 3.0f, 3.0f, -2.0f};
  const Row q = {1025.0f, 1027.0f, 1027.0f, 1022.0f};
  const Divergence d = divergence(p, q, 0);
  EXPECT_NEAR(d.kl, 0.0, 1e-13);
  EXPECT_NEAR(d.base_nats, d.model_nats, 1e-12);
  EXPECT_TRUE(d.same_top);  // both choose the lower of the equal ones
}

TEST(Divergence, WhatTheBaseRulesOutDoesNotCount) {
  const float none = -std::numeric_limits<float>::infinity();
  EXPECT_NEAR(divergence(Row{0.0f, none}, Row{0.0f, 0.0f}, 0).kl, std::log(2.0), 1e-15);
  EXPECT_TRUE(std::isinf(divergence(Row{0.0f, 0.0f}, Row{0.0f, none}, 0).kl));
}

TEST(Divergence, NaNIsNotHidden) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [p, q] : {std::pair{Row{0.0f, nan, 1.0f}, Row{0.0f, 0.0f, 0.0f}},
                             std::pair{Row{0.0f, 0.0f, 1.0f}, Row{nan, 0.0f, 0.0f}}})
    EXPECT_TRUE(std::isnan(divergence(p, q, 0).kl));
}

}  // namespace
}  // namespace freshet::eval
