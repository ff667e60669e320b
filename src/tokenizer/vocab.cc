#include "tokenizer/vocab.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/status.h"

namespace freshet::tokenizer {

std::string_view StringArena::add(std::string_view s) {
  constexpr size_t kBlock = 1 << 16;
  if (blocks_.empty() || capacity_ - used_ < s.size()) {
    capacity_ = std::max(kBlock, s.size());
    blocks_.push_back(std::make_unique<char[]>(capacity_));
    used_ = 0;
  }
  char* p = blocks_.back().get() + used_;
  if (!s.empty()) std::memcpy(p, s.data(), s.size());
  used_ += s.size();
  return {p, s.size()};
}

void TokenMap::reserve(size_t count) {
  const size_t slots = std::bit_ceil(std::max<size_t>(16, count * 2));
  if (slots > slots_.size()) grow(slots);
}

void TokenMap::grow(size_t slots) {
  std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots));
  for (const Slot& slot : old) {
    if (slot.id < 0) continue;
    size_t i = slot.hash & (slots - 1);
    while (slots_[i].id >= 0) i = (i + 1) & (slots - 1);
    slots_[i] = slot;
  }
}

bool TokenMap::insert(std::string_view key, int32_t id) {
  FRESHET_CHECK(id >= 0);
  if ((size_ + 1) * 2 > slots_.size()) grow(std::max<size_t>(16, slots_.size() * 2));
  const auto hash = static_cast<uint32_t>(hash_text(key));
  size_t i = hash & (slots_.size() - 1);
  for (; slots_[i].id >= 0; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].hash == hash && slots_[i].key == key) return false;
  }
  slots_[i] = {key, hash, id};
  ++size_;
  longest_ = std::max(longest_, key.size());
  return true;
}

int32_t TokenMap::find(std::string_view key) const {
  if (slots_.empty() || key.size() > longest_) return -1;
  const auto hash = static_cast<uint32_t>(hash_text(key));
  for (size_t i = hash & (slots_.size() - 1); slots_[i].id >= 0;
       i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].hash == hash && slots_[i].key == key) return slots_[i].id;
  }
  return -1;
}

void Vocab::reserve(size_t count) {
  map_.reserve(count);
  texts_.reserve(count);
}

void Vocab::set(int32_t id, std::string_view text) {
  FRESHET_CHECK(id >= 0);
  if (!has(id)) ++count_;
  if (id >= size()) texts_.resize(static_cast<size_t>(id) + 1);
  const std::string_view kept = arena_.add(text);
  texts_[static_cast<size_t>(id)] = kept;
  map_.insert(kept, id);
}

}  // namespace freshet::tokenizer
