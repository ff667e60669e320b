// A request while it runs: its samples with their samplers and texts, or its beam search.
//
// Plain state of the step loop (step_loop.h), which is the only one to touch it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/text_assembler.h"
#include "freshet/engine.h"
#include "grammar/late_matcher.h"
#include "sampling/beam.h"
#include "sampling/sampler.h"
#include "scheduler/sequence.h"

namespace freshet::engine {

// One of the n samples of a request.
struct Sample {
  int index = 0;
  scheduler::SequenceId sequence = 0;  // 0: not forked yet
  Sampler sampler;
  TextAssembler text;
  std::optional<grammar::LateMatcher> matcher;
  std::vector<uint32_t> mask;  // what may come next; empty: anything,
  bool complete = false;       // or that nothing may, and the vocabulary has no token to say so
  int outputs = 0;
  bool ended = false;
};

// An embedding in the making: states are added in order of position, each once, whatever is
// computed again after a preemption.
struct Embedding {
  int32_t positions = 0;    // that have been taken in
  std::vector<double> sum;  // [hidden]
};

// Beams go in lockstep: each row of logits is kept until all live beams have theirs.
struct Beams {
  BeamSearch search;
  std::vector<scheduler::SequenceId> sequences;  // in the order of the search
  std::vector<float> logits;                     // [live, vocab]
  std::vector<bool> ready;                       // [live]
  int length = 0;                                // tokens so far
};

struct LiveRequest {
  uint64_t id = 0;
  Request request;
  uint64_t seed = 0;
  int max_tokens = 0;                            // clipped to what the longest sequence leaves
  std::vector<int32_t> end_ids;                  // ascending; end the output by themselves
  std::vector<std::unique_ptr<Sample>> samples;  // empty with beams, and before its first step
  bool forked = false;                           // samples have sequences of their own
  std::optional<Beams> beams;
  std::optional<Embedding> embedding;
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // [prompt tokens], of each but the first
  bool prompt_logprobs_sent = false;
  int open = 0;  // samples that have not ended
  Usage usage;
};

}  // namespace freshet::engine
