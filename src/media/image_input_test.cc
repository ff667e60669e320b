#include "media/image_input.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "media/test_pictures.h"

namespace freshet::media {
namespace {

json::Value parsed(std::string_view text) {
  return json::parse(text).value();
}

std::string layout_of(const ImageInput& input, ImageFamily family) {
  switch (family) {
    case ImageFamily::kQwen:
    case ImageFamily::kPixtral:
      return fmt::format("{}x{}", input.grid_thw[1], input.grid_thw[2]);
    case ImageFamily::kIdefics3:
      return fmt::format("{}x{}", input.grid_rows, input.grid_columns);
    case ImageFamily::kMllama:
      return fmt::format("{}x{}", input.aspect_ratio_id, input.grid_rows * input.grid_columns);
    case ImageFamily::kLlavaNext:
      return fmt::format("{}x{}", input.shape[0], input.text_rows);
    case ImageFamily::kSingle:
      break;
  }
  return "";
}

// 200 pictures by family against checksums of the F32 values that transformers' PIL processors
// make.
TEST(ImageInput, EqualsTransformers) {
  const json::Object& families = golden_media().find("processed")->as_object();
  EXPECT_EQ(families.size(), 15u);
  for (const auto& [name, golden] : families) {
    const auto settings = image_settings(*golden.find("preprocessor"), {}, *golden.find("config"));
    ASSERT_TRUE(settings.ok()) << name << ": " << settings.status().message();
    const auto wanted = words_of(golden.get_string("values", ""));
    const auto layouts = words_of(golden.get_string("layout", ""));
    ASSERT_EQ(wanted.size(), 200u) << name;
    for (size_t i = 0; i < 200; ++i) {
      const Picture picture = test_picture(static_cast<int>(i));
      const auto input = image_input(picture, *settings);
      if (wanted[i] == "-") {
        EXPECT_FALSE(input.ok()) << name << " " << i;
        continue;
      }
      ASSERT_TRUE(input.ok()) << name << " " << i << ": " << input.status().message();
      EXPECT_EQ(crc_of(input->values.data(), input->values.size() * 4), wanted[i])
          << name << ", picture " << i << ": " << picture.width << " x " << picture.height;
      if (!layouts.empty()) {
        EXPECT_EQ(layout_of(*input, settings->family), layouts[i]) << name << ", picture " << i;
      }
      const auto planned = image_layout(picture.width, picture.height, *settings);
      ASSERT_TRUE(planned.ok());
      EXPECT_EQ(planned->shape, input->shape);
      EXPECT_EQ(planned->prompt, input->prompt);
    }
  }
}

ImageInput input_of(const json::Value& preprocessor, const json::Value& config, int width,
                    int height) {
  const auto settings = image_settings(preprocessor, {}, config);
  EXPECT_TRUE(settings.ok()) << settings.status().message();
  auto input = image_layout(width, height, *settings);
  EXPECT_TRUE(input.ok()) << input.status().message();
  return std::move(input).value();
}

using Pieces = std::vector<PromptPiece>;

TEST(ImageInput, PromptsOfPublishedModels) {
  // LLaVA 1.5.
  auto input = input_of(
      parsed(R"({"feature_extractor_type":"CLIPFeatureExtractor","size":336,"crop_size":336})"),
      parsed(R"({"model_type":"llava","vision_feature_select_strategy":"default",
                 "vision_config":{"model_type":"clip_vision_model","patch_size":14}})"),
      640, 480);
  EXPECT_EQ(input.shape, (std::vector<int64_t>{1, 3, 336, 336}));
  EXPECT_EQ(input.prompt, (Pieces{{"", 576}}));
  // Gemma 3.
  input = input_of(parsed(R"({"image_processor_type":"Gemma3ImageProcessorFast",
                              "size":{"height":896,"width":896},"do_pan_and_scan":null})"),
                   parsed(R"({"model_type":"gemma3","mm_tokens_per_image":256})"), 640, 480);
  EXPECT_EQ(input.prompt,
            (Pieces{{"\n\n<start_of_image>", 0}, {"", 256}, {"<end_of_image>\n\n", 0}}));
  EXPECT_EQ(input.text_rows, 256);
  // Qwen2.5-VL: 644 x 476 pixels are 46 x 34 patches.
  input = input_of(parsed(R"({"image_processor_type":"Qwen2VLImageProcessor","min_pixels":3136,
                              "max_pixels":12845056,"patch_size":14,"merge_size":2})"),
                   parsed(R"({"model_type":"qwen2_5_vl"})"), 640, 480);
  EXPECT_EQ(input.grid_thw, (std::array<int64_t, 3>{1, 34, 46}));
  EXPECT_EQ(input.shape, (std::vector<int64_t>{34 * 46, 1176}));
  EXPECT_EQ(input.prompt, (Pieces{{"", 17 * 23}}));
  // SmolVLM: 3 x 4 squares of 512 pixels and the whole picture, 64 rows each.
  input = input_of(parsed(R"({"image_processor_type":"Idefics3ImageProcessor",
                              "size":{"longest_edge":2048},"max_image_size":{"longest_edge":512}})"),
                   parsed(R"({"model_type":"idefics3","scale_factor":4,
                              "vision_config":{"image_size":512,"patch_size":16}})"),
                   640, 480);
  EXPECT_EQ(input.grid_rows, 3);
  EXPECT_EQ(input.grid_columns, 4);
  EXPECT_EQ(input.text_rows, 13 * 64);
  ASSERT_EQ(input.prompt.size(), 27u);
  EXPECT_EQ(input.prompt[0].text, "<fake_token_around_image><row_1_col_1>");
  EXPECT_EQ(input.prompt[8].text, "\n<fake_token_around_image><row_2_col_1>");
  EXPECT_EQ(input.prompt[24].text, "\n\n<fake_token_around_image><global-img>");
  EXPECT_EQ(input.prompt[26].text, "<fake_token_around_image>");
  // Llama 3.2 Vision.
  input = input_of(parsed(R"({"image_processor_type":"MllamaImageProcessor",
                              "size":{"height":560,"width":560},"max_image_tiles":4})"),
                   parsed(R"({"model_type":"mllama"})"), 1000, 500);
  EXPECT_EQ(input.prompt, (Pieces{{"<|image|>", 0}}));
  EXPECT_EQ(input.text_rows, 0);
  EXPECT_EQ(input.shape, (std::vector<int64_t>{1, 4, 3, 560, 560}));
  EXPECT_EQ(input.grid_columns, 2);
  EXPECT_EQ(input.aspect_ratio_id, 2);
}

TEST(ImageInput, HashDependsOnPixelsSizeAndSettings) {
  ImageSettings settings;
  settings.height = settings.width = 8;
  Picture picture = test_picture(8, 4, 6);
  const ContentHash first = content_hash(picture, settings);
  EXPECT_EQ(content_hash(picture, settings), first);
  Picture other = picture;
  std::swap(other.width, other.height);
  EXPECT_NE(content_hash(other, settings), first);
  other = picture;
  other.rgb.back() ^= 1;
  EXPECT_NE(content_hash(other, settings), first);
  settings.mean[1] = 0.25;
  EXPECT_NE(content_hash(picture, settings), first);
}

TEST(ImageInput, RefusesInOneLine) {
  const auto refused = [](std::string_view preprocessor, std::string_view config, int width,
                          int height) {
    const auto settings = image_settings(parsed(preprocessor), {}, parsed(config));
    if (!settings.ok()) return settings.status().message();
    return image_layout(width, height, *settings).status().message();
  };
  EXPECT_EQ(refused(R"({"image_processor_type":"Qwen2VLImageProcessor"})", "{}", 1, 201),
            "the picture has 1 x 201 pixels; one side may be at most 200 times the other");
  EXPECT_EQ(refused(R"({"image_processor_type":"CLIPImageProcessor"})", R"({"model_type":"llava"})",
                    1, 32000),
            "the picture would be resized to 224 x 7168000 pixels; the limit of a side is 32768");
  EXPECT_THAT(refused(R"({"image_processor_type":"ViTImageProcessor"})", "{}", 1, 1),
              testing::StartsWith("image processor \"ViT\" is not supported; known are CLIP,"));
  EXPECT_EQ(refused("{}", R"({"model_type":"llama"})", 1, 1),
            "\"image_processor_type\" is missing, and models of type \"llama\" have no default");
  EXPECT_EQ(refused(R"({"image_processor_type":"CLIPImageProcessor","resample":9})", "{}", 1, 1),
            "\"resample\" must be a filter of Pillow (0 to 5)");
  EXPECT_EQ(
      refused(R"({"image_processor_type":"CLIPImageProcessor","image_std":[1,0,1]})", "{}", 1, 1),
      "\"image_std\" must be positive numbers");
  EXPECT_EQ(refused(R"({"image_processor_type":"CLIPImageProcessor","crop_size":{"height":-1}})",
                    "{}", 1, 1),
            "crop_size: \"height\" must be an integer from 1 to 16384");
  EXPECT_EQ(refused(R"({"image_processor_type":"Gemma3ImageProcessor","do_pan_and_scan":true})",
                    R"({"model_type":"gemma3"})", 1, 1),
            "\"do_pan_and_scan\" is not supported; set it to false");
}

}  // namespace
}  // namespace freshet::media
