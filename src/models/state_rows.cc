#include "models/state_rows.h"

namespace freshet::models {
namespace {

void append(std::vector<int64_t>& order, int64_t first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) order.push_back(first + i);
}

}  // namespace

std::vector<int64_t> rows_by_part(int64_t heads, std::initializer_list<int64_t> sizes) {
  int64_t each = 0;
  for (const int64_t size : sizes) each += size;
  std::vector<int64_t> order;
  int64_t first = 0;
  for (const int64_t size : sizes) {
    for (int64_t h = 0; h < heads; ++h) append(order, h * each + first, size);
    first += size;
  }
  return order;
}

std::vector<int64_t> tiled_rows(int64_t key_heads, int64_t ratio, int64_t size, int64_t before) {
  std::vector<int64_t> order;
  append(order, 0, before);
  for (int64_t r = 0; r < ratio; ++r) {
    for (int64_t g = 0; g < key_heads; ++g) append(order, before + (g * ratio + r) * size, size);
  }
  return order;
}

}  // namespace freshet::models
