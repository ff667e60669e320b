#include "base/json.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>

namespace freshet::json {
namespace {

// SipHash-1-3 (Aumasson and Bernstein, 2012) with a random key per process: keys come from clients,
// who must not be able to choose keys that all collide.
class SipHash {
 public:
  SipHash() {
    std::random_device device;
    for (uint64_t& k : key_) k = (uint64_t{device()} << 32) | device();
  }

  uint64_t operator()(std::string_view s) const {
    uint64_t v[4] = {key_[0] ^ 0x736f6d6570736575, key_[1] ^ 0x646f72616e646f6d,
                     key_[0] ^ 0x6c7967656e657261, key_[1] ^ 0x7465646279746573};
    const size_t whole = s.size() / 8 * 8;
    for (size_t i = 0; i < whole; i += 8) {
      uint64_t word;
      std::memcpy(&word, s.data() + i, 8);
      absorb(v, word);
    }
    uint64_t last = uint64_t{s.size()} << 56;
    for (size_t i = whole; i < s.size(); ++i) {
      last |= uint64_t{static_cast<uint8_t>(s[i])} << (8 * (i - whole));
    }
    absorb(v, last);
    v[2] ^= 0xff;
    for (int i = 0; i < 3; ++i) round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
  }

 private:
  static void round(uint64_t* v) {
    v[0] += v[1];
    v[1] = std::rotl(v[1], 13) ^ v[0];
    v[0] = std::rotl(v[0], 32);
    v[2] += v[3];
    v[3] = std::rotl(v[3], 16) ^ v[2];
    v[0] += v[3];
    v[3] = std::rotl(v[3], 21) ^ v[0];
    v[2] += v[1];
    v[1] = std::rotl(v[1], 17) ^ v[2];
    v[2] = std::rotl(v[2], 32);
  }
  static void absorb(uint64_t* v, uint64_t word) {
    v[3] ^= word;
    round(v);
    v[0] ^= word;
  }

  uint64_t key_[2];
};

uint64_t hash_of(std::string_view s) {
  static const SipHash hash;
  return hash(s);
}

}  // namespace

// ---------------------------------------------------------------------------------------- Object

struct Object::Impl {
  static constexpr size_t kLinear = 8;  // up to this many members, a scan beats the table
  std::vector<Member> members;
  std::vector<uint32_t> slots;  // open addressing, a power of two: 1 + index into members, 0 free

  // The member's index, or members.size().
  size_t index_of(std::string_view key) const {
    if (slots.empty()) {
      size_t i = 0;
      while (i < members.size() && members[i].first != key) ++i;
      return i;
    }
    for (size_t s = hash_of(key) & (slots.size() - 1);; s = (s + 1) & (slots.size() - 1)) {
      if (slots[s] == 0) return members.size();
      if (members[slots[s] - 1].first == key) return slots[s] - 1;
    }
  }

  void place(size_t index) {
    size_t s = hash_of(members[index].first) & (slots.size() - 1);
    while (slots[s] != 0) s = (s + 1) & (slots.size() - 1);
    slots[s] = static_cast<uint32_t>(index + 1);
  }

  void rebuild() {
    slots.clear();
    if (members.size() <= kLinear) return;
    slots.resize(std::bit_ceil(members.size() * 2));
    for (size_t i = 0; i < members.size(); ++i) place(i);
  }

  void append(std::string key) {
    members.emplace_back(std::piecewise_construct, std::forward_as_tuple(std::move(key)),
                         std::forward_as_tuple());
    if (members.size() <= kLinear) return;
    if (members.size() * 4 > slots.size() * 3) {
      slots.assign(std::bit_ceil(members.size() * 2), 0);
      for (size_t i = 0; i < members.size(); ++i) place(i);
    } else {
      place(members.size() - 1);
    }
  }
};

Object::Object() = default;
Object::~Object() = default;
Object::Object(Object&&) noexcept = default;
Object::Object(const Object& other) {
  reserve(other.size());
  for (const auto& [key, value] : other) (*this)[key] = value;
}
void Object::reserve(size_t size) {
  if (size == 0) return;
  if (impl_ == nullptr) impl_ = std::make_unique<Impl>();
  impl_->members.reserve(size);
}
Object& Object::operator=(const Object& other) {
  if (this != &other) *this = Object(other);
  return *this;
}
Object& Object::operator=(Object&& other) noexcept {
  // The old members are destroyed last, because `other` may be inside them.
  const auto old = std::exchange(impl_, std::move(other.impl_));
  return *this;
}

size_t Object::size() const {
  return impl_ == nullptr ? 0 : impl_->members.size();
}

const Value* Object::find(std::string_view key) const {
  if (impl_ == nullptr) return nullptr;
  const size_t i = impl_->index_of(key);
  return i == impl_->members.size() ? nullptr : &impl_->members[i].second;
}
Value* Object::find(std::string_view key) {
  return const_cast<Value*>(std::as_const(*this).find(key));
}

Value& Object::operator[](std::string_view key) {
  if (impl_ == nullptr) impl_ = std::make_unique<Impl>();
  const size_t i = impl_->index_of(key);
  if (i == impl_->members.size()) impl_->append(std::string(key));
  return impl_->members[i].second;
}

bool Object::erase(std::string_view key) {
  if (impl_ == nullptr) return false;
  const size_t i = impl_->index_of(key);
  if (i == impl_->members.size()) return false;
  impl_->members.erase(impl_->members.begin() + static_cast<std::ptrdiff_t>(i));
  impl_->rebuild();
  return true;
}

namespace {
const std::vector<Object::Member>& no_members() {
  static const std::vector<Object::Member> none;
  return none;
}
}  // namespace

std::vector<Object::Member>::const_iterator Object::begin() const {
  return impl_ == nullptr ? no_members().begin() : impl_->members.cbegin();
}
std::vector<Object::Member>::const_iterator Object::end() const {
  return impl_ == nullptr ? no_members().end() : impl_->members.cend();
}

// ----------------------------------------------------------------------------------------- Value

Value::Value(double v) : data_(Number{json::number_text(v)}) {}
Value::Value(const char* s) : data_(std::string(s)) {}
Value::Value(std::string_view s) : data_(std::string(s)) {}
Value::Value(std::string s) : data_(std::move(s)) {}
Value::Value(Array a) : data_(std::move(a)) {}
Value::Value(Object o) : data_(std::move(o)) {}

Value Value::number_from_text(std::string text) {
  Value v;
  v.data_ = Number{std::move(text)};
  return v;
}

// Calls f on each child, as a mutable Value.
template <class F>
void Value::each_child(F&& f) {
  if (auto* array = std::get_if<Array>(&data_)) {
    for (Value& v : *array) f(v);
  } else if (auto* object = std::get_if<Object>(&data_)) {
    for (const auto& member : *object) f(const_cast<Value&>(member.second));
  }
}

Value::Value(const Value& other) {
  std::vector<std::pair<const Value*, Value*>> pending{{&other, this}};
  while (!pending.empty()) {
    const auto [from, to] = pending.back();
    pending.pop_back();
    if (from->is_array()) {
      const Array& source = from->as_array();
      Array& copy = to->data_.emplace<Array>(source.size());
      for (size_t i = 0; i < copy.size(); ++i) pending.emplace_back(&source[i], &copy[i]);
    } else if (from->is_object()) {
      Object& copy = to->data_.emplace<Object>();
      copy.reserve(from->as_object().size());
      for (const auto& [key, value] : from->as_object()) {
        pending.emplace_back(&value, &copy[key]);
      }
    } else if (const auto* number = std::get_if<Number>(&from->data_)) {
      to->data_ = *number;
    } else if (from->is_string()) {
      to->data_ = from->as_string();
    } else if (from->is_bool()) {
      to->data_ = from->as_bool();
    }
  }
}

Value::Value(Value&& other) noexcept : data_(std::move(other.data_)) {}

Value& Value::operator=(const Value& other) {
  if (this != &other) *this = Value(other);
  return *this;
}

Value& Value::operator=(Value&& other) noexcept {
  // Goes through a third value, because `other` may be inside *this.
  Value taken(std::move(other));
  data_.swap(taken.data_);
  return *this;
}

Value::~Value() {
  std::vector<Value> pending;
  const auto take_containers = [&](Value& child) {
    if (child.is_array() || child.is_object()) pending.push_back(std::move(child));
  };
  each_child(take_containers);
  while (!pending.empty()) {
    Value v = std::move(pending.back());
    pending.pop_back();
    v.each_child(take_containers);
    v.data_ = std::monostate{};
  }
}

bool Value::is_integer() const {
  return is_number() && number_text().find_first_of(".eEn") == std::string::npos;
}

bool Value::as_bool() const {
  FRESHET_CHECK(is_bool());
  return std::get<bool>(data_);
}
const std::string& Value::as_string() const {
  FRESHET_CHECK(is_string());
  return std::get<std::string>(data_);
}
const std::string& Value::number_text() const {
  FRESHET_CHECK(is_number());
  return std::get<Number>(data_).text;
}
const Array& Value::as_array() const {
  FRESHET_CHECK(is_array());
  return std::get<Array>(data_);
}
Array& Value::as_array() {
  FRESHET_CHECK(is_array());
  return std::get<Array>(data_);
}
const Object& Value::as_object() const {
  FRESHET_CHECK(is_object());
  return std::get<Object>(data_);
}
Object& Value::as_object() {
  FRESHET_CHECK(is_object());
  return std::get<Object>(data_);
}

namespace {

// The rounded value of a number outside double's range: 0 or infinity, by the position of its first
// digit.
double beyond_range(std::string_view text) {
  const bool negative = text.front() == '-';
  const size_t e = text.find_first_of("eE");
  const std::string_view mantissa = text.substr(negative ? 1 : 0, e - (negative ? 1 : 0));
  const size_t dot = std::min(mantissa.find('.'), mantissa.size());
  const size_t first = mantissa.find_first_of("123456789");
  const auto place = static_cast<int64_t>(dot) - static_cast<int64_t>(first);
  int64_t exponent = 0;
  if (e != std::string_view::npos) {
    const char* begin = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
    const auto [end, error] = std::from_chars(begin, text.data() + text.size(), exponent);
    if (error != std::errc()) exponent = *begin == '-' ? -(int64_t{1} << 62) : int64_t{1} << 62;
  }
  const double size = place + exponent > 0 ? std::numeric_limits<double>::infinity() : 0.0;
  return negative ? -size : size;
}

}  // namespace

double Value::as_double() const {
  const std::string& text = number_text();
  double d = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), d);
  return error == std::errc::result_out_of_range ? beyond_range(text) : d;
}

std::optional<int64_t> Value::as_int64() const {
  const std::string& text = number_text();
  int64_t i = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), i);
  if (error == std::errc() && end == text.data() + text.size()) return i;
  if (is_integer()) return std::nullopt;
  const double d = as_double();
  if (!(d >= -0x1p63 && d < 0x1p63) || d != std::trunc(d)) return std::nullopt;
  return static_cast<int64_t>(d);
}

const Value* Value::find(std::string_view key) const {
  return is_object() ? as_object().find(key) : nullptr;
}
bool Value::get_bool(std::string_view key, bool fallback) const {
  const Value* v = find(key);
  return v != nullptr && v->is_bool() ? v->as_bool() : fallback;
}
int64_t Value::get_int(std::string_view key, int64_t fallback) const {
  const Value* v = find(key);
  return v != nullptr && v->is_number() ? v->as_int64().value_or(fallback) : fallback;
}
double Value::get_double(std::string_view key, double fallback) const {
  const Value* v = find(key);
  return v != nullptr && v->is_number() ? v->as_double() : fallback;
}
std::string Value::get_string(std::string_view key, std::string_view fallback) const {
  const Value* v = find(key);
  return v != nullptr && v->is_string() ? v->as_string() : std::string(fallback);
}

namespace {
bool same_number(const Value& a, const Value& b) {
  if (a.number_text() == b.number_text()) return true;
  const auto i = a.as_int64();
  const auto j = b.as_int64();
  if (i.has_value() || j.has_value()) return i == j;
  return a.as_double() == b.as_double();
}
}  // namespace

bool Value::operator==(const Value& other) const {
  std::vector<std::pair<const Value*, const Value*>> pending{{this, &other}};
  while (!pending.empty()) {
    const auto [a, b] = pending.back();
    pending.pop_back();
    if (a->type() != b->type()) return false;
    if (a->is_bool() && a->as_bool() != b->as_bool()) return false;
    if (a->is_string() && a->as_string() != b->as_string()) return false;
    if (a->is_number() && !same_number(*a, *b)) return false;
    if (a->is_array()) {
      if (a->as_array().size() != b->as_array().size()) return false;
      for (size_t i = 0; i < a->as_array().size(); ++i) {
        pending.emplace_back(&a->as_array()[i], &b->as_array()[i]);
      }
    } else if (a->is_object()) {
      if (a->as_object().size() != b->as_object().size()) return false;
      for (const auto& [key, value] : a->as_object()) {
        const Value* match = b->find(key);
        if (match == nullptr) return false;
        pending.emplace_back(&value, match);
      }
    }
  }
  return true;
}

std::string number_text(double v) {
  if (std::isnan(v)) return "nan";
  if (std::isinf(v)) return v < 0 ? "-inf" : "inf";
  char buffer[32];
  const auto [end, error] =
      std::to_chars(buffer, buffer + sizeof buffer, v, std::chars_format::scientific);
  std::string_view s(buffer, static_cast<size_t>(end - buffer));
  std::string out;
  if (s.front() == '-') {
    out = "-";
    s.remove_prefix(1);
  }
  const size_t e = s.find('e');
  int exponent = 0;
  std::from_chars(s.data() + e + (s[e + 1] == '+' ? 2 : 1), s.data() + s.size(), exponent);
  std::string digits(1, s[0]);
  if (e > 2) digits += s.substr(2, e - 2);
  if (exponent < -4 || exponent >= 16) return out + std::string(s);
  if (exponent < 0)
    return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

}  // namespace freshet::json
