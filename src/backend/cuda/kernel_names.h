// GPU kernels by name: what --force-kernel takes, and what inspect prints. Needs no GPU.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/cuda/api.h"
#include "base/status.h"

namespace freshet::cuda {

// A forced row of each operation's table; -1: none.
using ForcedRows = std::array<int, kForcedOps>;
inline constexpr ForcedRows kNoForcedRows = {-1, -1, -1, -1};

// Parses texts like "matmul=q_sm90_m1_8" to rows. An error lists the known names.
Result<ForcedRows> forced_rows(std::span<const std::string> texts);

// Whether a device can run the forced rows; an error names the row and what it needs.
Status runs_on(const ForcedRows& rows, const DeviceLimits& limits, std::string_view device);

// Whether a forced row can run a GEMM with this weight for some number of tokens. OK if the row is
// for weights in other formats.
Status takes_weight(const ForcedRows& forced, const DeviceLimits& limits, Code code, int64_t rows,
                    int64_t cols);

// The row that runs a GEMM with this weight alone, by tokens: "1-8: a; 9-16: b; 17+: c".
std::string gemm_names(const ForcedRows& forced, const DeviceLimits& limits, Code code,
                       int64_t rows, int64_t cols);

}  // namespace freshet::cuda
