// The bench of `freshet eval kv`: what a model loses if its keys and values are kept in other ways.
//
// A policy is a row of a table: a name and what it changes in the options of a session. All
// policies run side by side with a base over the same windows of text, one length of window after
// the other, so that differences are paired. The protocol is that of compare.h. Blocks the calling
// thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "eval/compare.h"

namespace freshet::eval {

struct KvPolicy {
  std::string name;
  // On the reference path only, to compare with published methods: the engine does not serve it.
  bool simulated = false;
  std::function<void(SessionOptions&)> apply;
  // Bytes of keys and values for each token of a sequence of `tokens` tokens, in all layers.
  std::function<double(const ModelSpec&, int64_t tokens)> bytes_per_token;
};
// Every type of keys and values, and the simulations.
std::span<const KvPolicy> kv_policies();
// The error names those that there are.
Result<std::vector<KvPolicy>> kv_policies_by_name(std::span<const std::string> names);

struct KvQualityOptions {
  SessionOptions session;  // limits and what policies change are filled in
  std::string name;        // of the model, for results
  std::vector<std::string> texts;
  std::string base = "f32";
  std::vector<std::string> policies;
  std::vector<int64_t> windows;
  int batch = 4;  // windows at once
  std::function<Result<std::unique_ptr<Session>>(const SessionOptions&)> open = Session::open;
};

struct KvQuality {
  std::string model, base, arithmetic;
  struct Row {
    std::string policy;
    bool simulated = false;
    double bytes_per_token = 0.0;
    ModelComparison loss;  // base_nats and model_nats, delta, kl, top1_agreement
  };
  struct Length {
    int64_t window = 0;
    std::vector<Row> rows;
  };
  std::vector<Length> lengths;
  std::vector<int64_t> skipped;  // windows beyond the model's context, or longer than the texts
};
Result<KvQuality> kv_quality(const KvQualityOptions& options, const CompareProgress& progress);
std::string kv_quality_text(const KvQuality& q);
json::Object kv_quality_json(const KvQuality& q);

}  // namespace freshet::eval
