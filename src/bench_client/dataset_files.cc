#include "bench_client/dataset_files.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "base/json.h"

namespace freshet::bench_client {
namespace {

// Calls f(line, number) for each non-empty line; stops at the first error.
template <class F>
Status for_lines(std::string_view text, F&& f) {
  size_t number = 0;
  while (!text.empty()) {
    ++number;
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
    FRESHET_RETURN_IF_ERROR(f(line, number));
  }
  return {};
}

std::optional<int64_t> integer(std::string_view s) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
  if (error != std::errc() || end != s.data() + s.size() || s.empty()) return std::nullopt;
  return value;
}

// Days from 1970-01-01 in the Gregorian calendar (Hinnant, "chrono-compatible low-level date
// algorithms").
int64_t days_from_civil(int64_t year, int64_t month, int64_t day) {
  year -= month <= 2;
  const int64_t era = (year >= 0 ? year : year - 399) / 400;
  const int64_t year_of_era = year - era * 400;
  const int64_t day_of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
  const int64_t day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
  return era * 146097 + day_of_era - 719468;
}

// "2023-11-16 18:17:03.9799600", with 'T' and an offset of +00:00 or Z allowed. Returns the
// seconds since 1970 and their fraction separately, because one double would lose digits.
struct Timestamp {
  int64_t seconds = 0;
  double fraction = 0.0;
};
std::optional<Timestamp> parse_timestamp(std::string_view s) {
  if (s.ends_with("+00:00")) s.remove_suffix(6);
  if (s.ends_with('Z')) s.remove_suffix(1);
  constexpr std::string_view kShape = "dddd-dd-dd dd:dd:dd";
  if (s.size() < kShape.size()) return std::nullopt;
  for (size_t i = 0; i < kShape.size(); ++i) {
    const bool digit = s[i] >= '0' && s[i] <= '9';
    if (kShape[i] == 'd' ? !digit : s[i] != kShape[i] && !(i == 10 && s[i] == 'T'))
      return std::nullopt;
  }
  const auto part = [&](size_t at, size_t n) { return *integer(s.substr(at, n)); };
  const int64_t month = part(5, 2), day = part(8, 2), hour = part(11, 2), minute = part(14, 2);
  const int64_t second = part(17, 2);
  if (month < 1 || month > 12 || day < 1 || day > 31 || hour > 23 || minute > 59 || second > 60)
    return std::nullopt;
  Timestamp t;
  t.seconds = days_from_civil(part(0, 4), month, day) * 86400 + hour * 3600 + minute * 60 + second;
  std::string_view rest = s.substr(kShape.size());
  if (rest.empty()) return t;
  if (rest.front() != '.' || rest.size() < 2 || rest.size() > 19) return std::nullopt;
  double scale = 0.1;
  for (const char c : rest.substr(1)) {
    if (c < '0' || c > '9') return std::nullopt;
    t.fraction += scale * (c - '0');
    scale *= 0.1;
  }
  return t;
}

bool sensible(std::optional<int64_t> tokens, int64_t least) {
  return tokens && *tokens >= least && *tokens <= kMaxRowTokens;
}

Status refuse(size_t line, std::string_view why) {
  return invalid_argument("line {}: {}", line, why);
}

Result<json::Value> json_line(std::string_view line, size_t number) {
  auto parsed = json::parse(line);
  if (!parsed.ok()) return refuse(number, parsed.status().message());
  if (!parsed->is_object()) return refuse(number, "not a JSON object");
  return parsed;
}

std::optional<int64_t> member_integer(const json::Value& object, std::string_view key) {
  const json::Value* v = object.find(key);
  return v != nullptr && v->is_number() ? v->as_int64() : std::nullopt;
}

Status add_mooncake(std::string_view line, size_t number, std::vector<TraceRow>& rows) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value row, json_line(line, number));
  const auto input = member_integer(row, "input_length");
  const auto output = member_integer(row, "output_length");
  if (!sensible(input, 1) || !sensible(output, 1))
    return refuse(number, "input_length and output_length must be whole numbers from 1 to 4194304");
  const double ms = row.get_double("timestamp", -1.0);
  if (!(ms >= 0.0 && ms < 1e15)) return refuse(number, "timestamp must be milliseconds from 0");
  TraceRow t{ms / 1e3, static_cast<int>(*input), static_cast<int>(*output), {}};
  const json::Value* hashes = row.find("hash_ids");
  if (hashes == nullptr || !hashes->is_array()) return refuse(number, "hash_ids must be a list");
  for (const json::Value& h : hashes->as_array()) {
    const auto id = h.is_number() ? h.as_int64() : std::nullopt;
    if (!id) return refuse(number, "hash_ids must hold whole numbers");
    t.blocks.push_back(*id);
  }
  rows.push_back(std::move(t));
  return {};
}

}  // namespace

Result<std::vector<TraceRow>> parse_azure(std::string_view text) {
  std::vector<TraceRow> rows;
  std::optional<Timestamp> first;
  bool header = true;
  FRESHET_RETURN_IF_ERROR(for_lines(text, [&](std::string_view line, size_t number) -> Status {
    if (header) {
      header = false;
      if (line == "TIMESTAMP,ContextTokens,GeneratedTokens") return {};
      return refuse(number, "must be the heading TIMESTAMP,ContextTokens,GeneratedTokens");
    }
    const size_t a = std::min(line.find(','), line.size());
    const size_t b = std::min(line.find(',', a + 1), line.size());
    const auto time = parse_timestamp(line.substr(0, a));
    const auto input = a < b ? integer(line.substr(a + 1, b - a - 1)) : std::nullopt;
    const auto output = b < line.size() ? integer(line.substr(b + 1)) : std::nullopt;
    if (!time) return refuse(number, "the first column must be a time like 2023-11-16 18:17:03.97");
    if (!sensible(input, 0) || !sensible(output, 0))
      return refuse(number, "needs two numbers of tokens from 0 to 4194304");
    if (!first) first = time;
    const double at =
        static_cast<double>(time->seconds - first->seconds) + time->fraction - first->fraction;
    rows.push_back({std::max(0.0, at),
                    static_cast<int>(std::max<int64_t>(1, *input)),
                    static_cast<int>(std::max<int64_t>(1, *output)),
                    {}});
    return {};
  }));
  if (rows.empty()) return invalid_argument("holds no rows");
  return rows;
}

Result<std::vector<TraceRow>> parse_mooncake(std::string_view text) {
  std::vector<TraceRow> rows;
  FRESHET_RETURN_IF_ERROR(for_lines(text, [&](std::string_view line, size_t number) {
    return add_mooncake(line, number, rows);
  }));
  if (rows.empty()) return invalid_argument("holds no rows");
  const double first = rows.front().time;
  for (TraceRow& row : rows) row.time = std::max(0.0, row.time - first);
  return rows;
}

Result<std::vector<TextRow>> parse_sharegpt(std::string_view text) {
  FRESHET_ASSIGN_OR_RETURN(const json::Value all, json::parse(text));
  if (!all.is_array()) return invalid_argument("must be a JSON array of conversations");
  std::vector<TextRow> rows;
  for (size_t i = 0; i < all.as_array().size(); ++i) {
    const json::Value& entry = all.as_array()[i];
    const json::Value* turns = entry.find("conversations");
    if (turns == nullptr) turns = entry.find("conversation");
    if (turns == nullptr || !turns->is_array())
      return invalid_argument("entry {}: \"conversations\" must be a list", i);
    if (turns->as_array().size() < 2) continue;
    TextRow row;
    row.prompt = turns->as_array()[0].get_string("value", "");
    row.completion = turns->as_array()[1].get_string("value", "");
    if (!row.prompt.empty()) rows.push_back(std::move(row));
  }
  if (rows.empty()) return invalid_argument("holds no conversation of two turns");
  return rows;
}

Result<std::vector<TextRow>> parse_custom(std::string_view text) {
  std::vector<TextRow> rows;
  FRESHET_RETURN_IF_ERROR(for_lines(text, [&](std::string_view line, size_t number) -> Status {
    FRESHET_ASSIGN_OR_RETURN(const json::Value row, json_line(line, number));
    TextRow r;
    r.prompt = row.get_string("prompt", "");
    if (r.prompt.empty()) return refuse(number, "\"prompt\" must be a text");
    if (row.find("output_tokens") != nullptr) {
      const auto tokens = member_integer(row, "output_tokens");
      if (!sensible(tokens, 1))
        return refuse(number, "output_tokens must be a whole number from 1 to 4194304");
      r.output_tokens = static_cast<int>(*tokens);
    }
    rows.push_back(std::move(r));
    return {};
  }));
  if (rows.empty()) return invalid_argument("holds no rows");
  return rows;
}

Result<std::vector<std::string>> parse_lines(std::string_view text) {
  std::vector<std::string> lines;
  FRESHET_RETURN_IF_ERROR(for_lines(text, [&](std::string_view line, size_t) -> Status {
    lines.emplace_back(line);
    return {};
  }));
  if (lines.empty()) return invalid_argument("holds no lines");
  return lines;
}

}  // namespace freshet::bench_client
