#include <algorithm>
#include <charconv>

#include "base/json.h"
#include "base/utf8.h"

namespace freshet::json {
namespace {

void append_hex(std::string& out, uint32_t unit) {
  fmt::format_to(std::back_inserter(out), "\\u{:04x}", unit);
}

void append_escaped(std::string& out, char c) {
  static constexpr std::string_view kNames = "\"\\bfnrt";
  static constexpr std::string_view kBytes = "\"\\\b\f\n\r\t";
  const size_t i = kBytes.find(c);
  if (i == std::string_view::npos) return append_hex(out, static_cast<uint8_t>(c));
  out.push_back('\\');
  out.push_back(kNames[i]);
}

class Writer {
 public:
  explicit Writer(const WriteOptions& options) : options_(options) {}

  std::string run(const Value& root) {
    begin(root);
    while (!open_.empty()) {
      Frame& frame = open_.back();
      const size_t i = frame.next++;
      if (i == frame.size) {
        const bool is_array = frame.container->is_array();
        const bool filled = frame.size > 0;
        open_.pop_back();
        if (filled) new_line();
        out_.push_back(is_array ? ']' : '}');
        continue;
      }
      if (i > 0) out_ += options_.spaces && options_.indent < 0 ? ", " : ",";
      new_line();
      if (frame.container->is_array()) {
        begin(frame.container->as_array()[i]);
      } else {
        const auto& [key, value] =
            frame.sorted.empty()
                ? frame.container->as_object().begin()[static_cast<std::ptrdiff_t>(i)]
                : *frame.sorted[i];
        append_quoted(out_, key, options_.ascii);
        out_ += options_.spaces || options_.indent >= 0 ? ": " : ":";
        begin(value);
      }
    }
    return std::move(out_);
  }

 private:
  struct Frame {
    const Value* container;
    size_t size;
    size_t next = 0;
    std::vector<const Object::Member*> sorted{};  // empty: in the object's own order
  };

  // Writes a scalar, or opens a container. The caller's Frame& is invalid afterwards.
  void begin(const Value& v) {
    switch (v.type()) {
      case Type::kNull:
        out_ += "null";
        break;
      case Type::kBool:
        out_ += v.as_bool() ? "true" : "false";
        break;
      case Type::kNumber: {
        // Only NaN and the infinities contain an 'n', and JSON has none of them.
        const std::string& text = v.number_text();
        out_ += text.find('n') == std::string::npos ? text : "null";
        break;
      }
      case Type::kString:
        append_quoted(out_, v.as_string(), options_.ascii);
        break;
      case Type::kArray:
        out_.push_back('[');
        open_.push_back({&v, v.as_array().size()});
        break;
      case Type::kObject:
        out_.push_back('{');
        open_.push_back({&v, v.as_object().size()});
        if (options_.sort_keys) sort(open_.back());
        break;
    }
  }

  static void sort(Frame& frame) {
    for (const auto& member : frame.container->as_object()) frame.sorted.push_back(&member);
    std::sort(frame.sorted.begin(), frame.sorted.end(),
              [](const auto* a, const auto* b) { return a->first < b->first; });
  }

  void new_line() {
    if (options_.indent < 0) return;
    out_.push_back('\n');
    out_.append(static_cast<size_t>(options_.indent) * open_.size(), ' ');
  }

  const WriteOptions& options_;
  std::string out_;
  std::vector<Frame> open_;
};

}  // namespace

std::string write(const Value& value, const WriteOptions& options) {
  return Writer(options).run(value);
}

void append_quoted(std::string& out, std::string_view s, bool ascii) {
  out.push_back('"');
  for (size_t i = 0; i < s.size();) {
    const auto byte = static_cast<uint8_t>(s[i]);
    if (byte < 0x80) {
      if (byte < 0x20 || byte == '"' || byte == '\\' || (ascii && byte == 0x7F)) {
        append_escaped(out, s[i]);
      } else {
        out.push_back(s[i]);
      }
      ++i;
      continue;
    }
    const Utf8Char c = decode_utf8(s.substr(i, 4));
    i += c.size;
    if (!ascii) {
      append_utf8(out, c.code);
    } else if (c.code < 0x10000) {
      append_hex(out, c.code);
    } else {
      append_hex(out, 0xD800 + ((c.code - 0x10000) >> 10));
      append_hex(out, 0xDC00 + ((c.code - 0x10000) & 0x3FF));
    }
  }
  out.push_back('"');
}

}  // namespace freshet::json
