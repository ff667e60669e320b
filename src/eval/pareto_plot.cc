#include "eval/pareto_plot.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/escape_html.h"
#include "base/status.h"

namespace freshet::eval {
namespace {

// The plotting area, in pixels of the picture.
constexpr double kWidth = 800, kHeight = 520;
constexpr double kLeft = 90, kRight = 770, kTop = 50, kBottom = 455;
constexpr double kCharWidth = 6.6, kLineHeight = 14.0;  // of a point's name

constexpr const char* kStyle =
    "<style>\n"
    "svg { --ink: #1f2328; --faint: #d0d7de; --back: #ffffff; --line: #0969da; --dot: #0969da; "
    "--other: #6e7781; background: var(--back); font: 12px sans-serif }\n"
    "@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #30363d; --back: "
    "#0d1117; --line: #58a6ff; --dot: #58a6ff; --other: #8b949e } }\n"
    ".back { fill: var(--back) } text { fill: var(--ink); stroke: var(--back); stroke-width: 3px; "
    "paint-order: stroke } .grid { stroke: var(--faint) }\n"
    ".front { stroke: var(--line); fill: none; stroke-width: 2 }\n"
    ".best { fill: var(--dot); stroke: var(--dot) } .other { fill: var(--other); stroke: "
    "var(--other) }\n"
    ".zero { fill: var(--back) } .lead { stroke: var(--faint) }\n"
    "</style>\n";

struct Axis {
  double from, to;    // data
  double start, end;  // pixels
  bool logarithmic;
  double at(double value) const {
    const auto scale = [this](double v) { return logarithmic ? std::log10(v) : v; };
    return start + (scale(value) - scale(from)) / (scale(to) - scale(from)) * (end - start);
  }
};

// 1, 2 or 5 times a power of ten, so that about five steps fill the axis.
double tick_step(double range) {
  const double raw = range / 5.0, power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power) return factor * power;
  }
  return 10.0 * power;
}

Axis size_axis(std::span<const PlotPoint> points) {
  const auto [low, high] = std::ranges::minmax(points, {}, &PlotPoint::size);
  const double range = std::max(high.size - low.size, 0.1 * high.size);
  return {std::max(0.0, low.size - 0.08 * range), high.size + 0.08 * range, kLeft, kRight, false};
}

Axis loss_axis(std::span<const PlotPoint> points) {
  double low = 0.0, high = 0.0;
  for (const PlotPoint& p : points) {
    if (p.loss <= 0.0) continue;
    low = low == 0.0 ? p.loss : std::min(low, p.loss);
    high = std::max(high, p.loss);
  }
  if (high == 0.0) low = high = 1.0;
  return {low / 1.6, high * 1.6, kBottom, kTop, true};
}

std::string size_ticks(const Axis& axis) {
  std::string svg;
  const double step = tick_step(axis.to - axis.from);
  for (double n = std::ceil(axis.from / step); n * step <= axis.to; ++n) {
    const double x = axis.at(n * step);
    svg += fmt::format("<line class=\"grid\" x1=\"{0:.1f}\" y1=\"{1}\" x2=\"{0:.1f}\" y2=\"{2}\"/>",
                       x, kTop, kBottom);
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.6g}</text>\n", x,
                       kBottom + 18, n * step);
  }
  return svg;
}

std::string loss_ticks(const Axis& axis) {
  std::string svg;
  const bool few = axis.to / axis.from > 300.0;  // powers of ten alone
  for (double power = std::floor(std::log10(axis.from)); power <= std::log10(axis.to); ++power) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double value = factor * std::pow(10.0, power);
      if (value < axis.from || value > axis.to || (few && factor != 1.0)) continue;
      const double y = axis.at(value);
      svg +=
          fmt::format("<line class=\"grid\" x1=\"{0}\" y1=\"{2:.1f}\" x2=\"{1}\" y2=\"{2:.1f}\"/>",
                      kLeft, kRight, y);
      svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.6g}</text>\n",
                         kLeft - 8, y + 4, value);
    }
  }
  return svg;
}

struct Box {
  double x0, y0, x1, y1;
  bool meets(const Box& o) const { return x0 < o.x1 && o.x0 < x1 && y0 < o.y1 && o.y0 < y1; }
};

// The first free place for a name, right or left of its point and then further up or down.
Box place_name(double x, double y, double width, const std::vector<Box>& taken) {
  Box first{};
  for (int step = 0; step < 24; ++step) {
    for (const bool right : {true, false}) {
      const double shift = (step % 2 == 0 ? -1.0 : 1.0) * ((step + 1) / 2) * kLineHeight;
      const double x0 = right ? x + 9 : x - 9 - width, y0 = y - kLineHeight / 2 + shift;
      const Box box{x0, y0, x0 + width, y0 + kLineHeight};
      if (step == 0 && right) first = box;
      const bool inside =
          box.x0 >= kLeft && box.x1 <= kWidth && box.y0 >= kTop && box.y1 <= kBottom;
      if (inside && std::ranges::none_of(taken, [&](const Box& o) { return box.meets(o); }))
        return box;
    }
  }
  return first;
}

}  // namespace

std::vector<size_t> pareto_front(std::span<const PlotPoint> points) {
  std::vector<size_t> front;
  for (size_t i = 0; i < points.size(); ++i) {
    const bool beaten = std::ranges::any_of(points, [&](const PlotPoint& p) {
      return p.size <= points[i].size && p.loss <= points[i].loss &&
             (p.size < points[i].size || p.loss < points[i].loss);
    });
    if (!beaten) front.push_back(i);
  }
  std::ranges::stable_sort(front, {}, [&](size_t i) { return points[i].size; });
  return front;
}

std::string pareto_svg(std::span<const PlotPoint> points, const PlotLabels& labels) {
  FRESHET_CHECK(!points.empty());
  const Axis sizes = size_axis(points), losses = loss_axis(points);
  const auto x_of = [&](const PlotPoint& p) { return sizes.at(p.size); };
  const auto y_of = [&](const PlotPoint& p) { return p.loss > 0.0 ? losses.at(p.loss) : kBottom; };
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" role=\"img\">\n<title>{2}</title>\n",
      kWidth, kHeight, escape_html(labels.title));
  svg += kStyle;
  svg += fmt::format("<rect class=\"back\" width=\"{}\" height=\"{}\"/>\n", kWidth, kHeight);
  svg += fmt::format("<text x=\"{}\" y=\"28\" font-size=\"15\">{}</text>\n", kLeft,
                     escape_html(labels.title));
  svg += size_ticks(sizes) + loss_ticks(losses);
  svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                     (kLeft + kRight) / 2, kBottom + 45, escape_html(labels.size));
  svg += fmt::format(
      "<text transform=\"translate(22 {}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
      (kTop + kBottom) / 2, escape_html(labels.loss));
  const std::vector<size_t> front = pareto_front(points);
  std::string line;
  for (const size_t i : front) {
    if (points[i].loss <= 0.0) continue;  // infinitely far down
    line +=
        fmt::format("{}{:.1f},{:.1f}", line.empty() ? "" : " ", x_of(points[i]), y_of(points[i]));
  }
  svg += fmt::format("<polyline class=\"front\" points=\"{}\"/>\n", line);
  svg += fmt::format("<line class=\"front\" x1=\"{}\" y1=\"24\" x2=\"{}\" y2=\"24\"/>",
                     kRight - 110, kRight - 85);
  svg += fmt::format("<text x=\"{}\" y=\"28\">Pareto front</text>\n", kRight - 78);
  std::vector<Box> taken;
  for (const PlotPoint& p : points)
    taken.push_back({x_of(p) - 5, y_of(p) - 5, x_of(p) + 5, y_of(p) + 5});
  for (size_t i = 0; i < points.size(); ++i) {
    const double x = x_of(points[i]), y = y_of(points[i]);
    const bool best = std::ranges::find(front, i) != front.end();
    svg += fmt::format("<circle class=\"{}{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\"/>",
                       best ? "best" : "other", points[i].loss > 0.0 ? "" : " zero", x, y);
    const double width = kCharWidth * static_cast<double>(points[i].name.size());
    const Box box = place_name(x, y, width, taken);
    taken.push_back(box);
    const bool right = box.x0 > x;
    const double text_x = right ? box.x0 : box.x1, text_y = box.y0 + kLineHeight - 3;
    if (std::abs(box.y0 + kLineHeight / 2 - y) > 1.0) {
      svg += fmt::format(
          "<line class=\"lead\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>", x, y,
          text_x, text_y - 4);
    }
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", text_x,
                       text_y, right ? "start" : "end", escape_html(points[i].name));
  }
  return svg + "</svg>\n";
}

}  // namespace freshet::eval
