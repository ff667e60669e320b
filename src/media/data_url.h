// data: URLs (RFC 2397) with base64, as `image_url` and `input_audio` of the OpenAI API carry them,
// and the rule by which other URLs are refused.
//
// Strict: only base64, only the standard alphabet (RFC 4648) with its padding, no white space, no
// percent escapes, no left-over bits. The size is checked before memory is taken. Pure; safe to
// call from many threads. Nothing here opens a connection or a file.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::media {

struct DataUrl {
  std::string media_type;  // in lower case, without parameters: "image/png"; may be empty
  std::vector<uint8_t> bytes;
};

// `limit` is for the decoded bytes.
Result<std::vector<uint8_t>> decode_base64(std::string_view text, size_t limit);
Result<DataUrl> decode_data_url(std::string_view url, size_t limit);

// Where pictures and sound may come from. data: URLs always may. Anything else is fetched by
// somebody else, over https alone and from a host that is named here.
struct MediaPolicy {
  std::vector<std::string> allowed_hosts;  // host names in lower case, each exact; without ports
  size_t encoded_bytes = size_t{20} << 20;
  int pictures_per_request = 16;
};

enum class UrlKind { kData, kFetch };

// How `url` may be read. Errors: another scheme than data: and https:, a user or a port in the URL,
// or a host that is not allowed. The reader of a kFetch URL must apply this to every redirection,
// too.
Result<UrlKind> check_media_url(std::string_view url, const MediaPolicy& policy);

}  // namespace freshet::media
