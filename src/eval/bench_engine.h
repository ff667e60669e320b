// The tests of bench.h as requests to an engine, to measure what forward passes alone do not show:
// speculative decoding, and what it is compared with.
//
// Prompts are random tokens, outputs greedy and of full length. A test that only generates is timed
// from the first token to the last; tokens that come before it (`depth`) are in the prefix cache.
// Blocks the calling thread.
#pragma once

#include <functional>

#include "eval/bench.h"
#include "freshet/engine.h"

namespace freshet::eval {

struct EngineBench {
  BenchResult result;           // without `work`
  Usage::Speculation drafting;  // of the timed repetitions
  // gain() and predicted_gain() are of the timed repetitions; the costs are known at their end.
  EngineStats::Speculation gauge;
  EngineStats::Speculation stats;  // gain() and predicted_gain() are of the timed repetitions
};

// REQUIRES: the engine runs test.sequences sequences of test.context() + 2 tokens at once and has
// no other requests. `goes_on` returns false to stop before the next repetition.
Result<EngineBench> run_engine_bench(Engine& engine, const BenchTest& test, int repetitions,
                                     const std::function<bool()>& goes_on);

}  // namespace freshet::eval
