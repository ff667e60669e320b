// `bench serve`: puts load on an OpenAI-compatible server and measures it.
//
// Works with any server that streams /v1/completions or /v1/chat/completions. /v1/models,
// /tokenize, /detokenize and /metrics are used if the server has them. Everything runs on the
// caller's thread.
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
  std::string endpoint;  // "": chosen by `chat`
  std::string model;     // "": the first one that the server lists
  std::string api_key;
  std::vector<std::pair<std::string, std::string>> headers;
  bool insecure = false;  // do not check TLS certificates
  DatasetOptions dataset;
  ArrivalOptions arrivals;
  bool self_timed = true;  // traces use their own times unless a rate is given
  std::optional<int> max_concurrency;
  bool ignore_eos = false;
  int warmups = 0;
  double ready_timeout_s = 0.0;  // > 0: how long to wait for the server to be ready
  int vocab_size = 0;            // 0: ask the server
  std::optional<int> logprobs;
  json::Object extra_body;  // sampling parameters and other fields of each request
  Goodput goodput;
};

struct ServeHooks {
  std::function<void(const std::string& line)> say = [](const std::string&) {};
  std::function<void(size_t done, size_t total)> progress = [](size_t, size_t) {};
  const std::atomic<bool>* stop = nullptr;  // true: abort the run
};

struct ServeResult {
  BenchRun run;
  std::string model;
};

// `vocabulary`: the model's local tokenizer; nullptr: use the server's. Failed requests are part of
// the result; an error means that the run could not start.
Result<ServeResult> bench_serve(const ServeOptions& options, Vocabulary* vocabulary,
                                const ServeHooks& hooks);

// The body of one request.
std::string request_body(const ServeOptions& options, const std::string& model,
                         const Sample& sample);

}  // namespace freshet::bench_client
