// The methods of str. Methods of Markup return Markup and escape their arguments.
#include <algorithm>

#include "base/escape_html.h"
#include "tokenizer/template/builtins.h"
#include "tokenizer/template/format.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

template <bool left, bool right>
Value do_strip(Runtime& rt, const Value& v, const Bound& a) {
  const std::string& s = v.text();
  if (const Value* chars = a.given(0)) {
    const std::string_view set = need_string(*chars, "strip's argument");
    rt.expect(s.size(), set.size() / 64 + 1);
    rt.charge(s.size() * (set.size() / 64 + 1));
    return like(rt, v, std::string(strip(s, left, right, &set)));
  }
  return like(rt, v, std::string(strip(s, left, right, nullptr)));
}

template <std::string (*f)(std::string_view)>
Value do_case(Runtime& rt, const Value& v, const Bound&) {
  rt.charge(v.text().size() * 4);
  return like(rt, v, f(v.text()));
}

// Finds `what` up to `limit` times (negative: no limit), from the left.
std::vector<size_t> occurrences(Runtime& rt, std::string_view s, std::string_view what,
                                int64_t limit) {
  std::vector<size_t> out;
  rt.charge(s.size());
  for (size_t at = 0; limit < 0 || static_cast<int64_t>(out.size()) < limit;) {
    at = find(s, what, at);
    if (at == kNotFound) break;
    rt.step();
    out.push_back(at);
    at += what.size();
  }
  return out;
}

Value do_replace(Runtime& rt, const Value& v, const Bound& a) {
  const std::string& s = v.text();
  const std::string& old = need_string(*a[0], "replace's first argument");
  std::string with = need_string(*a[1], "replace's second argument");
  if (v.is_markup() && !a[1]->is_markup()) with = escape_html(with);
  const int64_t limit = a.integer(2, -1, "replace's count");
  std::vector<size_t> places;
  if (old.empty()) {
    // Python inserts the text before each character and at the end.
    rt.charge(s.size());
    for (size_t i = 0;
         i <= s.size() && (limit < 0 || static_cast<int64_t>(places.size()) < limit);) {
      places.push_back(i);
      i += i < s.size() ? decode_utf8(std::string_view(s).substr(i, 4)).size : 1;
    }
  } else {
    places = occurrences(rt, s, old, limit);
  }
  rt.expect(places.size(), with.size());
  std::string out;
  size_t at = 0;
  for (const size_t place : places) {
    out.append(s, at, place - at);
    out += with;
    at = place + old.size();
  }
  out.append(s, at);
  return like(rt, v, std::move(out));
}

// Runs of non-whitespace; after `limit` splits the rest stays whole.
std::vector<std::string_view> words(std::string_view s, int64_t limit) {
  std::vector<std::string_view> out;
  s = strip(s, true, false, nullptr);
  while (!s.empty()) {
    if (limit >= 0 && static_cast<int64_t>(out.size()) == limit) {
      out.push_back(s);
      break;
    }
    size_t end = 0;
    while (end < s.size()) {
      const Utf8Char c = decode_utf8(s.substr(end, 4));
      if (is_space(c.code)) break;
      end += c.size;
    }
    out.push_back(s.substr(0, end));
    s = strip(s.substr(end), true, false, nullptr);
  }
  return out;
}

Value strings(Runtime& rt, const Value& like_this, const std::vector<std::string_view>& parts) {
  std::vector<Value> out;
  out.reserve(parts.size());
  for (const auto part : parts) out.push_back(like(rt, like_this, std::string(part)));
  return rt.list(std::move(out));
}

Value do_split(Runtime& rt, const Value& v, const Bound& a) {
  const std::string_view s = v.text();
  const int64_t limit = a.integer(1, -1, "split's maxsplit");
  rt.charge(s.size());
  if (a.given(0) == nullptr) return strings(rt, v, words(s, limit));
  const std::string& separator = need_string(*a[0], "split's separator");
  if (separator.empty()) fail("empty separator");
  std::vector<std::string_view> parts;
  size_t at = 0;
  for (const size_t place : occurrences(rt, s, separator, limit)) {
    parts.push_back(s.substr(at, place - at));
    at = place + separator.size();
  }
  parts.push_back(s.substr(at));
  return strings(rt, v, parts);
}

// Like split, but counts the splits from the right.
Value do_rsplit(Runtime& rt, const Value& v, const Bound& a) {
  const std::string_view s = v.text();
  const int64_t limit = a.integer(1, -1, "rsplit's maxsplit");
  if (limit < 0) return do_split(rt, v, a);
  rt.charge(s.size());
  std::vector<std::string_view> parts;
  if (a.given(0) == nullptr) {
    const auto all = words(s, -1);
    const size_t kept = all.size() - std::min(all.size(), static_cast<size_t>(limit));
    if (kept > 0) {
      const auto* end = all[kept - 1].data() + all[kept - 1].size();
      const std::string_view head(s.data(), static_cast<size_t>(end - s.data()));
      parts.push_back(head);
    }
    parts.insert(parts.end(), all.begin() + static_cast<std::ptrdiff_t>(kept), all.end());
    return strings(rt, v, parts);
  }
  const std::string& separator = need_string(*a[0], "rsplit's separator");
  if (separator.empty()) fail("empty separator");
  const std::string reversed(s.rbegin(), s.rend());
  const std::string reversed_separator(separator.rbegin(), separator.rend());
  size_t end = s.size();
  for (const size_t place : occurrences(rt, reversed, reversed_separator, limit)) {
    const size_t start = s.size() - place;
    parts.push_back(s.substr(start, end - start));
    end = start - separator.size();
  }
  parts.push_back(s.substr(0, end));
  std::reverse(parts.begin(), parts.end());
  return strings(rt, v, parts);
}

Value do_splitlines(Runtime& rt, const Value& v, const Bound& a) {
  const std::string_view s = v.text();
  const bool keep = a.flag(0);
  rt.charge(s.size());
  std::vector<std::string_view> lines;
  size_t start = 0;
  for (size_t i = 0; i < s.size();) {
    const Utf8Char c = decode_utf8(s.substr(i, 4));
    size_t end = i + c.size;
    const bool is_break = (c.code >= 10 && c.code <= 13) || (c.code >= 28 && c.code <= 30) ||
                          c.code == 0x85 || c.code == 0x2028 || c.code == 0x2029;
    if (c.code == '\r' && end < s.size() && s[end] == '\n') ++end;
    if (is_break) {
      lines.push_back(s.substr(start, (keep ? end : i) - start));
      start = end;
    }
    i = end;
  }
  if (start < s.size()) lines.push_back(s.substr(start));
  return strings(rt, v, lines);
}

// s[start:end] for the arguments at `i` and `i + 1`, and the character offset of its start.
Value window(Runtime& rt, const Value& v, const Bound& a, size_t i, int64_t& offset) {
  offset = 0;
  if (a.given(i) == nullptr && a.given(i + 1) == nullptr) return v;
  const int64_t size = length(rt, v);
  const int64_t start = a.given(i) != nullptr ? need_int(*a[i], "start") : 0;
  offset = start < 0 ? std::max<int64_t>(start + size, 0) : start;
  return get_slice(rt, v, Value(start), a.given(i + 1) != nullptr ? *a[i + 1] : Value(), Value());
}

template <bool at_end>
Value do_affix(Runtime& rt, const Value& v, const Bound& a) {
  int64_t offset = 0;
  const Value s = window(rt, v, a, 1, offset);
  if (offset > length(rt, v)) return Value(false);
  const auto matches = [&](const Value& affix) {
    const std::string& text =
        need_string(affix, at_end ? "endswith's argument" : "startswith's argument");
    rt.charge(text.size());
    return at_end ? s.text().ends_with(text) : s.text().starts_with(text);
  };
  if (!a[0]->is(Kind::kTuple)) return Value(matches(*a[0]));
  return Value(std::any_of(a[0]->items().begin(), a[0]->items().end(), matches));
}

template <bool from_right, bool must_find>
Value do_find(Runtime& rt, const Value& v, const Bound& a) {
  int64_t offset = 0;
  const Value s = window(rt, v, a, 1, offset);
  const std::string& what = need_string(*a[0], "find's argument");
  rt.charge(s.text().size() * 2);
  const size_t at = from_right ? rfind(s.text(), what) : find(s.text(), what);
  if (at == kNotFound || offset > length(rt, v)) {
    if (must_find) fail("substring not found");
    return Value(int64_t{-1});
  }
  return Value(offset +
               static_cast<int64_t>(count_chars(std::string_view(s.text()).substr(0, at))));
}

Value do_count(Runtime& rt, const Value& v, const Bound& a) {
  int64_t offset = 0;
  const Value s = window(rt, v, a, 1, offset);
  const std::string& what = need_string(*a[0], "count's argument");
  if (what.empty()) return Value(length(rt, s) + 1);
  return Value(static_cast<int64_t>(occurrences(rt, s.text(), what, -1).size()));
}

Value do_join(Runtime& rt, const Value& v, const Bound& a) {
  std::string out;
  bool first = true;
  for (const Value& item : Items(rt, *a[0])) {
    if (!first) out += v.text();
    first = false;
    const std::string& text = need_string(item, "join's item");
    out += v.is_markup() && !item.is_markup() ? escape_html(text) : text;
    rt.step();
    rt.expect(out.size());
  }
  return like(rt, v, std::move(out));
}

enum class Side { kLeft, kRight, kBoth };

template <Side side>
Value do_justify(Runtime& rt, const Value& v, const Bound& a) {
  const int64_t missing = need_int(*a[0], "width") - length(rt, v);
  const std::string fill = a.has(1) ? need_string(*a[1], "fill") : " ";
  if (count_chars(fill) != 1) fail("The fill character must be exactly one character long");
  if (missing <= 0) return v;
  rt.expect(static_cast<size_t>(missing), fill.size());
  // Python's center() puts the odd space on the right, unless both the gap and the width are odd.
  const int64_t width = missing + length(rt, v);
  const int64_t left = side == Side::kLeft    ? 0
                       : side == Side::kRight ? missing
                                              : missing / 2 + (missing & width & 1);
  std::string out;
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += v.text();
  for (int64_t i = left; i < missing; ++i) out += fill;
  return like(rt, v, std::move(out));
}

Value do_zfill(Runtime& rt, const Value& v, const Bound& a) {
  const int64_t missing = need_int(*a[0], "width") - length(rt, v);
  if (missing <= 0) return v;
  rt.expect(static_cast<size_t>(missing));
  std::string out = v.text();
  const bool is_signed = !out.empty() && (out[0] == '-' || out[0] == '+');
  out.insert(is_signed ? 1 : 0, static_cast<size_t>(missing), '0');
  return like(rt, v, std::move(out));
}

Value do_expandtabs(Runtime& rt, const Value& v, const Bound& a) {
  const int64_t size = a.integer(0, 8, "tabsize");
  std::string out;
  int64_t column = 0;
  rt.charge(v.text().size() * 4);
  each_char(v.text(), [&](char32_t c, std::string_view bytes) {
    if (c == '\t') {
      const int64_t spaces = size > 0 ? size - column % size : 0;
      rt.expect(out.size() + static_cast<size_t>(spaces));
      out.append(static_cast<size_t>(spaces), ' ');
      column += spaces;
    } else {
      out += bytes;
      column = c == '\n' || c == '\r' ? 0 : column + 1;
    }
  });
  return like(rt, v, std::move(out));
}

template <bool at_end>
Value do_remove(Runtime& rt, const Value& v, const Bound& a) {
  const std::string& affix = need_string(*a[0], "the argument");
  const std::string& s = v.text();
  if (at_end ? !s.ends_with(affix) : !s.starts_with(affix)) return v;
  return like(rt, v, at_end ? s.substr(0, s.size() - affix.size()) : s.substr(affix.size()));
}

template <bool from_right>
Value do_partition(Runtime& rt, const Value& v, const Bound& a) {
  const std::string& s = v.text();
  const std::string& separator = need_string(*a[0], "partition's separator");
  if (separator.empty()) fail("empty separator");
  rt.charge(s.size() * 2);
  const size_t at = from_right ? rfind(s, separator) : find(s, separator);
  std::vector<Value> parts;
  if (at == kNotFound) {
    parts = {rt.str(""), rt.str(""), v};
    if (!from_right) std::swap(parts[0], parts[2]);
  } else {
    parts = {like(rt, v, s.substr(0, at)), like(rt, v, separator),
             like(rt, v, s.substr(at + separator.size()))};
  }
  return rt.tuple(std::move(parts));
}

// Whether there are characters and all of them match.
template <bool (*passes)(char32_t)>
Value do_all(Runtime& rt, const Value& v, const Bound&) {
  bool all = !v.text().empty();
  rt.charge(v.text().size() * 4);
  each_char(v.text(), [&](char32_t c, std::string_view) { all &= passes(c); });
  return Value(all);
}

bool is_alnum(char32_t c) {
  return is_alpha(c) || is_digit(c);
}

template <bool (*wanted)(char32_t), bool (*unwanted)(char32_t)>
Value do_cased(Runtime& rt, const Value& v, const Bound&) {
  bool any = false;
  bool all = true;
  rt.charge(v.text().size() * 4);
  each_char(v.text(), [&](char32_t c, std::string_view) {
    any |= wanted(c);
    all &= !unwanted(c);
  });
  return Value(any && all);
}

Value do_istitle(Runtime& rt, const Value& v, const Bound&) {
  bool any = false;
  bool good = true;
  bool in_word = false;
  rt.charge(v.text().size() * 4);
  each_char(v.text(), [&](char32_t c, std::string_view) {
    if (is_upper(c)) good &= !in_word;
    if (is_lower(c)) good &= in_word;
    in_word = is_upper(c) || is_lower(c);
    any |= in_word;
  });
  return Value(any && good);
}

Value do_isascii(Runtime&, const Value& v, const Bound&) {
  return Value(v.as<StringRep>().ascii);
}

Value do_isidentifier(Runtime&, const Value& v, const Bound&) {
  bool good = !v.text().empty();
  bool first = true;
  each_char(v.text(), [&](char32_t c, std::string_view) {
    good &= c == '_' || is_alpha(c) || (!first && is_digit(c));
    first = false;
  });
  return Value(good);
}

Value do_format(Runtime& rt, const Value& v, Args& args) {
  return format_braces(rt, v, args);
}

constexpr Builtin kMethods[] = {
    {"strip", "chars", 0, do_strip<true, true>},
    {"lstrip", "chars", 0, do_strip<true, false>},
    {"rstrip", "chars", 0, do_strip<false, true>},
    {"upper", "", 0, do_case<upper>},
    {"lower", "", 0, do_case<lower>},
    {"casefold", "", 0, do_case<casefold>},
    {"capitalize", "", 0, do_case<capitalize>},
    {"title", "", 0, do_case<title>},
    {"swapcase", "", 0, do_case<swapcase>},
    {"replace", "old new count", 2, do_replace},
    {"split", "sep maxsplit", 0, do_split},
    {"rsplit", "sep maxsplit", 0, do_rsplit},
    {"splitlines", "keepends", 0, do_splitlines},
    {"startswith", "prefix start end", 1, do_affix<false>},
    {"endswith", "suffix start end", 1, do_affix<true>},
    {"find", "sub start end", 1, do_find<false, false>},
    {"rfind", "sub start end", 1, do_find<true, false>},
    {"index", "sub start end", 1, do_find<false, true>},
    {"rindex", "sub start end", 1, do_find<true, true>},
    {"count", "sub start end", 1, do_count},
    {"join", "iterable", 1, do_join},
    {"ljust", "width fillchar", 1, do_justify<Side::kLeft>},
    {"rjust", "width fillchar", 1, do_justify<Side::kRight>},
    {"center", "width fillchar", 1, do_justify<Side::kBoth>},
    {"zfill", "width", 1, do_zfill},
    {"expandtabs", "tabsize", 0, do_expandtabs},
    {"removeprefix", "prefix", 1, do_remove<false>},
    {"removesuffix", "suffix", 1, do_remove<true>},
    {"partition", "sep", 1, do_partition<false>},
    {"rpartition", "sep", 1, do_partition<true>},
    {"isspace", "", 0, do_all<is_space>},
    {"isalpha", "", 0, do_all<is_alpha>},
    {"isalnum", "", 0, do_all<is_alnum>},
    {"isdigit", "", 0, do_all<is_digit>},
    {"isdecimal", "", 0, do_all<is_digit>},
    {"isnumeric", "", 0, do_all<is_digit>},
    {"isupper", "", 0, do_cased<is_upper, is_lower>},
    {"islower", "", 0, do_cased<is_lower, is_upper>},
    {"istitle", "", 0, do_istitle},
    {"isascii", "", 0, do_isascii},
    {"isidentifier", "", 0, do_isidentifier},
    {"format", "", 0, nullptr, do_format},
};

}  // namespace

std::span<const Builtin> string_methods() {
  return kMethods;
}

}  // namespace freshet::jinja
