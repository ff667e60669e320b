// Arbitrary-size integers as in Python: sign and magnitude.
//
// A value type for the rare numbers beyond 64 bits: simple algorithms, quadratic in the number of
// digits. Numbers of more than kMaxDigits decimal digits are an Error, so that no template can keep
// a CPU busy with them; Python refuses to print such numbers, too.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace freshet::jinja {

class BigInt {
 public:
  static constexpr size_t kMaxDigits = 4300;

  BigInt() = default;
  explicit BigInt(int64_t v);
  static BigInt from_double(double v);  // truncated. REQUIRES: finite
  // Digits of the base, 2 to 36, with an optional sign; nullopt if the text is not such a number.
  static std::optional<BigInt> parse(std::string_view text, int base = 10);

  std::optional<int64_t> to_int64() const;
  double to_double() const;  // the nearest float; infinite if out of range
  bool negative() const { return negative_; }
  std::string magnitude_text(int base = 10) const;
  std::string text() const { return (negative_ ? "-" : "") + magnitude_text(); }

  BigInt operator-() const;
  BigInt operator+(const BigInt& b) const;
  BigInt operator-(const BigInt& b) const { return *this + -b; }
  BigInt operator*(const BigInt& b) const;
  // The quotient rounded down, and the remainder, which has the sign of b. REQUIRES: b is not 0.
  std::pair<BigInt, BigInt> floor_div(const BigInt& b) const;
  BigInt pow(uint64_t exponent) const;
  // The float nearest to the quotient; infinite if out of range. REQUIRES: b is not 0.
  double divided_by(const BigInt& b) const;
  bool is_zero() const { return limbs_.empty(); }
  std::strong_ordering operator<=>(const BigInt& b) const;
  bool operator==(const BigInt& b) const = default;

 private:
  void trim();
  static int compare_magnitudes(const BigInt& a, const BigInt& b);
  void subtract_magnitude(const BigInt& b);  // REQUIRES: b is not larger than this magnitude
  void multiply_add(uint32_t factor, uint32_t addend);
  uint32_t divide_by(uint32_t divisor);  // returns the remainder
  size_t bits() const;
  bool bit(size_t i) const { return ((limbs_[i / 32] >> (i % 32)) & 1) != 0; }

  bool negative_ = false;        // never set for 0
  std::vector<uint32_t> limbs_;  // least significant first; the last one is not 0
};

}  // namespace freshet::jinja
