// URLs of servers ("http://host:port/prefix") and of resources on them (with path and query).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::http {

struct Url {
  bool tls = false;
  std::string host;  // without the brackets of an IPv6 address
  uint16_t port = 80;
  std::string prefix;  // "" or "/some/path", without a slash at the end

  std::string host_header() const;
  std::string origin() const;  // "https://host:port", the port only if it is not the default
  std::string text() const;    // without a slash at the end
};

// http and https only; no user, query or fragment.
Result<Url> parse_url(std::string_view text);

// A resource: `server` has an empty prefix; `target` begins with '/' and may have a query.
struct ResourceUrl {
  Url server;
  std::string target;

  std::string text() const { return server.origin() + target; }
};

// http and https only. A fragment is dropped; a user name is an error. Errors quote no query,
// because signed URLs carry secrets there.
Result<ResourceUrl> parse_resource_url(std::string_view text);

// What a Location header means for a resource at `from`: an absolute URL or an absolute path.
Result<ResourceUrl> resolve_location(const ResourceUrl& from, std::string_view location);

// Letters, digits and "-._~/" stay; other bytes become %XX.
std::string escape_path(std::string_view path);
// %XX becomes a byte; anything else stays.
std::string unescape(std::string_view text);

}  // namespace freshet::http
