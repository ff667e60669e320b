#include "hub/names.h"

#include <algorithm>

#include "http/url.h"

namespace freshet::hub {
namespace {

constexpr size_t kLongestName = 255;  // of a file, in most file systems
constexpr size_t kLongestPath = 2048;

bool is_alnum(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

// Printable ASCII only, so that an error message can quote it.
std::string shown_name(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 200)) out += c >= ' ' && c < 127 ? c : '?';
  return out;
}

// A word of letters, digits, '.', '_' and '-' that is not "." or "..".
bool is_plain_word(std::string_view text) {
  return !text.empty() && text.size() <= kLongestName && text.front() != '.' &&
         text.front() != '-' && std::all_of(text.begin(), text.end(), [](char c) {
           return is_alnum(c) || c == '.' || c == '_' || c == '-';
         });
}

// Takes the part before `separator` off `rest`; all of it if there is no separator.
std::string_view take_until(std::string_view& rest, char separator) {
  const size_t at = std::min(rest.find(separator), rest.size());
  const std::string_view first = rest.substr(0, at);
  rest.remove_prefix(std::min(at + 1, rest.size()));
  return first;
}

}  // namespace

std::string ModelRef::text() const {
  std::string out = "hf:" + repo;
  if (revision != "main") out += "@" + revision;
  if (!quant.empty()) out += ":" + quant;
  return out;
}

bool is_hub_name(std::string_view text) {
  return text.size() > 3 && (text[0] == 'h' || text[0] == 'H') &&
         (text[1] == 'f' || text[1] == 'F') && text[2] == ':';
}

Result<ModelRef> parse_model_ref(std::string_view text) {
  std::string_view rest = text;
  if (is_hub_name(rest)) rest.remove_prefix(3);
  if (rest.starts_with("//")) rest.remove_prefix(2);
  ModelRef ref;
  if (const size_t colon = rest.find(':'); colon != rest.npos) {
    ref.quant = rest.substr(colon + 1);
    rest = rest.substr(0, colon);
    if (ref.quant.empty())
      return invalid_argument("'{}' has nothing after the colon: write e.g. {}:Q4_K_M",
                              shown_name(text), shown_name(rest));
    FRESHET_RETURN_IF_ERROR(check_file_path(ref.quant));
  }
  if (const size_t at = rest.find('@'); at != rest.npos) {
    ref.revision = rest.substr(at + 1);
    rest = rest.substr(0, at);
  }
  ref.repo = rest;
  FRESHET_RETURN_IF_ERROR(check_repo(ref.repo));
  FRESHET_RETURN_IF_ERROR(check_revision(ref.revision));
  return ref;
}

std::optional<ModelRef> ref_of_url(std::string_view url, std::string_view endpoint) {
  if (!url.starts_with(endpoint)) return std::nullopt;
  std::string_view rest = url.substr(endpoint.size());
  if (!rest.starts_with('/')) return std::nullopt;
  rest.remove_prefix(1);
  rest = rest.substr(0, rest.find_first_of("?#"));
  if (rest.ends_with('/')) rest.remove_suffix(1);
  const std::string_view org = take_until(rest, '/'), name = take_until(rest, '/');
  if (name.empty()) return std::nullopt;
  ModelRef ref{.repo = fmt::format("{}/{}", org, name)};
  if (!check_repo(ref.repo).ok()) return std::nullopt;
  if (rest.empty()) return ref;
  const std::string_view kind = take_until(rest, '/');
  ref.revision = http::unescape(take_until(rest, '/'));
  if (!check_revision(ref.revision).ok()) return std::nullopt;
  if (kind == "tree" && rest.empty()) return ref;
  ref.quant = http::unescape(rest);
  if ((kind != "resolve" && kind != "blob") || !check_file_path(ref.quant).ok())
    return std::nullopt;
  return ref;
}

Status check_file_path(std::string_view path) {
  const auto refuse = [&](const char* why) {
    return invalid_argument("refused the file name '{}': {}", shown_name(path), why);
  };
  if (path.empty()) return refuse("it is empty");
  if (path.size() > kLongestPath) return refuse("it is too long");
  if (path.front() == '/') return refuse("it is an absolute path");
  for (const char c : path) {
    if (c == '\\') return refuse("it has a backslash");
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      return refuse("it has control characters");
  }
  for (std::string_view rest = path; !rest.empty();) {
    const bool last = rest.find('/') == rest.npos;
    const std::string_view part = take_until(rest, '/');
    if (part.empty() || (!last && rest.empty())) return refuse("it has an empty component");
    if (part == "." || part == "..") return refuse("it leaves its folder");
    if (part.size() > kLongestName) return refuse("it is too long");
  }
  return {};
}

Status check_repo(std::string_view repo) {
  std::string_view rest = repo;
  const std::string_view first = take_until(rest, '/');
  const bool has_owner = first.size() < repo.size();
  // "--" separates the parts of a folder's name in the cache.
  if (is_plain_word(first) && (!has_owner || is_plain_word(rest)) && repo.size() <= 200 &&
      repo.find("--") == repo.npos && repo.find("..") == repo.npos)
    return {};
  return invalid_argument(
      "'{}' is not the name of a repository: write ORG/REPO, e.g. "
      "hf:Qwen/Qwen3-0.6B-GGUF",
      shown_name(repo));
}

Status check_revision(std::string_view revision) {
  for (std::string_view rest = revision; !rest.empty();) {
    if (!is_plain_word(take_until(rest, '/')))
      return invalid_argument("'{}' is not a revision: give a branch, a tag or a commit",
                              shown_name(revision));
  }
  if (revision.empty() || revision.ends_with('/'))
    return invalid_argument("the revision after '@' is empty: give a branch, a tag or a commit");
  return {};
}

bool is_commit(std::string_view text) {
  return text.size() == 40 && is_hex(text);
}

bool is_blob_name(std::string_view text) {
  return is_plain_word(text) && text.size() <= 128 && !text.ends_with(".incomplete");
}

std::string repo_folder(std::string_view repo) {
  std::string out = "models--";
  for (const char c : repo) out += c == '/' ? std::string("--") : std::string(1, c);
  return out;
}

std::string repo_of_folder(std::string_view folder) {
  constexpr std::string_view kPrefix = "models--";
  if (!folder.starts_with(kPrefix)) return {};
  std::string repo(folder.substr(kPrefix.size()));
  if (const size_t at = repo.find("--"); at != repo.npos) repo.replace(at, 2, "/");
  return check_repo(repo).ok() ? repo : std::string();
}

std::string etag_text(std::string_view header) {
  if (header.starts_with("W/")) header.remove_prefix(2);
  if (header.size() >= 2 && header.front() == '"' && header.back() == '"')
    header = header.substr(1, header.size() - 2);
  return std::string(header);
}

}  // namespace freshet::hub
