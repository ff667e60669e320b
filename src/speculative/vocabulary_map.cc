#include "speculative/vocabulary_map.h"

#include <algorithm>
#include <unordered_map>

#include "base/utf8.h"

namespace freshet::speculative {
namespace {

// Below this share of the draft model's tokens it would hardly ever be right.
constexpr double kLeastShared = 0.1;

}  // namespace

Result<VocabularyMap> VocabularyMap::make(const tokenizer::Tokenizer& target, int target_vocab,
                                          const tokenizer::Tokenizer& draft, int draft_vocab) {
  VocabularyMap map;
  std::unordered_map<std::string_view, int32_t> by_bytes;
  const int known = std::min(draft_vocab, draft.vocab_size());
  for (int32_t id = 0; id < known; ++id) {
    const std::string_view bytes = draft.token_bytes(id);
    if (!bytes.empty()) by_bytes.try_emplace(bytes, id);
  }
  map.target_ids_.assign(static_cast<size_t>(draft_vocab), -1);
  map.first_.push_back(0);
  int shared = 0;
  for (int32_t id = 0; id < target_vocab; ++id) {
    const std::string_view bytes =
        id < target.vocab_size() ? target.token_bytes(id) : std::string_view();
    std::optional<int32_t> same;
    if (const auto found = by_bytes.find(bytes); !bytes.empty() && found != by_bytes.end()) {
      same = found->second;
    }
    if (target.bos() == id && draft.bos()) same = draft.bos();
    if (target.is_end_of_generation(id) && draft.eos()) same = draft.eos();
    if (same) {
      map.parts_.push_back(*same);
      int32_t& back = map.target_ids_[static_cast<size_t>(*same)];
      if (back < 0) back = id, ++shared;
    } else if (!bytes.empty() && find_invalid_utf8(bytes) == std::string_view::npos) {
      for (const int32_t part :
           draft.encode(bytes, {.add_special = false, .parse_special = false})) {
        if (part < draft_vocab) map.parts_.push_back(part);
      }
    }
    map.first_.push_back(static_cast<uint32_t>(map.parts_.size()));
  }
  if (shared < kLeastShared * static_cast<double>(by_bytes.size())) {
    return invalid_argument("the vocabularies of target and draft model share {} of {} tokens",
                            shared, by_bytes.size());
  }
  return map;
}

void VocabularyMap::translate(int32_t target_id, std::vector<int32_t>& ids) const {
  const auto at = static_cast<size_t>(target_id);
  if (at + 1 >= first_.size()) return;
  ids.insert(ids.end(), parts_.begin() + first_[at], parts_.begin() + first_[at + 1]);
}

}  // namespace freshet::speculative
