#include "eval/pareto_plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace freshet::eval {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST(ParetoPlot, FrontHasWhatNothingBeats) {
  const std::vector<PlotPoint> points = {{"q4", 4.5, 0.010},   {"bad", 4.6, 0.020},
                                         {"q8", 8.5, 0.001},   {"q3", 3.5, 0.05},
                                         {"twin", 4.5, 0.010}, {"same size", 8.5, 0.002}};
  EXPECT_THAT(pareto_front(points), ElementsAre(3, 0, 4, 2));
}

TEST(ParetoPlot, DrawsEveryPointOnceWithItsName) {
  const std::vector<PlotPoint> points = {
      {"a<b>&c", 4.5, 0.010}, {"q8", 8.5, 0.001}, {"worse", 8.6, 0.0011}, {"equal", 16.0, 0.0}};
  const std::string svg = pareto_svg(points, {"title", "bits & bytes", "loss"});
  EXPECT_THAT(svg, HasSubstr(">a&lt;b&gt;&amp;c</text>"));
  EXPECT_THAT(svg, Not(HasSubstr("<b>")));
  EXPECT_THAT(svg, HasSubstr("bits &amp; bytes"));
  EXPECT_EQ(count(svg, "<circle "), points.size());
  EXPECT_EQ(count(svg, "class=\"best\""), 2u);
  EXPECT_EQ(count(svg, "class=\"other\""), 1u);
  EXPECT_EQ(count(svg, "class=\"best zero\""), 1u);  // a logarithmic axis has no place for 0
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

TEST(ParetoPlot, OnePointAndEqualPointsHaveAxes) {
  for (const std::vector<PlotPoint>& points :
       {std::vector<PlotPoint>{{"one", 4.0, 0.01}}, {{"a", 4.0, 0.0}, {"b", 4.0, -0.1}}}) {
    const std::string svg = pareto_svg(points, {"t", "x", "y"});
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
    EXPECT_GE(count(svg, "class=\"grid\""), 2u);
  }
}

}  // namespace
}  // namespace freshet::eval
