#include "backend/cuda/copy_lane.h"

#include <algorithm>

#include "base/status.h"

namespace freshet::cuda {

CudaCopyLane::CudaCopyLane(const Api& api, Context* ctx, const ops::LaneLayers& groups)
    : api_(api), ctx_(ctx) {
  std::vector<LaneLayerView> layers;
  for (const std::vector<ops::LaneLayer>& group : groups) {
    groups_.emplace_back(static_cast<int32_t>(layers.size()), static_cast<int32_t>(group.size()));
    int64_t& longest = longest_.emplace_back(0);
    for (const ops::LaneLayer& layer : group) {
      layers.push_back({layer.data, layer.bytes, layer.offset});
      longest = std::max(longest, layer.bytes);
    }
  }
  check(api_.copies.open(ctx_, &lane_, layers.data(), static_cast<int32_t>(layers.size())));
}

CudaCopyLane::~CudaCopyLane() {
  api_.copies.close(ctx_, lane_);
}

void CudaCopyLane::check(int error) const {
  FRESHET_CHECK(error == 0, "CUDA: copies of blocks: {}", api_.error_text(error));
}

void CudaCopyLane::follow() {
  check(api_.copies.follow(ctx_, lane_));
}

void CudaCopyLane::precede() {
  check(api_.copies.precede(ctx_, lane_));
}

void CudaCopyLane::copy(int group, std::span<const ops::LaneUnit> units, bool to_device) {
  const auto [first, count] = groups_[static_cast<size_t>(group)];
  while (!units.empty()) {
    LaneUnits part;
    part.count = static_cast<int32_t>(std::min<size_t>(units.size(), kLaneUnits));
    for (int32_t i = 0; i < part.count; ++i)
      part.units[i] = {units[static_cast<size_t>(i)].host, units[static_cast<size_t>(i)].block};
    check(api_.copies.copy(ctx_, lane_, first, count, &part, longest_[static_cast<size_t>(group)],
                           to_device ? 1 : 0));
    units = units.subspan(static_cast<size_t>(part.count));
  }
}

void CudaCopyLane::wait() {
  check(api_.copies.wait(ctx_, lane_));
}

}  // namespace freshet::cuda
