#include "server/infill.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "server/fields.h"

namespace freshet::server {
namespace {

using tokenizer::Tokenizer;
using Ids = std::vector<int32_t>;

struct InfillTokens {
  std::optional<int32_t> prefix, suffix, middle;
  std::optional<int32_t> repository, file;  // for the extras; few vocabularies have them
};

std::optional<int32_t> first_of(const Tokenizer& t, std::initializer_list<const char*> spellings) {
  for (const char* spelling : spellings) {
    if (const auto id = t.token_to_id(spelling)) return id;
  }
  return std::nullopt;
}

InfillTokens tokens_of(const Tokenizer& t) {
  InfillTokens out;
  out.prefix = first_of(t, {"<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>",
                            "<PRE>", "▁<PRE>", "<|code_prefix|>"});
  out.suffix = first_of(t, {"<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>",
                            "<SUF>", "▁<SUF>", "<|code_suffix|>"});
  out.middle = first_of(t, {"<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>",
                            "<MID>", "▁<MID>", "<|code_middle|>"});
  out.repository = first_of(
      t, {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>"});
  out.file = first_of(t, {"<|file_sep|>", "<file_sep>"});
  return out;
}

Ids encode_plain(const Tokenizer& t, std::string_view text) {
  return text.empty() ? Ids{} : t.encode(text, {.add_special = false, .parse_special = false});
}

void append(Ids& out, const Ids& more) {
  out.insert(out.end(), more.begin(), more.end());
}

Ids encode_extras(const Tokenizer& t, const InfillTokens& marks, const InfillRequest& request) {
  Ids out;
  if (request.extras.empty()) return out;
  if (marks.repository) {
    out.push_back(*marks.repository);
    append(out, encode_plain(t, "myproject\n"));
  }
  for (const InfillFile& file : request.extras) {
    if (marks.file) {
      out.push_back(*marks.file);
      append(out, encode_plain(t, file.filename + "\n"));
    } else {
      append(out, encode_plain(t, "\n\n--- snippet ---\n\n"));
    }
    append(out, encode_plain(t, file.text));
  }
  if (marks.file) {
    out.push_back(*marks.file);
    append(out, encode_plain(t, "filename\n"));
  }
  return out;
}

void keep_last(Ids& ids, size_t count) {
  if (ids.size() > count) ids.erase(ids.begin(), ids.end() - static_cast<std::ptrdiff_t>(count));
}

}  // namespace

Parsed<InfillRequest> parse_infill(const json::Value& body) {
  constexpr size_t kMaxText = size_t{64} << 20;
  InfillRequest out;
  Fields fields(body);
  for (const char* name : {"input_prefix", "input_suffix"}) {
    if (fields.get(name) == nullptr) fields.fail(name, fmt::format("'{}' is missing", name));
  }
  fields.read("input_prefix", out.prefix, kMaxText);
  fields.read("input_suffix", out.suffix, kMaxText);
  fields.read("prompt", out.prompt, kMaxText);
  const json::Value* extras = fields.get("input_extra");
  if (extras != nullptr && !extras->is_array())
    fields.fail("input_extra", "'input_extra' must be an array of {\"filename\", \"text\"}");
  if (fields.error()) return *fields.error();
  if (extras == nullptr) return out;
  for (const json::Value& extra : extras->as_array()) {
    const json::Value* text = extra.is_object() ? extra.find("text") : nullptr;
    if (text == nullptr || !text->is_string())
      return bad_request("input_extra", "each of 'input_extra' needs a 'text' string");
    out.extras.push_back({extra.get_string("filename", "tmp"), text->as_string()});
  }
  return out;
}

Parsed<Ids> infill_prompt(const Tokenizer& t, const InfillRequest& request, size_t max_tokens) {
  const InfillTokens marks = tokens_of(t);
  std::string missing;
  const auto need = [&](const std::optional<int32_t>& mark, const char* name) {
    if (!mark) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", name);
  };
  need(marks.prefix, "prefix");
  need(marks.suffix, "suffix");
  need(marks.middle, "middle");
  if (!missing.empty()) {
    return ApiError{
        501,
        fmt::format("this model cannot infill: its vocabulary has no {} token for it", missing),
        ""};
  }
  const size_t fixed = 3 + (t.adds_bos() && t.bos() ? 1 : 0);
  const size_t room = max_tokens > fixed ? max_tokens - fixed : 0;
  Ids before = encode_plain(t, request.prefix);
  append(before, encode_plain(t, request.prompt));
  Ids after = encode_plain(t, request.suffix);
  // At least a quarter for the suffix; more if prefix and prompt need less than the rest.
  const size_t after_room = std::max(room / 4, room - std::min(room, before.size()));
  if (after.size() > after_room) after.resize(after_room);
  keep_last(before, room - after.size());
  Ids extras = encode_extras(t, marks, request);
  keep_last(extras, room - after.size() - before.size());

  Ids out;
  if (fixed == 4) out.push_back(*t.bos());
  append(out, extras);
  out.push_back(*marks.prefix);
  append(out, before);
  out.push_back(*marks.suffix);
  append(out, after);
  out.push_back(*marks.middle);
  return out;
}

}  // namespace freshet::server
