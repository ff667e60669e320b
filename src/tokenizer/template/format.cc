#include "tokenizer/template/format.h"

#include <algorithm>
#include <cmath>

#include "base/escape_html.h"
#include "base/json.h"
#include "tokenizer/template/number.h"
#include "tokenizer/template/operators.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {

std::string fixed(double v, int precision) {
  return fmt::format("{:.{}f}", v, precision);
}

namespace {

constexpr int kMaxPrecision = 1000;

// [[fill]align][sign][#][0][width][,][.precision][type]
struct Spec {
  std::string fill = " ";
  char align = '\0';
  char sign = '-';
  bool alternate = false;
  size_t width = 0;
  char grouping = '\0';
  int precision = -1;
  char type = '\0';
};

// Reads digits; a width larger than any memory is an error at once.
size_t read_number(std::string_view s, size_t& i) {
  size_t n = 0;
  while (i < s.size() && s[i] >= '0' && s[i] <= '9') {
    n = n * 10 + static_cast<size_t>(s[i++] - '0');
    if (n > size_t{1} << 31) fail_limit("memory");
  }
  return n;
}

int checked_precision(size_t n) {
  if (n > static_cast<size_t>(kMaxPrecision))
    fail("a format's precision is limited to {}", kMaxPrecision);
  return static_cast<int>(n);
}

bool is_align(char c) {
  return c == '<' || c == '>' || c == '^' || c == '=';
}

Spec parse_spec(std::string_view s) {
  Spec spec;
  size_t i = 0;
  const size_t first = s.empty() ? 0 : decode_utf8(s.substr(0, 4)).size;
  if (first < s.size() && is_align(s[first])) {
    spec.fill = s.substr(0, first);
    spec.align = s[first];
    i = first + 1;
  } else if (!s.empty() && is_align(s[0])) {
    spec.align = s[0];
    i = 1;
  }
  if (i < s.size() && (s[i] == '+' || s[i] == '-' || s[i] == ' ')) spec.sign = s[i++];
  if (i < s.size() && s[i] == '#') {
    spec.alternate = true;
    ++i;
  }
  if (i < s.size() && s[i] == '0') {
    if (spec.align == '\0') {
      spec.fill = "0";
      spec.align = '=';
    }
    ++i;
  }
  spec.width = read_number(s, i);
  if (i < s.size() && (s[i] == ',' || s[i] == '_')) spec.grouping = s[i++];
  if (i < s.size() && s[i] == '.') {
    ++i;
    const size_t start = i;
    const size_t n = read_number(s, i);
    if (i == start) fail("Format specifier missing precision");
    spec.precision = static_cast<int>(std::min<size_t>(n, INT32_MAX));
  }
  if (i < s.size()) spec.type = s[i++];
  if (i != s.size()) fail("Invalid format specifier '{}'", s);
  return spec;
}

// Pads sign + body to the width.
std::string pad(Runtime& rt, const Spec& spec, char default_align, std::string sign,
                const std::string& body) {
  const size_t size = sign.size() + count_chars(body);
  const char align = spec.align == '\0' ? default_align : spec.align;
  if (size >= spec.width) return sign + body;
  const size_t missing = spec.width - size;
  rt.expect(missing, spec.fill.size());
  const size_t left = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  std::string before;
  std::string after;
  for (size_t i = 0; i < left; ++i) before += spec.fill;
  for (size_t i = left; i < missing; ++i) after += spec.fill;
  return align == '=' ? sign + before + body : before + sign + body + after;
}

std::string group(std::string digits, char separator) {
  if (separator == '\0') return digits;
  const size_t point = std::min(digits.find_first_of(".e"), digits.size());
  for (size_t i = point; i > 3; i -= 3) digits.insert(i - 3, 1, separator);
  return digits;
}

std::string sign_of(bool negative, char mode) {
  return negative ? "-" : mode == '-' ? "" : std::string(1, mode);
}

// The digits of a magnitude for a float presentation type.
std::string float_digits(double v, char type, int precision, bool alternate) {
  const bool upper_case = type >= 'A' && type <= 'Z';
  std::string out;
  if (std::isinf(v) || std::isnan(v)) {
    out = std::isnan(v) ? "nan" : "inf";
  } else {
    const int p = precision < 0 ? 6 : checked_precision(static_cast<size_t>(precision));
    switch (type) {
      case 'f':
      case 'F':
        out = fixed(v, p);
        break;
      case '%':
        out = fixed(v * 100, p);
        break;
      case 'e':
      case 'E':
        out = fmt::format("{:.{}e}", v, p);
        break;
      default:
        out = alternate ? fmt::format("{:#.{}g}", v, std::max(p, 1))
                        : fmt::format("{:.{}g}", v, std::max(p, 1));
    }
  }
  if (upper_case) out = upper(out);
  if (type == '%') out += '%';
  return out;
}

std::string format_float(Runtime& rt, const Spec& spec, double v) {
  const double magnitude = std::fabs(v);
  std::string digits;
  if (spec.type == '\0' && spec.precision < 0) {
    digits = json::number_text(magnitude);
  } else if (spec.type == '\0') {
    digits = float_digits(magnitude, 'g', spec.precision, false);
    if (digits.find_first_of(".en") == kNotFound) digits += ".0";
  } else if (std::string_view("fFeEgG%n").find(spec.type) != kNotFound) {
    digits = float_digits(magnitude, spec.type, spec.precision, spec.alternate);
  } else {
    fail("Unknown format code '{}' for object of type 'float'", spec.type);
  }
  return pad(rt, spec, '>', sign_of(std::signbit(v) && !std::isnan(v), spec.sign),
             group(std::move(digits), spec.grouping));
}

std::string int_digits(const BigInt& v, char type) {
  const int base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
  const std::string digits = v.magnitude_text(base);
  return type == 'X' ? upper(digits) : digits;
}

// For an integer of any size.
std::string format_int(Runtime& rt, const Spec& spec, const Value& v) {
  if (spec.type != '\0' && std::string_view("fFeEgG%").find(spec.type) != kNotFound) {
    return format_float(rt, spec, *to_float(v));
  }
  if (spec.type == 'c') {
    const int64_t code = v.is_int() ? v.as_int() : -1;
    if (code < 0 || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF))
      fail("%c arg not in range(0x110000)");
    std::string c;
    append_utf8(c, static_cast<char32_t>(code));
    return pad(rt, spec, '<', "", c);
  }
  if (spec.type != '\0' && std::string_view("dnxXob").find(spec.type) == kNotFound) {
    fail("Unknown format code '{}' for object of type 'int'", spec.type);
  }
  if (v.is(Kind::kBigInt)) rt.step(static_cast<int64_t>(v.text().size()));
  const BigInt number = to_big(v);
  std::string sign = sign_of(number.negative(), spec.sign);
  if (spec.alternate && std::string_view("xXob").find(spec.type) != kNotFound) {
    sign += {'0', spec.type};
  }
  std::string digits = int_digits(number, spec.type);
  return pad(rt, spec, '>', std::move(sign), group(std::move(digits), spec.grouping));
}

std::string format_string(Runtime& rt, const Spec& spec, std::string_view s) {
  if (spec.type != '\0' && spec.type != 's') {
    fail("Unknown format code '{}' for object of type 'str'", spec.type);
  }
  if (spec.precision >= 0) s = s.substr(0, offset_of(s, static_cast<size_t>(spec.precision)));
  return pad(rt, spec, '<', "", std::string(s));
}

std::string format_value(Runtime& rt, const Value& v, std::string_view spec_text) {
  const Spec spec = parse_spec(spec_text);
  if (v.is(Kind::kFloat)) return format_float(rt, spec, v.as_float());
  if (v.is(Kind::kInt) || v.is(Kind::kBigInt) || (v.is(Kind::kBool) && !spec_text.empty())) {
    return format_int(rt, spec, v);
  }
  if (!v.is_string() && !v.is(Kind::kBool) && !spec_text.empty()) {
    fail("unsupported format string passed to {}.__format__", type_name(v));
  }
  return format_string(rt, spec, str_of(rt, v));
}

// ------------------------------------------------------------------------------------- str.format

class BraceFormatter {
 public:
  BraceFormatter(Runtime& rt, const Args& args, bool markup)
      : rt_(rt), args_(args), markup_(markup) {}

  std::string run(std::string_view s, int depth) {
    if (depth > 2) fail("Max string recursion exceeded");
    std::string out;
    for (size_t i = 0; i < s.size(); ++i) {
      rt_.expect(out.size());
      if ((s[i] == '{' || s[i] == '}') && i + 1 < s.size() && s[i + 1] == s[i]) {
        out += s[i++];
      } else if (s[i] == '}') {
        fail("Single '}}' encountered in format string");
      } else if (s[i] != '{') {
        out += s[i];
      } else {
        i = field(s, i + 1, depth, out);
      }
    }
    return out;
  }

 private:
  // A field whose first character is s[start]; returns the offset of its closing brace.
  size_t field(std::string_view s, size_t start, int depth, std::string& out) {
    rt_.step();
    size_t end = start;
    for (int open = 1; end < s.size(); ++end) {
      if (s[end] == '{') ++open;
      if (s[end] == '}' && --open == 0) break;
    }
    if (end >= s.size()) fail("expected '}}' before end of string");
    const std::string_view body = s.substr(start, end - start);
    const size_t name_end = std::min(body.find_first_of("!:"), body.size());
    Value v = lookup(body.substr(0, name_end));
    std::string_view rest = body.substr(name_end);
    if (!rest.empty() && rest[0] == '!') {
      const char how = rest.size() > 1 ? rest[1] : '\0';
      if ((how != 's' && how != 'r') || (rest.size() > 2 && rest[2] != ':')) {
        fail("a conversion in a format string must be !s or !r");
      }
      std::string text;
      if (how == 'r') {
        append_repr(rt_, text, v);
      } else {
        append_str(rt_, text, v);
      }
      v = rt_.str(std::move(text));
      rest.remove_prefix(2);
    }
    const std::string spec = rest.empty() ? "" : run(rest.substr(1), depth + 1);
    const std::string text = format_value(rt_, v, spec);
    out += markup_ && !v.is_markup() ? escape_html(text) : text;
    return end;
  }

  Value lookup(std::string_view path) {
    const size_t end = std::min(path.find_first_of(".["), path.size());
    Value v = first(path.substr(0, end));
    for (size_t i = end; i < path.size();) {
      rt_.step();
      if (path[i] == '.') {
        const size_t stop = std::min(path.find_first_of(".[", i + 1), path.size());
        v = get_attribute(rt_, v, path.substr(i + 1, stop - i - 1));
        i = stop;
      } else {
        const size_t stop = path.find(']', i);
        if (path[i] != '[' || stop == kNotFound) fail("Missing ']' in format string");
        const std::string_view key = path.substr(i + 1, stop - i - 1);
        size_t at = 0;
        const size_t n = read_number(key, at);
        v = !key.empty() && at == key.size() ? get_item(rt_, v, Value(static_cast<int64_t>(n)))
                                             : get_item(rt_, v, rt_.str(std::string(key)));
        i = stop + 1;
      }
      need_defined(v);
    }
    return v;
  }

  Value first(std::string_view name) {
    size_t at = 0;
    size_t index = read_number(name, at);
    if (at == name.size()) {
      if (name.empty()) index = next_++;
      if (index >= args_.positional.size()) {
        fail("Replacement index {} out of range for positional args tuple", index);
      }
      return args_.positional[index];
    }
    for (const auto& [key, value] : args_.named) {
      if (key == name) return value;
    }
    fail("no argument '{}' for the format string", name);
  }

  Runtime& rt_;
  const Args& args_;
  bool markup_;
  size_t next_ = 0;
};

// --------------------------------------------------------------------------------------- str % v

class PercentFormatter {
 public:
  PercentFormatter(Runtime& rt, const Value& format, const Value& values)
      : rt_(rt), s_(format.text()), values_(values), markup_(format.is_markup()) {}

  std::string run() {
    for (i_ = 0; i_ < s_.size(); ++i_) {
      rt_.expect(out_.size());
      if (s_[i_] == '%') {
        ++i_;
        conversion();
      } else {
        out_ += s_[i_];
      }
    }
    // Here Python treats everything with subscripts as a mapping, and does not require that all of
    // a mapping is used.
    const bool mapping = values_.is_dict() || values_.is(Kind::kList) || values_.is(Kind::kRange) ||
                         values_.is_undefined();
    if (used_dict_ || mapping) return std::move(out_);
    if (next_ < (values_.is(Kind::kTuple) ? values_.items().size() : 1)) {
      fail("not all arguments converted during string formatting");
    }
    return std::move(out_);
  }

 private:
  char at() const {
    if (i_ >= s_.size()) fail("incomplete format");
    return s_[i_];
  }

  Value next() {
    const bool tuple = values_.is(Kind::kTuple);
    if (next_ >= (tuple ? values_.items().size() : 1))
      fail("not enough arguments for format string");
    const size_t i = next_++;
    return tuple ? values_.items()[i] : values_;
  }

  size_t number_or_star() {
    if (i_ < s_.size() && s_[i_] == '*') {
      ++i_;
      const int64_t n = need_int(next(), "* in a format");
      if (n < 0 || n > INT32_MAX) fail_limit("memory");
      return static_cast<size_t>(n);
    }
    return read_number(s_, i_);
  }

  void conversion() {
    rt_.step();
    Spec spec;
    Value value;
    bool have_value = false;
    if (at() == '(') {
      const size_t close = s_.find(')', i_);
      if (close == kNotFound) fail("incomplete format key");
      if (!values_.is_dict()) fail("format requires a mapping");
      const std::string_view key = s_.substr(i_ + 1, close - i_ - 1);
      const Value* found = values_.dict().find(key);
      if (found == nullptr) fail("the format's key '{}' is missing", key);
      value = *found;
      have_value = used_dict_ = true;
      i_ = close + 1;
    }
    bool zero = false;
    for (; std::string_view("#0- +").find(at()) != kNotFound; ++i_) {
      if (at() == '#') spec.alternate = true;
      if (at() == '0') zero = true;
      if (at() == '-') spec.align = '<';
      if (at() == '+' || (at() == ' ' && spec.sign != '+')) spec.sign = at();
    }
    spec.width = number_or_star();
    if (at() == '.') {
      ++i_;
      spec.precision = static_cast<int>(std::min<size_t>(number_or_star(), INT32_MAX));
    }
    while (at() == 'l' || at() == 'h' || at() == 'L') ++i_;
    if (at() == '%') {
      out_ += '%';
      return;
    }
    if (!have_value) value = next();
    convert(spec, zero, at(), value);
  }

  void convert(Spec& spec, bool zero, char type, const Value& value) {
    if (type == 's' || type == 'r' || type == 'a') {
      std::string text;
      if (type == 's') {
        append_str(rt_, text, value);
      } else {
        append_repr(rt_, text, value);
      }
      if (markup_ && !value.is_markup()) text = escape_html(text);
      if (spec.align == '\0') spec.align = '>';
      out_ += format_string(rt_, spec, text);
      return;
    }
    if (type == 'c' && value.is_string()) {
      if (length(rt_, value) != 1) fail("%c requires int or char");
      if (spec.align == '\0') spec.align = '>';
      out_ += format_string(rt_, spec, value.text());
      return;
    }
    if (std::string_view("diuxXoeEfFgGc").find(type) == kNotFound) {
      fail("unsupported format character '{}'", type);
    }
    need_defined(value);
    if (!is_any_number(value))
      fail("%{} format: a number is required, not {}", type, type_name(value));
    if (zero && spec.align == '\0') {
      spec.align = '=';
      spec.fill = "0";
    }
    spec.type = type == 'i' || type == 'u' ? 'd' : type;
    if (std::string_view("eEfFgG").find(type) != kNotFound) {
      out_ += format_float(rt_, spec, *to_float(value));
      return;
    }
    const auto n = to_int(rt_, value, 10);
    if (!n) fail("cannot convert float infinity or NaN to integer");
    out_ += format_int(rt_, spec, *n);
  }

  Runtime& rt_;
  std::string_view s_;
  const Value& values_;
  bool markup_;
  size_t i_ = 0;
  size_t next_ = 0;
  bool used_dict_ = false;
  std::string out_;
};

}  // namespace

Value format_percent(Runtime& rt, const Value& format, const Value& values) {
  return rt.str(PercentFormatter(rt, format, values).run(), format.is_markup());
}

Value format_braces(Runtime& rt, const Value& format, const Args& args) {
  const bool markup = format.is_markup();
  return rt.str(BraceFormatter(rt, args, markup).run(format.text(), 0), markup);
}

}  // namespace freshet::jinja
