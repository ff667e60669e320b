// The states of sequences in layers that keep a summary of constant size instead of keys and
// values: where they are, and which of them a step reads and writes.
//
// A state is read at the beginning of a sequence's tokens of the step and written at their end,
// over the one that was read. A step may keep copies of the states in between (`saves`). A sequence
// whose first token is in the step begins with zeros, whatever its slot holds. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/buffer.h"

namespace freshet::ops {

// Limits of the operations below.
constexpr int kMostTaps = 16;    // of a convolution
constexpr int kMostState = 512;  // rows of a state

// The states of one layer: `slots` of them, each of `bytes`.
struct StateView {
  uint8_t* data = nullptr;
  size_t bytes = 0;
  int32_t slots = 0;

  float* at(int32_t slot, size_t offset = 0) const {  // offset: in bytes
    return reinterpret_cast<float*>(data + static_cast<size_t>(slot) * bytes + offset);
  }
};

// Token t of the batch belongs to the sequence s with query_start[s] <= t < query_start[s + 1].
struct StateBatch {
  std::span<const int32_t> query_start;  // [sequences + 1]
  std::span<const int32_t> context_len;  // [sequences], this step's tokens included
  const int32_t* slots = nullptr;        // [sequences, slot_stride]: the first of each row counts
  int64_t slot_stride = 0;
  std::span<const int32_t> saves;  // empty, or [tokens]: the slot that keeps the state after a
                                   // token; -1: none

  int sequences() const { return static_cast<int>(context_len.size()); }
  int32_t slot(int sequence) const { return slots[sequence * slot_stride]; }
  bool begins(int sequence) const {  // its first token is in the step
    const auto s = static_cast<size_t>(sequence);
    return context_len[s] == query_start[s + 1] - query_start[s];
  }
};

// Where an operation keeps its part of the states: `offset` bytes into each, a multiple of 64.
struct StateRef {
  StateView view;
  size_t offset = 0;
  StateBatch batch;
};

// A depthwise causal convolution: out[t, c] = act(bias[c] + sum_i weight[i, c] x[t - taps + 1 + i,
// c]), summed in the order of i, with zeros in front of the sequence. Its state: the last taps - 1
// rows of x, oldest first, as they were before the step writes to `out`, which may be x.
struct CausalConv {
  Matrix x, out;                  // [tokens, channels]
  const float* weight = nullptr;  // [taps, channels]
  const float* bias = nullptr;    // [channels] or nullptr
  int taps = 0;
  bool silu = false;
  StateRef state;
};

// Mamba: with D = softplus(dt[t, c] + dt_bias[c]), for each channel c and n < N,
//   h[n, c] = exp(D a[n, c]) h[n, c] + D x[t, c] b[t, n],
//   out[t, c] = d[c] x[t, c] + sum_n c[t, n] h[n, c].
// The state is h [N, channels].
struct SelectiveScan {
  Matrix x, dt, out;               // [tokens, channels]; out may be x
  Matrix b, c;                     // [tokens, N]
  const float* dt_bias = nullptr;  // [channels] or nullptr
  const float* a = nullptr;        // [N, channels]
  const float* d = nullptr;        // [channels]
  StateRef state;
};

// Mamba-2 and linear attention with decay: for each head, with D = clamp(softplus(dt[t, head] +
// dt_bias[head])), or 1 without dt, and the b and c of the head's group,
//   h[n, p] = exp(D a[head]) h[n, p] + b[t, n] (D x[t, p]),
//   out[t, p] = d[head] x[t, p] + sum_n c[t, n] h[n, p].
// The state is h [heads, N, head_dim].
struct LinearScan {
  Matrix x, out;                       // [tokens, heads * head_dim]; out may be x
  Matrix b, c;                         // [tokens, groups * N]
  Matrix dt;                           // [tokens, heads]; may be absent
  const float* dt_bias = nullptr;      // [heads] or nullptr
  float dt_min = 0.0f, dt_max = 0.0f;  // dt_max 0: no limits
  const float* a = nullptr;            // [heads]
  const float* d = nullptr;            // [heads] or nullptr
  int heads = 0;
  int head_dim = 0;
  int groups = 1;
  int n = 0;
  StateRef state;
};

// The gated delta rule: for each value head, with the query and key of its key head, both divided
// by their lengths and the query by sqrt(key_dim), B = sigmoid(b[t, head]), g = a[head]
// softplus(alpha[t, head] + dt_bias[head]),
//   s = exp(g) s;  s += k (B (v - s^T k))^T;  out = s^T q.
// The state is s [value_heads, key_dim, value_dim].
struct DeltaScan {
  Matrix q, k;                     // [tokens, key_heads * key_dim]; room afterwards
  Matrix v, out;                   // [tokens, value_heads * value_dim]; out may be v
  Matrix b, alpha;                 // [tokens, value_heads]
  const float* a = nullptr;        // [value_heads]
  const float* dt_bias = nullptr;  // [value_heads]
  int key_heads = 0;
  int value_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  StateRef state;
  bool tiled = false;  // value head h uses key head h % key_heads; otherwise neighbours share one
};

}  // namespace freshet::ops
