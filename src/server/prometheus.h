// Counters and histograms in the Prometheus text format 0.0.4.
//
// Family objects live as long as their registry and are thread-safe: counters are atomics, a
// histogram takes a short lock. Label values are escaped here. Histograms count the unit in
// their name (seconds or tokens); their buckets are ascending upper bounds, and +Inf is added.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace freshet::server {

using Labels = std::vector<std::pair<std::string, std::string>>;
std::string format_labels(const Labels& labels);  // "" or {a="b",c="d"}

class Counter {
 public:
  void add(double v = 1.0) { value_.fetch_add(v, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0.0};
};

class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds)
      : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}
  void observe(double v, uint64_t times = 1);
  struct Snapshot {
    std::vector<uint64_t> cumulative;  // one per bound, then +Inf
    double sum = 0.0;
  };
  Snapshot snapshot() const;
  const std::vector<double>& bounds() const { return bounds_; }

 private:
  const std::vector<double> bounds_;
  mutable std::mutex mutex_;
  std::vector<uint64_t> counts_;
  double sum_ = 0.0;
};

class Registry {
 public:
  // `common`: labels of every sample.
  explicit Registry(Labels common) : common_(std::move(common)) {}

  // The same name and labels give the same object. The `help` of the first call is used.
  Counter& counter(const std::string& name, const std::string& help, const Labels& labels = {});
  Histogram& histogram(const std::string& name, const std::string& help,
                       std::vector<double> bounds);
  // A histogram whose counts are kept elsewhere.
  void histogram_from(const std::string& name, const std::string& help, std::vector<double> bounds,
                      std::function<Histogram::Snapshot()> read);
  // `read` is called when the page is written, from any thread.
  void gauge(const std::string& name, const std::string& help, std::function<double()> read,
             const Labels& labels = {});
  // A counter whose value is kept elsewhere.
  void counter_from(const std::string& name, const std::string& help, std::function<double()> read,
                    const Labels& labels = {});
  // A gauge that is always 1 and has only these labels, which carry the information.
  void info(const std::string& name, const std::string& help, const Labels& labels);

  std::string expose() const;

 private:
  struct Sample {
    Labels labels;
    std::unique_ptr<Counter> counter;
    std::unique_ptr<Histogram> histogram;
    std::function<double()> read;
    std::vector<double> bounds;  // with read_histogram
    std::function<Histogram::Snapshot()> read_histogram;
    bool bare = false;  // without the common labels
  };
  struct Family {
    std::string name, help, type;
    std::vector<Sample> samples;
  };
  Family& family(const std::string& name, const std::string& help, const char* type);
  static void add_read(Family& family, std::function<double()> read, const Labels& labels);
  void expose_histogram(const Family& family, const Sample& sample, std::string& out) const;

  const Labels common_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Family>> families_;
};

}  // namespace freshet::server
