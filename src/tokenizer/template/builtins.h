// Tables of the callables that templates can use: filters, tests, methods and global functions.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "tokenizer/template/operators.h"

namespace freshet::jinja {

// Arguments matched to parameters; null if omitted.
class Bound {
 public:
  const Value* operator[](size_t i) const { return values_[i]; }
  bool has(size_t i) const { return values_[i] != nullptr; }
  bool flag(size_t i, bool fallback = false) const {
    return has(i) ? truth(*values_[i]) : fallback;
  }
  // None counts as omitted.
  const Value* given(size_t i) const {
    return has(i) && !values_[i]->is_none() ? values_[i] : nullptr;
  }
  int64_t integer(size_t i, int64_t fallback, std::string_view what) const {
    return has(i) ? need_int(*values_[i], what) : fallback;
  }

 private:
  friend Bound bind(std::string_view, std::string_view, int, const Args&);
  std::array<const Value*, 6> values_{};
};

// `parameters` are names separated by single spaces. Throws for too many, unknown or missing
// arguments.
Bound bind(std::string_view function, std::string_view parameters, int required, const Args& args);

struct Builtin {
  std::string_view name;
  std::string_view parameters;
  int required = 0;
  Value (*run)(Runtime& rt, const Value& self, const Bound& args) = nullptr;
  // Used instead of run by builtins that take any arguments.
  Value (*run_any)(Runtime& rt, const Value& self, Args& args) = nullptr;

  Value operator()(Runtime& rt, const Value& self, Args& args) const {
    return run_any != nullptr ? run_any(rt, self, args)
                              : run(rt, self, bind(name, parameters, required, args));
  }
};

std::span<const Builtin> text_filters();
std::span<const Builtin> sequence_filters();
std::span<const Builtin> value_filters();
std::span<const Builtin> rare_filters();
std::span<const Builtin> string_methods();
std::span<const Builtin> dict_methods();
std::span<const Builtin> sequence_methods();  // of lists, tuples and ranges
std::span<const Builtin> loop_methods();
std::span<const Builtin> cycler_methods();
std::span<const Builtin> global_functions();

// nullptr if there is none.
const Builtin* find_filter(std::string_view name);
const Builtin* find_method(const Value& receiver, std::string_view name);

struct Predicate {
  std::string_view name;
  std::string_view parameters;
  int required = 0;
  bool (*run)(Runtime& rt, const Value& self, const Bound& args) = nullptr;
};
const Predicate* find_predicate(std::string_view name);

struct FunctionRep final : Rep {
  const Builtin* builtin = nullptr;
};
struct MethodRep final : Rep {
  const Builtin* builtin = nullptr;
  Value receiver;
};

// json.dumps(v): null separators mean Python's defaults.
struct JsonStyle {
  bool ascii = false;
  bool sort_keys = false;
  std::string indent;  // indentation of one level
  bool pretty = false;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
Value to_json(Runtime& rt, const Value& v, const JsonStyle& style);

// A string made from `self` or its parts: markup if `self` is markup.
inline Value like(Runtime& rt, const Value& self, std::string text) {
  return rt.str(std::move(text), self.is_markup());
}

}  // namespace freshet::jinja
