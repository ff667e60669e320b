#include "backend/cpu/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#include <unistd.h>
#endif

namespace freshet::cpu {

using ops::Capabilities;
using ops::CpuIsa;

namespace {

#if defined(__x86_64__)

struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned sub) {
  Leaf l;
  if (!__get_cpuid_count(leaf, sub, &l.eax, &l.ebx, &l.ecx, &l.edx)) return {};
  return l;
}

bool bit(unsigned word, int n) {
  return (word >> n & 1) != 0;
}

// Which register files the system saves. Uses the instruction itself, because the intrinsic would
// need -mxsave for this file.
uint64_t saved_state() {
  unsigned lo = 0, hi = 0;
  asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return uint64_t{hi} << 32 | lo;
}

// Linux grants the tiles' large state only on request (for all later threads of the process).
bool tiles_permitted() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

int l2_bytes() {
  for (unsigned i = 0; i < 16; ++i) {
    const Leaf l = cpuid(4, i);
    if ((l.eax & 31) == 0) break;
    if ((l.eax >> 5 & 7) != 2) continue;
    const uint64_t line = (l.ebx & 0xfff) + 1, parts = (l.ebx >> 12 & 0x3ff) + 1,
                   ways = (l.ebx >> 22) + 1, sets = uint64_t{l.ecx} + 1;
    return static_cast<int>(line * parts * ways * sets);
  }
  const int kib = static_cast<int>(cpuid(0x80000006, 0).ecx >> 16);  // AMD
  return kib > 0 ? kib << 10 : 1 << 20;
}

Capabilities probe(CpuIsa limit) {
  Capabilities c;
  c.l2_bytes = l2_bytes();
  const Leaf l1 = cpuid(1, 0), l7 = cpuid(7, 0), l71 = cpuid(7, 1);
  if (!bit(l1.ecx, 27)) return c;  // OSXSAVE
  const uint64_t state = saved_state();
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6;
  const bool avx2 = ymm && bit(l1.ecx, 28) && bit(l1.ecx, 12) && bit(l1.ecx, 29) && bit(l7.ebx, 5);
  if (!avx2 || limit < CpuIsa::kAvx2) return c;
  c.isa = CpuIsa::kAvx2;
  c.avx_vnni = limit >= CpuIsa::kAvxVnni && bit(l71.eax, 4);
  if (c.avx_vnni) c.isa = CpuIsa::kAvxVnni;
  const bool avx512 =
      zmm && bit(l7.ebx, 16) && bit(l7.ebx, 17) && bit(l7.ebx, 30) && bit(l7.ebx, 31);
  if (!avx512 || limit < CpuIsa::kAvx512) return c;
  c.isa = CpuIsa::kAvx512;
  if (!bit(l7.ecx, 11) || limit < CpuIsa::kAvx512Vnni) return c;
  c.isa = CpuIsa::kAvx512Vnni;
  c.avx512_bf16 = bit(l71.eax, 5);
  const bool tiles =
      bit(l7.edx, 24) && bit(l7.edx, 25) && bit(l7.edx, 22) && (state >> 17 & 3) == 3;
  const bool gfni_vbmi = bit(l7.ecx, 8) && bit(l7.ecx, 1);  // present wherever tiles are
  if (tiles && gfni_vbmi && limit >= CpuIsa::kAmx && tiles_permitted()) c.isa = CpuIsa::kAmx;
  return c;
}

#elif defined(__aarch64__)

Capabilities probe(CpuIsa limit) {
  constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  Capabilities c;
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (l2 > 0) c.l2_bytes = static_cast<int>(l2);
  if (limit < CpuIsa::kNeon) return c;
  c.isa = CpuIsa::kNeon;
  if (limit >= CpuIsa::kNeonDot && (::getauxval(AT_HWCAP) & kDotProducts) != 0) {
    c.isa = CpuIsa::kNeonDot;
  }
  return c;
}

#else

Capabilities probe(CpuIsa) {
  return {};
}

#endif

}  // namespace

Capabilities detect(CpuIsa limit) {
  return probe(limit);
}

}  // namespace freshet::cpu
