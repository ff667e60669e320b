#include "tokenizer/template/operators.h"

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "tokenizer/template/format.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {

void fail_undefined(const Value& v) {
  if (v.rep() == nullptr) fail("a value is undefined");
  fail("{}", v.as<UndefinedRep>().message);
}

int64_t need_int(const Value& v, std::string_view what) {
  need_defined(v);
  if (!v.is_int()) fail("{} must be an integer, not {}", what, type_name(v));
  return v.as_int();
}

const std::string& need_string(const Value& v, std::string_view what) {
  need_defined(v);
  if (!v.is_string()) fail("{} must be a string, not {}", what, type_name(v));
  return v.text();
}

namespace {

void append_sequence(Runtime& rt, std::string& out, std::span<const Value> items) {
  bool first = true;
  for (const Value& v : items) {
    if (!first) out += ", ";
    first = false;
    append_repr(rt, out, v);
  }
}

void append_dict(Runtime& rt, std::string& out, const DictRep& dict) {
  out += '{';
  bool first = true;
  for (const auto& [key, value] : dict.items) {
    if (!first) out += ", ";
    first = false;
    append_repr(rt, out, key);
    out += ": ";
    append_repr(rt, out, value);
  }
  out += '}';
}

void append_range(std::string& out, const RangeRep& r) {
  out += fmt::format("range({}, {}", r.start, r.stop);
  if (r.step != 1) out += fmt::format(", {}", r.step);
  out += ')';
}

void append_namespace(Runtime& rt, std::string& out, const NamespaceRep& ns) {
  out += "<Namespace {";
  bool first = true;
  for (const auto& [key, value] : ns.attributes) {
    if (!first) out += ", ";
    first = false;
    append_repr(out, std::string_view(key));
    out += ": ";
    append_repr(rt, out, value);
  }
  out += "}>";
}

}  // namespace

void append_repr(Runtime& rt, std::string& out, const Value& v) {
  const Runtime::Level level(rt);  // namespaces can contain themselves
  rt.step();
  if (out.size() > rt.budget().left) fail_limit("memory");
  switch (v.kind()) {
    case Kind::kUndefined:
      out += "Undefined";
      break;
    case Kind::kString:
      rt.charge(v.text().size());
      if (v.is_markup()) out += "Markup(";
      append_repr(out, std::string_view(v.text()));
      if (v.is_markup()) out += ')';
      break;
    case Kind::kList:
      out += '[';
      append_sequence(rt, out, v.items());
      out += ']';
      break;
    case Kind::kTuple:
      out += '(';
      append_sequence(rt, out, v.items());
      out += v.items().size() == 1 ? ",)" : ")";
      break;
    case Kind::kView:
      out += "dict_items([";
      append_sequence(rt, out, v.items());
      out += "])";
      break;
    case Kind::kDict:
      append_dict(rt, out, v.dict());
      break;
    case Kind::kNamespace:
      append_namespace(rt, out, v.as<NamespaceRep>());
      break;
    default:
      append_str(rt, out, v);
  }
}

void append_str(Runtime& rt, std::string& out, const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      break;
    case Kind::kNone:
      out += "None";
      break;
    case Kind::kBool:
      out += v.as_bool() ? "True" : "False";
      break;
    case Kind::kInt:
      out += std::to_string(v.as_int());
      break;
    case Kind::kFloat:
      out += json::number_text(v.as_float());
      break;
    case Kind::kString:
    case Kind::kBigInt:
      out += v.text();
      break;
    case Kind::kRange:
      append_range(out, v.as<RangeRep>());
      break;
    case Kind::kGenerator:
    case Kind::kLoop:
    case Kind::kMacro:
    case Kind::kFunction:
    case Kind::kMethod:
    case Kind::kCycler:
    case Kind::kJoiner:
      out += fmt::format("<{} object>", type_name(v));
      break;
    default:
      append_repr(rt, out, v);
  }
}

std::string str_of(Runtime& rt, const Value& v) {
  std::string out;
  append_str(rt, out, v);
  return out;
}

Value soft_str(Runtime& rt, const Value& v) {
  return v.is_string() ? v : rt.str(str_of(rt, v));
}

bool truth(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return v.as_int() != 0;
    case Kind::kFloat:
      return v.as_float() != 0;
    case Kind::kString:
      return !v.text().empty();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
      return !v.items().empty();
    case Kind::kDict:
      return !v.dict().items.empty();
    case Kind::kRange:
      return v.as<RangeRep>().size() != 0;
    default:
      return true;
  }
}

namespace {

bool equal_sequences(Runtime& rt, std::span<const Value> a, std::span<const Value> b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!equals(rt, a[i], b[i])) return false;
  }
  return true;
}

bool equal_dicts(Runtime& rt, const DictRep& a, const DictRep& b) {
  if (a.items.size() != b.items.size()) return false;
  for (const auto& [key, value] : a.items) {
    const Value* other = b.find(key);
    if (other == nullptr || !equals(rt, value, *other)) return false;
  }
  return true;
}

}  // namespace

bool equals(Runtime& rt, const Value& a, const Value& b) {
  rt.step();
  if (is_any_number(a) && is_any_number(b)) return compare_numbers(a, b) == 0;
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
      return true;
    case Kind::kString:
      if (a.text().size() != b.text().size()) return false;
      rt.charge(a.text().size());
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
      return equal_sequences(rt, a.items(), b.items());
    case Kind::kDict:
      return equal_dicts(rt, a.dict(), b.dict());
    case Kind::kRange: {
      const auto& ra = a.as<RangeRep>();
      const auto& rb = b.as<RangeRep>();
      return ra.size() == rb.size() && (ra.size() == 0 || ra.start == rb.start) &&
             (ra.size() < 2 || ra.step == rb.step);
    }
    default:
      return a.same_object(b);
  }
}

bool less(Runtime& rt, const Value& a, const Value& b) {
  rt.step();
  need_defined(a);
  need_defined(b);
  if (is_any_number(a) && is_any_number(b)) return compare_numbers(a, b) < 0;
  if (a.is_string() && b.is_string()) {
    rt.charge(std::min(a.text().size(), b.text().size()));
    return a.text() < b.text();
  }
  if (a.is_list() && a.kind() == b.kind()) {
    for (size_t i = 0; i < a.items().size() && i < b.items().size(); ++i) {
      if (!equals(rt, a.items()[i], b.items()[i])) return less(rt, a.items()[i], b.items()[i]);
    }
    return a.items().size() < b.items().size();
  }
  fail("'<' not supported between instances of '{}' and '{}'", type_name(a), type_name(b));
}

bool contains(Runtime& rt, const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kUndefined:
      return false;
    case Kind::kString: {
      need_defined(item);
      if (!item.is_string()) {
        fail("'in <string>' requires string as left operand, not {}", type_name(item));
      }
      rt.charge(container.text().size());
      return find(container.text(), item.text()) != kNotFound;
    }
    case Kind::kDict:
      if (item.is_string()) rt.charge(item.text().size());
      return container.dict().find(item) != nullptr;
    default: {
      const Items items(rt, container);
      return std::any_of(items.begin(), items.end(),
                         [&](const Value& v) { return equals(rt, v, item); });
    }
  }
}

bool compare(Runtime& rt, CompareOp op, const Value& a, const Value& b) {
  switch (op) {
    case CompareOp::kEq:
      return equals(rt, a, b);
    case CompareOp::kNe:
      return !equals(rt, a, b);
    case CompareOp::kLt:
      return less(rt, a, b);
    case CompareOp::kGt:
      return less(rt, b, a);
    // Not the negation of the opposite comparison, because of NaN.
    case CompareOp::kLe:
      return less(rt, a, b) || equals(rt, a, b);
    case CompareOp::kGe:
      return less(rt, b, a) || equals(rt, a, b);
    case CompareOp::kIn:
      return contains(rt, b, a);
    case CompareOp::kNotIn:
      return !contains(rt, b, a);
  }
  return false;
}

int64_t length(Runtime& rt, const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString: {
      const auto& s = v.as<StringRep>();
      if (s.ascii) return static_cast<int64_t>(s.text.size());
      rt.charge(s.text.size());
      return static_cast<int64_t>(count_chars(s.text));
    }
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
      return static_cast<int64_t>(v.items().size());
    case Kind::kDict:
      return static_cast<int64_t>(v.dict().items.size());
    case Kind::kRange:
      return v.as<RangeRep>().size();
    default:
      fail("object of type '{}' has no len()", type_name(v));
  }
}

bool is_iterable(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kView:
    case Kind::kRange:
    case Kind::kGenerator:
      return true;
    default:
      return false;
  }
}

Items::Items(Runtime& rt, const Value& v) : keep_(v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      break;
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kView:
      span_ = v.items();
      return;
    case Kind::kString: {
      rt.expect(v.text().size(), 16);
      const bool markup = v.is_markup();
      each_char(v.text(), [&](char32_t, std::string_view bytes) {
        owned_.push_back(rt.str(std::string(bytes), markup));
      });
      break;
    }
    case Kind::kDict:
      rt.step(static_cast<int64_t>(v.dict().items.size()));
      for (const auto& [key, value] : v.dict().items) owned_.push_back(key);
      break;
    case Kind::kRange: {
      const auto& r = v.as<RangeRep>();
      rt.step(r.size());
      for (int64_t i = 0; i < r.size(); ++i) owned_.emplace_back(r.start + i * r.step);
      break;
    }
    case Kind::kGenerator: {
      auto& g = v.as<GeneratorRep>();
      rt.step(static_cast<int64_t>(g.items.size()));
      span_ = std::span<const Value>(g.items).subspan(g.next);
      g.next = g.items.size();
      return;
    }
    default:
      fail("'{}' object is not iterable", type_name(v));
  }
  span_ = owned_;
}

}  // namespace freshet::jinja
