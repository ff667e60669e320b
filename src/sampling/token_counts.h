// The tokens of a sequence and their counts in the output, for penalties.
//
// An open-addressing table, sized once for the longest possible sequence; add() never allocates.
// Owned by one sequence, not synchronised.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "ops/sample.h"

namespace freshet {

class TokenCounts {
 public:
  using Entry = ops::SampleRow::Seen;  // `outputs`: times in the output; 0: in the prompt only

  TokenCounts() = default;
  explicit TokenCounts(size_t distinct)
      : slots_(std::bit_ceil(distinct * 2 + 1), -1), mask_(slots_.size() - 1), limit_(distinct) {
    entries_.reserve(distinct);
  }

  void add(int32_t id, bool output) {
    size_t at = (static_cast<uint32_t>(id) * 0x9E3779B1u) & mask_;
    while (slots_[at] >= 0 && entries_[static_cast<size_t>(slots_[at])].id != id)
      at = (at + 1) & mask_;
    if (slots_[at] < 0) {
      FRESHET_CHECK(entries_.size() < limit_, "more than the {} tokens planned for", limit_);
      slots_[at] = static_cast<int32_t>(entries_.size());
      entries_.push_back({id, 0});
    }
    if (output) ++entries_[static_cast<size_t>(slots_[at])].outputs;
  }

  const std::vector<Entry>& entries() const { return entries_; }  // in order of first appearance

 private:
  std::vector<int32_t> slots_;
  size_t mask_ = 0;
  size_t limit_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace freshet
