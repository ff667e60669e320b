#include "loader/tensor_source.h"

namespace freshet::loader {

std::optional<int64_t> checked_product(const std::vector<int64_t>& shape) {
  // A zero dimension must not hide an overflow: strides are computed from the other dimensions.
  int64_t product = 1;
  bool empty = false;
  for (const int64_t d : shape) {
    if (d < 0) return std::nullopt;
    if (d == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, d, &product)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : product;
}

int64_t TensorSource::elements() const {
  const auto n = checked_product(shape);
  FRESHET_CHECK(n.has_value(), "tensor '{}' was listed with an impossible shape", name);
  return *n;
}

Result<quant::Format> TensorSource::usable_format() const {
  if (format) return *format;
  return unsupported("tensor '{}' has type {}, which is not supported", name, dtype);
}

}  // namespace freshet::loader
