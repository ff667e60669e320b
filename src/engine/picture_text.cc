#include "engine/picture_text.h"

#include <algorithm>
#include <utility>

namespace freshet::engine {
namespace {

// The text with each marker replaced by its picture's texts and image tokens.
Result<std::string> with_image_tokens(std::string_view text, std::span<const Picture> pictures,
                                      std::string_view marker, std::string_view token) {
  std::string out;
  size_t found = 0;
  size_t at = 0;
  while (true) {
    const size_t next = text.find(marker, at);
    out += text.substr(at, next - at);
    if (next == text.npos) break;
    at = next + marker.size();
    if (found++ >= pictures.size()) continue;
    for (const media::PromptPiece& piece : pictures[found - 1]->prompt) {
      out += piece.text;
      for (int64_t row = 0; row < piece.rows; ++row) out += token;
    }
  }
  if (found == pictures.size()) return out;
  if (found > pictures.size()) {
    return invalid_argument(
        "the text has {} picture markers ({}) for {} pictures: texts must not "
        "contain the marker",
        found, marker, pictures.size());
  }
  return invalid_argument("the chat template shows {} of {} pictures", found, pictures.size());
}

}  // namespace

Result<Picture> read_picture(std::span<const uint8_t> file, const PictureReading& reading,
                             int64_t most_rows, const media::PictureLimits& limits) {
  FRESHET_ASSIGN_OR_RETURN(const media::PictureHeader header,
                           media::read_picture_header(file, limits));
  FRESHET_ASSIGN_OR_RETURN(const media::ImageInput layout,
                           media::image_layout(header.width, header.height, reading.settings));
  if (layout.text_rows > most_rows) {
    return invalid_argument("a picture of {} x {} takes {} tokens; there is room for {}",
                            header.width, header.height, layout.text_rows,
                            std::max<int64_t>(0, most_rows));
  }
  FRESHET_ASSIGN_OR_RETURN(const media::Picture picture, media::decode_picture(file, limits));
  FRESHET_ASSIGN_OR_RETURN(media::ImageInput input, media::image_input(picture, reading.settings));
  return std::make_shared<const media::ImageInput>(std::move(input));
}

Result<PictureText> expand_pictures(std::string_view text, std::span<const Picture> pictures,
                                    const PictureReading& reading, const Tokenizer& tokenizer,
                                    const tokenizer::EncodeOptions& options) {
  if (tokenizer.token_bytes(reading.token).empty())
    return invalid_argument("the vocabulary lacks the model's image token (id {})", reading.token);
  FRESHET_ASSIGN_OR_RETURN(const std::string expanded,
                           with_image_tokens(text, pictures, reading.settings.marker,
                                             tokenizer.token_bytes(reading.token)));
  PictureText prompt;
  prompt.ids = tokenizer.encode(expanded, options);
  prompt.pictures.assign(pictures.begin(), pictures.end());
  int64_t rows = 0;
  // A model that reads by cross-attention has one token for a picture.
  const bool one_each = reading.settings.family == media::ImageFamily::kMllama;
  for (const Picture& picture : pictures) rows += one_each ? 1 : picture->text_rows;
  const int64_t found = std::ranges::count(prompt.ids, reading.token);
  if (found != rows) {
    return invalid_argument(
        "the prompt has {} image tokens for {} rows of pictures: texts must "
        "not contain the image token",
        found, rows);
  }
  return prompt;
}

}  // namespace freshet::engine
