// What a device is told of a row of logits from which it is to draw a token: src/sampling's rule as
// plain words, which travel to the device with a step's other numbers.
//
// A step has one array of 32-bit words: a SampleRow for each row of logits, then their lists, which
// rows name by the word they start at. The rule is Sampler's (sampling/sampler.h), bit for bit:
// lists change the logits, then the temperature, min-p, top-k and top-p; tokens' shares are the
// whole numbers of sampling/logits.h. Plain types only: the CUDA plug-in reads these words.
#pragma once

#include <cstdint>

namespace freshet::ops {

struct SampleRow {
  enum How : int32_t {
    kNotHere = 0,  // the host chooses: the device says kSeeLogits
    kBest,         // of the changed logits, the lowest id of the largest
    kDraw,
  };
  static constexpr int32_t kSeeLogits = -2;

  struct List {
    int32_t at = 0, count = 0;  // of its first word; of its items
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
  float min_p_cut;         // logits below the largest plus this go: -inf keeps all
  int32_t top_k = 0;       // 0: all
  float top_p = 1.0f;
  uint32_t bits_low = 0, bits_high = 0;  // random: which share
  float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
  // >= 0: one more token was put out than `seen` knows, the batch's token of this number.
  int32_t last = -1;
  List allowed;  // words of a mask; none: everything
  List seen;     // Seen, each id once
  List biases;   // Bias, each id once
  List barred;   // ids
};
inline constexpr size_t kSampleRowWords = sizeof(SampleRow) / sizeof(int32_t);
static_assert(sizeof(SampleRow) % sizeof(int32_t) == 0);

}  // namespace freshet::ops
