// Filters on text.
#include <algorithm>

#include "tokenizer/template/builtins.h"
#include "tokenizer/template/format.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

// This filter is the method of the same name, applied to the value as a string.
template <size_t N>
struct Name {
  constexpr Name(const char (&s)[N]) { std::copy_n(s, N, text); }
  char text[N];
};
template <Name name>
Value by_method(Runtime& rt, const Value& v, Args& args) {
  const Value s = soft_str(rt, v);
  return (*find_method(s, name.text))(rt, s, args);
}

Value do_trim(Runtime& rt, const Value& v, const Bound& a) {
  const Value s = soft_str(rt, v);
  Args args;
  if (a.has(0)) args.positional.push_back(*a[0]);
  return (*find_method(s, "strip"))(rt, s, args);
}

Value do_replace(Runtime& rt, const Value& v, const Bound& a) {
  const Value s = rt.str(str_of(rt, v));
  Args args;
  args.positional = {rt.str(str_of(rt, *a[0])), rt.str(str_of(rt, *a[1]))};
  if (const Value* count = a.given(2)) args.positional.push_back(*count);
  return (*find_method(s, "replace"))(rt, s, args);
}

// Words as in Jinja's title filter: they start after whitespace, hyphens and opening brackets.
Value do_title(Runtime& rt, const Value& v, const Bound&) {
  const Value s = soft_str(rt, v);
  rt.charge(s.text().size() * 4);
  std::string out, rest;  // rest: the word after its first letter
  bool start = true;
  each_char(s.text(), [&](char32_t c, std::string_view bytes) {
    const bool divides = c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || is_space(c);
    if (divides) {
      out += lower(rest);
      rest.clear();
    }
    if (divides || start) {
      out += upper(bytes);
    } else {
      rest += bytes;
    }
    start = divides;
  });
  out += lower(rest);
  return like(rt, s, std::move(out));
}

Value do_indent(Runtime& rt, const Value& v, const Bound& a) {
  const std::string& s = need_string(v, "indent's text");
  std::string indention = "    ";
  if (a.has(0) && a[0]->is_string()) {
    indention = a[0]->text();
  } else if (a.has(0)) {
    const int64_t width = std::max<int64_t>(need_int(*a[0], "indent's width"), 0);
    rt.expect(static_cast<size_t>(width));
    indention.assign(static_cast<size_t>(width), ' ');
  }
  rt.charge(s.size());
  rt.expect(s.size(), sizeof(std::string));
  const std::vector<std::string> lines = lines_of(s);
  rt.expect(lines.size(), indention.size());
  const bool blank = a.flag(2);
  std::string out = a.flag(1) ? indention + lines[0] : lines[0];
  for (size_t i = 1; i < lines.size(); ++i) {
    out += '\n';
    if (blank || !lines[i].empty()) out += indention;
    out += lines[i];
  }
  return like(rt, v, std::move(out));
}

Value do_truncate(Runtime& rt, const Value& v, const Bound& a) {
  const std::string end = a.has(2) ? need_string(*a[2], "truncate's end") : "...";
  const int64_t size = a.integer(0, 255, "truncate's length");
  const int64_t leeway = a.given(3) != nullptr ? need_int(*a[3], "truncate's leeway") : 5;
  const int64_t room = size - static_cast<int64_t>(count_chars(end));
  if (room < 0) fail("expected length >= {}, got {}", count_chars(end), size);
  if (leeway < 0) fail("expected leeway >= 0, got {}", leeway);
  if (length(rt, v) - leeway <= size) return v;
  const std::string& s = need_string(v, "truncate's text");
  std::string head = s.substr(0, offset_of(s, static_cast<size_t>(room)));
  if (!a.flag(1)) head = head.substr(0, head.rfind(' '));
  return like(rt, v, head + end);
}

Value do_wordcount(Runtime& rt, const Value& v, const Bound&) {
  const std::string s = str_of(rt, v);
  rt.charge(s.size() * 4);
  int64_t words = 0;
  bool in_word = false;
  each_char(s, [&](char32_t c, std::string_view) {
    const bool word = is_alpha(c) || is_digit(c) || c == '_';
    words += word && !in_word ? 1 : 0;
    in_word = word;
  });
  return Value(words);
}

Value do_center(Runtime& rt, const Value& v, const Bound& a) {
  const Value s = soft_str(rt, v);
  Args args;
  args.positional = {Value(a.integer(0, 80, "center's width"))};
  return (*find_method(s, "center"))(rt, s, args);
}

Value do_format(Runtime& rt, const Value& v, Args& args) {
  if (!args.positional.empty() && !args.named.empty()) {
    fail("format can't handle positional and keyword arguments at the same time");
  }
  const Value s = soft_str(rt, v);
  if (args.named.empty()) return format_percent(rt, s, rt.tuple(args.positional));
  std::vector<std::pair<Value, Value>> items;
  for (const auto& [key, value] : args.named) items.emplace_back(rt.str(key), value);
  return format_percent(rt, s, rt.dict(std::move(items)));
}

Value do_urlencode(Runtime& rt, const Value& v, const Bound&) {
  const auto quote = [&](const Value& part, bool in_query) {
    std::string out;
    for (const char c : str_of(rt, part)) {
      const bool safe = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' ||
                        c == '-' || c == '~' || (c == '/' && !in_query);
      if (safe) {
        out += c;
      } else if (c == ' ' && in_query) {
        out += '+';
      } else {
        out += fmt::format("%{:02X}", static_cast<uint8_t>(c));
      }
    }
    rt.charge(out.size());
    return out;
  };
  if (v.is_string() || !is_iterable(v)) return rt.str(quote(v, false));
  Args none;
  const Items pairs(rt, v.is_dict() ? (*find_method(v, "items"))(rt, v, none) : v);
  std::string out;
  for (const Value& item : pairs) {
    const Items pair(rt, item);
    if (pair.size() != 2) fail("urlencode needs pairs");
    rt.expect(out.size());
    if (!out.empty()) out += '&';
    out.append(quote(pair[0], true)).append(1, '=').append(quote(pair[1], true));
  }
  return rt.str(std::move(out));
}

constexpr Builtin kFilters[] = {
    {"trim", "chars", 0, do_trim},
    {"upper", "", 0, nullptr, by_method<"upper">},
    {"lower", "", 0, nullptr, by_method<"lower">},
    {"capitalize", "", 0, nullptr, by_method<"capitalize">},
    {"title", "", 0, do_title},
    {"replace", "old new count", 2, do_replace},
    {"indent", "width first blank", 0, do_indent},
    {"truncate", "length killwords end leeway", 0, do_truncate},
    {"wordcount", "", 0, do_wordcount},
    {"center", "width", 0, do_center},
    {"format", "", 0, nullptr, do_format},
    {"urlencode", "", 0, do_urlencode},
};

}  // namespace

std::span<const Builtin> text_filters() {
  return kFilters;
}

}  // namespace freshet::jinja
