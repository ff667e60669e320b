// Which problems decode_cluster_sm90.cu supports. Plain C++.
#pragma once

#include "backend/cuda/attention/decode_sm90.h"

namespace freshet::cuda {

inline constexpr int64_t kClusterPieceTokens = 512, kClusterRanks = 4;  // blocks of a piece

inline bool supports_decode_cluster(const DeviceLimits& limits, const AttentionProblem& p) {
  if (!supports_decode(limits, p) || !p.partial || p.key_dim != 128) return false;
  const auto pieces_of = [](int64_t tokens) {
    return (tokens + kClusterPieceTokens - 1) / kClusterPieceTokens;
  };
  int64_t pieces = pieces_of(p.max_context);
  if (p.window > 0) {
    const int64_t seen = pieces_of(p.window) + 1;
    pieces = pieces < seen ? pieces : seen;
  }
  // More would wait for each other: their copies of values are small. Codes are read fast enough by
  // blocks that leave more multiprocessors to the next kernel.
  const int64_t most = stores_bytes(p) ? limits.multiprocessors / 2 : limits.multiprocessors;
  return decode_tiles(p) * pieces * kClusterRanks <= most;
}

}  // namespace freshet::cuda
