#include "server/picture_parts.h"

#include <utility>

#include <fmt/format.h>

namespace freshet::server {
namespace {

// The URL of a part of type image_url or input_image, in either route's spelling.
std::optional<std::string> read_picture_part(const json::Value& part, std::string& url) {
  const json::Value* given = part.find("image_url");
  const json::Value* detail = part.find("detail");
  if (given != nullptr && given->is_object()) {
    if (const json::Value* inner = given->find("detail")) detail = inner;
    given = given->find("url");
  }
  if (given == nullptr || !given->is_string() || given->as_string().empty()) {
    return part.find("file_id") != nullptr
               ? "pictures by 'file_id' are not supported: no files are stored; send 'image_url'"
               : "a picture needs 'image_url' with a data: URL";
  }
  if (detail != nullptr && !detail->is_null()) {
    const std::string level = detail->is_string() ? detail->as_string() : "";
    if (level != "auto" && level != "low" && level != "high" && level != "original")
      return "'detail' must be auto, low, high or original";
  }
  url = given->as_string();
  return std::nullopt;
}

bool is_text_type(const std::string& type) {
  return type == "text" || type == "input_text" || type == "output_text" || type == "refusal";
}

// The bytes of a picture's file.
Result<std::vector<uint8_t>> bytes_of(const std::string& url, const MediaOptions& options) {
  FRESHET_ASSIGN_OR_RETURN(const media::UrlKind kind, media::check_media_url(url, options.policy));
  if (kind != media::UrlKind::kData) return options.fetch(url);
  FRESHET_ASSIGN_OR_RETURN(media::DataUrl data,
                           media::decode_data_url(url, options.policy.encoded_bytes));
  return std::move(data.bytes);
}

}  // namespace

std::optional<std::string> read_parts(const json::Array& parts, const RequestLimits& limits,
                                      json::Array& out) {
  for (const json::Value& part : parts) {
    const std::string type = part.is_object() ? part.get_string("type", "") : "";
    const json::Value* text =
        part.is_object() ? part.find(type == "refusal" ? "refusal" : "text") : nullptr;
    json::Object plain;
    if (is_text_type(type) && text != nullptr && text->is_string()) {
      plain["type"] = "text";
      plain["text"] = *text;
    } else if ((type == "image_url" || type == "input_image") && limits.max_pictures) {
      std::string url;
      if (auto error = read_picture_part(part, url)) return error;
      json::Object inner;
      inner["url"] = std::move(url);
      plain["type"] = "image_url";
      plain["image_url"] = std::move(inner);
    } else {
      return fmt::format("content of type '{}' is not supported: this model reads text {}", type,
                         limits.max_pictures ? "and pictures" : "only");
    }
    out.emplace_back(std::move(plain));
  }
  return std::nullopt;
}

std::vector<std::string> take_pictures(json::Array& messages) {
  std::vector<std::string> urls;
  for (json::Value& message : messages) {
    json::Value* content = message.as_object().find("content");
    if (content == nullptr || !content->is_array()) continue;
    for (json::Value& part : content->as_array()) {
      if (part.get_string("type", "") != "image_url") continue;
      urls.push_back(part.find("image_url")->get_string("url", ""));
      json::Object place;
      place["type"] = "image";
      part = std::move(place);
    }
  }
  return urls;
}

Parsed<std::vector<engine::Picture>> read_pictures(const std::vector<std::string>& urls,
                                                   const PictureReading& reading,
                                                   const MediaOptions& options, int64_t most_tokens,
                                                   const char* field) {
  std::vector<engine::Picture> pictures;
  for (size_t i = 0; i < urls.size(); ++i) {
    const auto wrong = [&](const Status& status) {
      return bad_request(field, fmt::format("picture {}: {}", i + 1, status.message()));
    };
    const auto bytes = bytes_of(urls[i], options);
    if (!bytes.ok()) return wrong(bytes.status());
    auto picture = engine::read_picture(*bytes, reading, most_tokens);
    if (!picture.ok()) return wrong(picture.status());
    most_tokens -= (*picture)->text_rows;
    pictures.push_back(*std::move(picture));
  }
  return pictures;
}

}  // namespace freshet::server
