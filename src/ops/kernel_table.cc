#include "ops/kernel_table.h"

#include <array>

namespace freshet::ops {
namespace {
constexpr std::array<std::string_view, 6> kIsaNames = {"scalar", "avx2",       "avxvnni",
                                                       "avx512", "avx512vnni", "amx"};
}

std::string_view name_of(CpuIsa isa) {
  return kIsaNames[static_cast<size_t>(isa)];
}

Result<CpuIsa> isa_by_name(std::string_view name) {
  for (size_t i = 0; i < kIsaNames.size(); ++i) {
    if (kIsaNames[i] == name) return static_cast<CpuIsa>(i);
  }
  return invalid_argument(
      "unknown instruction set \"{}\"; known: scalar avx2 avxvnni avx512 avx512vnni amx", name);
}

bool Capabilities::has(CpuIsa needed) const {
  return needed == CpuIsa::kAvxVnni ? avx_vnni : needed <= isa;
}

}  // namespace freshet::ops
