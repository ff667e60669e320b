#include <algorithm>

#include "kv_cache/block_cache.h"
#include "kv_cache/retention/retention.h"

namespace freshet::kv_cache {

void KeyScores::Layer::widen(int rows, int64_t slots) {
  const int64_t wider = (slots + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  if (stride >= wider) return;
  std::vector<int64_t> room(static_cast<size_t>(rows * wider));
  for (int64_t row = 0; stride > 0 && row < rows; ++row)
    std::copy_n(sums.begin() + row * stride, stride, room.begin() + row * wider);
  sums = std::move(room);
  stride = wider;
}

void KeyScores::add(const KeyScores& drafted, int32_t count) {
  layers.resize(drafted.layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& from = drafted.layers[i];
    if (from.stride == 0) continue;
    const int64_t rows = std::ssize(from.sums) / from.stride / drafted.queries;
    layers[i].widen(static_cast<int>(rows), from.stride);
    for (int64_t row = 0; row < count * rows; ++row) {
      int64_t* const to = layers[i].sums.data() + row % rows * layers[i].stride;
      const int64_t* const add = from.sums.data() + row * from.stride;
      for (int64_t slot = 0; slot < from.stride; ++slot) to[slot] += add[slot];
    }
  }
}

}  // namespace freshet::kv_cache
