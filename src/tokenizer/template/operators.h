// Python's operators on values: text, truth, comparison, arithmetic, subscripts, iteration. All
// throw Error when Python would raise, with Python's message if template authors may know it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/template/runtime.h"

namespace freshet::jinja {

enum class BinaryOp : uint8_t { kAdd, kSub, kMul, kDiv, kFloorDiv, kMod, kPow };
enum class CompareOp : uint8_t { kEq, kNe, kLt, kLe, kGt, kGe, kIn, kNotIn };

// str(v) and repr(v).
void append_str(Runtime& rt, std::string& out, const Value& v);
std::string str_of(Runtime& rt, const Value& v);
void append_repr(Runtime& rt, std::string& out, const Value& v);
// v itself if it is a string (markup stays markup), else str(v).
Value soft_str(Runtime& rt, const Value& v);

bool truth(const Value& v);
bool equals(Runtime& rt, const Value& a, const Value& b);
// a < b; throws for types without an ordering.
bool less(Runtime& rt, const Value& a, const Value& b);
bool contains(Runtime& rt, const Value& container, const Value& item);
bool compare(Runtime& rt, CompareOp op, const Value& a, const Value& b);
Value binary(Runtime& rt, BinaryOp op, const Value& a, const Value& b);
Value negate(Runtime& rt, const Value& v);

// len(v)
int64_t length(Runtime& rt, const Value& v);
bool is_iterable(const Value& v);

// The items of an iteration over a value. Keeps the value alive.
class Items {
 public:
  Items(Runtime& rt, const Value& v);
  size_t size() const { return span_.size(); }
  const Value& operator[](size_t i) const { return span_[i]; }
  auto begin() const { return span_.begin(); }
  auto end() const { return span_.end(); }
  std::vector<Value> copy() const { return {span_.begin(), span_.end()}; }

 private:
  Value keep_;
  std::vector<Value> owned_;
  std::span<const Value> span_;
};

// obj.name, without methods: an undefined value if there is no such attribute.
Value get_attribute(Runtime& rt, const Value& object, std::string_view name);
// obj[key]: the same, but a string key falls back on attributes.
Value get_item(Runtime& rt, const Value& object, const Value& key);
// obj[start:stop:step]; None for an omitted bound.
Value get_slice(Runtime& rt, const Value& object, const Value& start, const Value& stop,
                const Value& step);

[[noreturn]] void fail_undefined(const Value& v);
// Throws for an undefined value, which may not be used in computations.
inline void need_defined(const Value& v) {
  if (v.is_undefined()) fail_undefined(v);
}
// v as an integer where Python requires one; `what` names it in the error.
int64_t need_int(const Value& v, std::string_view what);
const std::string& need_string(const Value& v, std::string_view what);

}  // namespace freshet::jinja
