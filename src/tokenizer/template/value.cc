#include "tokenizer/template/value.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tokenizer/template/big_int.h"
#include "tokenizer/template/merge_sort.h"

namespace freshet::jinja {

void fail_limit(std::string_view what) {
  throw Error(StatusCode::kResourceExhausted,
              fmt::format("the template's limit on {} was reached", what));
}

std::string_view type_name(const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return v.is_markup() ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kView:
      return "dict_items";
    case Kind::kRange:
      return "range";
    case Kind::kGenerator:
      return "generator";
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kMacro:
      return "Macro";
    case Kind::kFunction:
      return "function";
    case Kind::kMethod:
      return "builtin_function_or_method";
    case Kind::kCycler:
      return "Cycler";
    case Kind::kJoiner:
      return "Joiner";
    case Kind::kBigInt:
      return "int";
  }
  return "object";
}

bool Value::same_object(const Value& other) const {
  if (kind_ != other.kind_) return false;
  switch (kind_) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
      return bits_.b == other.bits_.b;
    case Kind::kInt:
      return bits_.i == other.bits_.i;
    case Kind::kFloat:
      return bits_.f == other.bits_.f;
    case Kind::kString:
      return text() == other.text();
    default:
      return bits_.rep == other.bits_.rep;
  }
}

namespace {

int rank(const Value& v) {
  switch (v.kind()) {
    case Kind::kNone:
      return 0;
    case Kind::kBool:
    case Kind::kInt:
    case Kind::kBigInt:
    case Kind::kFloat:
      return 1;
    case Kind::kString:
      return 2;
    case Kind::kTuple:
      // Nested tuples can be small and still take exponentially long to compare.
      for (const Value& item : v.items()) {
        if (item.is(Kind::kTuple)) fail("a tuple within a tuple cannot be a key here");
      }
      return 3;
    case Kind::kList:
    case Kind::kDict:
      fail("unhashable type: '{}'", type_name(v));
    default:
      return 4;
  }
}

template <class T>
int three_way(const T& a, const T& b) {
  return a < b ? -1 : b < a ? 1 : 0;
}

}  // namespace

std::partial_ordering compare_numbers(const Value& a, const Value& b) {
  if (a.is_int() && b.is_int()) return a.as_int() <=> b.as_int();
  if (a.is(Kind::kFloat) && b.is(Kind::kFloat)) return a.as_float() <=> b.as_float();
  const auto big = [](const Value& v) {
    return v.is_int() ? BigInt(v.as_int()) : BigInt::parse(v.text()).value();
  };
  if (a.is_integer() && b.is_integer()) return big(a) <=> big(b);
  const bool float_first = a.is(Kind::kFloat);
  const double f = float_first ? a.as_float() : b.as_float();
  const Value& i = float_first ? b : a;
  if (std::isnan(f)) return std::partial_ordering::unordered;
  if (std::isinf(f)) return float_first ? f <=> 0.0 : 0.0 <=> f;
  // The float's integer part decides, or else its fraction.
  std::partial_ordering order = big(i) <=> BigInt::from_double(f);
  if (order == 0) order = 0.0 <=> (f - std::trunc(f));
  return float_first ? 0 <=> order : order;
}

int compare_keys(const Value& a, const Value& b) {
  const int ra = rank(a);
  const int rb = rank(b);
  if (ra != rb) return three_way(ra, rb);
  switch (ra) {
    case 0:
      return 0;
    case 1: {
      const std::partial_ordering order = compare_numbers(a, b);
      return order < 0 ? -1 : order > 0 ? 1 : 0;
    }
    case 2:
      return three_way(a.text().compare(b.text()), 0);
    case 3:
      for (size_t i = 0; i < a.items().size() && i < b.items().size(); ++i) {
        if (const int c = compare_keys(a.items()[i], b.items()[i]); c != 0) return c;
      }
      return three_way(a.items().size(), b.items().size());
    default:
      return three_way(a.rep(), b.rep());
  }
}

const Value* DictRep::find(const Value& key) const {
  const auto it = std::lower_bound(
      sorted.begin(), sorted.end(), key,
      [&](uint32_t i, const Value& k) { return compare_keys(items[i].first, k) < 0; });
  if (it == sorted.end() || compare_keys(items[*it].first, key) != 0) {
    if (sorted.empty()) compare_keys(key, key);  // an unhashable key is an error even here
    return nullptr;
  }
  return &items[*it].second;
}

const Value* DictRep::find(std::string_view key) const {
  const auto before = [&](uint32_t i, std::string_view k) {
    const Value& v = items[i].first;
    return v.is_string() ? v.text() < k : rank(v) < 2;
  };
  const auto it = std::lower_bound(sorted.begin(), sorted.end(), key, before);
  if (it == sorted.end()) return nullptr;
  const auto& [found, value] = items[*it];
  return found.is_string() && found.text() == key ? &value : nullptr;
}

void DictRep::seal() {
  sorted.resize(items.size());
  std::iota(sorted.begin(), sorted.end(), 0);
  if (items.size() == 1) compare_keys(items[0].first, items[0].first);
  merge_sort(sorted, [&](uint32_t i, uint32_t j) {
    return compare_keys(items[i].first, items[j].first) < 0;
  });
  std::vector<bool> dropped(items.size());
  bool any = false;
  for (size_t i = 0; i + 1 < sorted.size(); ++i) {
    // Equal keys are in order of insertion, so the last value moves to the first position.
    size_t end = i + 1;
    while (end < sorted.size() &&
           compare_keys(items[sorted[i]].first, items[sorted[end]].first) == 0) {
      dropped[sorted[end++]] = true;
    }
    if (end == i + 1) continue;
    items[sorted[i]].second = items[sorted[end - 1]].second;
    i = end - 1;
    any = true;
  }
  if (!any) return;
  size_t kept = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    if (!dropped[i]) {
      if (kept != i) items[kept] = std::move(items[i]);
      ++kept;
    }
  }
  items.resize(kept);
  seal();
}

int64_t RangeRep::size() const {
  if (step > 0 ? start >= stop : start <= stop) return 0;
  // Unsigned, because the difference of any two ends fits.
  const auto a = static_cast<uint64_t>(start);
  const auto b = static_cast<uint64_t>(stop);
  const auto s = static_cast<uint64_t>(step);
  const uint64_t n = step > 0 ? (b - a - 1) / s : (a - b - 1) / (0 - s);
  return static_cast<int64_t>(std::min<uint64_t>(n, INT64_MAX - 1)) + 1;
}

Value* NamespaceRep::find(std::string_view name) {
  for (auto& [key, value] : attributes) {
    if (key == name) return &value;
  }
  return nullptr;
}

}  // namespace freshet::jinja
