#include "kv_cache/block_pool.h"

namespace freshet::kv_cache {

BlockPool::BlockPool(int32_t blocks) {
  FRESHET_CHECK(blocks >= 0);
  refs_.assign(static_cast<size_t>(blocks), 0);
  free_.reserve(static_cast<size_t>(blocks));
  for (int32_t id = blocks - 1; id >= 0; --id) free_.push_back(id);
}

size_t BlockPool::index(int32_t id) const {
  FRESHET_CHECK(id >= 0 && id < size(), "block {} of {}", id, size());
  return static_cast<size_t>(id);
}

int32_t BlockPool::take() {
  if (free_.empty()) return kNoBlock;
  const int32_t id = free_.back();
  free_.pop_back();
  refs_[index(id)] = 1;
  return id;
}

void BlockPool::ref(int32_t id) {
  int32_t& refs = refs_[index(id)];
  FRESHET_CHECK(refs > 0, "block {} is free", id);
  ++refs;
}

int32_t BlockPool::unref(int32_t id) {
  int32_t& refs = refs_[index(id)];
  FRESHET_CHECK(refs > 0, "block {} is already free", id);
  if (--refs == 0) free_.push_back(id);
  return refs;
}

Status BlockPool::check_conserved() const {
  std::vector<bool> listed(refs_.size(), false);
  for (const int32_t id : free_) {
    if (listed[index(id)]) return internal_error("block {} is in the free list twice", id);
    if (refs(id) != 0) return internal_error("block {} is free with {} references", id, refs(id));
    listed[index(id)] = true;
  }
  for (int32_t id = 0; id < size(); ++id) {
    if (refs(id) < 0) return internal_error("block {} has {} references", id, refs(id));
    if (refs(id) == 0 && !listed[index(id)]) return internal_error("block {} is lost", id);
  }
  return {};
}

}  // namespace freshet::kv_cache
