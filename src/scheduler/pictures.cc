#include "scheduler/pictures.h"

#include <algorithm>

#include <fmt/format.h>

namespace freshet::scheduler {

std::string error_in(std::span<const PictureSpan> pictures, int32_t tokens) {
  int32_t before = 0;
  for (const PictureSpan& p : pictures) {
    if (p.count < 1 || p.first < before || p.first > tokens - p.count) {
      return fmt::format("a picture has rows {} to {} of a prompt of {} tokens", p.first, p.end(),
                         tokens);
    }
    before = p.end();
  }
  return {};
}

std::vector<int32_t> key_tokens(std::span<const int32_t> tokens,
                                std::span<const PictureSpan> pictures) {
  std::vector<int32_t> keys(tokens.begin(), tokens.end());
  for (const PictureSpan& p : pictures) std::fill_n(keys.begin() + p.first, p.count, p.name);
  return keys;
}

int32_t uncut_end(std::span<const PictureSpan> pictures, int32_t first, int32_t end) {
  for (const PictureSpan& p : pictures) {
    if (p.both_ways && p.first < end && end < p.end()) return std::max(first, p.first);
  }
  return end;
}

int32_t end_of_picture_at(std::span<const PictureSpan> pictures, int32_t first) {
  for (const PictureSpan& p : pictures) {
    if (p.both_ways && p.first <= first && first < p.end()) return p.end();
  }
  return first;
}

std::vector<PictureMark> marks_of(std::span<const PictureSpan> pictures, int32_t from,
                                  int32_t count) {
  std::vector<PictureMark> marks;
  for (const PictureSpan& p : pictures) {
    if (p.end() <= from || p.first >= from + count) continue;
    PictureMark& mark = marks.emplace_back(PictureMark{kFirstPictureName, p.first, p.count});
    std::ranges::copy(p.hash, mark.begin() + 3);
  }
  return marks;
}

}  // namespace freshet::scheduler
