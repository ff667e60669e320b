// The URL of a server: "http://host:port/prefix".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::bench_client {

struct Url {
  bool tls = false;
  std::string host;  // without the brackets of an IPv6 address
  uint16_t port = 80;
  std::string prefix;  // "" or "/some/path", without a slash at the end

  std::string host_header() const;
  std::string text() const;  // without a slash at the end
};

// http and https only; no user, query or fragment.
Result<Url> parse_url(std::string_view text);

}  // namespace freshet::bench_client
