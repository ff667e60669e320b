#include "kv_cache/encoder_cache.h"

#include <utility>

namespace freshet::kv_cache {

bool EncoderCache::fits(const std::string& key, int32_t blocks) const {
  return blocks <= available() || outputs_.contains(key);
}

std::optional<EncoderCache::Taken> EncoderCache::take(const std::string& key, int32_t blocks) {
  if (const auto known = outputs_.find(key); known != outputs_.end()) {
    Output& output = known->second;
    FRESHET_CHECK(std::ssize(output.blocks) == blocks, "an output of {} blocks, {} asked for",
                  output.blocks.size(), blocks);
    if (std::exchange(output.idle, false)) {
      idle_.erase(output.place);
      idle_blocks_ -= blocks;
    }
    for (const int32_t block : output.blocks) pool_.ref(block);
    return Taken{output.blocks, true};
  }
  if (blocks > available()) return std::nullopt;
  while (pool_.free() < blocks) evict_oldest();
  Taken taken;
  for (int32_t i = 0; i < blocks; ++i) taken.blocks.push_back(pool_.take());
  return taken;
}

void EncoderCache::keep(const std::string& key, std::span<const int32_t> blocks) {
  if (!share_ || key.empty() || blocks.empty()) return;
  const auto [at, added] = outputs_.try_emplace(key);
  FRESHET_CHECK(added, "an output was computed twice");
  at->second.blocks.assign(blocks.begin(), blocks.end());
  for (const int32_t block : blocks) pool_.ref(block);
}

void EncoderCache::release(const std::string& key, std::vector<int32_t>& blocks) {
  for (const int32_t block : blocks) pool_.unref(block);
  const auto known = blocks.empty() ? outputs_.end() : outputs_.find(key);
  blocks.clear();
  if (known == outputs_.end() || known->second.idle) return;
  Output& output = known->second;
  if (pool_.refs(output.blocks.front()) > 1) return;
  output.idle = true;
  output.place = idle_.insert(idle_.end(), key);
  idle_blocks_ += static_cast<int32_t>(output.blocks.size());
}

void EncoderCache::evict_oldest() {
  FRESHET_CHECK(!idle_.empty(), "no encoder's output to evict");
  const auto oldest = outputs_.find(idle_.front());
  for (const int32_t block : oldest->second.blocks) pool_.unref(block);
  idle_blocks_ -= static_cast<int32_t>(oldest->second.blocks.size());
  outputs_.erase(oldest);
  idle_.pop_front();
  ++evictions_;
}

Status EncoderCache::check(std::span<const int32_t> held) const {
  FRESHET_RETURN_IF_ERROR(pool_.check_conserved().with_context("encoders' outputs"));
  std::vector<int32_t> expected(held.begin(), held.end());
  int32_t idle = 0;
  for (const auto& [key, output] : outputs_) {
    bool unused = true;
    for (const int32_t block : output.blocks) {
      unused = unused && held[static_cast<size_t>(block)] == 0;
      ++expected[static_cast<size_t>(block)];
    }
    if (unused != output.idle)
      return internal_error("an encoder's output is {}listed as idle", unused ? "not " : "");
    if (output.idle) idle += static_cast<int32_t>(output.blocks.size());
  }
  if (idle != idle_blocks_)
    return internal_error("{} idle blocks of encoders, {} counted", idle, idle_blocks_);
  for (int32_t b = 0; b < size(); ++b) {
    if (expected[static_cast<size_t>(b)] != pool_.refs(b)) {
      return internal_error("block {} of encoders has {} references, {} holders", b, pool_.refs(b),
                            expected[static_cast<size_t>(b)]);
    }
  }
  return {};
}

}  // namespace freshet::kv_cache
