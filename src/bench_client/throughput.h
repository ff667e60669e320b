// `bench throughput`: the same workloads without a server, on an engine in this process. Submits
// all requests at once. Blocks the calling thread.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "bench_client/dataset.h"
#include "bench_client/report.h"
#include "freshet/engine.h"
#include "tokenizer/tokenizer.h"

namespace freshet::bench_client {

// A local tokenizer. Keeps a reference. `ids`: of a model that has no vocabulary.
class LocalVocabulary final : public Vocabulary {
 public:
  explicit LocalVocabulary(const tokenizer::Tokenizer& tokenizer, int ids = 0)
      : tokenizer_(tokenizer), ids_(ids) {}
  Result<Ids> encode(const std::string& text) override;
  Result<std::string> decode(const Ids& ids) override;
  Result<Ids> usable_ids() override;

 private:
  const tokenizer::Tokenizer& tokenizer_;
  int ids_;
};

struct ThroughputOptions {
  DatasetOptions dataset;
  int ids = 0;            // of a model that has no vocabulary
  int samples = 1;        // answers per prompt
  SamplingParams params;  // max_tokens and n are set for each request
  const std::atomic<bool>* stop = nullptr;
  std::function<void(size_t done, size_t total)> progress = [](size_t, size_t) {};
};

struct ThroughputResult {
  double elapsed = 0.0;  // seconds
  int requests = 0;
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  std::optional<SpecDecode> spec_decode;  // if there were drafts
};

Result<ThroughputResult> bench_throughput(Engine& engine, const ThroughputOptions& options);

// The three lines that vLLM prints; with drafts, a fourth.
std::string throughput_text(const ThroughputResult& result);
// vLLM's keys: elapsed_time, num_requests, total_num_tokens, requests_per_second,
// tokens_per_second; plus output_tokens_per_second, and with drafts those of
// add_spec_decode().
json::Object throughput_json(const ThroughputResult& result);

}  // namespace freshet::bench_client
