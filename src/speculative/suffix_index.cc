#include "speculative/suffix_index.h"

#include <algorithm>
#include <utility>

namespace freshet::speculative {
namespace {

constexpr int32_t kBetweenTexts = -1;
constexpr size_t kMostOccurrences = 256;  // that a query looks at, latest first

uint64_t pair_of(int32_t a, int32_t b) {
  return static_cast<uint64_t>(static_cast<uint32_t>(a)) << 32 | static_cast<uint32_t>(b);
}

}  // namespace

void SuffixIndex::append(std::span<const int32_t> tokens) {
  for (const int32_t id : tokens) {
    const int64_t at = size();
    int64_t before = -1;
    if (!tokens_.empty() && tokens_.back() != kBetweenTexts && id != kBetweenTexts) {
      const auto [entry, fresh] = last_.try_emplace(pair_of(tokens_.back(), id), at);
      if (!fresh) before = std::exchange(entry->second, at);
    }
    tokens_.push_back(id);
    previous_.push_back(before);
  }
}

void SuffixIndex::end_text() {
  append({&kBetweenTexts, 1});
  texts_.push_back(size());
}

void SuffixIndex::forget_oldest_text() {
  if (texts_.empty()) return;
  valid_ = texts_.front();
  texts_.pop_front();
  if (2 * (valid_ - first_) > std::ssize(tokens_)) compact();
}

void SuffixIndex::compact() {
  const auto gone = static_cast<std::ptrdiff_t>(valid_ - first_);
  tokens_.erase(tokens_.begin(), tokens_.begin() + gone);
  previous_.erase(previous_.begin(), previous_.begin() + gone);
  first_ = valid_;
  std::erase_if(last_, [this](const auto& entry) { return entry.second < first_; });
}

SuffixIndex::Guess SuffixIndex::guess(std::span<const int32_t> tail, const Limits& limits) const {
  Guess guess;
  if (tail.size() < 2) return guess;
  const auto found = last_.find(pair_of(tail[tail.size() - 2], tail.back()));
  if (found == last_.end()) return guess;
  // Positions of what followed, of the occurrences with the longest context.
  std::vector<int64_t> next;
  int64_t longest = 2;
  const auto depth = std::min<int64_t>(limits.depth, std::ssize(tail));
  size_t seen = 0;
  int64_t at = found->second;
  // The tail itself, where it ends the newest text: nothing follows it.
  if (at + 1 == size()) at = previous_[static_cast<size_t>(at - first_)];
  for (; at > valid_ && seen < kMostOccurrences; ++seen) {
    int64_t length = 2;
    while (length < depth && at - length >= valid_ &&
           token(at - length) == tail[tail.size() - 1 - static_cast<size_t>(length)]) {
      ++length;
    }
    if (length > longest) next.clear();
    longest = std::max(longest, length);
    if (length == longest) next.push_back(at + 1);
    at = previous_[static_cast<size_t>(at - first_)];
  }
  const auto most = std::min(static_cast<int64_t>(limits.most),
                             static_cast<int64_t>(limits.factor * static_cast<double>(longest)));
  double share = 1.0;
  std::unordered_map<int32_t, int> counts;
  while (!next.empty() && std::ssize(guess.tokens) < most) {
    counts.clear();
    int32_t best = kBetweenTexts;
    int best_count = 0;
    for (const int64_t at : next) {  // ties go to the latest occurrence
      const int count = ++counts[token(at)];
      if (count > best_count && token(at) != kBetweenTexts) best = token(at), best_count = count;
    }
    if (best == kBetweenTexts) break;
    share *= static_cast<double>(best_count) / static_cast<double>(next.size());
    if (share < limits.min_share) break;
    guess.tokens.push_back(best);
    guess.score += share;
    std::erase_if(next, [&](int64_t& at) { return token(at) != best || ++at == size(); });
  }
  return guess;
}

}  // namespace freshet::speculative
