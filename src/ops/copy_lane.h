// A queue of copies between the blocks of a cache in a device's memory and the device's
// host_memory(), beside the steps.
//
// Copies run in order on a stream of their own. Nothing orders them with the device's other work
// but follow() and precede(), which the step thread calls. copy() may be called by any thread, by
// one at a time; wait() by any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace freshet::ops {

// One layer's blocks: block b is at data + b * bytes, and at `offset` in the copy of a block of all
// layers. Bytes and offsets are multiples of 64.
struct LaneLayer {
  uint8_t* data = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
};
using LaneLayers = std::vector<std::vector<LaneLayer>>;  // [groups]

// A block of all layers of a group, and its copy.
struct LaneUnit {
  uint8_t* host = nullptr;
  int64_t block = 0;
};

class CopyLane {
 public:
  virtual ~CopyLane() = default;
  // Later copies wait for the work enqueued so far.
  virtual void follow() = 0;
  // Work enqueued later waits for the copies so far.
  virtual void precede() = 0;
  virtual void copy(int group, std::span<const LaneUnit> units, bool to_device) = 0;
  virtual void wait() = 0;  // until the copies so far have ended
};

}  // namespace freshet::ops
