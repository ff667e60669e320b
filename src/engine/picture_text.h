// Prompts with pictures: from a text with one marker for each picture to token ids, of which some
// stand for rows of the pictures.
//
// The markers are what the chat template writes. Each becomes the text and the image tokens that
// the model's processor asks for, and the whole text is tokenised at once, as the model was
// trained. Pure functions, safe to call from many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "freshet/engine.h"
#include "media/data_url.h"
#include "media/decode.h"
#include "media/image_input.h"
#include "tokenizer/tokenizer.h"

namespace freshet {

// How a model takes pictures.
struct PictureReading {
  media::ImageSettings settings;
  int32_t token = 0;  // the id of each row
};

}  // namespace freshet

namespace freshet::engine {

using Picture = std::shared_ptr<const media::ImageInput>;

// Decodes a file and makes its picture ready. `most_rows`: more rows than this cannot fit a prompt;
// a picture that has more is refused before it is decoded. Errors are one line.
Result<Picture> read_picture(std::span<const uint8_t> file, const PictureReading& reading,
                             int64_t most_rows, const media::PictureLimits& limits = {});

// A prompt as Request takes it.
struct PictureText {
  std::vector<int32_t> ids;
  std::vector<Picture> pictures;
};

// Errors: the number of markers in the text is not that of the pictures, or the text has image
// tokens of its own.
Result<PictureText> expand_pictures(std::string_view text, std::span<const Picture> pictures,
                                    const PictureReading& reading, const Tokenizer& tokenizer,
                                    const tokenizer::EncodeOptions& options);

}  // namespace freshet::engine
