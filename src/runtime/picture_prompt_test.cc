#include "runtime/picture_prompt.h"

#include <memory>
#include <utility>

#include <gtest/gtest.h>

namespace freshet::runtime {
namespace {

constexpr int32_t kImage = 9;
using Ids = std::vector<int32_t>;

ModelSpec model_of(VisionSpec vision, int axes) {
  ModelSpec spec;
  vision.image_token = kImage;
  spec.vision = std::make_shared<const VisionSpec>(std::move(vision));
  if (axes == 3) spec.ropes.push_back({.rotary_dim = 6, .axes = {0, 1, 2}});
  return spec;
}

PicturePrompt place(const ModelSpec& spec, const Ids& ids,
                    const std::vector<PictureLayout>& pictures) {
  auto placed = place_pictures(spec, ids, pictures);
  EXPECT_TRUE(placed.ok()) << placed.status().message();
  return std::move(*placed);
}

std::vector<std::pair<int, int>> pairs_of(const std::vector<ops::KeyRange>& ranges) {
  std::vector<std::pair<int, int>> pairs;
  for (const ops::KeyRange& r : ranges) pairs.emplace_back(r.first, r.end);
  return pairs;
}

// As get_rope_index() of transformers' Qwen2.5-VL has it.
TEST(PicturePrompt, PicturesHavePositionsOnThreeAxes) {
  const Ids ids{1, 1, 9, 9, 9, 9, 9, 9, 1, 9, 9};
  const PicturePrompt p =
      place(model_of({}, 3), ids, {{.rows = 6, .grid = {2, 3}}, {.rows = 2, .grid = {2, 1}}});
  EXPECT_EQ(p.axis_positions, (Ids{0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 2, 2, 4, 2, 3,
                                   2, 2, 3, 3, 2, 3, 4, 5, 5, 5, 6, 6, 6, 6, 7, 6}));
  EXPECT_EQ(p.shift, 8 - 11);
  EXPECT_TRUE(p.spans.empty() && p.views.empty());
  ASSERT_EQ(p.places.size(), 2u);
  EXPECT_EQ(p.places[1].token, 9);
  EXPECT_EQ(p.places[1].picture, 1);

  // A batch of a text, the end of the prompt and a token behind it.
  ForwardBatch b;
  b.token_ids = {1, 1};
  b.positions = {7, 8};
  const VisionRows rows[] = {{.rows = 6, .width = 1, .values = std::vector<float>(6)},
                             {.rows = 2, .width = 1, .values = std::vector<float>(2)}};
  const VisionRows* const pointers[] = {&rows[0], &rows[1]};
  add_picture_tokens(p, pointers, 3, 7, 5, b);
  b.token_ids.resize(7);
  b.positions = {7, 8, 7, 8, 9, 10, 11};
  complete_picture_tokens(3, b);
  EXPECT_EQ(b.axis_positions, (Ids{7, 7, 7, 8, 8, 8, 2, 3, 4, 5, 5, 5, 6, 6, 6, 6, 7, 6, 8, 8, 8}));
  ASSERT_EQ(b.embedding_rows.size(), 2u);
  EXPECT_EQ(b.embedding_rows[0].token, 2);
  EXPECT_EQ(b.embedding_rows[0].rows, rows[0].values.data() + 5);
  EXPECT_EQ(b.embedding_rows[1].token, 4);
  EXPECT_EQ(b.embedding_rows[1].count, 2);
}

TEST(PicturePrompt, APictureMayHaveSeveralRuns) {
  const PicturePrompt p = place(model_of({}, 1), {9, 9, 1, 9, 1, 9}, {{.rows = 3}, {.rows = 1}});
  ASSERT_EQ(p.places.size(), 3u);
  EXPECT_EQ(p.places[1].token, 3);
  EXPECT_EQ(p.places[1].picture, 0);
  EXPECT_EQ(p.places[1].row, 2);
  EXPECT_EQ(p.places[2].picture, 1);
  EXPECT_TRUE(p.axis_positions.empty());
}

// As transformers' get_cross_attention_token_mask() has it.
TEST(PicturePrompt, TokensSeeTheLastPicturesBeforeThem) {
  VisionSpec vision;
  vision.cross = true;
  const PicturePrompt p = place(
      model_of(vision, 1), {1, 9, 2, 9, 9, 3},
      {{.rows = 8, .used_rows = 2}, {.rows = 8, .used_rows = 3}, {.rows = 8, .used_rows = 4}});
  EXPECT_TRUE(p.places.empty());
  EXPECT_EQ(pairs_of(p.views),
            (std::vector<std::pair<int, int>>{{0, 0}, {0, 2}, {0, 2}, {2, 5}, {2, 9}, {2, 9}}));
}

TEST(PicturePrompt, ErrorsCountImageTokens) {
  const auto few = place_pictures(model_of({}, 1), Ids{1, 9, 9}, std::vector<PictureLayout>{{3}});
  ASSERT_FALSE(few.ok());
  EXPECT_EQ(few.status().message(), "the prompt has 2 image tokens (id 9), its 1 picture needs 3");
}

}  // namespace
}  // namespace freshet::runtime
