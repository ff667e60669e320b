#include "engine/text_assembler.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace freshet::engine {
namespace {

// The length of the longest suffix of `text` that is a proper prefix of a stop string.
size_t possible_beginning(std::string_view text, const std::vector<std::string>& stops) {
  size_t longest = 0;
  for (const std::string& stop : stops) {
    for (size_t n = std::min(text.size(), stop.size() - 1); n > longest; --n) {
      if (text.ends_with(std::string_view(stop).substr(0, n))) {
        longest = n;
        break;
      }
    }
  }
  return longest;
}

}  // namespace

TextAssembler::TextAssembler(const tokenizer::Tokenizer* tokenizer, bool skip_special,
                             std::vector<std::string> stops, bool include_stop)
    : stops_(std::move(stops)), include_stop_(include_stop) {
  if (tokenizer != nullptr) {
    decoder_.emplace(*tokenizer, tokenizer::DecodeOptions{.skip_special = skip_special});
  }
}

std::string TextAssembler::push(int32_t id, bool may_stop) {
  if (!decoder_) return {};
  held_ += decoder_->push(id);
  return release(may_stop);
}

std::string TextAssembler::release(bool may_stop) {
  if (stops_.empty()) return std::exchange(held_, {});
  size_t first = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = may_stop ? held_.find(stop) : std::string::npos;
    if (at < first) {
      first = at;
      stopped_by_ = &stop;
    }
  }
  if (stopped_by_ != nullptr) {
    held_.resize(first + (include_stop_ ? stopped_by_->size() : 0));
    return std::exchange(held_, {});
  }
  const size_t keep = possible_beginning(held_, stops_);
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return out;
}

std::string TextAssembler::finish() {
  if (!decoder_ || stopped_by_ != nullptr) return {};
  held_ += decoder_->finish();
  return std::exchange(held_, {});
}

}  // namespace freshet::engine
