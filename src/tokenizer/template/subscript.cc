#include <algorithm>

#include "tokenizer/template/loop.h"
#include "tokenizer/template/operators.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

std::string describe(const Value& v) {
  return v.is_none() ? "None" : fmt::format("'{} object'", type_name(v));
}

Value no_attribute(Runtime& rt, const Value& object, std::string_view name) {
  need_defined(object);
  return rt.undefined(fmt::format("{} has no attribute '{}'", describe(object), name));
}

// Characters [start, stop) of a string, every step-th.
Value slice_string(Runtime& rt, const Value& v, int64_t start, int64_t step, int64_t count) {
  const auto& rep = v.as<StringRep>();
  rt.charge(rep.text.size());
  if (count == 0) return rt.str("", rep.markup);
  if (step == 1) {
    size_t begin = static_cast<size_t>(start);
    size_t end = begin + static_cast<size_t>(count);
    if (!rep.ascii) {
      begin = offset_of(rep.text, begin);
      end = begin + offset_of(std::string_view(rep.text).substr(begin), static_cast<size_t>(count));
    }
    return rt.str(rep.text.substr(begin, end - begin), rep.markup);
  }
  std::vector<std::string_view> chars;
  rt.expect(rep.text.size(), sizeof(std::string_view));
  each_char(rep.text, [&](char32_t, std::string_view bytes) { chars.push_back(bytes); });
  std::string out;
  for (int64_t i = 0; i < count; ++i) out += chars[static_cast<size_t>(start + i * step)];
  return rt.str(std::move(out), rep.markup);
}

Value item_at(Runtime& rt, const Value& object, int64_t index) {
  const int64_t size = length(rt, object);
  const int64_t i = index < 0 ? index + size : index;
  if (i < 0 || i >= size) {
    return rt.undefined(fmt::format("{} has no element {}", describe(object), index));
  }
  switch (object.kind()) {
    case Kind::kString:
      return slice_string(rt, object, i, 1, 1);
    case Kind::kRange: {
      const auto& r = object.as<RangeRep>();
      return Value(r.start + i * r.step);
    }
    default:
      return object.items()[static_cast<size_t>(i)];
  }
}

}  // namespace

Value get_attribute(Runtime& rt, const Value& object, std::string_view name) {
  switch (object.kind()) {
    case Kind::kUndefined:
      fail_undefined(object);
    case Kind::kDict:
      rt.charge(name.size());
      if (const Value* v = object.dict().find(name)) return *v;
      break;
    case Kind::kNamespace:
      if (const Value* v = object.as<NamespaceRep>().find(name)) return *v;
      break;
    case Kind::kLoop:
      return loop_attribute(rt, object, name);
    case Kind::kCycler:
      if (name == "current") {
        const auto& cycler = object.as<CyclerRep>();
        return cycler.items[cycler.next];
      }
      break;
    case Kind::kTuple:
      if (object.as<ListRep>().is_group && name == "grouper") return object.items()[0];
      if (object.as<ListRep>().is_group && name == "list") return object.items()[1];
      break;
    default:
      break;
  }
  return no_attribute(rt, object, name);
}

Value get_item(Runtime& rt, const Value& object, const Value& key) {
  need_defined(object);
  if (object.is_dict() && !key.is(Kind::kList) && !key.is_dict()) {
    if (key.is_string()) rt.charge(key.text().size());
    if (const Value* v = object.dict().find(key)) return *v;
    if (key.is_string()) return no_attribute(rt, object, key.text());
    return rt.undefined(fmt::format("{} has no element {}", describe(object), str_of(rt, key)));
  }
  const bool indexable = object.is_list() || object.is_string() || object.is(Kind::kRange);
  if (indexable && key.is_int()) return item_at(rt, object, key.as_int());
  if (key.is_string()) return get_attribute(rt, object, key.text());
  std::string text = "?";
  if (key.is_undefined() || key.is_number() || key.is_none()) text = str_of(rt, key);
  return rt.undefined(fmt::format("{} has no element {}", describe(object), text));
}

Value get_slice(Runtime& rt, const Value& object, const Value& start, const Value& stop,
                const Value& step) {
  need_defined(object);
  const bool sliceable = object.is_list() || object.is_string() || object.is(Kind::kRange);
  if (!sliceable) fail("{} cannot be sliced", describe(object));
  const int64_t by = step.is_none() ? 1 : need_int(step, "a slice's step");
  if (by == 0) fail("slice step cannot be zero");
  const int64_t size = length(rt, object);
  // Python clamps both ends to the range reachable in this direction.
  const int64_t low = by < 0 ? -1 : 0;
  const int64_t high = by < 0 ? size - 1 : size;
  const auto bound = [&](const Value& v, int64_t fallback) {
    if (v.is_none()) return fallback;
    const int64_t i = need_int(v, "a slice's end");
    return std::clamp(i < 0 ? i + size : i, low, high);
  };
  const int64_t first = bound(start, by < 0 ? high : low);
  const int64_t last = bound(stop, by < 0 ? low : high);
  RangeRep range;
  range.start = first;
  range.stop = last;
  // A step longer than the sequence takes one item; with this bound it cannot overflow.
  range.step = std::clamp(by, -size - 1, size + 1);
  const int64_t count = range.size();
  if (object.is_string()) return slice_string(rt, object, first, range.step, count);
  std::vector<Value> items;
  rt.step(count);
  rt.expect(static_cast<size_t>(count), sizeof(Value));
  items.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) items.push_back(item_at(rt, object, first + i * range.step));
  return rt.list(std::move(items), object.is(Kind::kTuple) ? Kind::kTuple : Kind::kList);
}

}  // namespace freshet::jinja
