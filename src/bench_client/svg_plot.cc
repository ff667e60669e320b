#include "bench_client/svg_plot.h"

#include <algorithm>
#include <cmath>

#include "base/escape_html.h"

namespace freshet::bench_client {
namespace {

constexpr double kPanelWidth = 440.0;
constexpr double kPanelHeight = 236.0;
constexpr double kGap = 20.0;
constexpr double kHead = 78.0;
constexpr size_t kMostPoints = 400;

constexpr char kStyle[] =
    "<style>"
    "svg{--bg:#fff;--box:#f7f8f9;--text:#1b2126;--muted:#5d6873;--line:#dfe4e8;--a:#0b7285;"
    "--b:#b07a1e;font-family:system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{--bg:#14181c;--box:#1b2026;--text:#e6eaed;"
    "--muted:#9aa6b1;--line:#2e363d;--a:#3bb6c9;--b:#e0a84a}}"
    ".bg{fill:var(--bg)}.box{fill:var(--box)}text{fill:var(--muted);font-size:12px}"
    ".title{fill:var(--text);font-size:18px;font-weight:600}"
    ".name{fill:var(--text);font-size:14px;font-weight:600}"
    ".grid{stroke:var(--line);stroke-width:1}"
    ".a,.b{fill:none;stroke-width:2;stroke-linejoin:round}.a{stroke:var(--a)}.b{stroke:var(--b)}"
    ".fa{fill:var(--a)}.fb{fill:var(--b)}"
    "</style>";

// XML allows no other control characters, not even as entities.
std::string escape(std::string text) {
  std::ranges::replace_if(text, [](char c) { return static_cast<unsigned char>(c) < ' '; }, ' ');
  return escape_html(text);
}

// The tick distance of a scale from 0 to about `top` with four or five ticks.
double nice_step(double top) {
  if (!(top > 0.0) || !std::isfinite(top)) return 0.25;
  const double raw = top / 4.5;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double m : {1.0, 2.0, 2.5, 5.0}) {
    if (raw <= m * power) return m * power;
  }
  return 10.0 * power;
}

std::string mark_text(double v, bool percent) {
  if (percent) return fmt::format("{:.0f}%", 100.0 * v);
  return std::abs(v) >= 10000.0 ? fmt::format("{:g}k", v / 1000.0) : fmt::format("{:g}", v);
}

struct Scale {
  double from, to;   // in pixels
  double low, high;  // of the values
  double operator()(double v) const { return from + (v - low) / (high - low) * (to - from); }
};

class PanelWriter {
 public:
  PanelWriter(const Panel& panel, double left, double top) : panel_(panel), left_(left), top_(top) {
    double x = 0.0;
    double y = panel.top;
    for (const Line& line : panel.lines) {
      for (const auto& [px, py] : line.points) {
        x = std::max(x, px);
        if (panel.top <= 0.0) y = std::max(y, py);
      }
    }
    x_step_ = nice_step(x);
    y_step_ = panel.percent ? 0.25 : nice_step(y);
    const double y_top =
        panel.top > 0.0 ? panel.top : y_step_ * std::max(1.0, std::ceil(y / y_step_));
    x_ = {left + 52.0, left + kPanelWidth - 18.0, 0.0, x > 0.0 ? x : 1.0};
    y_ = {top + kPanelHeight - 30.0, top + 44.0, 0.0, y_top};
  }

  std::string write() {
    out_ = fmt::format(
        "<rect class=\"box\" x=\"{:.0f}\" y=\"{:.0f}\" width=\"{:.0f}\" "
        "height=\"{:.0f}\" rx=\"10\"/>\n",
        left_, top_, kPanelWidth, kPanelHeight);
    text("name", left_ + 16.0, top_ + 26.0, "start", panel_.title);
    legend();
    marks();
    for (size_t i = 0; i < panel_.lines.size(); ++i) line(panel_.lines[i], i == 0 ? "a" : "b");
    return out_;
  }

 private:
  void text(const char* style, double x, double y, const char* anchor, const std::string& s) {
    out_ +=
        fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n",
                    style, x, y, anchor, escape(s));
  }

  void legend() {
    double right = left_ + kPanelWidth - 18.0;
    for (size_t i = panel_.lines.size(); i-- > 0;) {
      const std::string& name = panel_.lines[i].name;
      if (name.empty()) continue;
      text("", right, top_ + 26.0, "end", name);
      right -= 7.0 * static_cast<double>(name.size()) + 12.0;
      out_ += fmt::format(
          "<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"10\" height=\"3\" rx=\"1\"/>\n",
          i == 0 ? "fa" : "fb", right - 2.0, top_ + 21.0);
      right -= 16.0;
    }
  }

  void marks() {
    for (int i = 0; i * y_step_ <= y_.high * 1.0001; ++i) {
      const double v = i * y_step_;
      out_ += fmt::format(
          "<line class=\"grid\" x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
          x_.from, x_.to, y_(v), y_(v));
      text("", x_.from - 8.0, y_(v) + 4.0, "end", mark_text(v, panel_.percent));
    }
    for (int i = 0; i * x_step_ <= x_.high * 1.0001; ++i) {
      const double v = i * x_step_;
      const bool last = (i + 1) * x_step_ > x_.high * 1.0001;
      text("", x_(v), y_.from + 18.0, "middle",
           mark_text(v, false) + (last ? " " + panel_.x_unit : ""));
    }
  }

  void line(const Line& line, const char* style) {
    if (line.points.empty()) return;
    out_ += fmt::format("<path class=\"{}\" d=\"", style);
    char command = 'M';
    for (const auto& [px, py] : line.points) {
      out_ += fmt::format("{}{:.1f} {:.1f}", command, x_(px), y_(std::min(py, y_.high)));
      command = 'L';
    }
    out_ += "\"/>\n";
  }

  const Panel& panel_;
  const double left_;
  const double top_;
  double x_step_ = 1.0;
  double y_step_ = 1.0;
  Scale x_{};
  Scale y_{};
  std::string out_;
};

// Tokens and requests in flight over time, in equal intervals of at least a quarter of a second.
std::vector<Panel> over_time(const BenchRun& run) {
  const double end = std::max(run.duration, 1e-3);
  const size_t parts = static_cast<size_t>(std::clamp(end * 4.0, 8.0, 120.0));
  const double part = end / static_cast<double>(parts);
  std::vector<double> tokens(parts, 0.0);
  std::vector<double> busy(parts, 0.0);  // seconds of requests
  const auto index = [&](double t) {
    return std::min(static_cast<size_t>(std::max(0.0, t) / part), parts - 1);
  };
  for (const Outcome& o : run.outcomes) {
    if (!o.success) continue;
    double at = o.start + o.ttft;
    ++tokens[index(at)];
    for (const double gap : o.itl) ++tokens[index(at += gap)];
    const double stop = o.start + o.latency;
    for (size_t i = index(o.start); i <= index(stop); ++i) {
      const double from = std::max(o.start, part * static_cast<double>(i));
      const double to = std::min(stop, part * static_cast<double>(i + 1));
      busy[i] += std::max(0.0, to - from);
    }
  }
  Line rate, flight;
  for (size_t i = 0; i < parts; ++i) {
    const double t = part * (static_cast<double>(i) + 0.5);
    rate.points.emplace_back(t, tokens[i] / part);
    flight.points.emplace_back(t, busy[i] / part);
  }
  return {{"Output tokens per second", "s", {rate}, 0.0, false},
          {"Requests in flight", "s", {flight}, 0.0, false}};
}

}  // namespace

std::vector<std::pair<double, double>> cumulative(std::vector<double> values) {
  std::vector<std::pair<double, double>> points;
  if (values.empty()) return points;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  points.emplace_back(values.front(), 0.0);
  const size_t steps = std::min(n, kMostPoints);
  for (size_t i = 1; i <= steps; ++i) {
    const size_t rank = (i * n + steps - 1) / steps;  // rank of `steps` is n
    points.emplace_back(values[rank - 1], static_cast<double>(rank) / static_cast<double>(n));
  }
  return points;
}

std::string svg(const std::string& title, const std::string& subtitle,
                const std::vector<Panel>& panels) {
  const size_t rows = (panels.size() + 1) / 2;
  const double width = 2.0 * kPanelWidth + 3.0 * kGap;
  const double height = kHead + static_cast<double>(rows) * (kPanelHeight + kGap);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\" role=\"img\">\n<title>{2}</title>\n",
      width, height, escape(title));
  out += kStyle;
  out += fmt::format(
      "\n<rect class=\"bg\" width=\"{:.0f}\" height=\"{:.0f}\"/>\n"
      "<text class=\"title\" x=\"{:.0f}\" y=\"34\">{}</text>\n"
      "<text x=\"{:.0f}\" y=\"56\">{}</text>\n",
      width, height, kGap, escape(title), kGap, escape(subtitle));
  for (size_t i = 0; i < panels.size(); ++i) {
    const double left = kGap + static_cast<double>(i % 2) * (kPanelWidth + kGap);
    const double top = kHead + static_cast<double>(i / 2) * (kPanelHeight + kGap);
    out += PanelWriter(panels[i], left, top).write();
  }
  return out + "</svg>\n";
}

std::string plot(const BenchRun& run, const std::string& title) {
  std::vector<Panel> panels;
  const std::pair<const char*, const char*> metrics[] = {{"ttft", "Time to first token"},
                                                         {"tpot", "Time per output token"},
                                                         {"itl", "Inter-token latency"},
                                                         {"e2el", "End-to-end latency"}};
  for (const auto& [key, name] : metrics) {
    std::vector<double> ms = values_of(run, key);
    for (double& v : ms) v *= 1e3;
    const Summary s = summarise(ms, std::vector<double>{99.0});
    Line line{fmt::format("median {:.4g}, p99 {:.4g} ms", s.median, s.percentiles.front().second),
              cumulative(std::move(ms))};
    panels.push_back({name, "ms", {std::move(line)}, 1.0, true});
  }
  for (Panel& panel : over_time(run)) panels.push_back(std::move(panel));
  const Totals t = totals(run);
  const double seconds = std::max(run.duration, 1e-9);
  const std::string subtitle =
      fmt::format("{} requests in {:.1f} s, {} failed: {:.2f} requests/s, {:.1f} output tokens/s",
                  t.completed, run.duration, t.failed, t.completed / seconds,
                  static_cast<double>(t.output_tokens) / seconds);
  return svg(title, subtitle, panels);
}

}  // namespace freshet::bench_client
