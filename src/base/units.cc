#include "base/units.h"

#include <fmt/format.h>

namespace freshet {

std::string format_bytes(size_t bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes >= size_t{1} << 30) return fmt::format("{:.1f} GiB", b / (1 << 30));
  if (bytes >= size_t{10} << 20) return fmt::format("{:.0f} MiB", b / (1 << 20));
  if (bytes >= size_t{1} << 20) return fmt::format("{:.1f} MiB", b / (1 << 20));
  if (bytes >= 1024) return fmt::format("{:.0f} KiB", b / 1024);
  return fmt::format("{} byte{}", bytes, bytes == 1 ? "" : "s");
}

}  // namespace freshet
