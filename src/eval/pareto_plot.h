// An SVG picture of models as points: size against loss, with the Pareto front as a line.
//
// The loss is on a logarithmic axis. Colours follow the reader's light or dark scheme. Pure;
// thread-safe.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace freshet::eval {

struct PlotPoint {
  std::string name;
  double size = 0.0;  // > 0
  double loss = 0.0;  // <= 0 is drawn at the lower edge, hollow
};

struct PlotLabels {
  std::string title;
  std::string size;  // of the axes
  std::string loss;
};

// The points that no other point beats in both (equal points beat each other in neither), by
// ascending size.
std::vector<size_t> pareto_front(std::span<const PlotPoint> points);

// REQUIRES: at least one point; all numbers are finite.
std::string pareto_svg(std::span<const PlotPoint> points, const PlotLabels& labels);

}  // namespace freshet::eval
