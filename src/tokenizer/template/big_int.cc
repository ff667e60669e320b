#include "tokenizer/template/big_int.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/json.h"
#include "tokenizer/template/value.h"

namespace freshet::jinja {
namespace {

constexpr size_t kMaxBits = BigInt::kMaxDigits * 3322 / 1000;  // log2(10) bits per digit

void check_bits(size_t bits) {
  if (bits > kMaxBits) fail("an integer has more than {} digits", BigInt::kMaxDigits);
}

}  // namespace

BigInt::BigInt(int64_t v) : negative_(v < 0) {
  for (uint64_t m = v < 0 ? 0 - static_cast<uint64_t>(v) : static_cast<uint64_t>(v); m != 0;
       m >>= 32)
    limbs_.push_back(static_cast<uint32_t>(m));
}

BigInt BigInt::from_double(double v) {
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(std::trunc(v)), &exponent);
  BigInt out(static_cast<int64_t>(std::ldexp(fraction, 53)));  // times 2^(exponent - 53)
  for (; exponent > 53; --exponent) out.multiply_add(2, 0);
  for (; exponent < 53 && !out.is_zero(); ++exponent) out.divide_by(2);
  out.negative_ = v < 0 && !out.is_zero();
  return out;
}

std::optional<BigInt> BigInt::parse(std::string_view text, int base) {
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (text.empty()) return std::nullopt;
  check_bits(text.size());  // exact for base 2; an underestimate for other bases
  BigInt out;
  for (const char c : text) {
    const int digit = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'z' ? c - 'a' + 10
                      : c >= 'A' && c <= 'Z' ? c - 'A' + 10
                                             : 36;
    if (digit >= base) return std::nullopt;
    out.multiply_add(static_cast<uint32_t>(base), static_cast<uint32_t>(digit));
  }
  check_bits(out.bits());
  out.negative_ = negative && !out.is_zero();
  return out;
}

std::optional<int64_t> BigInt::to_int64() const {
  if (limbs_.size() > 2) return std::nullopt;
  uint64_t m = 0;
  for (size_t i = limbs_.size(); i-- > 0;) m = (m << 32) | limbs_[i];
  if (m > static_cast<uint64_t>(INT64_MAX) + (negative_ ? 1 : 0)) return std::nullopt;
  return static_cast<int64_t>(negative_ ? 0 - m : m);
}

double BigInt::to_double() const {
  return json::Value::number_from_text(text()).as_double();
}

std::string BigInt::magnitude_text(int base) const {
  if (is_zero()) return "0";
  BigInt rest = *this;
  std::string out;
  while (!rest.is_zero())
    out += "0123456789abcdefghijklmnopqrstuvwxyz"[rest.divide_by(static_cast<uint32_t>(base))];
  std::reverse(out.begin(), out.end());
  return out;
}

BigInt BigInt::operator-() const {
  BigInt out = *this;
  out.negative_ = !negative_ && !is_zero();
  return out;
}

BigInt BigInt::operator+(const BigInt& b) const {
  const bool this_is_larger = compare_magnitudes(*this, b) >= 0;
  BigInt out = this_is_larger ? *this : b;
  const BigInt& other = this_is_larger ? b : *this;
  if (negative_ != b.negative_) {
    out.subtract_magnitude(other);
    return out;
  }
  uint64_t carry = 0;
  for (size_t i = 0; i < other.limbs_.size() || carry != 0; ++i) {
    if (i == out.limbs_.size()) out.limbs_.push_back(0);
    carry += uint64_t{out.limbs_[i]} + (i < other.limbs_.size() ? other.limbs_[i] : 0);
    out.limbs_[i] = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  check_bits(out.bits());
  return out;
}

BigInt BigInt::operator*(const BigInt& b) const {
  check_bits(bits() + b.bits());
  BigInt out;
  out.limbs_.assign(limbs_.size() + b.limbs_.size(), 0);
  for (size_t i = 0; i < limbs_.size(); ++i) {
    uint64_t carry = 0;
    for (size_t j = 0; j < b.limbs_.size() || carry != 0; ++j) {
      carry += out.limbs_[i + j];
      if (j < b.limbs_.size()) carry += uint64_t{limbs_[i]} * b.limbs_[j];
      out.limbs_[i + j] = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
  }
  out.negative_ = negative_ != b.negative_;
  out.trim();
  return out;
}

std::pair<BigInt, BigInt> BigInt::floor_div(const BigInt& b) const {
  BigInt quotient, rest, divisor = b;
  divisor.negative_ = false;
  quotient.limbs_.assign(limbs_.size(), 0);
  for (size_t i = bits(); i-- > 0;) {  // long division, bit by bit
    rest.multiply_add(2, bit(i) ? 1 : 0);
    if (compare_magnitudes(rest, divisor) < 0) continue;
    rest.subtract_magnitude(divisor);
    quotient.limbs_[i / 32] |= uint32_t{1} << (i % 32);
  }
  quotient.negative_ = negative_ != b.negative_;
  quotient.trim();
  rest.negative_ = negative_;
  rest.trim();
  if (!rest.is_zero() && negative_ != b.negative_) {
    quotient = quotient - BigInt(1);
    rest = rest + b;
  }
  return {std::move(quotient), std::move(rest)};
}

BigInt BigInt::pow(uint64_t exponent) const {
  BigInt result(1), base = *this;
  if (bits() > 1) {
    if (exponent > kMaxBits) check_bits(kMaxBits + 1);
    check_bits((bits() - 1) * static_cast<size_t>(exponent));
  } else {
    exponent = exponent == 0 ? 0 : 2 - (exponent & 1);  // 0, 1 and -1
  }
  while (true) {
    if ((exponent & 1) != 0) result = result * base;
    exponent >>= 1;
    if (exponent == 0) return result;
    base = base * base;
  }
}

double BigInt::divided_by(const BigInt& b) const {
  // A quotient with some more bits than a float has; the last bit records a remainder.
  constexpr int kQuotientBits = 70;
  BigInt above = *this, below = b;
  above.negative_ = below.negative_ = false;
  const int shift = kQuotientBits + static_cast<int>(b.bits()) - static_cast<int>(bits());
  for (int i = 0; i < shift; ++i) above.multiply_add(2, 0);
  for (int i = 0; i < -shift; ++i) below.multiply_add(2, 0);
  auto [quotient, rest] = above.floor_div(below);
  if (!rest.is_zero() && !quotient.is_zero()) quotient.limbs_[0] |= 1;
  const double magnitude = std::ldexp(quotient.to_double(), -shift);
  return negative_ != b.negative_ ? -magnitude : magnitude;
}

std::strong_ordering BigInt::operator<=>(const BigInt& b) const {
  if (negative_ != b.negative_)
    return negative_ ? std::strong_ordering::less : std::strong_ordering::greater;
  const int c = compare_magnitudes(*this, b);
  return (negative_ ? -c : c) <=> 0;
}

void BigInt::trim() {
  while (!limbs_.empty() && limbs_.back() == 0) limbs_.pop_back();
  if (limbs_.empty()) negative_ = false;
}

int BigInt::compare_magnitudes(const BigInt& a, const BigInt& b) {
  if (a.limbs_.size() != b.limbs_.size()) return a.limbs_.size() < b.limbs_.size() ? -1 : 1;
  for (size_t i = a.limbs_.size(); i-- > 0;) {
    if (a.limbs_[i] != b.limbs_[i]) return a.limbs_[i] < b.limbs_[i] ? -1 : 1;
  }
  return 0;
}

void BigInt::subtract_magnitude(const BigInt& b) {
  int64_t borrow = 0;
  for (size_t i = 0; i < limbs_.size(); ++i) {
    borrow += int64_t{limbs_[i]} - (i < b.limbs_.size() ? int64_t{b.limbs_[i]} : 0);
    limbs_[i] = static_cast<uint32_t>(borrow);
    borrow >>= 32;
  }
  trim();
}

void BigInt::multiply_add(uint32_t factor, uint32_t addend) {
  uint64_t carry = addend;
  for (uint32_t& limb : limbs_) {
    carry += uint64_t{limb} * factor;
    limb = static_cast<uint32_t>(carry);
    carry >>= 32;
  }
  if (carry != 0) limbs_.push_back(static_cast<uint32_t>(carry));
}

uint32_t BigInt::divide_by(uint32_t divisor) {
  uint64_t rest = 0;
  for (size_t i = limbs_.size(); i-- > 0;) {
    rest = (rest << 32) | limbs_[i];
    limbs_[i] = static_cast<uint32_t>(rest / divisor);
    rest %= divisor;
  }
  trim();
  return static_cast<uint32_t>(rest);
}

size_t BigInt::bits() const {
  return limbs_.empty() ? 0
                        : limbs_.size() * 32 - static_cast<size_t>(std::countl_zero(limbs_.back()));
}

}  // namespace freshet::jinja
