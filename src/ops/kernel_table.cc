#include "ops/kernel_table.h"

#include <array>

#include "base/platform.h"

namespace freshet::ops {
namespace {
constexpr std::array<std::string_view, 8> kIsaNames = {"scalar",     "avx2", "avxvnni", "avx512",
                                                       "avx512vnni", "amx",  "neon",    "neondot"};

constexpr bool is_arm(CpuIsa isa) {
  return isa >= CpuIsa::kNeon;
}
}  // namespace

std::string_view name_of(CpuIsa isa) {
  return kIsaNames[static_cast<size_t>(isa)];
}

Result<CpuIsa> isa_by_name(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kIsaNames.size(); ++i) {
    const auto isa = static_cast<CpuIsa>(i);
    if (isa != CpuIsa::kScalar && is_arm(isa) != kArm64) continue;
    if (kIsaNames[i] == name) return isa;
    known += fmt::format(" {}", kIsaNames[i]);
  }
  return invalid_argument("unknown instruction set \"{}\"; known:{}", name, known);
}

bool Capabilities::has(CpuIsa needed) const {
  if (needed == CpuIsa::kScalar) return true;
  if (is_arm(needed) != is_arm(isa)) return false;
  return needed == CpuIsa::kAvxVnni ? avx_vnni : needed <= isa;
}

}  // namespace freshet::ops
