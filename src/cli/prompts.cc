#include "cli/prompts.h"

#include <fstream>
#include <iostream>
#include <istream>

namespace freshet::cli {
namespace {

// No prompt is longer.
constexpr size_t kMaxInput = size_t{1} << 30;

Result<std::vector<std::string>> read_lines(std::istream& in, const std::string& name) {
  std::vector<std::string> prompts;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    if (line.front() == '"') {
      const auto value = json::parse(line);
      if (!value.ok()) return value.status().with_context(fmt::format("{}, line {}", name, number));
      if (value->is_string()) line = value->as_string();
    }
    prompts.push_back(line);
  }
  if (prompts.empty()) return invalid_argument("{} has no prompt", name);
  return prompts;
}

}  // namespace

Result<std::vector<std::vector<int32_t>>> read_ids(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value root, json::parse_file(path));
  if (!root.is_array())
    return invalid_argument("{}: expected a JSON list of lists of token ids", path);
  std::vector<std::vector<int32_t>> lists;
  for (const json::Value& list : root.as_array()) {
    auto ids = ids_from_json(list);
    if (!ids.ok()) return ids.status().with_context(fmt::format("{}, list {}", path, lists.size()));
    if (ids->empty()) return invalid_argument("{}, list {} is empty", path, lists.size());
    lists.push_back(std::move(ids).value());
  }
  if (lists.empty()) return invalid_argument("{} has no list of ids", path);
  return lists;
}

Result<std::vector<std::string>> read_prompts(const std::string& path) {
  if (path == "-") return read_lines(std::cin, "standard input");
  std::ifstream file(path);
  if (!file) return not_found("cannot open {}", path);
  return read_lines(file, path);
}

Result<std::string> read_stdin() {
  std::string text;
  char piece[1 << 16];
  while (std::cin.read(piece, sizeof piece) || std::cin.gcount() > 0) {
    text.append(piece, static_cast<size_t>(std::cin.gcount()));
    if (text.size() > kMaxInput) return invalid_argument("standard input is too long");
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

json::Array ids_to_json(const std::vector<int32_t>& ids) {
  json::Array array;
  array.reserve(ids.size());
  for (const int32_t id : ids) array.emplace_back(id);
  return array;
}

Result<std::vector<int32_t>> ids_from_json(const json::Value& value) {
  if (!value.is_array()) return invalid_argument("expected a JSON array of token ids");
  std::vector<int32_t> ids;
  ids.reserve(value.as_array().size());
  for (const json::Value& v : value.as_array()) {
    const auto id = v.is_number() ? v.as_int64() : std::nullopt;
    if (!id || *id < 0 || *id > INT32_MAX) {
      std::string shown = json::write(v);
      if (shown.size() > 40) shown.replace(37, std::string::npos, "...");
      return invalid_argument("expected token ids, found {}", shown);
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

}  // namespace freshet::cli
