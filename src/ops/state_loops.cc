#include "ops/state_loops.h"

#include <algorithm>
#include <cmath>

#include "base/vector_clones.h"
#include "ops/state_math.h"

namespace freshet::ops {
namespace {

int width_of(int64_t column, int64_t columns) {
  return static_cast<int>(std::min<int64_t>(kLanes, columns - column));
}

// A tile of a state: rows of `stride` floats, of which the tile has `width` from `column` on.
struct StateTile {
  const StateRef& state;
  int64_t first;  // in floats, after the offset
  int64_t stride;
  int width;

  float* row(int32_t slot, int64_t r) const {
    return state.view.at(slot, state.offset) + first + r * stride;
  }
};

FRESHET_LANES_INLINE void load_state(Lanes* rows, int64_t count, const StateTile& tile,
                                     int sequence) {
  const bool begins = tile.state.batch.begins(sequence);
  const int32_t slot = tile.state.batch.slot(sequence);
  for (int64_t r = 0; r < count; ++r) {
    if (begins) {
      lanes_of(rows[r], 0.0f);
    } else {
      load_lanes(rows[r], tile.row(slot, r), tile.width);
    }
  }
}
FRESHET_LANES_INLINE void save_state(const Lanes* rows, int64_t count, const StateTile& tile,
                                     int32_t slot) {
  for (int64_t r = 0; r < count; ++r) store_lanes(tile.row(slot, r), rows[r], tile.width);
}
FRESHET_LANES_INLINE int32_t saved_at(const StateBatch& batch, int64_t token) {
  return batch.saves.empty() ? -1 : batch.saves[static_cast<size_t>(token)];
}

}  // namespace

FRESHET_VECTOR_CLONES
void causal_conv_tile(const CausalConv& conv, int sequence, int64_t column) {
  const StateBatch& batch = conv.state.batch;
  const int64_t channels = conv.x.cols;
  const int width = width_of(column, channels), before = conv.taps - 1;
  const StateTile tile{conv.state, column, channels, width};
  Lanes weight[kMostTaps], past[kMostTaps], bias;
  lanes_of(bias, 0.0f);
  if (conv.bias != nullptr) load_lanes(bias, conv.bias + column, width);
  for (int i = 0; i < conv.taps; ++i) {
    load_lanes(weight[i], conv.weight + i * channels + column, width);
  }
  load_state(past, before, tile, sequence);
  const auto s = static_cast<size_t>(sequence);
  for (int64_t t = batch.query_start[s]; t < batch.query_start[s + 1]; ++t) {
    load_lanes(past[before], conv.x.row(t) + column, width);
    Lanes sum = bias;
    for (int i = 0; i < conv.taps; ++i) sum += weight[i] * past[i];
    for (int i = 0; i < before; ++i) past[i] = past[i + 1];
    if (conv.silu) {
      Lanes gate = sum;
      sigmoid_lanes(gate);
      sum *= gate;
    }
    store_lanes(conv.out.row(t) + column, sum, width);
    if (const int32_t slot = saved_at(batch, t); slot >= 0) save_state(past, before, tile, slot);
  }
  save_state(past, before, tile, batch.slot(sequence));
}

FRESHET_VECTOR_CLONES
void selective_scan_tile(const SelectiveScan& scan, int sequence, int64_t column) {
  const StateBatch& batch = scan.state.batch;
  const int64_t channels = scan.x.cols, n = scan.b.cols;
  const int width = width_of(column, channels);
  const StateTile tile{scan.state, column, channels, width};
  Lanes h[kMostState], a[kMostState], bias, d;
  lanes_of(bias, 0.0f);
  if (scan.dt_bias != nullptr) load_lanes(bias, scan.dt_bias + column, width);
  load_lanes(d, scan.d + column, width);
  for (int64_t i = 0; i < n; ++i) load_lanes(a[i], scan.a + i * channels + column, width);
  load_state(h, n, tile, sequence);
  const auto s = static_cast<size_t>(sequence);
  for (int64_t t = batch.query_start[s]; t < batch.query_start[s + 1]; ++t) {
    const float* const b = scan.b.row(t);
    const float* const c = scan.c.row(t);
    Lanes x, dt;
    load_lanes(x, scan.x.row(t) + column, width);
    load_lanes(dt, scan.dt.row(t) + column, width);
    dt += bias;
    softplus_lanes(dt);
    const Lanes dx = dt * x;
    Lanes sum = d * x;
    for (int64_t i = 0; i < n; ++i) {
      Lanes decay = dt * a[i];
      exp_lanes(decay);
      h[i] = decay * h[i] + dx * b[i];
      sum += h[i] * c[i];
    }
    store_lanes(scan.out.row(t) + column, sum, width);
    if (const int32_t slot = saved_at(batch, t); slot >= 0) save_state(h, n, tile, slot);
  }
  save_state(h, n, tile, batch.slot(sequence));
}

FRESHET_VECTOR_CLONES
void linear_scan_tile(const LinearScan& scan, int sequence, int head, int64_t column) {
  const StateBatch& batch = scan.state.batch;
  const int64_t n = scan.n, dim = scan.head_dim;
  const int width = width_of(column, dim);
  const StateTile tile{scan.state, int64_t{head} * n * dim + column, dim, width};
  const int64_t group = int64_t{head} / (scan.heads / scan.groups) * n, at = head * dim + column;
  Lanes h[kMostState];
  load_state(h, n, tile, sequence);
  const auto s = static_cast<size_t>(sequence);
  for (int64_t t = batch.query_start[s]; t < batch.query_start[s + 1]; ++t) {
    const float* const b = scan.b.row(t) + group;
    const float* const c = scan.c.row(t) + group;
    float step = 1.0f;
    if (scan.dt.data != nullptr) {
      step = scan.dt.row(t)[head];
      if (scan.dt_bias != nullptr) step += scan.dt_bias[head];
      step = softplus_one(step);
      if (scan.dt_max > 0) step = std::clamp(step, scan.dt_min, scan.dt_max);
    }
    const float decay = exp_one(step * scan.a[head]);
    Lanes x, sum[4];
    load_lanes(x, scan.x.row(t) + at, width);
    sum[0] = x * (scan.d != nullptr ? scan.d[head] : 0.0f);
    for (int i = 1; i < 4; ++i) lanes_of(sum[i], 0.0f);
    x *= step;
    // Four independent sums, so that none waits for the previous addition.
    for (int64_t i = 0; i < n; ++i) {
      h[i] = h[i] * decay + x * b[i];
      sum[i % 4] += h[i] * c[i];
    }
    sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    store_lanes(scan.out.row(t) + at, sum[0], width);
    if (const int32_t slot = saved_at(batch, t); slot >= 0) save_state(h, n, tile, slot);
  }
  save_state(h, n, tile, batch.slot(sequence));
}

FRESHET_VECTOR_CLONES
void normalise_delta_heads(const DeltaScan& scan, int64_t token, int head) {
  const int64_t dim = scan.key_dim;
  for (const bool query : {true, false}) {
    float* const x = (query ? scan.q : scan.k).row(token) + head * dim;
    Lanes sums;
    lanes_of(sums, 0.0f);
    for (int64_t i = 0; i < dim; i += kLanes) {
      Lanes v;
      load_lanes(v, x + i, width_of(i, dim));
      sums += v * v;
    }
    float sum = 0.0f;
    for (int i = 0; i < kLanes; ++i) sum += sums[i];
    float scale = 1.0f / std::sqrt(sum + 1e-6f);
    if (query) scale *= 1.0f / std::sqrt(static_cast<float>(dim));
    for (int64_t i = 0; i < dim; ++i) x[i] *= scale;
  }
}

FRESHET_VECTOR_CLONES
void delta_scan_tile(const DeltaScan& scan, int sequence, int head, int64_t column) {
  const StateBatch& batch = scan.state.batch;
  const int64_t keys = scan.key_dim, dim = scan.value_dim;
  const int width = width_of(column, dim);
  const StateTile tile{scan.state, int64_t{head} * keys * dim + column, dim, width};
  const int key_head =
      scan.tiled ? head % scan.key_heads : head / (scan.value_heads / scan.key_heads);
  const int64_t key = key_head * keys;
  const int64_t at = head * dim + column;
  Lanes s[kMostState];
  load_state(s, keys, tile, sequence);
  const auto first = static_cast<size_t>(sequence);
  for (int64_t t = batch.query_start[first]; t < batch.query_start[first + 1]; ++t) {
    const float* const q = scan.q.row(t) + key;
    const float* const k = scan.k.row(t) + key;
    const float step = softplus_one(scan.alpha.row(t)[head] + scan.dt_bias[head]);
    const float decay = exp_one(step * scan.a[head]);
    Lanes v, seen[4], sum[4];
    load_lanes(v, scan.v.row(t) + at, width);
    for (int i = 0; i < 4; ++i) {
      lanes_of(seen[i], 0.0f);
      lanes_of(sum[i], 0.0f);
    }
    for (int64_t i = 0; i < keys; ++i) {
      s[i] *= decay;
      seen[i % 4] += s[i] * k[i];
    }
    v -= (seen[0] + seen[1]) + (seen[2] + seen[3]);
    v *= sigmoid_one(scan.b.row(t)[head]);
    for (int64_t i = 0; i < keys; ++i) {
      s[i] += v * k[i];
      sum[i % 4] += s[i] * q[i];
    }
    sum[0] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    store_lanes(scan.out.row(t) + at, sum[0], width);
    if (const int32_t slot = saved_at(batch, t); slot >= 0) save_state(s, keys, tile, slot);
  }
  save_state(s, keys, tile, batch.slot(sequence));
}

FRESHET_VECTOR_CLONES
void sigmoid_product_row(float* x, const float* gate, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int width = width_of(i, n);
    Lanes v, g;
    load_lanes(v, x + i, width);
    load_lanes(g, gate + i, width);
    sigmoid_lanes(g);
    store_lanes(x + i, v * g, width);
  }
}

}  // namespace freshet::ops
