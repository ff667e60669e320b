// Rows of pictures among the tokens of a prompt, as the scheduler sees them.
//
// All rows of a picture have the same token id, so ids do not tell what a block of the cache holds.
// In the cache's keys a row has the picture's name in place of its id: a negative number that
// stands for the content, given by the caller and never given to another content. Below the cache,
// where names do not hold, keys take in the content's hash. Pure functions; integers only.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace freshet::scheduler {

constexpr int32_t kFirstPictureName = -2;  // -1 is kExpected; names go down from here

// Rows [first, first + count) of the prompt are rows of a picture, or of a part of one.
struct PictureSpan {
  int32_t first = 0;
  int32_t count = 0;
  int32_t name = kFirstPictureName;
  std::array<int32_t, 8> hash{};  // of the content
  // Its rows attend to one another in both directions: a step computes all that are left of them.
  bool both_ways = false;

  int32_t end() const { return first + count; }
};

// "": the spans are ascending, do not overlap and lie within `tokens`. Otherwise what is wrong.
std::string error_in(std::span<const PictureSpan> pictures, int32_t tokens);

// The tokens as the prefix cache has to know them: names in place of ids.
std::vector<int32_t> key_tokens(std::span<const int32_t> tokens,
                                std::span<const PictureSpan> pictures);

// The largest end in [first, end] of a part of a step that begins at `first` and cuts no picture
// whose rows attend in both directions.
int32_t uncut_end(std::span<const PictureSpan> pictures, int32_t first, int32_t end);

// The end of the both-ways picture that `first` lies in; `first` itself if there is none.
int32_t end_of_picture_at(std::span<const PictureSpan> pictures, int32_t first);

// What the key of a block of tokens [from, from + count) takes in before its tokens, for each
// picture that has rows in it: where the picture begins and its content's hash, after a negative
// number, which no token is.
using PictureMark = std::array<int32_t, 11>;
std::vector<PictureMark> marks_of(std::span<const PictureSpan> pictures, int32_t from,
                                  int32_t count);

}  // namespace freshet::scheduler
