// Any bytes as a multipart body: no crash, one line of error, and parts inside the body.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "server/multipart.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace freshet::server;
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  const auto parsed = parse_form("multipart/form-data; boundary=b", body);
  if (const auto* error = std::get_if<ApiError>(&parsed)) {
    FRESHET_CHECK(!error->message.empty() && error->message.find('\n') == std::string::npos);
    return 0;
  }
  for (const FormPart& part : std::get<std::vector<FormPart>>(parsed)) {
    FRESHET_CHECK(!part.name.empty());
    FRESHET_CHECK(part.content.empty() ||
                  (part.content.data() >= body.data() &&
                   part.content.data() + part.content.size() <= body.data() + body.size()));
  }
  // The content type comes from the client, too.
  (void)parse_form(body.substr(0, 256), body);
  return 0;
}
