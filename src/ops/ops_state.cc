// Operations on sequences with states: checks, and tiles for the workers.
#include <algorithm>

#include "ops/ops.h"
#include "ops/ops_impl.h"
#include "ops/state_loops.h"
#include "ops/state_math.h"

namespace freshet::ops {
namespace {

int64_t tiles_of(int64_t columns) {
  return (columns + kLanes - 1) / kLanes;
}

bool same_shape(const Matrix& a, const Matrix& b) {
  return a.rows == b.rows && a.cols == b.cols;
}

void check_states(const char* op, int64_t tokens, const StateRef& state, int64_t numbers) {
  const StateBatch& b = state.batch;
  const auto n = static_cast<size_t>(b.sequences());
  FRESHET_CHECK(
      b.query_start.size() == n + 1 && b.query_start[0] == 0 && b.query_start[n] == tokens,
      "{} tokens={} sequences={} query_start [{}]", op, tokens, n, b.query_start.size());
  FRESHET_CHECK(state.offset + static_cast<size_t>(numbers) * sizeof(float) <= state.view.bytes,
                "{} numbers={} offset={} in a state of {} bytes", op, numbers, state.offset,
                state.view.bytes);
  for (int s = 0; s < b.sequences(); ++s) {
    FRESHET_CHECK(b.slot(s) >= 0 && b.slot(s) < state.view.slots, "{} sequence={} slot {} of {}",
                  op, s, b.slot(s), state.view.slots);
  }
  FRESHET_CHECK(b.saves.empty() || std::ssize(b.saves) == tokens, "{} tokens={} saves [{}]", op,
                tokens, b.saves.size());
  for (const int32_t slot : b.saves) {
    FRESHET_CHECK(slot < state.view.slots, "{} keeps a state in slot {} of {}", op, slot,
                  state.view.slots);
  }
}

// Calls tile(sequence, t) for t in [0, tiles) of every sequence. `work`: per tile and token.
template <class Impl, class Tile>
void for_tiles(Impl& impl, int64_t tokens, int sequences, int64_t tiles, int64_t work,
               const Tile& tile) {
  if (tokens == 0) return;
  const int64_t each = work * std::max<int64_t>(1, tokens / sequences);
  impl.for_rows(sequences * tiles, each, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) tile(static_cast<int>(i / tiles), i % tiles);
  });
}

}  // namespace

void Ops::sigmoid_product(const Matrix& x, const Matrix& gate) {
  FRESHET_CHECK(same_shape(x, gate), "sigmoid_product [{}, {}] by [{}, {}]", x.rows, x.cols,
                gate.rows, gate.cols);
  if (Device* d = device(); d != nullptr && x.rows > 0) return d->sigmoid_product(x, gate);
  impl_->for_rows(x.rows, x.cols * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) sigmoid_product_row(x.row(t), gate.row(t), x.cols);
  });
}

void Ops::causal_conv(const CausalConv& c) {
  FRESHET_CHECK(same_shape(c.x, c.out) && c.taps >= 1 && c.taps <= kMostTaps,
                "causal_conv x [{}, {}], out [{}, {}], taps={}", c.x.rows, c.x.cols, c.out.rows,
                c.out.cols, c.taps);
  check_states("causal_conv", c.x.rows, c.state, (c.taps - 1) * c.x.cols);
  if (Device* d = device(); d != nullptr && c.x.rows > 0) return d->causal_conv(c);
  for_tiles(*impl_, c.x.rows, c.state.batch.sequences(), tiles_of(c.x.cols), kLanes * c.taps,
            [&](int s, int64_t tile) { causal_conv_tile(c, s, tile * kLanes); });
}

void Ops::selective_scan(const SelectiveScan& c) {
  const int64_t n = c.b.cols;
  FRESHET_CHECK(same_shape(c.x, c.dt) && same_shape(c.x, c.out) && same_shape(c.b, c.c) &&
                    c.b.rows == c.x.rows && n >= 1 && n <= kMostState,
                "selective_scan x [{}, {}], dt [{}, {}], b [{}, {}]", c.x.rows, c.x.cols, c.dt.rows,
                c.dt.cols, c.b.rows, n);
  check_states("selective_scan", c.x.rows, c.state, n * c.x.cols);
  if (Device* d = device(); d != nullptr && c.x.rows > 0) return d->selective_scan(c);
  for_tiles(*impl_, c.x.rows, c.state.batch.sequences(), tiles_of(c.x.cols), kLanes * n * 16,
            [&](int s, int64_t tile) { selective_scan_tile(c, s, tile * kLanes); });
}

void Ops::linear_scan(const LinearScan& c) {
  FRESHET_CHECK(same_shape(c.x, c.out) && same_shape(c.b, c.c) &&
                    c.x.cols == int64_t{c.heads} * c.head_dim && c.n >= 1 && c.n <= kMostState &&
                    c.b.cols == int64_t{c.groups} * c.n && c.heads % c.groups == 0 &&
                    (c.dt.data == nullptr || (c.dt.rows == c.x.rows && c.dt.cols == c.heads)),
                "linear_scan x [{}, {}], b [{}, {}], heads={} groups={} n={}", c.x.rows, c.x.cols,
                c.b.rows, c.b.cols, c.heads, c.groups, c.n);
  check_states("linear_scan", c.x.rows, c.state, c.x.cols * c.n);
  if (Device* d = device(); d != nullptr && c.x.rows > 0) return d->linear_scan(c);
  const int64_t tiles = tiles_of(c.head_dim);
  for_tiles(*impl_, c.x.rows, c.state.batch.sequences(), tiles * c.heads, kLanes * int64_t{c.n} * 4,
            [&](int s, int64_t tile) {
              linear_scan_tile(c, s, static_cast<int>(tile / tiles), tile % tiles * kLanes);
            });
}

void Ops::delta_scan(const DeltaScan& c) {
  FRESHET_CHECK(same_shape(c.q, c.k) && same_shape(c.v, c.out) && same_shape(c.b, c.alpha) &&
                    c.b.cols == c.value_heads && c.q.cols == int64_t{c.key_heads} * c.key_dim &&
                    c.key_dim <= kMostState && c.v.cols == int64_t{c.value_heads} * c.value_dim &&
                    c.value_heads % c.key_heads == 0,
                "delta_scan q [{}, {}], v [{}, {}], heads {} and {}", c.q.rows, c.q.cols, c.v.rows,
                c.v.cols, c.key_heads, c.value_heads);
  check_states("delta_scan", c.v.rows, c.state, c.v.cols * c.key_dim);
  if (Device* d = device(); d != nullptr && c.v.rows > 0) return d->delta_scan(c);
  impl_->for_rows(c.q.rows, c.q.cols * 2, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      for (int h = 0; h < c.key_heads; ++h) normalise_delta_heads(c, t, h);
    }
  });
  const int64_t tiles = tiles_of(c.value_dim);
  for_tiles(*impl_, c.v.rows, c.state.batch.sequences(), tiles * c.value_heads,
            kLanes * int64_t{c.key_dim} * 8, [&](int s, int64_t tile) {
              delta_scan_tile(c, s, static_cast<int>(tile / tiles), tile % tiles * kLanes);
            });
}

}  // namespace freshet::ops
