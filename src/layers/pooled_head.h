// Turns the states of a text into an embedding or scores instead of tokens.
//
// A head pools the states after the final norm to one vector and runs a few small layers on it. The
// layers are plain F32 on the host, in a fixed order of sums: a text has the same bits in every
// batch. Immutable after loading, so safe to use from many threads; a PoolState belongs to one
// text.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace freshet {

enum class PoolKind {
  kFirst,    // the state of the first token ([CLS])
  kLast,     // of the last one
  kMean,     // over all tokens, added in order of position
  kMax,      // of each feature over all tokens
  kMeanSqrt  // the sum divided by the square root of the number of tokens
};

// One layer after the pooling.
struct HeadStage {
  enum class Kind { kLinear, kLayerNorm, kRmsNorm };
  enum class Act { kNone, kTanh, kGelu, kGeluTanh, kRelu, kSilu, kSigmoid };
  Kind kind = Kind::kLinear;
  std::vector<float> weight;  // [out, in], or [in] of a norm; empty: ones
  std::vector<float> bias;    // [out] or empty
  int in = 0, out = 0;
  float eps = 1e-5f;
  Act act = Act::kNone;
};

struct PooledHead {
  PoolKind pool = PoolKind::kLast;
  std::vector<HeadStage> stages;
  bool normalize = false;  // run() is followed by normalize_vector()
  int size = 0;            // of the result

  // REQUIRES: pooled has the size of the first stage's input.
  std::vector<float> run(std::vector<float> pooled) const;
};

struct PooledHeads {
  PooledHead embedding;
  bool own_embedding = false;   // the model's files say how embeddings are pooled
  std::vector<int> matryoshka;  // sizes that embeddings may be cut to
  bool any_size = false;        // ... or any
  // Texts that the model was trained to see before its inputs, by name; the default's name.
  std::vector<std::pair<std::string, std::string>> prompts;
  std::string default_prompt;

  std::optional<PooledHead> classifier;
  std::vector<std::string> labels;  // [classifier->size]
  // One score passes through a sigmoid, several through a softmax, unless the request asks for raw
  // scores.
  bool sigmoid_default = true;
  // The classifier compares the logits of these tokens, as a language model answers "yes" or "no":
  // the first one less the second one. Empty: other classifiers.
  std::vector<int32_t> answer_tokens;
};

// Pools states as they arrive, in order of position, each once.
class PoolState {
 public:
  explicit PoolState(PoolKind kind) : kind_(kind) {}
  // Whether the states of all tokens are needed.
  bool needs_all() const { return kind_ != PoolKind::kLast; }
  void add(std::span<const float> state);
  std::vector<float> result() const;

 private:
  PoolKind kind_;
  int64_t count_ = 0;
  std::vector<double> sum_;  // or the state, or the maxima
};

void normalize_vector(std::vector<float>& v);

}  // namespace freshet
