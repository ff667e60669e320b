// Filters on sequences.
#include <algorithm>

#include "tokenizer/template/builtins.h"
#include "tokenizer/template/merge_sort.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

Value fold_case(Runtime& rt, const Value& v, bool case_sensitive) {
  if (case_sensitive || !v.is_string()) return v;
  rt.charge(v.text().size() * 4);
  return rt.str(lower(v.text()));
}

// Follows a path "a.b.0" from a value; a null path is the value itself.
Value follow(Runtime& rt, Value v, const Value* path, const Value* fallback = nullptr) {
  if (path == nullptr) return v;
  if (!path->is_string()) return get_item(rt, v, *path);
  std::string_view rest = path->text();
  while (true) {
    const size_t end = std::min(rest.find('.'), rest.size());
    const std::string_view part = rest.substr(0, end);
    const bool is_index =
        !part.empty() && part.size() < 18 && part.find_first_not_of("0123456789") == kNotFound;
    const Value key = is_index ? Value(static_cast<int64_t>(std::stoll(std::string(part))))
                               : rt.str(std::string(part));
    v = get_item(rt, v, key);
    if (fallback != nullptr && v.is_undefined()) v = *fallback;
    if (end == rest.size()) return v;
    rest.remove_prefix(end + 1);
  }
}

Value do_join(Runtime& rt, const Value& v, const Bound& a) {
  const std::string separator = a.has(0) ? str_of(rt, *a[0]) : "";
  std::string out;
  bool first = true;
  for (const Value& item : Items(rt, v)) {
    if (!first) out += separator;
    first = false;
    append_str(rt, out, follow(rt, item, a.given(1)));
    rt.step();
    rt.expect(out.size());
  }
  return rt.str(std::move(out));
}

Value do_first(Runtime& rt, const Value& v, const Bound&) {
  if (v.is_string() && !v.text().empty()) return get_item(rt, v, Value(int64_t{0}));
  if (v.is(Kind::kGenerator)) {
    auto& g = v.as<GeneratorRep>();
    if (g.next < g.items.size()) return g.items[g.next++];
  }
  const Items items(rt, v);
  return items.size() == 0 ? rt.undefined("No first item, sequence was empty.") : items[0];
}

Value do_last(Runtime& rt, const Value& v, const Bound&) {
  if (v.is(Kind::kGenerator)) fail("'generator' object is not reversible");
  if (v.is_string() && !v.text().empty()) return get_item(rt, v, Value(int64_t{-1}));
  const Items items(rt, v);
  return items.size() == 0 ? rt.undefined("No last item, sequence was empty.")
                           : items[items.size() - 1];
}

Value do_list(Runtime& rt, const Value& v, const Bound&) {
  const Items items(rt, v);
  rt.step(static_cast<int64_t>(items.size()));
  return rt.list(items.copy());
}

Value do_items(Runtime& rt, const Value& v, const Bound&) {
  if (v.is_undefined()) return rt.generator({});
  if (!v.is_dict()) fail("Can only get item pairs from a mapping.");
  std::vector<Value> pairs;
  for (const auto& [key, value] : v.dict().items) pairs.push_back(rt.pair(key, value));
  return rt.generator(std::move(pairs));
}

// Sorts by keys that are computed once; stable, also in reverse.
std::vector<Value> sorted(Runtime& rt, const std::vector<Value>& items,
                          const std::vector<Value>& keys, bool reverse) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  merge_sort(order, [&](size_t i, size_t j) {
    return reverse ? less(rt, keys[j], keys[i]) : less(rt, keys[i], keys[j]);
  });
  std::vector<Value> out;
  out.reserve(items.size());
  for (const size_t i : order) out.push_back(items[i]);
  return out;
}

Value do_dictsort(Runtime& rt, const Value& v, const Bound& a) {
  need_defined(v);
  if (!v.is_dict()) fail("'{}' object has no attribute 'items'", type_name(v));
  const std::string by = a.has(1) ? need_string(*a[1], "dictsort's by") : "key";
  if (by != "key" && by != "value") fail("You can only sort by either \"key\" or \"value\"");
  std::vector<Value> pairs;
  std::vector<Value> keys;
  for (const auto& [key, value] : v.dict().items) {
    pairs.push_back(rt.pair(key, value));
    keys.push_back(fold_case(rt, by == "key" ? key : value, a.flag(0)));
  }
  return rt.list(sorted(rt, pairs, keys, a.flag(2)));
}

Value do_sort(Runtime& rt, const Value& v, const Bound& a) {
  const Items items(rt, v);
  // "a,b" sorts by a, then by b.
  std::vector<Value> paths;
  if (const Value* attribute = a.given(2)) {
    if (!attribute->is_string()) paths.push_back(*attribute);
    std::string_view rest;
    if (attribute->is_string()) rest = attribute->text();
    while (!rest.empty()) {
      const size_t end = std::min(rest.find(','), rest.size());
      paths.push_back(rt.str(std::string(rest.substr(0, end))));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  std::vector<Value> keys;
  for (const Value& item : items) {
    if (paths.empty()) {
      keys.push_back(fold_case(rt, item, a.flag(1)));
      continue;
    }
    std::vector<Value> parts;
    for (const Value& path : paths)
      parts.push_back(fold_case(rt, follow(rt, item, &path), a.flag(1)));
    keys.push_back(rt.list(std::move(parts)));
  }
  return rt.list(sorted(rt, items.copy(), keys, a.flag(0)));
}

Value do_unique(Runtime& rt, const Value& v, const Bound& a) {
  const Items items(rt, v);
  std::vector<std::pair<Value, Value>> seen;
  for (size_t i = 0; i < items.size(); ++i) {
    Value key = fold_case(rt, follow(rt, items[i], a.given(1)), a.flag(0));
    seen.emplace_back(std::move(key), Value(static_cast<int64_t>(items.size() - i)));
  }
  // A dict keeps the last value of equal keys, so it is filled from the back to keep the first
  // item.
  std::reverse(seen.begin(), seen.end());
  std::vector<int64_t> firsts;
  const Value unique = rt.dict(std::move(seen));
  for (const auto& [key, left] : unique.dict().items) firsts.push_back(left.as_int());
  std::sort(firsts.rbegin(), firsts.rend());
  std::vector<Value> out;
  for (const int64_t left : firsts) out.push_back(items[items.size() - static_cast<size_t>(left)]);
  return rt.generator(std::move(out));
}

Value min_or_max(Runtime& rt, const Value& v, const Bound& a, bool want_max) {
  const Items items(rt, v);
  if (items.size() == 0) return rt.undefined("No aggregated item, sequence was empty.");
  size_t best = 0;
  Value best_key = fold_case(rt, follow(rt, items[0], a.given(1)), a.flag(0));
  for (size_t i = 1; i < items.size(); ++i) {
    Value key = fold_case(rt, follow(rt, items[i], a.given(1)), a.flag(0));
    if (want_max ? less(rt, best_key, key) : less(rt, key, best_key)) {
      best = i;
      best_key = std::move(key);
    }
  }
  return items[best];
}

Value do_min(Runtime& rt, const Value& v, const Bound& a) {
  return min_or_max(rt, v, a, false);
}
Value do_max(Runtime& rt, const Value& v, const Bound& a) {
  return min_or_max(rt, v, a, true);
}

Value do_sum(Runtime& rt, const Value& v, const Bound& a) {
  Value total = a.has(1) ? *a[1] : Value(int64_t{0});
  if (total.is_string()) fail("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : Items(rt, v)) {
    total = binary(rt, BinaryOp::kAdd, total, follow(rt, item, a.given(0)));
    rt.step();
  }
  return total;
}

Value do_reverse(Runtime& rt, const Value& v, const Bound&) {
  if (v.is_string()) return get_slice(rt, v, Value(), Value(), Value(int64_t{-1}));
  if (!is_iterable(v)) fail("argument must be iterable");
  std::vector<Value> items = Items(rt, v).copy();
  std::reverse(items.begin(), items.end());
  return v.is(Kind::kGenerator) ? rt.list(std::move(items)) : rt.generator(std::move(items));
}

Value do_batch(Runtime& rt, const Value& v, const Bound& a) {
  const int64_t size = need_int(*a[0], "batch's linecount");
  std::vector<Value> out;
  std::vector<Value> row;
  for (const Value& item : Items(rt, v)) {
    if (static_cast<int64_t>(row.size()) == size) out.push_back(rt.list(std::exchange(row, {})));
    row.push_back(item);
  }
  if (!row.empty()) {
    if (const Value* fill = a.given(1);
        fill != nullptr && static_cast<int64_t>(row.size()) < size) {
      rt.expect(static_cast<size_t>(size), sizeof(Value));
      row.resize(static_cast<size_t>(size), *fill);
    }
    out.push_back(rt.list(std::move(row)));
  }
  return rt.generator(std::move(out));
}

Value do_slice(Runtime& rt, const Value& v, const Bound& a) {
  const int64_t slices = need_int(*a[0], "slice's count");
  const Items items(rt, v);
  if (slices == 0) fail("integer division or modulo by zero");
  std::vector<Value> out;
  const int64_t count = static_cast<int64_t>(items.size());
  size_t at = 0;
  for (int64_t i = 0; i < slices; ++i) {
    rt.step();
    const bool extra = i < count % slices;
    const auto size = static_cast<size_t>(count / slices + (extra ? 1 : 0));
    std::vector<Value> part(items.begin() + static_cast<std::ptrdiff_t>(at),
                            items.begin() + static_cast<std::ptrdiff_t>(at + size));
    if (a.given(1) != nullptr && !extra) part.push_back(*a[1]);
    out.push_back(rt.list(std::move(part)));
    at += size;
  }
  return rt.generator(std::move(out));
}

Value do_groupby(Runtime& rt, const Value& v, const Bound& a) {
  const Items items(rt, v);
  std::vector<Value> keyed;
  std::vector<Value> keys;
  for (const Value& item : items) {
    keys.push_back(fold_case(rt, follow(rt, item, a[0], a.given(1)), a.flag(2)));
    keyed.push_back(rt.pair(keys.back(), item));
  }
  keyed = sorted(rt, keyed, keys, false);
  std::vector<Value> groups;
  for (size_t i = 0; i < keyed.size();) {
    const Value& key = keyed[i].items()[0];
    std::vector<Value> members;
    for (; i < keyed.size() && equals(rt, keyed[i].items()[0], key); ++i) {
      members.push_back(keyed[i].items()[1]);
    }
    // A NaN is not equal to anything.
    if (members.empty()) members.push_back(keyed[i++].items()[1]);
    const Value name = a.flag(2) ? key : follow(rt, members[0], a[0], a.given(1));
    const Value group = rt.pair(name, rt.list(std::move(members)));
    group.as<ListRep>().is_group = true;
    groups.push_back(group);
  }
  return rt.list(std::move(groups));
}

Args rest_of(const Args& args, size_t skip) {
  Args rest;
  rest.positional.assign(args.positional.begin() + static_cast<std::ptrdiff_t>(skip),
                         args.positional.end());
  rest.named = args.named;
  return rest;
}

Value do_map(Runtime& rt, const Value& v, Args& args) {
  const Runtime::Level level(rt);  // map('map', 'map', ...)
  if (!truth(v)) return rt.generator({});
  std::vector<Value> out;
  if (args.positional.empty() && !args.named.empty()) {
    const Bound a = bind("map", "attribute default", 1, args);
    for (const Value& item : Items(rt, v)) out.push_back(follow(rt, item, a[0], a.given(1)));
    return rt.generator(std::move(out));
  }
  if (args.positional.empty()) fail("map requires a filter argument");
  const std::string& name = need_string(args.positional[0], "map's filter");
  for (const Value& item : Items(rt, v)) {
    rt.step();
    Args rest = rest_of(args, 1);
    out.push_back(rt.filter(name, item, rest));
  }
  return rt.generator(std::move(out));
}

Value choose(Runtime& rt, const Value& v, Args& args, bool wanted, bool by_attribute) {
  std::vector<Value> out;
  if (!truth(v)) return rt.generator({});
  const size_t skip = by_attribute ? 1 : 0;
  if (args.positional.size() < skip) fail("Missing parameter for attribute name");
  const Value* path = by_attribute ? &args.positional[0] : nullptr;
  for (const Value& item : Items(rt, v)) {
    rt.step();
    const Value subject = follow(rt, item, path);
    bool passes = false;
    if (args.positional.size() > skip) {
      Args rest = rest_of(args, skip + 1);
      passes = rt.test(need_string(args.positional[skip], "a test's name"), subject, rest);
    } else {
      passes = truth(subject);
    }
    if (passes == wanted) out.push_back(item);
  }
  return rt.generator(std::move(out));
}

template <bool wanted, bool by_attribute>
Value do_choose(Runtime& rt, const Value& v, Args& args) {
  return choose(rt, v, args, wanted, by_attribute);
}

constexpr Builtin kFilters[] = {
    {"join", "d attribute", 0, do_join},
    {"first", "", 0, do_first},
    {"last", "", 0, do_last},
    {"list", "", 0, do_list},
    {"items", "", 0, do_items},
    {"dictsort", "case_sensitive by reverse", 0, do_dictsort},
    {"sort", "reverse case_sensitive attribute", 0, do_sort},
    {"unique", "case_sensitive attribute", 0, do_unique},
    {"min", "case_sensitive attribute", 0, do_min},
    {"max", "case_sensitive attribute", 0, do_max},
    {"sum", "attribute start", 0, do_sum},
    {"reverse", "", 0, do_reverse},
    {"batch", "linecount fill_with", 1, do_batch},
    {"slice", "slices fill_with", 1, do_slice},
    {"groupby", "attribute default case_sensitive", 1, do_groupby},
    {"map", "", 0, nullptr, do_map},
    {"select", "", 0, nullptr, do_choose<true, false>},
    {"reject", "", 0, nullptr, do_choose<false, false>},
    {"selectattr", "", 0, nullptr, do_choose<true, true>},
    {"rejectattr", "", 0, nullptr, do_choose<false, true>},
};

}  // namespace

std::span<const Builtin> sequence_filters() {
  return kFilters;
}

}  // namespace freshet::jinja
