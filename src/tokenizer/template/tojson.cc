#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "tokenizer/template/builtins.h"
#include "tokenizer/template/merge_sort.h"

namespace freshet::jinja {
namespace {

class JsonWriter {
 public:
  JsonWriter(Runtime& rt, const JsonStyle& style) : rt_(rt), style_(style) {}

  std::string run(const Value& v) {
    write(v, 1);
    return std::move(out_);
  }

 private:
  void write(const Value& v, size_t depth) {
    rt_.step();
    rt_.expect(out_.size());
    switch (v.kind()) {
      case Kind::kNone:
        out_ += "null";
        return;
      case Kind::kBool:
        out_ += v.as_bool() ? "true" : "false";
        return;
      case Kind::kInt:
        out_ += std::to_string(v.as_int());
        return;
      case Kind::kFloat:
        out_ += number(v.as_float());
        return;
      case Kind::kBigInt:
        out_ += v.text();
        return;
      case Kind::kString:
        quoted(v.text());
        return;
      case Kind::kList:
      case Kind::kTuple:
        return array(v.items(), depth);
      case Kind::kDict:
        return object(v.dict(), depth);
      default:
        fail("Object of type {} is not JSON serializable", type_name(v));
    }
  }

  void quoted(std::string_view s) {
    rt_.charge(s.size());
    rt_.expect(s.size(), 2);
    json::append_quoted(out_, s, style_.ascii);
  }

  static std::string number(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d < 0 ? "-Infinity" : "Infinity";
    return json::number_text(d);
  }

  void new_line(size_t depth) {
    if (!style_.pretty) return;
    out_ += '\n';
    rt_.charge(depth * style_.indent.size());
    for (size_t i = 0; i < depth; ++i) out_ += style_.indent;
  }

  void separate(bool& first, size_t depth) {
    if (!first) out_ += style_.item_separator;
    first = false;
    new_line(depth);
  }

  void array(const std::vector<Value>& items, size_t depth) {
    out_ += '[';
    bool first = true;
    for (const Value& v : items) {
      separate(first, depth);
      write(v, depth + 1);
    }
    if (!items.empty()) new_line(depth - 1);
    out_ += ']';
  }

  std::string key_text(const Value& key) {
    switch (key.kind()) {
      case Kind::kString:
      case Kind::kBigInt:
        return key.text();
      case Kind::kNone:
        return "null";
      case Kind::kBool:
        return key.as_bool() ? "true" : "false";
      case Kind::kInt:
        return std::to_string(key.as_int());
      case Kind::kFloat:
        return number(key.as_float());
      default:
        fail("keys must be str, int, float, bool or None, not {}", type_name(key));
    }
  }

  void object(const DictRep& dict, size_t depth) {
    std::vector<const std::pair<Value, Value>*> members;
    members.reserve(dict.items.size());
    for (const auto& member : dict.items) members.push_back(&member);
    if (style_.sort_keys) {
      merge_sort(members,
                 [&](const auto* a, const auto* b) { return less(rt_, a->first, b->first); });
    }
    out_ += '{';
    bool first = true;
    for (const auto* member : members) {
      separate(first, depth);
      quoted(key_text(member->first));
      out_ += style_.key_separator;
      write(member->second, depth + 1);
    }
    if (!members.empty()) new_line(depth - 1);
    out_ += '}';
  }

  Runtime& rt_;
  const JsonStyle& style_;
  std::string out_;
};

}  // namespace

Value to_json(Runtime& rt, const Value& v, const JsonStyle& style) {
  return rt.str(JsonWriter(rt, style).run(v));
}

}  // namespace freshet::jinja
