#include "sampling/token_bans.h"

#include <algorithm>

namespace freshet {

TokenBans::TokenBans(const SamplingParams& params, int64_t vocab, std::span<const int32_t> prompt)
    : vocab_(vocab), ngram_(params.no_repeat_ngram_size) {
  for (const std::vector<int32_t>& word : params.bad_words) add(word, false);
  for (const std::vector<int32_t>& word : params.bad_words_ids) add(word, true);
  for (const int32_t id : params.begin_suppress_tokens) {
    if (id >= 0 && id < vocab) at_begin_.push_back(id);
  }
  const bool whole =
      std::ranges::any_of(sequences_, [](const Sequence& s) { return s.from_prompt; });
  if (ngram_ > 0 || whole) prompt_.assign(prompt.begin(), prompt.end());
}

void TokenBans::add(const std::vector<int32_t>& word, bool from_prompt) {
  if (word.empty()) return;
  for (const int32_t id : word) {
    if (id < 0 || id >= vocab_) return;
  }
  if (word.size() == 1) {
    single_.push_back(word.front());
  } else {
    sequences_.push_back({word, from_prompt});
  }
}

size_t TokenBans::most() const {
  return single_.size() + at_begin_.size() + sequences_.size();
}

void TokenBans::list(int64_t outputs, std::vector<int32_t>& ids) const {
  ids.insert(ids.end(), single_.begin(), single_.end());
  if (outputs == 0) ids.insert(ids.end(), at_begin_.begin(), at_begin_.end());
}

void TokenBans::list(std::span<const int32_t> output, std::vector<int32_t>& ids) const {
  list(std::ssize(output), ids);
  const int64_t all = std::ssize(prompt_) + std::ssize(output);
  for (const auto& [word, from_prompt] : sequences_) {
    const int64_t before = std::ssize(word) - 1;
    if (before > (from_prompt ? all : std::ssize(output))) continue;
    int64_t same = 0;
    while (same < before && word[static_cast<size_t>(same)] == token(output, all - before + same))
      ++same;
    if (same == before) ids.push_back(word.back());
  }
  if (ngram_ > 0) list_repeats(output, ids);
}

int32_t TokenBans::token(std::span<const int32_t> output, int64_t i) const {
  const int64_t prompt = std::ssize(prompt_);
  return i < prompt ? prompt_[static_cast<size_t>(i)] : output[static_cast<size_t>(i - prompt)];
}

void TokenBans::list_repeats(std::span<const int32_t> output, std::vector<int32_t>& ids) const {
  const int64_t all = std::ssize(prompt_) + std::ssize(output);
  const int64_t before = ngram_ - 1;
  for (int64_t first = 0; first + before < all; ++first) {
    int64_t same = 0;
    while (same < before && token(output, first + same) == token(output, all - before + same))
      ++same;
    const int32_t next = token(output, first + before);
    if (same == before && next >= 0 && next < vocab_) ids.push_back(next);
  }
}

}  // namespace freshet
