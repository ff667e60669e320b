// Plots a benchmark run as one SVG: latency distributions, and throughput and concurrency over
// time. Self-contained (no script, no fonts); follows the viewer's dark or light scheme. Pure
// functions.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bench_client/report.h"

namespace freshet::bench_client {

struct Line {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x ascends
};

struct Panel {
  std::string title;
  std::string x_unit;
  std::vector<Line> lines;  // at most two
  double top = 0.0;         // top of the y scale; 0: from the points
  bool percent = false;     // y is a fraction, 0..1
};

// Two panels per row. Text is escaped.
std::string svg(const std::string& title, const std::string& subtitle,
                const std::vector<Panel>& panels);

// TTFT, TPOT, ITL and end-to-end latency as cumulative distributions; tokens per second and
// requests in flight over time.
std::string plot(const BenchRun& run, const std::string& title);

// The fraction of values at or below each value, reduced to a few hundred points.
std::vector<std::pair<double, double>> cumulative(std::vector<double> values);

}  // namespace freshet::bench_client
