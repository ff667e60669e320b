#include "server/multipart.h"

#include <algorithm>
#include <cctype>
#include <optional>

namespace freshet::server {
namespace {

constexpr size_t kMaxBoundary = 70;  // RFC 2046
constexpr size_t kMaxPartHeader = 8192;

std::string_view stripped(std::string_view s) {
  while (!s.empty() && (s.front() == ' ' || s.front() == '\t')) s.remove_prefix(1);
  while (!s.empty() && (s.back() == ' ' || s.back() == '\t')) s.remove_suffix(1);
  return s;
}

bool same_letters(std::string_view a, std::string_view b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) {
           return std::tolower(static_cast<unsigned char>(x)) ==
                  std::tolower(static_cast<unsigned char>(y));
         });
}

// A value such as `form-data; name="file"; filename="a.wav"`: the part before the first ';', and
// the parameters.
struct HeaderValue {
  std::string_view kind;
  std::vector<std::pair<std::string_view, std::string>> parameters;

  const std::string* find(std::string_view name) const {
    for (const auto& [known, value] : parameters) {
      if (same_letters(known, name)) return &value;
    }
    return nullptr;
  }
};

// Reads a parameter's value, quoted or not, from the front of `rest`.
std::optional<std::string> take_value(std::string_view& rest) {
  std::string value;
  if (rest.empty() || rest.front() != '"') {
    const size_t end = std::min(rest.find(';'), rest.size());
    value = stripped(rest.substr(0, end));
    rest.remove_prefix(end);
    return value;
  }
  for (size_t i = 1; i < rest.size(); ++i) {
    if (rest[i] == '"') {
      rest = stripped(rest.substr(i + 1));
      if (!rest.empty() && rest.front() != ';') return std::nullopt;
      return value;
    }
    // Browsers write backslashes of file names as they are: only \" is an escape.
    if (rest[i] == '\\' && i + 1 < rest.size() && rest[i + 1] == '"') ++i;
    value += rest[i];
  }
  return std::nullopt;
}

std::optional<HeaderValue> parse_value(std::string_view text) {
  HeaderValue out;
  const size_t semicolon = std::min(text.find(';'), text.size());
  out.kind = stripped(text.substr(0, semicolon));
  std::string_view rest = text.substr(semicolon);
  while (!rest.empty()) {
    rest = stripped(rest.substr(1));  // the ';'
    if (rest.empty()) break;
    const size_t equals = rest.find('=');
    if (equals == std::string_view::npos) return std::nullopt;
    const std::string_view name = stripped(rest.substr(0, equals));
    rest = stripped(rest.substr(equals + 1));
    auto value = take_value(rest);
    if (!value || name.empty()) return std::nullopt;
    out.parameters.emplace_back(name, std::move(*value));
  }
  return out;
}

ApiError wrong_form(std::string message) {
  return bad_request("", "the body is no valid multipart/form-data: " + std::move(message));
}

// Reads the header lines of a part into it.
std::optional<ApiError> read_part_header(std::string_view header, FormPart& part) {
  bool named = false;
  while (!header.empty()) {
    const size_t end = std::min(header.find("\r\n"), header.size());
    const std::string_view line = header.substr(0, end);
    header.remove_prefix(std::min(end + 2, header.size()));
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos) return wrong_form("a part has a header without a name");
    const std::string_view field = stripped(line.substr(0, colon));
    if (same_letters(field, "content-transfer-encoding"))
      return wrong_form("Content-Transfer-Encoding is not supported: send parts as they are");
    if (!same_letters(field, "content-disposition")) continue;
    const auto value = parse_value(line.substr(colon + 1));
    const std::string* name =
        value && same_letters(value->kind, "form-data") ? value->find("name") : nullptr;
    if (name == nullptr || name->empty() || named)
      return wrong_form("a part needs one Content-Disposition: form-data with a name");
    part.name = *name;
    named = true;
    if (const std::string* file = value->find("filename")) part.file_name = *file;
  }
  if (!named) return wrong_form("a part has no Content-Disposition");
  return std::nullopt;
}

}  // namespace

std::variant<std::vector<FormPart>, ApiError> parse_form(std::string_view content_type,
                                                         std::string_view body) {
  const auto type = parse_value(content_type);
  const std::string* boundary =
      type && same_letters(type->kind, "multipart/form-data") ? type->find("boundary") : nullptr;
  if (boundary == nullptr || boundary->empty() || boundary->size() > kMaxBoundary) {
    return bad_request("", "send the file as multipart/form-data, with a boundary in Content-Type");
  }
  const std::string first = "--" + *boundary, between = "\r\n" + first;
  std::vector<FormPart> parts;
  size_t at = body.find(first);
  if (at == std::string_view::npos || (at != 0 && !body.substr(0, at).ends_with("\r\n")))
    return wrong_form("its boundary does not occur");
  at += first.size();
  for (;;) {
    std::string_view rest = body.substr(at);
    if (rest.starts_with("--")) return parts;
    const size_t line = rest.find("\r\n");
    if (line == std::string_view::npos || !stripped(rest.substr(0, line)).empty())
      return wrong_form("a boundary's line does not end");
    if (parts.size() == kMaxFormParts) return wrong_form("it has more than 64 parts");
    rest.remove_prefix(line + 2);
    const size_t header = std::min(rest.substr(0, kMaxPartHeader).find("\r\n\r\n"), rest.size());
    if (header == rest.size()) return wrong_form("the header of a part does not end");
    FormPart part;
    if (auto error = read_part_header(rest.substr(0, header), part)) return *error;
    rest.remove_prefix(header + 2);  // an empty part's boundary begins with the header's last CRLF
    const size_t end = rest.find(between);
    if (end == std::string_view::npos) return wrong_form("the last boundary is missing");
    part.content = end < 2 ? std::string_view() : rest.substr(2, end - 2);
    at = static_cast<size_t>(rest.data() - body.data()) + end + between.size();
    parts.push_back(std::move(part));
  }
}

}  // namespace freshet::server
