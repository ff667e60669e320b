#include "grammar/late_matcher.h"

#include <algorithm>
#include <utility>

namespace freshet::grammar {
namespace {

std::string_view without_leading_space(std::string_view s) {
  return s.substr(std::min(s.find_first_not_of(" \t\r\n"), s.size()));
}

void set_bit(std::span<uint32_t> mask, int32_t id) {
  mask[static_cast<size_t>(id) / 32] |= uint32_t{1} << (id % 32);
}

}  // namespace

ThoughtTokens::ThoughtTokens(std::string open, std::string close, std::vector<std::string> tokens)
    : open_(std::move(open)), close_(std::move(close)), tokens_(std::move(tokens)) {
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (!tokens_[id].empty() && without_leading_space(tokens_[id]).empty())
      spaces_.push_back(static_cast<int32_t>(id));
  }
  find_openers();
  find_enders();
}

std::string_view ThoughtTokens::token(int32_t id) const {
  const auto at = static_cast<size_t>(id);
  return at < tokens_.size() ? std::string_view(tokens_[at]) : std::string_view();
}

// If the tag is a token, that token; otherwise the tokens that spell it, except those that lead to
// a position from which the vocabulary cannot continue.
void ThoughtTokens::find_openers() {
  openers_.resize(open_.size());
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (tokens_[id] == open_) openers_[0].push_back(static_cast<int32_t>(id));
  }
  if (!openers_[0].empty()) return;
  for (size_t spelled = open_.size(); spelled-- > 0;) {
    const std::string_view rest = std::string_view(open_).substr(spelled);
    for (size_t id = 0; id < tokens_.size(); ++id) {
      const std::string_view bytes = tokens_[id];
      const bool goes_on = !bytes.empty() && bytes.size() < rest.size() &&
                           rest.starts_with(bytes) && !openers_[spelled + bytes.size()].empty();
      const bool ends =
          bytes.starts_with(rest) && without_leading_space(bytes.substr(rest.size())).empty();
      if (goes_on || ends) openers_[spelled].push_back(static_cast<int32_t>(id));
    }
  }
}

void ThoughtTokens::find_enders() {
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string_view bytes = tokens_[id];
    const auto add = [&](size_t length, std::string_view behind) {
      behind = without_leading_space(behind);
      if (!behind.empty())
        enders_.push_back({static_cast<int32_t>(id), length, std::string(behind)});
    };
    for (size_t length = 1; length < close_.size() && length < bytes.size(); ++length) {
      if (bytes.starts_with(std::string_view(close_).substr(close_.size() - length)))
        add(length, bytes.substr(length));
    }
    const size_t at = bytes.find(close_);
    if (at != std::string_view::npos) add(close_.size(), bytes.substr(at + close_.size()));
  }
}

LateMatcher::LateMatcher(std::shared_ptr<const Grammar> grammar,
                         std::shared_ptr<const ThoughtTokens> thought, bool inside)
    : matcher_(std::move(grammar)), thought_(std::move(thought)), place_(Place::kAnswer) {
  if (thought_) place_ = inside ? Place::kThought : Place::kBefore;
}

bool LateMatcher::fill_mask(std::span<uint32_t> mask) {
  if (place_ == Place::kThought) return mask_enders(mask);
  if (fits_) {
    matcher_.fill_mask(mask);
  } else {
    std::ranges::fill(mask, 0);
  }
  if (place_ == Place::kBefore) {
    for (const int32_t id : thought_->openers(spelled_)) set_bit(mask, id);
  }
  if (space_) {
    for (const int32_t id : thought_->spaces()) set_bit(mask, id);
  }
  return true;
}

// Excludes tokens that would end the thought with an answer that the grammar refuses. In most
// thoughts there is no such token: it requires that the closing tag has begun.
bool LateMatcher::mask_enders(std::span<uint32_t> mask) {
  bool any = false;
  const std::string_view close = thought_->close();
  for (const ThoughtTokens::Ender& ender : thought_->enders()) {
    if (!tail_.ends_with(close.substr(0, close.size() - ender.length))) continue;
    if (matcher_.accept_bytes(ender.answer)) {
      matcher_.rollback(1);
      continue;
    }
    if (!std::exchange(any, true)) std::ranges::fill(mask, ~uint32_t{0});
    mask[static_cast<size_t>(ender.id) / 32] &= ~(uint32_t{1} << (ender.id % 32));
  }
  return any;
}

bool LateMatcher::can_end() const {
  return place_ != Place::kThought && fits_ && matcher_.can_end();
}

void LateMatcher::accept(int32_t id) {
  if (history_.size() == kMostRollback) history_.pop_front();
  history_.push_back({matcher_.accepted(), place_, spelled_, fits_, tail_, space_});
  switch (place_) {
    case Place::kBefore:
      return take_beginning(id);
    case Place::kThought:
      return take_thought(thought_->token(id));
    case Place::kAnswer:
      matcher_.accept(id);  // refuses the white space in between
      space_ = false;
  }
}

void LateMatcher::rollback(int tokens) {
  FRESHET_CHECK(tokens >= 0 && tokens <= std::ssize(history_));
  if (tokens == 0) return;
  const auto at = history_.end() - tokens;
  const bool before = at->place == Place::kBefore;
  if (before && std::exchange(opened_, false)) {  // the opening tag has reset the grammar matcher
    matcher_.rollback(matcher_.accepted());
    for (int i = 0; i < at->accepted; ++i) matcher_.accept(beginning_[static_cast<size_t>(i)]);
  } else {
    matcher_.rollback(matcher_.accepted() - at->accepted);
  }
  if (before) beginning_.resize(static_cast<size_t>(at->accepted));
  place_ = at->place;
  spelled_ = at->spelled;
  fits_ = at->fits;
  tail_ = std::move(at->tail);
  space_ = at->space;
  history_.erase(at, history_.end());
}

void LateMatcher::take_beginning(int32_t id) {
  const std::string_view bytes = thought_->token(id);
  const std::string_view rest = std::string_view(thought_->open()).substr(spelled_);
  fits_ = fits_ && matcher_.accept(id);
  if (fits_) beginning_.push_back(id);
  if (bytes.starts_with(rest)) {
    matcher_.rollback(matcher_.accepted());  // it was not the beginning of an answer
    opened_ = true;
    fits_ = true;
    place_ = Place::kThought;
    take_thought(bytes.substr(rest.size()));
  } else if (!bytes.empty() && rest.starts_with(bytes)) {
    spelled_ += bytes.size();
  } else {
    place_ = Place::kAnswer;
  }
}

void LateMatcher::take_thought(std::string_view bytes) {
  tail_ += bytes;
  const std::string& close = thought_->close();
  const size_t at = tail_.find(close);
  if (at == std::string::npos) {
    if (tail_.size() >= close.size()) tail_.erase(0, tail_.size() - close.size() + 1);
    return;
  }
  const std::string_view behind = std::string_view(tail_).substr(at + close.size());
  const std::string_view answer = without_leading_space(behind);
  if (!answer.empty()) matcher_.accept_bytes(answer);
  space_ = behind.empty();
  place_ = Place::kAnswer;
}

}  // namespace freshet::grammar
