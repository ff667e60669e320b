#include "server/prometheus.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace freshet::server {
namespace {

std::string escape(std::string_view s, bool quotes) {
  std::string out;
  for (char c : s) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
  return out;
}

std::string number(double v) {
  if (std::isnan(v)) return "NaN";
  if (std::isinf(v)) return v > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", v);
}

Labels joined(const Labels& a, const Labels& b) {
  Labels all = a;
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

}  // namespace

std::string format_labels(const Labels& labels) {
  if (labels.empty()) return {};
  std::string out = "{";
  for (const auto& [name, value] : labels) {
    out += fmt::format("{}{}=\"{}\"", out.size() > 1 ? "," : "", name, escape(value, true));
  }
  return out + "}";
}

void Histogram::observe(double v, uint64_t times) {
  const size_t bucket =
      static_cast<size_t>(std::lower_bound(bounds_.begin(), bounds_.end(), v) - bounds_.begin());
  std::lock_guard lock(mutex_);
  counts_[bucket] += times;
  sum_ += v * static_cast<double>(times);
}

Histogram::Snapshot Histogram::snapshot() const {
  std::lock_guard lock(mutex_);
  Snapshot s;
  uint64_t total = 0;
  for (uint64_t c : counts_) s.cumulative.push_back(total += c);
  s.sum = sum_;
  return s;
}

Registry::Family& Registry::family(const std::string& name, const std::string& help,
                                   const char* type) {
  for (auto& f : families_) {
    if (f->name == name) return *f;
  }
  families_.push_back(std::make_unique<Family>(Family{name, help, type, {}}));
  return *families_.back();
}

Counter& Registry::counter(const std::string& name, const std::string& help, const Labels& labels) {
  std::lock_guard lock(mutex_);
  Family& f = family(name, help, "counter");
  for (Sample& s : f.samples) {
    if (s.labels == labels) return *s.counter;
  }
  f.samples.push_back({labels, std::make_unique<Counter>(), nullptr, nullptr});
  return *f.samples.back().counter;
}

Histogram& Registry::histogram(const std::string& name, const std::string& help,
                               std::vector<double> bounds) {
  std::lock_guard lock(mutex_);
  Family& f = family(name, help, "histogram");
  if (f.samples.empty())
    f.samples.push_back({{}, nullptr, std::make_unique<Histogram>(std::move(bounds)), nullptr});
  return *f.samples.back().histogram;
}

void Registry::gauge(const std::string& name, const std::string& help, std::function<double()> read,
                     const Labels& labels) {
  std::lock_guard lock(mutex_);
  family(name, help, "gauge").samples.push_back({labels, nullptr, nullptr, std::move(read)});
}

void Registry::counter_from(const std::string& name, const std::string& help,
                            std::function<double()> read) {
  std::lock_guard lock(mutex_);
  family(name, help, "counter").samples.push_back({{}, nullptr, nullptr, std::move(read)});
}

void Registry::expose_histogram(const Family& f, const Sample& sample, std::string& out) const {
  const auto s = sample.histogram->snapshot();
  const Labels labels = joined(common_, sample.labels);
  const auto& bounds = sample.histogram->bounds();
  for (size_t i = 0; i < s.cumulative.size(); ++i) {
    Labels with_bound = labels;
    with_bound.emplace_back("le", i < bounds.size() ? number(bounds[i]) : "+Inf");
    out += fmt::format("{}_bucket{} {}\n", f.name, format_labels(with_bound), s.cumulative[i]);
  }
  out += fmt::format("{}_sum{} {}\n", f.name, format_labels(labels), number(s.sum));
  out += fmt::format("{}_count{} {}\n", f.name, format_labels(labels), s.cumulative.back());
}

std::string Registry::expose() const {
  std::lock_guard lock(mutex_);
  std::string out;
  for (const auto& f : families_) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", f->name, escape(f->help, false), f->name,
                       f->type);
    for (const Sample& s : f->samples) {
      if (s.histogram) {
        expose_histogram(*f, s, out);
        continue;
      }
      const double value = s.counter ? s.counter->value() : s.read();
      out += fmt::format("{}{} {}\n", f->name, format_labels(joined(common_, s.labels)),
                         number(value));
    }
  }
  return out;
}

}  // namespace freshet::server
