// The run-time values of a template, modelled on Python's.
//
// Value is a small handle; the object behind it is immutable and shared, except for namespaces,
// loops, generators, cyclers and joiners. Constants of a program have no budget and may be used
// from many threads (the reference count is atomic); all other values belong to one rendering and
// must die before its Budget. Each value stores its depth, which is limited when the value is made,
// so recursion over values is bounded. Errors in this folder propagate as the exception Error, up
// to ChatTemplate.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace freshet::jinja {

struct Error : std::exception {
  Error(StatusCode c, std::string m) : code(c), message(std::move(m)) {}
  const char* what() const noexcept override { return message.c_str(); }
  StatusCode code;
  std::string message;
  int line = 0;  // filled in by the innermost statement or token
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> f, Args&&... args) {
  throw Error(StatusCode::kInvalidArgument, fmt::format(f, std::forward<Args>(args)...));
}
[[noreturn]] void fail_limit(std::string_view what);

// Bytes held by the values of one rendering.
struct Budget {
  size_t left = 0;
  void take(size_t bytes) {
    if (bytes > left) fail_limit("memory");
    left -= bytes;
  }
  void give(size_t bytes) { left += bytes; }
};

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kView,  // dict.items() etc.: can be iterated and counted, not indexed
  kRange,
  kGenerator,  // yields its items once
  kNamespace,
  kLoop,
  kMacro,
  kFunction,
  kMethod,  // a method bound to its receiver
  kCycler,
  kJoiner,
  kBigInt,  // an integer beyond 64 bits, as decimal text; see big_int.h
};

struct Rep {
  Rep() = default;
  Rep(const Rep&) = delete;
  Rep& operator=(const Rep&) = delete;
  virtual ~Rep() {
    if (budget != nullptr) budget->give(bytes);
  }
  // Drops references to other values, to break cycles when a rendering ends.
  virtual void clear() {}

  std::atomic<uint32_t> references{0};
  int depth = 1;
  size_t bytes = 0;
  Budget* budget = nullptr;
};

constexpr int kMaxValueDepth = 200;

struct StringRep;
struct ListRep;
struct DictRep;

class Value {
 public:
  Value() = default;  // None
  explicit Value(bool b) : kind_(Kind::kBool) { bits_.b = b; }
  explicit Value(int64_t i) : kind_(Kind::kInt) { bits_.i = i; }
  explicit Value(double f) : kind_(Kind::kFloat) { bits_.f = f; }
  Value(Kind kind, Rep* rep) : kind_(kind) {
    bits_.rep = rep;
    if (rep != nullptr) rep->references.fetch_add(1, std::memory_order_relaxed);
  }
  Value(const Value& other) : kind_(other.kind_), bits_(other.bits_) {
    if (shared()) bits_.rep->references.fetch_add(1, std::memory_order_relaxed);
  }
  Value(Value&& other) noexcept : kind_(other.kind_), bits_(other.bits_) {
    other.kind_ = Kind::kNone;
  }
  Value& operator=(Value other) noexcept {
    std::swap(kind_, other.kind_);
    std::swap(bits_, other.bits_);
    return *this;
  }
  ~Value() {
    if (shared() && bits_.rep->references.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      delete bits_.rep;
    }
  }
  static Value undefined() { return {Kind::kUndefined, nullptr}; }

  Kind kind() const { return kind_; }
  bool is(Kind k) const { return kind_ == k; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_dict() const { return kind_ == Kind::kDict; }
  bool is_list() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }
  // Truth value as in Python.
  bool is_int() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }
  bool is_number() const { return is_int() || kind_ == Kind::kFloat; }
  // Integers of any size.
  bool is_integer() const { return is_int() || kind_ == Kind::kBigInt; }

  // REQUIRES: the value is of this kind.
  bool as_bool() const { return bits_.b; }
  int64_t as_int() const { return kind_ == Kind::kBool ? bits_.b : bits_.i; }
  double as_float() const {
    return kind_ == Kind::kFloat ? bits_.f : static_cast<double>(as_int());
  }
  const std::string& text() const;          // the UTF-8 of a string
  bool is_markup() const;                   // a string made by |safe or |escape
  const std::vector<Value>& items() const;  // of a list, tuple or view
  const DictRep& dict() const;
  Rep* rep() const { return bits_.rep; }
  template <class T>
  T& as() const {
    return *static_cast<T*>(bits_.rep);
  }
  int depth() const { return shared() ? bits_.rep->depth : 0; }
  bool same_object(const Value& other) const;

 private:
  bool shared() const {
    return (kind_ >= Kind::kString || kind_ == Kind::kUndefined) && bits_.rep != nullptr;
  }
  Kind kind_ = Kind::kNone;
  union {
    bool b;
    int64_t i;
    double f;
    Rep* rep;
  } bits_ = {.rep = nullptr};
};

struct UndefinedRep final : Rep {
  std::string message;
};

struct StringRep final : Rep {
  std::string text;
  bool ascii = false;
  bool markup = false;
};

// Lists, tuples and views.
struct ListRep final : Rep {
  std::vector<Value> items;
  bool is_group = false;  // a tuple from groupby, with the attributes grouper and list
};

// Ordered by insertion; look-ups use binary search, which no choice of keys can slow down.
struct DictRep final : Rep {
  std::vector<std::pair<Value, Value>> items;
  std::vector<uint32_t> sorted;  // indices into items, sorted by key

  const Value* find(const Value& key) const;  // nullptr if absent
  const Value* find(std::string_view key) const;
  // Sorts the index; for equal keys, the first position and the last value stay.
  void seal();
};

struct RangeRep final : Rep {
  int64_t start = 0, stop = 0, step = 1;
  int64_t size() const;
};

struct GeneratorRep final : Rep {
  std::vector<Value> items;
  size_t next = 0;
};

struct NamespaceRep final : Rep {
  std::vector<std::pair<std::string, Value>> attributes;
  Value* find(std::string_view name);
  void clear() override { attributes.clear(); }
};

struct CyclerRep final : Rep {
  std::vector<Value> items;
  size_t next = 0;
};

struct JoinerRep final : Rep {
  Value separator;
  bool used = false;
};

inline const std::string& Value::text() const {
  return as<StringRep>().text;
}
inline bool Value::is_markup() const {
  return is_string() && as<StringRep>().markup;
}
inline const std::vector<Value>& Value::items() const {
  return as<ListRep>().items;
}
inline const DictRep& Value::dict() const {
  return as<DictRep>();
}

// Python's name of the value's type: "str", "dict", ...
std::string_view type_name(const Value& v);

// Compares two numbers exactly, whatever their types. std::partial_ordering::unordered with a NaN.
std::partial_ordering compare_numbers(const Value& a, const Value& b);
inline bool is_any_number(const Value& v) {
  return v.is_number() || v.is(Kind::kBigInt);
}

// A total order of dict keys: numbers by value, then strings, then tuples. Throws for values that
// Python cannot hash.
int compare_keys(const Value& a, const Value& b);

}  // namespace freshet::jinja
