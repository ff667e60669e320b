// Suffix decoding (arXiv:2411.04975): what followed the longest earlier occurrence of the
// sequence's end, in its own text or in outputs of the same owner's earlier requests.
//
// Outputs are kept per owner (a tenant and its cache salt): nobody's text is proposed to somebody
// else, so the speed of an answer tells nothing about other callers.
#include <deque>
#include <unordered_map>

#include "speculative/registry.h"
#include "speculative/suffix_index.h"

namespace freshet::speculative {
namespace {

class Suffix final : public Drafter {
 public:
  explicit Suffix(const Config& config)
      : most_texts_(static_cast<size_t>(config.suffix_decoding_max_cached_requests)) {
    limits_.depth = config.suffix_decoding_max_tree_depth;
    limits_.factor = config.suffix_decoding_max_spec_factor;
    limits_.min_share = config.suffix_decoding_min_token_prob;
  }

  void propose(std::span<DraftRequest> requests) override {
    for (DraftRequest& r : requests) {
      const auto [at, fresh] = sequences_.try_emplace(r.sequence);
      Sequence& s = at->second;
      if (fresh) {
        s.owner = r.owner;
        s.prompt = r.tokens.size() - 1;
      }
      s.own.append(r.tokens.subspan(s.read));
      s.output.insert(s.output.end(),
                      r.tokens.begin() + static_cast<std::ptrdiff_t>(std::max(s.read, s.prompt)),
                      r.tokens.end());
      s.read = r.tokens.size();
      limits_.most = r.limit;
      SuffixIndex::Guess guess = s.own.guess(r.tokens, limits_);
      if (const auto shared = owners_.find(r.owner); shared != owners_.end()) {
        SuffixIndex::Guess other = shared->second.guess(r.tokens, limits_);
        if (other.score > guess.score) guess = std::move(other);
      }
      r.draft = std::move(guess.tokens);
    }
  }

  void forget(uint64_t sequence) override {
    const auto at = sequences_.find(sequence);
    if (at == sequences_.end()) return;
    const Sequence s = std::move(at->second);
    sequences_.erase(at);
    if (most_texts_ == 0) return;
    SuffixIndex& texts = owners_[s.owner];
    texts.append(s.output);
    texts.end_text();
    order_.push_back(s.owner);
    while (order_.size() > most_texts_) {
      const auto oldest = owners_.find(order_.front());
      order_.pop_front();
      oldest->second.forget_oldest_text();
      if (oldest->second.texts() == 0) owners_.erase(oldest);
    }
  }

 private:
  struct Sequence {
    uint64_t owner = 0;
    size_t prompt = 0;
    size_t read = 0;  // tokens that `own` holds
    SuffixIndex own;
    std::vector<int32_t> output;
  };

  const size_t most_texts_;
  SuffixIndex::Limits limits_;
  std::unordered_map<uint64_t, Sequence> sequences_;
  std::unordered_map<uint64_t, SuffixIndex> owners_;
  std::deque<uint64_t> order_;  // whose texts were kept, oldest first
};

}  // namespace

std::unique_ptr<Drafter> suffix_drafter(const Config& config) {
  return std::make_unique<Suffix>(config);
}

}  // namespace freshet::speculative
