// What operations are told: a projection, a norm, a gated unit, a router and experts.
//
// Plain data. Pointers lead into the memory of the device that the operation runs on.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ops/weight.h"
#include "tensor/buffer.h"

namespace freshet::ops {

// What a projection may bring into a cache while it waits for its input: the weights of the group
// of two that comes next (gate and up, to the output projection of attention). Affects speed only.
using PrefetchNext = std::array<const Weight*, 2>;

// A projection, one GEMM of a group: out = [out +] scale * (x W^T + bias).
struct Product {
  const Weight* weight = nullptr;  // nullptr in a fused operation: there is no such projection
  Matrix out;                      // [x.rows, weight.rows]
  const float* bias = nullptr;     // [weight.rows] or nullptr
  float scale = 1.0f;
  bool add = false;                 // add to what out holds (a residual)
  PrefetchNext prefetch_next = {};  // read from a group's last product
};

enum class Activation { kNone, kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kQuickGelu };

enum class NormKind { kRms, kLayer };
struct Norm {
  NormKind kind = NormKind::kRms;
  const float* weight =
      nullptr;                  // [features]; nullptr: ones. Gemma's (1 + w) is folded in at load.
  const float* bias = nullptr;  // [features] or nullptr
  float eps = 1e-6f;
};

// Gated linear unit (SwiGLU and its kin): out = act(gate) * up; `limit` > 0 clamps as GPT-OSS does:
// gate = min(gate, limit), up = clamp(up, ±limit), out = (up + 1) * gate * sigmoid(alpha * gate).
struct Glu {
  Activation activation = Activation::kSilu;
  float limit = 0.0f;
  float alpha = 0.0f;
};

// How router logits become expert weights, in this order: scores, group limit, top-k, renormalise,
// scale.
struct Routing {
  enum class Score { kSoftmax, kSigmoid, kTopkSoftmax /* softmax over the chosen logits */ };
  Score score = Score::kSoftmax;
  int experts = 0;
  int top_k = 0;
  int groups = 1;                     // experts split into groups, of which
  int top_groups = 1;                 // this many stay
  int group_score_top = 1;            // a group's score: the sum of its best 1 or 2
  const float* correction = nullptr;  // [experts] added for the choice, not for the weight
  bool renormalize = false;
  float renormalize_eps = 0.0f;
  float scale = 1.0f;
};

struct Experts {
  std::span<const Weight> gate_up;      // [experts] of [2 * ff, hidden]: gate rows, then up rows
  std::span<const Weight> down;         // [experts] of [hidden, ff]
  const float* gate_up_bias = nullptr;  // [experts, 2 * ff] or nullptr
  const float* down_bias = nullptr;     // [experts, hidden] or nullptr
  Glu glu;
  bool weight_before = false;  // scale the expert's input instead of its output (Llama 4)
};

}  // namespace freshet::ops
