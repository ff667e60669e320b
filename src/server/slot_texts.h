// llama-server's slots, as far as texts belong to them: the last text of each.
//
// A request belongs to the slot that its id_slot names, or else to slot 0. When it has ended, the
// slot remembers its prompt and answer and the salt under which they are cached. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace freshet::server {

class SlotTexts {
 public:
  static constexpr int kSlots = 64;
  struct Text {
    std::vector<int32_t> tokens;
    std::string salt;
  };

  void set(int slot, std::vector<int32_t> tokens, std::string salt) {
    const std::lock_guard lock(mutex_);
    texts_[index(slot)] = {std::move(tokens), std::move(salt)};
  }
  Text get(int slot) const {
    const std::lock_guard lock(mutex_);
    return texts_[index(slot)];
  }

 private:
  static size_t index(int slot) { return slot < 0 ? 0 : static_cast<size_t>(slot); }

  mutable std::mutex mutex_;
  std::array<Text, kSlots> texts_;
};

}  // namespace freshet::server
