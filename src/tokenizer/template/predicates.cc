#include <unordered_map>

#include "tokenizer/template/builtins.h"
#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

int64_t remainder(Runtime& rt, const Value& v, int64_t by) {
  const Value m = binary(rt, BinaryOp::kMod, v, Value(by));
  return m.is_int() ? m.as_int() : m.as_float() == 0 ? 0 : m.as_float() == 1 ? 1 : -1;
}

// Whether the text has cased letters and all of them are of the wanted case.
template <class Wanted, class Unwanted>
bool all_cased(Runtime& rt, const Value& v, Wanted wanted, Unwanted unwanted) {
  bool any = false;
  bool all = true;
  each_char(str_of(rt, v), [&](char32_t c, std::string_view) {
    any |= wanted(c);
    all &= !unwanted(c);
  });
  return any && all;
}

bool is_sequence(const Value& v) {
  // Undefined has a length and no items; views and generators have no subscripts.
  return v.is_string() || v.is_list() || v.is_dict() || v.is(Kind::kRange) || v.is_undefined();
}

template <CompareOp op>
bool compares(Runtime& rt, const Value& v, const Bound& a) {
  return compare(rt, op, v, *a[0]);
}

constexpr Predicate kPredicates[] = {
    {"odd", "", 0,
     [](Runtime& rt, const Value& v, const Bound&) { return remainder(rt, v, 2) == 1; }},
    {"even", "", 0,
     [](Runtime& rt, const Value& v, const Bound&) { return remainder(rt, v, 2) == 0; }},
    {"divisibleby", "num", 1,
     [](Runtime& rt, const Value& v, const Bound& a) {
       return !truth(binary(rt, BinaryOp::kMod, v, *a[0]));
     }},
    {"defined", "", 0, [](Runtime&, const Value& v, const Bound&) { return !v.is_undefined(); }},
    {"undefined", "", 0, [](Runtime&, const Value& v, const Bound&) { return v.is_undefined(); }},
    {"filter", "", 0,
     [](Runtime&, const Value& v, const Bound&) {
       return v.is_string() && find_filter(v.text()) != nullptr;
     }},
    {"test", "", 0,
     [](Runtime&, const Value& v, const Bound&) {
       return v.is_string() && find_predicate(v.text()) != nullptr;
     }},
    {"none", "", 0, [](Runtime&, const Value& v, const Bound&) { return v.is_none(); }},
    {"boolean", "", 0, [](Runtime&, const Value& v, const Bound&) { return v.is(Kind::kBool); }},
    {"true", "", 0,
     [](Runtime&, const Value& v, const Bound&) { return v.is(Kind::kBool) && v.as_bool(); }},
    {"false", "", 0,
     [](Runtime&, const Value& v, const Bound&) { return v.is(Kind::kBool) && !v.as_bool(); }},
    {"integer", "", 0,
     [](Runtime&, const Value& v, const Bound&) {
       return v.is(Kind::kInt) || v.is(Kind::kBigInt);
     }},
    {"float", "", 0, [](Runtime&, const Value& v, const Bound&) { return v.is(Kind::kFloat); }},
    {"number", "", 0, [](Runtime&, const Value& v, const Bound&) { return is_any_number(v); }},
    {"string", "", 0, [](Runtime&, const Value& v, const Bound&) { return v.is_string(); }},
    {"mapping", "", 0, [](Runtime&, const Value& v, const Bound&) { return v.is_dict(); }},
    {"sequence", "", 0, [](Runtime&, const Value& v, const Bound&) { return is_sequence(v); }},
    {"iterable", "", 0, [](Runtime&, const Value& v, const Bound&) { return is_iterable(v); }},
    {"callable", "", 0,
     [](Runtime&, const Value& v, const Bound&) {
       return v.is(Kind::kMacro) || v.is(Kind::kFunction) || v.is(Kind::kMethod) ||
              v.is(Kind::kJoiner) || v.is(Kind::kLoop) || v.is_undefined();
     }},
    {"lower", "", 0,
     [](Runtime& rt, const Value& v, const Bound&) {
       return all_cased(rt, v, is_lower, is_upper);
     }},
    {"upper", "", 0,
     [](Runtime& rt, const Value& v, const Bound&) {
       return all_cased(rt, v, is_upper, is_lower);
     }},
    {"escaped", "", 0, [](Runtime&, const Value& v, const Bound&) { return v.is_markup(); }},
    {"sameas", "other", 1,
     [](Runtime&, const Value& v, const Bound& a) { return v.same_object(*a[0]); }},
    {"in", "seq", 1,
     [](Runtime& rt, const Value& v, const Bound& a) { return contains(rt, *a[0], v); }},
    {"eq", "other", 1, compares<CompareOp::kEq>},
    {"equalto", "other", 1, compares<CompareOp::kEq>},
    {"==", "other", 1, compares<CompareOp::kEq>},
    {"ne", "other", 1, compares<CompareOp::kNe>},
    {"!=", "other", 1, compares<CompareOp::kNe>},
    {"lt", "other", 1, compares<CompareOp::kLt>},
    {"lessthan", "other", 1, compares<CompareOp::kLt>},
    {"<", "other", 1, compares<CompareOp::kLt>},
    {"le", "other", 1, compares<CompareOp::kLe>},
    {"<=", "other", 1, compares<CompareOp::kLe>},
    {"gt", "other", 1, compares<CompareOp::kGt>},
    {"greaterthan", "other", 1, compares<CompareOp::kGt>},
    {">", "other", 1, compares<CompareOp::kGt>},
    {"ge", "other", 1, compares<CompareOp::kGe>},
    {">=", "other", 1, compares<CompareOp::kGe>},
};

}  // namespace

const Predicate* find_predicate(std::string_view name) {
  static const auto table = [] {
    std::unordered_map<std::string_view, const Predicate*> t;
    for (const Predicate& p : kPredicates) t.emplace(p.name, &p);
    return t;
  }();
  const auto it = table.find(name);
  return it == table.end() ? nullptr : it->second;
}

}  // namespace freshet::jinja
