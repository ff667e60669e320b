// The merge loop of byte-pair encoding (Sennrich et al., 2016): while neighbours can merge, merge
// the pair of the lowest rank, leftmost first.
//
// For few symbols, the best pair is found by repeated linear scans; for many, by a heap in O(n log
// n).
#pragma once

#include <algorithm>

#include "tokenizer/model.h"

namespace freshet::tokenizer {

template <class Ranks>
void merge_few(Scratch& s, const Ranks& ranks) {
  std::vector<Symbol>& symbols = s.symbols;
  s.merges.clear();
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    s.merges.push_back(ranks(symbols[i], symbols[i + 1]));
  }
  while (!s.merges.empty()) {
    size_t best = 0;
    for (size_t i = 1; i < s.merges.size(); ++i) {
      if (s.merges[i].rank < s.merges[best].rank) best = i;
    }
    if (s.merges[best].rank == Merge::kNone) return;
    symbols[best].size += symbols[best + 1].size;
    symbols[best].id = s.merges[best].id;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best) + 1);
    s.merges.erase(s.merges.begin() + static_cast<ptrdiff_t>(best));
    if (best > 0) s.merges[best - 1] = ranks(symbols[best - 1], symbols[best]);
    if (best < s.merges.size()) s.merges[best] = ranks(symbols[best], symbols[best + 1]);
  }
}

template <class Ranks>
void merge_many(Scratch& s, const Ranks& ranks) {
  std::vector<Symbol>& symbols = s.symbols;
  using Candidate = Scratch::Candidate;
  const auto later = [](const Candidate& a, const Candidate& b) { return a.key > b.key; };
  const auto count = static_cast<int32_t>(symbols.size());
  const auto at = [&](int32_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  s.heap.clear();
  const auto consider = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return false;
    const Merge merge = ranks(at(left), at(right));
    if (merge.rank == Merge::kNone) return false;
    const uint64_t key = (static_cast<uint64_t>(static_cast<uint32_t>(merge.rank)) << 32) |
                         static_cast<uint32_t>(left);
    s.heap.push_back({key, at(left).size + at(right).size, merge.id});
    return true;
  };
  for (int32_t i = 0; i < count; ++i) {
    at(i).previous = i - 1;
    at(i).next = i + 1 < count ? i + 1 : -1;
    if (i > 0) consider(i - 1, i);
  }
  std::make_heap(s.heap.begin(), s.heap.end(), later);
  while (!s.heap.empty()) {
    std::pop_heap(s.heap.begin(), s.heap.end(), later);
    const Candidate best = s.heap.back();
    s.heap.pop_back();
    const auto left = static_cast<int32_t>(best.key & 0xFFFFFFFF);
    const int32_t right = at(left).next;
    // A symbol's size is 0 once its left neighbour absorbed it. Symbols only grow, so an equal
    // total size means that both symbols are unchanged.
    if (at(left).size == 0 || right < 0 || at(left).size + at(right).size != best.size) continue;
    at(left).size = best.size;
    at(left).id = best.id;
    at(left).next = at(right).next;
    if (at(right).next >= 0) at(at(right).next).previous = left;
    at(right).size = 0;
    if (consider(at(left).previous, left)) std::push_heap(s.heap.begin(), s.heap.end(), later);
    if (consider(left, at(left).next)) std::push_heap(s.heap.begin(), s.heap.end(), later);
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.size == 0; });
}

// Merges scratch.symbols in place. ranks(left, right) returns the merge of two neighbours.
template <class Ranks>
void merge_symbols(Scratch& scratch, const Ranks& ranks) {
  constexpr size_t kFew = 40;
  if (scratch.symbols.size() <= kFew) {
    merge_few(scratch, ranks);
  } else {
    merge_many(scratch, ranks);
  }
}

}  // namespace freshet::tokenizer
