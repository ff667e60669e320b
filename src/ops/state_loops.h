// The loops of the operations on states: each call does one tile of columns for all tokens of one
// sequence, in their order. A tile is at most kLanes columns, which do not depend on others.
//
// ops_state.cc checks the shapes and distributes the tiles. Every call reads the state of its tile,
// or begins with zeros, and writes it back. Different tiles may run at the same time.
#pragma once

#include <cstdint>

#include "ops/state.h"

namespace freshet::ops {

void causal_conv_tile(const CausalConv& conv, int sequence, int64_t column);
void selective_scan_tile(const SelectiveScan& scan, int sequence, int64_t column);
// column: in the head
void linear_scan_tile(const LinearScan& scan, int sequence, int head, int64_t column);
void delta_scan_tile(const DeltaScan& scan, int sequence, int head, int64_t column);
// Divides a query and a key by their lengths.
void normalise_delta_heads(const DeltaScan& scan, int64_t token, int head);
void sigmoid_product_row(float* x, const float* gate, int64_t n);

}  // namespace freshet::ops
