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

// Where pictures and sound may come from. data: URLs always may. Anything else is read by somebody
// else: file: URLs from one folder, others from hosts that are named here.
struct MediaPolicy {
  // "HOST" or "HOST:PORT" allows https URLs with that very host and port; "http://HOST[:PORT]"
  // allows http ones.
  std::vector<std::string> allowed_hosts;
  std::string local_folder;  // of file: URLs; empty: none
  size_t encoded_bytes = size_t{20} << 20;
  int pictures_per_request = 16;
};

enum class UrlKind { kData, kFile, kFetch };

// An error unless `host` is an entry as MediaPolicy::allowed_hosts takes them.
Status check_media_host(std::string_view host);

// How `url` may be read. Errors: another scheme than data:, file:, https: and http:, a user in the
// URL, or a host that is not allowed. The reader of a kFetch URL must apply this to every
// redirection, too; the reader of a kFile URL must check that the file lies in the folder.
Result<UrlKind> check_media_url(std::string_view url, const MediaPolicy& policy);

}  // namespace freshet::media
