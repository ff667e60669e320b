// A CopyLane on a GPU: a kernel on a stream of its own reads and writes the pinned memory of the
// host, so that any list of blocks takes one launch.
#pragma once

#include <utility>
#include <vector>

#include "backend/cuda/api.h"
#include "ops/copy_lane.h"

namespace freshet::cuda {

class CudaCopyLane final : public ops::CopyLane {
 public:
  CudaCopyLane(const Api& api, Context* ctx, const ops::LaneLayers& groups);
  ~CudaCopyLane() override;
  void follow() override;
  void precede() override;
  void copy(int group, std::span<const ops::LaneUnit> units, bool to_device) override;
  void wait() override;

 private:
  void check(int error) const;

  const Api& api_;
  Context* ctx_;
  void* lane_ = nullptr;
  std::vector<std::pair<int32_t, int32_t>> groups_;  // first layer, layers
  std::vector<int64_t> longest_;                     // [groups] bytes of a layer's block
};

}  // namespace freshet::cuda
