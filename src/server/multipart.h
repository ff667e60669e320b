// The parts of a multipart/form-data body (RFC 7578): names, file names and contents.
//
// Parts are views of the body, which must outlive them. Strict: a body that ends without its last
// boundary, a part without a name, or a coding (Content-Transfer-Encoding) is an error. Pure.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "server/api_error.h"

namespace freshet::server {

struct FormPart {
  std::string name;
  std::string file_name;  // "" if it is no file
  std::string_view content;
};

constexpr size_t kMaxFormParts = 64;

// `content_type`: the header of the request.
std::variant<std::vector<FormPart>, ApiError> parse_form(std::string_view content_type,
                                                         std::string_view body);

}  // namespace freshet::server
