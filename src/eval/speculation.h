// What speculation gives: the same requests with and without a drafter, on engines in this process.
//
// Turns alternate between the two engines, so that other load meets both; times are of decoding
// alone, from a request's first token to its last. If memory does not hold both engines, one is
// loaded after the other. Blocks the calling thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "eval/head_wiring.h"
#include "freshet/engine.h"

namespace freshet::eval {

struct SpeculationOptions {
  EngineOptions engine;  // with a speculative_config
  std::string text;      // prompts are pieces of it
  int prompts = 8;
  int prompt_tokens = 64;
  int max_tokens = 128;
  int clients = 1;  // requests at the same time
  int turns = 5;    // of each engine
  float temperature = 0.0f;
  uint64_t seed = 0;
  const std::atomic<bool>* stop = nullptr;
  // Engine::load, or what chooses a device before.
  std::function<Result<std::unique_ptr<Engine>>(const EngineOptions&)> load = Engine::load;
  std::function<void(const std::string& stage, double fraction)> progress = [](const std::string&,
                                                                               double) {};
};

struct SpeculationResult {
  bool equal = false;        // the same tokens in every request of every turn
  int first_different = -1;  // prompt
  int64_t drafts = 0;        // steps of a sequence with drafts
  int64_t draft_tokens = 0;
  int64_t accepted_tokens = 0;
  std::vector<double> acceptance_by_position;  // share of the steps that accept so far
  double acceptance_length = 1.0;              // tokens of a step with drafts
  double speedup = 0.0;                        // median over turns
  double predicted_speedup = 0.0;              // by the engine's cost model
  double gauge = 0.0;                          // what the engine itself measures (EngineStats)
  double tokens_per_s = 0.0;                   // of a request, medians
  double plain_tokens_per_s = 0.0;
  int turns = 0;
  // With rejection sampling: drafts rejected in a turn, the sum of the total variation distances,
  // and the deviation in standard deviations.
  std::optional<int64_t> rejections;
  double expected_rejections = 0.0;
  double z = 0.0;
  bool may_differ = false;       // a way of acceptance that changes tokens
  std::optional<Wiring> wiring;  // of a draft head
};

Result<SpeculationResult> evaluate_speculation(const SpeculationOptions& options);

std::string speculation_text(const SpeculationResult& result);
json::Object speculation_json(const SpeculationResult& result);

}  // namespace freshet::eval
