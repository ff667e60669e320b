// A pool of block ids with reference counts.
//
// Ids are in [0, size()). A block without references is free. The block that was freed last is
// taken first, so the ids are a function of the calls alone. Not synchronised.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace freshet::kv_cache {

inline constexpr int32_t kNoBlock = -1;

class BlockPool {
 public:
  explicit BlockPool(int32_t blocks);

  int32_t size() const { return static_cast<int32_t>(refs_.size()); }
  int32_t free() const { return static_cast<int32_t>(free_.size()); }
  int32_t refs(int32_t id) const { return refs_[index(id)]; }

  int32_t take();             // with one reference; kNoBlock when none is free
  void ref(int32_t id);       // REQUIRES: refs(id) > 0
  int32_t unref(int32_t id);  // REQUIRES: refs(id) > 0. Returns the references left; 0: it is free.

  // An error unless the free list holds each block without references exactly once.
  Status check_conserved() const;

 private:
  size_t index(int32_t id) const;

  std::vector<int32_t> refs_;
  std::vector<int32_t> free_;
};

}  // namespace freshet::kv_cache
