#include <algorithm>
#include <cctype>

#include <fmt/format.h>

#include "server/http_server.h"

namespace freshet::server {
namespace {

std::string lower(std::string_view s) {
  std::string out(s);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::string_view trim(std::string_view s) {
  while (!s.empty() && (s.front() == ' ' || s.front() == '\t')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == ' ' || s.back() == '\t')) s.remove_suffix(1);
  return s;
}

bool is_token_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// A name or an IPv4 address (RFC 3986's reg-name), without unusual percent-encoded characters.
bool is_host_name(std::string_view s) {
  for (size_t i = 0; i < s.size(); ++i) {
    const bool plain = std::isalnum(static_cast<unsigned char>(s[i])) ||
                       std::string_view("-._~!$&'()*+,;=").find(s[i]) != std::string_view::npos;
    if (plain) continue;
    if (s[i] != '%' || i + 2 >= s.size() || hex_digit(s[i + 1]) < 0 || hex_digit(s[i + 2]) < 0)
      return false;
    i += 2;
  }
  return true;
}

// host[:port], with IPv6 addresses in brackets. No user name ('@').
bool is_host_and_port(std::string_view s) {
  size_t end = s.find(':');
  if (s.starts_with('[')) {
    end = s.find(']');
    if (end == std::string_view::npos) return false;
    const std::string_view address = s.substr(1, end - 1);
    if (address.find(':') == std::string_view::npos || !std::ranges::all_of(address, [](char c) {
          return hex_digit(c) >= 0 || c == ':' || c == '.';
        }))
      return false;
    ++end;
  } else if (!is_host_name(s.substr(0, end))) {
    return false;
  }
  if (end >= s.size()) return true;
  if (s[end] != ':') return false;
  std::string_view port = s.substr(end + 1);
  if (!std::ranges::all_of(port, is_digit)) return false;
  while (port.size() > 1 && port.front() == '0') port.remove_prefix(1);
  return port.size() < 5 || (port.size() == 5 && port <= "65535");
}

// The framing headers of a header block, collected over its lines.
struct FramingFields {
  int hosts = 0;
  int lengths = 0;
  int codings = 0;
};

std::optional<std::string> check_field(std::string_view line, bool http10, FramingFields& seen) {
  if (line.front() == ' ' || line.front() == '\t') return "folded header lines are obsolete";
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || colon == 0) return "header line without a name";
  const std::string_view name = line.substr(0, colon);
  if (!std::all_of(name.begin(), name.end(), is_token_char))
    return "invalid character in a header name";
  const std::string field = lower(name);
  const std::string_view value = trim(line.substr(colon + 1));
  if (field == "host") {
    if (++seen.hosts > 1) return "more than one Host";
    if (!is_host_and_port(value)) return "invalid Host";
  }
  if (field == "content-length") {
    if (++seen.lengths > 1) return "more than one Content-Length";
    if (value.empty() || value.size() > 18 ||
        !std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      return "invalid Content-Length";
    }
  }
  if (field == "transfer-encoding") {
    if (http10) return "Transfer-Encoding in HTTP/1.0";
    if (++seen.codings > 1 || lower(value) != "chunked")
      return "only the chunked transfer coding is accepted";
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> header_block_error(std::string_view raw) {
  for (size_t i = 0; i < raw.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(raw[i]);
    if (c == '\r' && (i + 1 == raw.size() || raw[i + 1] != '\n')) return "bare CR in the header";
    if (c == '\n' && (i == 0 || raw[i - 1] != '\r')) return "bare LF in the header";
    if ((c < 0x20 && c != '\r' && c != '\n' && c != '\t') || c == 0x7f)
      return "control character in the header";
  }
  size_t end = raw.find("\r\n");
  if (end == std::string_view::npos) return "incomplete header";
  const std::string_view request_line = raw.substr(0, end);
  const bool http10 = request_line.ends_with(" HTTP/1.0");
  if (!http10 && !request_line.ends_with(" HTTP/1.1"))
    return "only HTTP/1.0 and HTTP/1.1 are spoken here";
  FramingFields seen;
  for (size_t at = end + 2;; at = end + 2) {
    end = raw.find("\r\n", at);
    if (end == std::string_view::npos) return "incomplete header";
    if (end == at) break;
    if (auto error = check_field(raw.substr(at, end - at), http10, seen)) return error;
  }
  if (seen.codings > 0 && seen.lengths > 0) return "both Content-Length and Transfer-Encoding";
  if (!http10 && seen.hosts != 1) return "Host is missing";
  return std::nullopt;
}

std::optional<std::string> percent_decode(std::string_view s) {
  std::string out;
  out.reserve(s.size());
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] != '%') {
      out += s[i];
      continue;
    }
    const int high = i + 2 < s.size() ? hex_digit(s[i + 1]) : -1;
    const int low = i + 2 < s.size() ? hex_digit(s[i + 2]) : -1;
    if (high < 0 || low < 0 || high * 16 + low == 0) return std::nullopt;
    out += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return out;
}

std::optional<RequestTarget> parse_target(std::string_view target, std::string_view scheme) {
  if (target.find('#') != std::string_view::npos) return std::nullopt;
  RequestTarget out;
  if (!target.starts_with('/')) {
    constexpr std::string_view kMark = "://";
    const size_t mark = target.find(kMark);
    if (mark == std::string_view::npos || lower(target.substr(0, mark)) != scheme)
      return std::nullopt;
    target.remove_prefix(mark + kMark.size());
    const std::string_view host = target.substr(0, target.find_first_of("/?"));
    if (host.empty() || host.starts_with(':') || !is_host_and_port(host)) return std::nullopt;
    out.host = host;
    target.remove_prefix(host.size());
  }
  const size_t question = target.find('?');
  auto path = percent_decode(target.substr(0, question));
  if (!path) return std::nullopt;
  out.path = path->empty() ? "/" : std::move(*path);
  if (question != std::string_view::npos) out.query = target.substr(question + 1);
  return out;
}

std::string host_and_port(const std::string& host, int port) {
  const bool v6 = host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

std::string_view HttpRequest::header(std::string_view lower_case_name) const {
  for (const auto& [name, value] : headers) {
    if (name == lower_case_name) return value;
  }
  return {};
}

std::string_view reason_phrase(int status) {
  switch (status) {
    case 100:
      return "Continue";
    case 200:
      return "OK";
    case 204:
      return "No Content";
    case 304:
      return "Not Modified";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 422:
      return "Unprocessable Content";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    default:
      return "Unknown";
  }
}

}  // namespace freshet::server
