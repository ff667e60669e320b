// Which problems decode_cluster_sm90.cu supports. Plain C++.
#pragma once

#include "backend/cuda/attention/decode_sm90.h"

namespace freshet::cuda {

inline constexpr int64_t kClusterPieceTokens = 512, kClusterRanks = 4;  // blocks of a split

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
  // More blocks would wait for each other, since their copies of values are small. A cache of codes
  // is read fast enough by half of the SMs, which leaves the others to the next kernel.
  const int64_t most = stores_bytes(p) ? limits.multiprocessors / 2 : limits.multiprocessors;
  return decode_tiles(p) * pieces * kClusterRanks <= most;
}

}  // namespace freshet::cuda
