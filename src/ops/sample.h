// The sampling descriptor: tells a device how to sample a token from a row of logits. It encodes
// the rule of src/sampling as plain words, which are copied to the device with a step's other
// inputs.
//
// A step has one array of 32-bit words: one SampleRow per row of logits, then their lists, to which
// the rows refer by the index of the first word. The rule is that of Sampler (sampling/sampler.h),
// bit for bit: lists change the logits, then temperature, min-p, top-k and top-p apply; an
// exponential race (ops/race.h) draws one of the remaining tokens, by the integer weights of
// sampling/logits.h. Plain types only, because the CUDA plug-in reads these words.
#pragma once

#include <cstdint>

#include "ops/race.h"

namespace freshet::ops {

struct SampleRow {
  enum How : int32_t {
    kNotHere = 0,  // the host samples: the device returns kSeeLogits
    kBest,         // argmax of the changed logits; ties go to the lowest id
    kDraw,
  };
  static constexpr int32_t kSeeLogits = -2;

  struct List {
    int32_t at = 0, count = 0;  // index of its first word; number of items
  };
  struct Seen {  // a token of the sequence
    int32_t id, outputs;
  };
  struct Bias {
    int32_t id;
    float bias;
  };

  int32_t how = kNotHere;  // the first word
  float scale = 1.0f;      // 1 / temperature
  float min_p_cut;         // logits below the maximum plus this are dropped; -inf keeps all
  int32_t top_k = 0;       // 0: all
  float top_p = 1.0f;
  RaceStream race;  // the noise of the draw
  float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
  // >= 0: `seen` lacks the last sampled token, which is the batch's token with this index.
  int32_t last = -1;
  List allowed;  // words of a mask; empty: all tokens are allowed
  List seen;     // Seen, each id once
  List biases;   // Bias, each id once
  List barred;   // ids
};
inline constexpr size_t kSampleRowWords = sizeof(SampleRow) / sizeof(int32_t);
static_assert(sizeof(SampleRow) % sizeof(int32_t) == 0);

}  // namespace freshet::ops
