// JSON values: ordered, hashed, with numbers kept exactly as they were written.
//
// Value is a value type (deep copies; moves are cheap). Objects keep insertion order and look keys
// up in O(1) once they hold more than a few. A number keeps its text, so that 64-bit integers and
// 0.1 come back out unchanged. Parsing is strict RFC 8259 over UTF-8, with limits on depth and
// size. Nothing here throws or recurses: however deep a value is, copying, comparing, writing and
// destroying it take constant stack. Reading is safe from many threads;
// writing needs external synchronisation.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"

namespace freshet::json {

class Value;
using Array = std::vector<Value>;

// Insertion-ordered map from strings to values. Duplicate keys: the last value wins, the first
// position stays (as Python's json does).
class Object {
 public:
  using Member = std::pair<std::string, Value>;
  Object();
  ~Object();
  Object(const Object&);
  Object(Object&&) noexcept;
  Object& operator=(const Object&);
  Object& operator=(Object&&) noexcept;

  size_t size() const;
  bool empty() const { return size() == 0; }
  const Value* find(std::string_view key) const;  // nullptr when absent
  Value* find(std::string_view key);
  Value& operator[](std::string_view key);  // inserts null when absent
  bool erase(std::string_view key);
  void reserve(size_t size);
  std::vector<Member>::const_iterator begin() const;
  std::vector<Member>::const_iterator end() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

enum class Type { kNull, kBool, kNumber, kString, kArray, kObject };

class Value {
 public:
  Value() = default;  // null
  Value(std::nullptr_t) {}
  Value(std::same_as<bool> auto b) : data_(std::in_place_type<bool>, b) {}
  template <std::integral T>
    requires(!std::same_as<T, bool>)
  Value(T v) : data_(Number{std::to_string(v)}) {}
  Value(double v);  // NaN and infinities become null when written
  Value(const char* s);
  Value(std::string_view s);
  Value(std::string s);
  Value(Array a);
  Value(Object o);
  static Value number_from_text(std::string text);  // REQUIRES: a valid JSON number

  Type type() const { return static_cast<Type>(data_.index()); }
  bool is_null() const { return type() == Type::kNull; }
  bool is_bool() const { return type() == Type::kBool; }
  bool is_number() const { return type() == Type::kNumber; }
  bool is_integer() const;  // a number written without '.', 'e' or 'E'
  bool is_string() const { return type() == Type::kString; }
  bool is_array() const { return type() == Type::kArray; }
  bool is_object() const { return type() == Type::kObject; }

  // REQUIRES: the matching type.
  bool as_bool() const;
  double as_double() const;
  std::optional<int64_t> as_int64() const;  // nullopt: not an integer, or out of range; 3.0 is 3
  const std::string& as_string() const;
  const std::string& number_text() const;
  const Array& as_array() const;
  Array& as_array();
  const Object& as_object() const;
  Object& as_object();

  // Forgiving look-ups: a missing key, another type or a non-object gives the fallback (nullptr).
  const Value* find(std::string_view key) const;  // a null member is found as a null Value
  bool get_bool(std::string_view key, bool fallback) const;
  int64_t get_int(std::string_view key, int64_t fallback) const;
  double get_double(std::string_view key, double fallback) const;
  std::string get_string(std::string_view key, std::string_view fallback) const;

  bool operator==(const Value&) const;  // numbers by value, objects regardless of order

  Value(const Value&);
  Value(Value&&) noexcept;
  Value& operator=(const Value&);
  Value& operator=(Value&&) noexcept;
  ~Value();

 private:
  struct Number {
    std::string text;
  };
  template <class F>
  void each_child(F&& f);
  // In the order of Type.
  std::variant<std::monostate, bool, Number, std::string, Array, Object> data_;
};

struct ParseLimits {
  size_t depth = 128;
  size_t bytes = size_t{1} << 30;
};

// Errors give the byte offset and what was expected there. An unpaired surrogate escape is an
// error, because UTF-8 cannot represent it.
Result<Value> parse(std::string_view text, const ParseLimits& limits = {});
Result<Value> parse_file(const std::string& path, const ParseLimits& limits = {});

struct WriteOptions {
  int indent = -1;         // < 0: one line
  bool ascii = false;      // escape everything beyond ASCII as \uXXXX
  bool spaces = false;     // ", " and ": " as Python's json.dumps
  bool sort_keys = false;  // by bytes, which for UTF-8 is by code point
};
std::string write(const Value& value, const WriteOptions& options = {});
// Appends `s` as a JSON string with its quotes. Invalid UTF-8 becomes U+FFFD.
void append_quoted(std::string& out, std::string_view s, bool ascii = false);
// The shortest text that reads back as `v`, laid out as Python's repr: 3.0, 0.1, 1e+16, inf, nan.
std::string number_text(double v);

}  // namespace freshet::json
