// Arguments of operations: projection, norm, GLU, router and experts.
//
// Plain data. Pointers refer to the memory of the device that runs the operation.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ops/weight.h"
#include "tensor/buffer.h"

namespace freshet::ops {

// The weights that a projection may prefetch while it waits for its input: those of the next group
// of two (for the output projection of attention: gate and up). Affects speed only.
using PrefetchNext = std::array<const Weight*, 2>;

// A projection, one GEMM of a group: out = [out +] scale * (x W^T + bias).
struct Product {
  const Weight* weight = nullptr;  // nullptr in a fused operation: this projection is absent
  Matrix out;                      // [x.rows, weight.rows]
  const float* bias = nullptr;     // [weight.rows] or nullptr
  float scale = 1.0f;
  bool add = false;                 // adds to the content of out (a residual)
  PrefetchNext prefetch_next = {};  // read from a group's last product
};

// xIELU (arXiv:2411.13010), an activation whose slopes are weights of a layer. x > 0: positive x^2
// + beta x; otherwise: negative (e^min(x, eps) - 1 - x) + beta x.
struct Xielu {
  float positive = 0.8f, negative = 0.8f, beta = 0.5f, eps = -1e-6f;
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

// Gated linear unit (SwiGLU and variants): out = act(gate) * up. `limit` > 0 clamps as in GPT-OSS:
// gate = min(gate, limit), up = clamp(up, ±limit), out = (up + 1) * gate * sigmoid(alpha * gate).
struct Glu {
  Activation activation = Activation::kSilu;
  float limit = 0.0f;
  float alpha = 0.0f;
};

// A scale that grows with the position: 1 + gain ln(1 + floor((position + 1) / interval)).
struct PositionScale {
  float gain = 0.0f;  // 0: the scale is 1
  float interval = 1.0f;
};

// Converts router logits to expert weights, in this order: scores, group limit, top-k, renormalise,
// scale.
struct Routing {
  enum class Score {
    kSoftmax,
    kSigmoid,
    kTopkSoftmax,  // softmax over the chosen logits
    // Sparsemixer (arXiv:2409.12136). Each choice is the largest of the remaining logits; its
    // weight is its share in a softmax over those remaining logits l for which (best - l) /
    // max(|l|, best) is at most `tolerance`.
    kSparsemixer,
  };
  Score score = Score::kSoftmax;
  int experts = 0;
  int top_k = 0;
  int groups = 1;                     // experts are split into groups, of which
  int top_groups = 1;                 // this many remain
  int group_score_top = 1;            // a group's score is the sum of its best 1 or 2
  const float* correction = nullptr;  // [experts] added for the selection, not for the weight
  bool renormalize = false;
  float renormalize_eps = 0.0f;
  float scale = 1.0f;
  float tolerance = 0.0f;  // kSparsemixer
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
