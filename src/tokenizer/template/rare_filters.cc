// Filters that published templates rarely use: wordwrap, striptags, xmlattr, pprint, random.
#include <algorithm>
#include <random>

#include "base/escape_html.h"
#include "tokenizer/template/builtins.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

// --------------------------------------------------------------------------------------- wordwrap

// Python's textwrap on the characters of one line.
class TextWrap {
 public:
  TextWrap(std::string_view line, size_t width, bool break_long, bool break_hyphens)
      : width_(width), break_long_(break_long), break_hyphens_(break_hyphens) {
    each_char(line, [&](char32_t c, std::string_view bytes) {
      codes_.push_back(c);
      bytes_.push_back(bytes);
    });
  }

  std::vector<std::string> lines() {
    std::vector<Chunk> chunks = split();
    std::reverse(chunks.begin(), chunks.end());
    std::vector<std::string> out;
    while (!chunks.empty()) {
      std::vector<Chunk> line;
      size_t length = 0;
      if (blank(chunks.back()) && !out.empty()) chunks.pop_back();
      while (!chunks.empty() && length + chunks.back().size() <= width_) {
        length += chunks.back().size();
        line.push_back(chunks.back());
        chunks.pop_back();
      }
      if (!chunks.empty() && chunks.back().size() > width_) break_word(chunks, line, length);
      if (!line.empty() && blank(line.back())) line.pop_back();
      if (line.empty()) continue;
      std::string text;
      for (const Chunk& c : line) {
        for (size_t i = c.begin; i < c.end; ++i) text += bytes_[i];
      }
      out.push_back(std::move(text));
    }
    return out;
  }

 private:
  struct Chunk {
    size_t begin, end;
    size_t size() const { return end - begin; }
  };

  bool space(size_t i) const {
    return i < codes_.size() && codes_[i] < 0x80 &&
           std::string_view("\t\n\v\f\r ").find(static_cast<char>(codes_[i])) != kNotFound;
  }
  bool word(size_t i) const {  // \w
    return i < codes_.size() && (is_alpha(codes_[i]) || is_digit(codes_[i]) || codes_[i] == U'_');
  }
  bool letter(size_t i) const { return word(i) && !is_digit(codes_[i]) && codes_[i] != U'_'; }
  bool word_or_mark(size_t i) const {
    return word(i) ||
           (i < codes_.size() && codes_[i] < 0x80 &&
            std::string_view("!\"'&.,?").find(static_cast<char>(codes_[i])) != kNotFound);
  }
  bool hyphen(size_t i) const { return i < codes_.size() && codes_[i] == U'-'; }

  // For two or more dashes between words: the offset of their end, else 0.
  size_t dash_end(size_t i) const {
    size_t end = i;
    while (hyphen(end)) ++end;
    return i > 0 && word_or_mark(i - 1) && end >= i + 2 && word(end) ? end : 0;
  }
  // Whether a word may be split after the hyphen at i.
  bool cuts_behind(size_t i) const {
    const bool before = (i >= 2 && letter(i - 1) && letter(i - 2)) ||
                        (i >= 3 && word_or_mark(i - 1) && hyphen(i - 2) && letter(i - 3));
    return before && letter(i + 1) && (letter(i + 2) || (hyphen(i + 2) && letter(i + 3)));
  }

  std::vector<Chunk> split() const {
    std::vector<Chunk> chunks;
    for (size_t i = 0; i < codes_.size(); i = chunks.back().end) {
      size_t end = i;
      while (space(end)) ++end;
      if (end == i && break_hyphens_) end = std::max(end, dash_end(i));
      while (end < codes_.size() && (end == i || !space(end)) && !space(i)) {
        if (end > i && break_hyphens_ && dash_end(i) == end) break;
        ++end;
        if (!break_hyphens_) continue;
        if (hyphen(end) && cuts_behind(end)) {
          ++end;
          break;
        }
        if (dash_end(end) != 0) break;
      }
      chunks.push_back({i, end});
    }
    return chunks;
  }

  bool blank(const Chunk& c) const {
    for (size_t i = c.begin; i < c.end; ++i) {
      if (!is_space(codes_[i])) return false;
    }
    return true;
  }

  void break_word(std::vector<Chunk>& chunks, std::vector<Chunk>& line, size_t length) const {
    Chunk& rest = chunks.back();
    if (!break_long_) {
      if (!line.empty()) return;
      line.push_back(rest);
      chunks.pop_back();
      return;
    }
    const size_t room = width_ - length;
    size_t end = room;
    for (size_t i = room; break_hyphens_ && i-- > 1;) {
      if (!hyphen(rest.begin + i)) continue;
      bool only_hyphens = true;
      for (size_t k = 0; k < i; ++k) only_hyphens &= hyphen(rest.begin + k);
      if (!only_hyphens) end = i + 1;
      break;
    }
    line.push_back({rest.begin, rest.begin + end});
    rest.begin += end;
  }

  size_t width_;
  bool break_long_, break_hyphens_;
  std::vector<char32_t> codes_;
  std::vector<std::string_view> bytes_;
};

Value do_wordwrap(Runtime& rt, const Value& v, const Bound& a) {
  const std::string& s = need_string(v, "wordwrap's text");
  const int64_t width = a.integer(0, 79, "wordwrap's width");
  if (width <= 0) fail("invalid width {} (must be > 0)", width);
  const bool break_long = !a.has(1) || truth(*a[1]);
  const std::string wrap = a.given(2) != nullptr ? need_string(*a[2], "wrapstring") : "\n";
  const bool break_hyphens = !a.has(3) || truth(*a[3]);
  rt.charge(s.size() * 64);
  rt.expect(s.size(), 32 + wrap.size());
  std::vector<std::string> lines = lines_of(s);
  if (lines.back().empty()) lines.pop_back();
  std::string out;
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += wrap;
    bool first = true;
    TextWrap one(lines[i], static_cast<size_t>(width), break_long, break_hyphens);
    for (const std::string& part : one.lines()) {
      if (!first) out += wrap;
      first = false;
      out += part;
    }
  }
  return like(rt, v, std::move(out));
}

// -------------------------------------------------------------------------------------- striptags

// The text without tags and comments, up to the first one that is not closed.
std::string without_tags(std::string_view s) {
  std::string out;
  while (true) {
    const size_t begin = s.find('<');
    const bool comment = begin != kNotFound && s.substr(begin).starts_with("<!--");
    const std::string_view close = comment ? "-->" : ">";
    const size_t end = begin == kNotFound ? begin : s.find(close, begin + (comment ? 4 : 1));
    if (end == kNotFound) return out += s;
    out += s.substr(0, begin);
    s.remove_prefix(end + close.size());
  }
}

struct Entity {
  std::string_view name, text;
};
constexpr Entity kEntities[] = {
    {"amp", "&"},         {"lt", "<"},          {"gt", ">"},          {"quot", "\""},
    {"apos", "'"},        {"nbsp", "\u00A0"},   {"copy", "\u00A9"},   {"reg", "\u00AE"},
    {"trade", "\u2122"},  {"deg", "\u00B0"},    {"plusmn", "\u00B1"}, {"times", "\u00D7"},
    {"divide", "\u00F7"}, {"middot", "\u00B7"}, {"bull", "\u2022"},   {"hellip", "\u2026"},
    {"ndash", "\u2013"},  {"mdash", "\u2014"},  {"lsquo", "\u2018"},  {"rsquo", "\u2019"},
    {"ldquo", "\u201C"},  {"rdquo", "\u201D"},  {"laquo", "\u00AB"},  {"raquo", "\u00BB"},
    {"euro", "\u20AC"},   {"pound", "\u00A3"},  {"yen", "\u00A5"},    {"cent", "\u00A2"},
    {"sect", "\u00A7"},   {"para", "\u00B6"},   {"auml", "\u00E4"},   {"ouml", "\u00F6"},
    {"uuml", "\u00FC"},   {"Auml", "\u00C4"},   {"Ouml", "\u00D6"},   {"Uuml", "\u00DC"},
    {"szlig", "\u00DF"},  {"eacute", "\u00E9"}, {"egrave", "\u00E8"}, {"agrave", "\u00E0"},
    {"ccedil", "\u00E7"}, {"ntilde", "\u00F1"},
};

// Replaces &name; and &#number;, for the names that such texts use.
std::string unescape_html(std::string_view s) {
  std::string out;
  for (size_t i = 0; i < s.size();) {
    const size_t end = s[i] == '&' ? s.find(';', i) : kNotFound;
    if (end == kNotFound || end - i > 12) {
      out += s[i++];
      continue;
    }
    const std::string_view name = s.substr(i + 1, end - i - 1);
    bool known = false;
    for (const Entity& e : kEntities) {
      if (e.name != name) continue;
      out += e.text;
      known = true;
    }
    if (name.size() > 1 && name[0] == '#') {
      const bool hex = name[1] == 'x' || name[1] == 'X';
      uint32_t code = 0;
      known = name.size() > (hex ? 2 : 1);
      for (const char c : name.substr(hex ? 2 : 1)) {
        const int d = c >= '0' && c <= '9'          ? c - '0'
                      : hex && c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : hex && c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                    : -1;
        known &= d >= 0;
        code = std::min<uint32_t>(code * (hex ? 16 : 10) + static_cast<uint32_t>(d), 0x110000);
      }
      const bool invalid = code == 0 || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000);
      if (known) append_utf8(out, invalid ? 0xFFFD : static_cast<char32_t>(code));
    }
    if (!known) out += s.substr(i, end + 1 - i);
    i = end + 1;
  }
  return out;
}

Value do_striptags(Runtime& rt, const Value& v, const Bound&) {
  const std::string s = str_of(rt, v);
  rt.charge(s.size() * 8);
  rt.expect(s.size(), 4);
  const std::string bare = without_tags(s);
  std::string out;
  bool gap = false;
  each_char(bare, [&](char32_t c, std::string_view bytes) {
    if (is_space(c)) {
      gap = !out.empty();
      return;
    }
    if (gap) out += ' ';
    gap = false;
    out += bytes;
  });
  return rt.str(unescape_html(out));
}

// ---------------------------------------------------------------------------------------- xmlattr

Value do_xmlattr(Runtime& rt, const Value& v, const Bound& a) {
  if (!v.is_dict()) fail("xmlattr needs a dict, not {}", type_name(v));
  std::string out;
  for (const auto& [key, value] : v.dict().items) {
    if (value.is_none() || value.is_undefined()) continue;
    const std::string& name = need_string(key, "an attribute's name");
    const std::string text = str_of(rt, value);
    if (name.find_first_of(" \t\n\r\f\v/>=") != kNotFound)
      fail("Invalid character in attribute name: '{}'", name);
    rt.expect(out.size() + 5 * (name.size() + text.size()));
    rt.charge(name.size() + text.size());
    if (!out.empty()) out += ' ';
    out += key.is_markup() ? name : escape_html(name);
    out += "=\"";
    out += value.is_markup() ? text : escape_html(text);
    out += '"';
  }
  const bool space = !a.has(0) || truth(*a[0]);
  return rt.str(space && !out.empty() ? " " + out : out);
}

// ----------------------------------------------------------------------------------------- pprint

// Python's pprint.pformat: a value goes on one line if it fits in 80 characters, otherwise one item
// per line.
class PrettyPrinter {
 public:
  explicit PrettyPrinter(Runtime& rt) : rt_(rt) {}

  std::string run(const Value& v) {
    format(v, 0, 0, 0);
    return std::move(out_);
  }

 private:
  static constexpr int64_t kWidth = 80;

  // As repr, with dicts in key order.
  std::string repr(const Value& v) {
    const Runtime::Level level(rt_);
    std::string out;
    if (v.is_dict()) {
      out += '{';
      for (const auto* item : sorted(v.dict())) {
        if (out.size() > 1) out += ", ";
        out += repr(item->first) + ": " + repr(item->second);
      }
      return out += '}';
    }
    if (!v.is_list()) {
      append_repr(rt_, out, v);
      return out;
    }
    const bool tuple = v.is(Kind::kTuple);
    out += tuple ? '(' : '[';
    for (const Value& item : v.items()) out += (out.size() > 1 ? ", " : "") + repr(item);
    if (tuple) return out += v.items().size() == 1 ? ",)" : ")";
    return out += ']';
  }

  std::vector<const std::pair<Value, Value>*> sorted(const DictRep& dict) {
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) {
      return compare_keys(a->first, b->first) < 0;
    });
    return items;
  }

  static int64_t width_of(std::string_view s) { return static_cast<int64_t>(count_chars(s)); }

  void format(const Value& v, int64_t indent, int64_t allowance, int level) {
    const Runtime::Level depth(rt_);
    rt_.expect(out_.size());
    const std::string whole = repr(v);
    rt_.charge(whole.size());
    if (width_of(whole) <= kWidth - indent - allowance) {
      out_ += whole;
    } else if (v.is_dict() && !v.dict().items.empty()) {
      dict(v.dict(), indent, allowance + 1, level + 1);
    } else if (v.is(Kind::kList)) {
      out_ += '[';
      items(v, indent, allowance + 1, level + 1);
      out_ += ']';
    } else if (v.is(Kind::kTuple)) {
      const std::string_view end = v.items().size() == 1 ? ",)" : ")";
      out_ += '(';
      items(v, indent, allowance + static_cast<int64_t>(end.size()), level + 1);
      out_ += end;
    } else if (v.is_string() && !v.is_markup() && !v.text().empty()) {
      string(v.text(), indent, allowance, level + 1);
    } else {
      out_ += whole;
    }
  }

  void new_line(int64_t indent) { out_ += "\n" + std::string(static_cast<size_t>(indent), ' '); }

  void dict(const DictRep& d, int64_t indent, int64_t allowance, int level) {
    const auto all = sorted(d);
    out_ += '{';
    for (size_t i = 0; i < all.size(); ++i) {
      const bool last = i + 1 == all.size();
      const std::string key = repr(all[i]->first);
      out_ += key + ": ";
      format(all[i]->second, indent + 1 + width_of(key) + 2, last ? allowance : 1, level);
      if (last) break;
      out_ += ',';
      new_line(indent + 1);
    }
    out_ += '}';
  }

  void items(const Value& v, int64_t indent, int64_t allowance, int level) {
    for (size_t i = 0; i < v.items().size(); ++i) {
      if (i > 0) {
        out_ += ',';
        new_line(indent + 1);
      }
      format(v.items()[i], indent + 1, i + 1 == v.items().size() ? allowance : 1, level);
    }
  }

  std::string quoted(std::string_view s) {
    std::string out;
    jinja::append_repr(out, s);
    return out;
  }

  // The words of a line, each with the spaces after it.
  static std::vector<std::string> words(std::string_view line) {
    std::vector<std::string> parts;
    bool spaces = true;
    each_char(line, [&](char32_t c, std::string_view bytes) {
      if (parts.empty() || (spaces && !is_space(c))) parts.emplace_back();
      spaces = is_space(c);
      parts.back() += bytes;
    });
    return parts;
  }

  void string(const std::string& s, int64_t indent, int64_t allowance, int level) {
    if (level == 1) {
      ++indent;
      ++allowance;
    }
    const int64_t width = kWidth - indent;
    std::vector<std::string> chunks;
    const std::vector<std::string> lines = kept_lines(s);
    for (size_t i = 0; i < lines.size(); ++i) {
      const bool last_line = i + 1 == lines.size();
      const std::string whole = quoted(lines[i]);
      if (width_of(whole) <= width - (last_line ? allowance : 0)) {
        chunks.push_back(whole);
        continue;
      }
      const std::vector<std::string> parts = words(lines[i]);
      std::string current;
      for (size_t j = 0; j < parts.size(); ++j) {
        const bool last = last_line && j + 1 == parts.size();
        if (width_of(quoted(current + parts[j])) > width - (last ? allowance : 0)) {
          if (!current.empty()) chunks.push_back(quoted(current));
          current = parts[j];
        } else {
          current += parts[j];
        }
      }
      if (!current.empty()) chunks.push_back(quoted(current));
    }
    if (chunks.size() == 1) {
      out_ += chunks[0];
      return;
    }
    if (level == 1) out_ += '(';
    for (size_t i = 0; i < chunks.size(); ++i) {
      if (i > 0) new_line(indent);
      out_ += chunks[i];
    }
    if (level == 1) out_ += ')';
  }

  // Lines, including their line ends.
  static std::vector<std::string> kept_lines(const std::string& s) {
    std::vector<std::string> lines;
    size_t begin = 0;
    for (const std::string& line : lines_of(s)) {
      size_t end = begin + line.size();
      if (end < s.size()) {
        const bool pair = s[end] == '\r' && end + 1 < s.size() && s[end + 1] == '\n';
        end += pair ? 2 : decode_utf8(std::string_view(s).substr(end, 4)).size;
      }
      if (end > begin) lines.push_back(s.substr(begin, end - begin));
      begin = end;
    }
    return lines;
  }

  Runtime& rt_;
  std::string out_;
};

Value do_pprint(Runtime& rt, const Value& v, const Bound&) {
  return rt.str(PrettyPrinter(rt).run(v));
}

Value do_random(Runtime& rt, const Value& v, const Bound&) {
  const int64_t n = length(rt, v);
  if (n == 0) return rt.undefined("No random item, sequence was empty.");
  std::random_device device;
  return get_item(rt, v, Value(std::uniform_int_distribution<int64_t>(0, n - 1)(device)));
}

constexpr Builtin kFilters[] = {
    {"wordwrap", "width break_long_words wrapstring break_on_hyphens", 0, do_wordwrap},
    {"striptags", "", 0, do_striptags},
    {"xmlattr", "autospace", 0, do_xmlattr},
    {"pprint", "", 0, do_pprint},
    {"random", "", 0, do_random},
};

}  // namespace

std::span<const Builtin> rare_filters() {
  return kFilters;
}

}  // namespace freshet::jinja
