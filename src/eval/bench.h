// Speed of a model's forward pass, under llama-bench's names: pp512 is a prompt of 512 tokens,
// tg128 the generation of 128, pp512+tg128 one after the other, "@ d4096" with 4096 tokens before
// it.
//
// Times the forward passes that the engine would run, without sampling and tokenisation. One thread
// drives the session. Results depend on the load of the machine, hence the repetitions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "eval/session.h"

namespace freshet::eval {

struct BenchTest {
  int prompt = 0;
  int generate = 0;
  int depth = 0;
  int sequences = 1;  // that do the same at the same time
  std::string name() const;
  int64_t context() const { return int64_t{depth} + prompt + generate; }
  int64_t tokens() const { return (int64_t{prompt} + generate) * sequences; }
};

// A model's weights by how often a step needs them. An embedding that is only looked up counts
// nowhere; experts count with the share that a token is routed to.
struct ModelWork {
  double layer_weights = 0.0;
  double layer_bytes = 0.0;
  // The part of these behind the model's last keys and values, which tokens without logits skip.
  double last_weights = 0.0;
  double last_bytes = 0.0;
  double head_weights = 0.0;
  double head_bytes = 0.0;
  int64_t parameters = 0;  // of all matrices
};
ModelWork model_work(const Model& model);

// The least that a test must read and compute: weights once a step, keys and values of the context.
struct BenchWork {
  double bytes = 0.0;
  double operations = 0.0;  // multiplications and additions of the GEMMs
};

struct BenchResult {
  BenchTest test;
  BenchWork work;
  std::vector<double> seconds;  // of each repetition
  double median_s() const;
  double tokens_per_s() const;  // from the median
  double spread() const;        // standard deviation of the repetitions' tokens/s
};

// Some tokens, always the same for a seed.
std::vector<int32_t> some_tokens(int64_t n, int64_t vocab, uint64_t seed = 1);

// REQUIRES: the session holds test.sequences sequences of test.context() tokens. Prompts run in
// chunks of session.options().batch tokens. `goes_on` returns false to stop early.
Result<BenchResult> run_bench(Session& session, const BenchTest& test, int repetitions,
                              const std::function<bool()>& goes_on);

BenchWork work_of(const Session& session, const BenchTest& test);

}  // namespace freshet::eval
