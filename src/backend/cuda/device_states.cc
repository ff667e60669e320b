// CudaDevice: operations on sequences with states.
#include "backend/cuda/arguments.h"
#include "backend/cuda/device.h"

namespace freshet::cuda {

StateArgs CudaDevice::state_args(const ops::StateRef& state, int64_t tokens) {
  const ops::StateBatch& b = state.batch;
  const auto slots = static_cast<size_t>(b.sequences() * b.slot_stride);
  return {state.view.data + state.offset,
          static_cast<int64_t>(state.view.bytes),
          ints(b.query_start),
          ints(b.context_len),
          ints({b.slots, slots}),
          b.slot_stride,
          b.saves.empty() ? nullptr : ints(b.saves),
          b.sequences(),
          static_cast<int32_t>(tokens)};
}

void CudaDevice::causal_conv(const ops::CausalConv& c) {
  const CausalConvArgs args = {rows_of(c.x),
                               rows_of(c.out),
                               c.weight,
                               c.bias,
                               c.taps,
                               c.silu,
                               state_args(c.state, c.x.rows)};
  check(api_.states.causal_conv(ctx_, &args), "causal_conv");
}

void CudaDevice::selective_scan(const ops::SelectiveScan& s) {
  const SelectiveScanArgs args = {rows_of(s.x), rows_of(s.dt), rows_of(s.out),
                                  rows_of(s.b), rows_of(s.c),  s.dt_bias,
                                  s.a,          s.d,           state_args(s.state, s.x.rows)};
  check(api_.states.selective_scan(ctx_, &args), "selective_scan");
}

void CudaDevice::linear_scan(const ops::LinearScan& s) {
  const LinearScanArgs args = {rows_of(s.x),
                               rows_of(s.out),
                               rows_of(s.b),
                               rows_of(s.c),
                               rows_of(s.dt),
                               s.dt_bias,
                               s.a,
                               s.d,
                               s.dt_min,
                               s.dt_max,
                               s.heads,
                               s.head_dim,
                               s.groups,
                               s.n,
                               state_args(s.state, s.x.rows)};
  check(api_.states.linear_scan(ctx_, &args), "linear_scan");
}

// Tiled value heads take one scan for each tile. Each scan divides queries and keys by the square
// roots of their squared lengths plus 1e-6, in place. Those of unit length change by half a
// millionth; shorter keys, of squared lengths near 1e-6, come out longer in later tiles than in the
// first, alike in every batch.
void CudaDevice::delta_scan(const ops::DeltaScan& s) {
  if (s.tiled && s.value_heads > s.key_heads) {
    const int64_t values = int64_t{s.key_heads} * s.value_dim;
    for (int64_t first = 0; first < s.value_heads; first += s.key_heads) {
      ops::DeltaScan tile = s;
      tile.v = s.v.slice_cols(first * s.value_dim, values);
      tile.out = s.out.slice_cols(first * s.value_dim, values);
      tile.b = s.b.slice_cols(first, s.key_heads);
      tile.alpha = s.alpha.slice_cols(first, s.key_heads);
      tile.a += first;
      tile.dt_bias += first;
      tile.value_heads = s.key_heads;
      tile.state.offset += static_cast<size_t>(first * s.value_dim * s.key_dim) * sizeof(float);
      delta_scan(tile);
    }
    return;
  }
  const DeltaScanArgs args = {rows_of(s.q),
                              rows_of(s.k),
                              rows_of(s.v),
                              rows_of(s.out),
                              rows_of(s.b),
                              rows_of(s.alpha),
                              s.a,
                              s.dt_bias,
                              s.key_heads,
                              s.value_heads,
                              s.key_dim,
                              s.value_dim,
                              state_args(s.state, s.v.rows)};
  check(api_.states.delta_scan(ctx_, &args), "delta_scan");
}

}  // namespace freshet::cuda
