// Prompt lookup: the tokens that followed the last occurrence of the sequence's last n tokens.
//
// The longest n from prompt_lookup_max down to prompt_lookup_min that occurred before wins; of its
// occurrences, the last one. The copy may run into itself, so a text that repeats with any period
// gets full drafts. Ends of n-grams are kept in a hash table that grows with the sequence, so a
// look-up takes no longer for a long text. With synthetic acceptance the sequence's beginning is
// copied if nothing is found: texts of random weights repeat nothing, and steps shall take what
// they take where drafts are found.
#include <algorithm>
#include <unordered_map>

#include "speculative/registry.h"

namespace freshet::speculative {
namespace {

class Ngram final : public Drafter {
 public:
  Ngram(int min, int max, bool always) : min_(min), max_(max), always_(always) {}

  void propose(std::span<DraftRequest> requests) override {
    for (DraftRequest& r : requests) {
      Seen& seen = seen_[r.sequence];
      add(seen, r.tokens.first(r.tokens.size() - 1));
      copy(std::max(find(seen, r.tokens), size_t{always_ ? 1U : 0U}), r);
    }
  }
  void forget(uint64_t sequence) override { seen_.erase(sequence); }

 private:
  // The n-grams of a sequence that end before its last token.
  struct Seen {
    size_t tokens = 0;  // that were read
    std::unordered_map<uint64_t, int32_t> ends;
  };

  // Calls use(n, hash) with each n-gram at the end of `tokens`, shortest first.
  template <class Use>
  void each_at_end(std::span<const int32_t> tokens, const Use& use) const {
    uint64_t hash = 0;
    const auto longest = std::min(static_cast<size_t>(max_), tokens.size());
    for (size_t n = 1; n <= longest; ++n) {
      hash = (hash ^ static_cast<uint64_t>(tokens[tokens.size() - n] + 1)) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 29;
      if (static_cast<int>(n) >= min_) use(n, hash + n);
    }
  }

  void add(Seen& seen, std::span<const int32_t> tokens) const {
    for (; seen.tokens < tokens.size(); ++seen.tokens) {
      const size_t end = seen.tokens + 1;
      each_at_end(tokens.first(end),
                  [&](size_t, uint64_t hash) { seen.ends[hash] = static_cast<int32_t>(end); });
    }
  }

  // The end of the longest n-gram that also ends the sequence; 0: there is none.
  size_t find(const Seen& seen, std::span<const int32_t> tokens) const {
    size_t found = 0;
    each_at_end(tokens, [&](size_t n, uint64_t hash) {
      const auto at = seen.ends.find(hash);
      if (at == seen.ends.end()) return;
      const auto end = static_cast<size_t>(at->second);
      if (std::ranges::equal(tokens.subspan(end - n, n), tokens.last(n))) found = end;
    });
    return found;
  }

  static void copy(size_t from, DraftRequest& r) {
    if (from == 0) return;
    for (size_t i = from; std::ssize(r.draft) < r.limit; ++i) {
      const size_t size = r.tokens.size();
      r.draft.push_back(i < size ? r.tokens[i] : r.draft[i - size]);
    }
  }

  const int min_, max_;
  const bool always_;
  std::unordered_map<uint64_t, Seen> seen_;
};

}  // namespace

std::unique_ptr<Drafter> ngram_drafter(const Config& config) {
  return std::make_unique<Ngram>(config.prompt_lookup_min, config.prompt_lookup_max,
                                 config.acceptance.method == Acceptance::kSynthetic);
}

}  // namespace freshet::speculative
