// A stable sort that is safe with any comparison: also one that throws or is not an ordering, such
// as Python's < with a NaN.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

namespace freshet::jinja {

template <class T, class Less>
void merge_sort(std::vector<T>& v, Less less) {
  std::vector<T> other(v.size());
  for (size_t width = 1; width < v.size(); width *= 2) {
    for (size_t start = 0; start < v.size(); start += 2 * width) {
      size_t a = start;
      const size_t a_end = std::min(start + width, v.size());
      size_t b = a_end;
      const size_t b_end = std::min(start + 2 * width, v.size());
      for (size_t out = start; out < b_end; ++out) {
        const bool take_b = b < b_end && (a == a_end || less(v[b], v[a]));
        other[out] = take_b ? v[b++] : v[a++];
      }
    }
    std::swap(v, other);
  }
}

}  // namespace freshet::jinja
