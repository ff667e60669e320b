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
  Sample& sample = f.samples.emplace_back();
  sample.labels = labels;
  sample.counter = std::make_unique<Counter>();
  return *sample.counter;
}

Histogram& Registry::histogram(const std::string& name, const std::string& help,
                               std::vector<double> bounds) {
  std::lock_guard lock(mutex_);
  Family& f = family(name, help, "histogram");
  if (f.samples.empty())
    f.samples.emplace_back().histogram = std::make_unique<Histogram>(std::move(bounds));
  return *f.samples.back().histogram;
}

void Registry::histogram_from(const std::string& name, const std::string& help,
                              std::vector<double> bounds,
                              std::function<Histogram::Snapshot()> read) {
  std::lock_guard lock(mutex_);
  Sample& sample = family(name, help, "histogram").samples.emplace_back();
  sample.bounds = std::move(bounds);
  sample.read_histogram = std::move(read);
}

void Registry::add_read(Family& family, std::function<double()> read, const Labels& labels) {
  Sample& sample = family.samples.emplace_back();
  sample.labels = labels;
  sample.read = std::move(read);
}

void Registry::gauge(const std::string& name, const std::string& help, std::function<double()> read,
                     const Labels& labels) {
  std::lock_guard lock(mutex_);
  add_read(family(name, help, "gauge"), std::move(read), labels);
}

void Registry::counter_from(const std::string& name, const std::string& help,
                            std::function<double()> read, const Labels& labels) {
  std::lock_guard lock(mutex_);
  add_read(family(name, help, "counter"), std::move(read), labels);
}

void Registry::info(const std::string& name, const std::string& help, const Labels& labels) {
  std::lock_guard lock(mutex_);
  Family& f = family(name, help, "gauge");
  add_read(f, [] { return 1.0; }, labels);
  f.samples.back().bare = true;
}

void Registry::expose_histogram(const Family& f, const Sample& sample, std::string& out) const {
  const bool ours = sample.histogram != nullptr;
  const auto s = ours ? sample.histogram->snapshot() : sample.read_histogram();
  const auto& bounds = ours ? sample.histogram->bounds() : sample.bounds;
  const Labels labels = joined(common_, sample.labels);
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
      if (s.histogram || s.read_histogram) {
        expose_histogram(*f, s, out);
        continue;
      }
      const double value = s.counter ? s.counter->value() : s.read();
      const Labels labels = s.bare ? s.labels : joined(common_, s.labels);
      out += fmt::format("{}{} {}\n", f->name, format_labels(labels), number(value));
    }
  }
  return out;
}

}  // namespace freshet::server
