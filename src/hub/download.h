// Downloads one file: resumes, tries again, verifies.
//
// The bytes go to `partial`; only a complete file with the right size and hash is renamed to
// `final`. A kill at any time leaves a prefix in `partial`, where the next download() goes on.
// One thread; blocking.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "hub/client.h"

namespace freshet::hub {

struct Progress {
  std::string file;
  int64_t done = 0, total = 0;    // bytes, of all files of the model; total 0: unknown
  double bytes_per_second = 0.0;  // of the last seconds; 0: not known yet
  double seconds_left = -1.0;     // -1: not known
};

struct Observer {
  std::function<void(const Progress&)> progress;  // several times per second
  std::function<void(std::string)> note;          // one line, e.g. about another try
};

// Counts bytes and tells the observer.
class Meter {
 public:
  Meter(const Observer& observer, int64_t total) : observer_(observer) { state_.total = total; }
  void begin_file(const std::string& name) { state_.file = name; }
  void have(int64_t bytes) { state_.done += bytes; }  // without a download; may be negative
  void received(int64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  const Observer& observer_;
  Progress state_;
  Clock::time_point shown_{}, window_{};
  int64_t window_bytes_ = 0;
};

struct DownloadJob {
  std::string url;
  std::string what;  // for errors: "ORG/REPO" or a URL
  std::string partial, final;
  int64_t size = -1;  // -1: unknown
  std::string blob;   // SHA-256 (64 digits) or git's SHA-1 (40); others are not verified
};

Status download(HubClient& client, const DownloadJob& job, Meter& meter, const Observer& observer);

}  // namespace freshet::hub
