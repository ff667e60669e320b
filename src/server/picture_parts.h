// Pictures among the parts of a message: OpenAI's `image_url` and Responses' `input_image`.
//
// Parsing is pure: parts become {"type": "image_url", "image_url": {"url": ...}}, whichever route
// they came by, and take_pictures() then leaves {"type": "image"} in their places, which chat
// templates know. Reading gets the bytes and makes them ready for the model. Safe to call from many
// threads.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/picture_text.h"
#include "server/openai_request.h"

namespace freshet::server {

// Checks the parts of a content and appends them to `out`: text as {"type": "text", "text": ...},
// pictures as above. Returns what is wrong.
std::optional<std::string> read_parts(const json::Array& parts, const RequestLimits& limits,
                                      json::Array& out);

// Takes the URLs of all pictures out of the messages, in order.
std::vector<std::string> take_pictures(json::Array& messages);

// Where pictures come from.
struct MediaOptions {
  media::MediaPolicy policy;
  // Reads what is not a data: URL; called only for URLs that the policy allows. Blocks.
  std::function<Result<std::vector<uint8_t>>(const std::string& url)> fetch;
};

// Errors name the picture by its number, from 1, and `field`. `most_tokens`: that a prompt may
// have.
Parsed<std::vector<engine::Picture>> read_pictures(const std::vector<std::string>& urls,
                                                   const PictureReading& reading,
                                                   const MediaOptions& options, int64_t most_tokens,
                                                   const char* field);

}  // namespace freshet::server
