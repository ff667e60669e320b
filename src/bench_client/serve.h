// `bench serve`: load on an OpenAI-compatible server, and what came of it.
//
// Speaks to any server that has /v1/completions or /v1/chat/completions with streaming; /v1/models,
// /tokenize, /detokenize and /metrics are used where they are there. One thread does everything,
// the caller's.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "bench_client/arrivals.h"
#include "bench_client/dataset.h"
#include "bench_client/report.h"

namespace freshet::bench_client {

struct ServeOptions {
  bool chat = false;
  std::string base_url = "http://127.0.0.1:8000";
  std::string endpoint;  // "": by `chat`
  std::string model;     // "": the first that the server has
  std::string api_key;
  std::vector<std::pair<std::string, std::string>> headers;
  bool insecure = false;  // TLS certificates are not checked
  DatasetOptions dataset;
  ArrivalOptions arrivals;
  bool self_timed = true;  // traces keep their own times, unless a rate is given
  std::optional<int> max_concurrency;
  bool ignore_eos = false;
  int warmups = 0;
  double ready_timeout_s = 0.0;  // > 0: wait so long for the server to come up
  int vocab_size = 0;            // 0: ask the server
  std::optional<int> logprobs;
  json::Object extra_body;  // sampling parameters and whatever else a request shall carry
  Goodput goodput;
};

struct ServeHooks {
  std::function<void(const std::string& line)> say = [](const std::string&) {};
  std::function<void(size_t done, size_t total)> progress = [](size_t, size_t) {};
  const std::atomic<bool>* stop = nullptr;  // set: the run is given up
};

struct ServeResult {
  BenchRun run;
  std::string model;
};

// `vocabulary`: the model's tokenizer where it is at hand; nullptr: the server's is used.
// Failed requests are part of the result; the error is for runs that could not take place.
Result<ServeResult> bench_serve(const ServeOptions& options, Vocabulary* vocabulary,
                                const ServeHooks& hooks);

// The body of one request.
std::string request_body(const ServeOptions& options, const std::string& model,
                         const Sample& sample);

}  // namespace freshet::bench_client
