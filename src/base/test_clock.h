// Clocks for tests with time limits: the CPU time of this process, which other programs do not
// lengthen, and whether the build is slow on purpose.
#pragma once

#include <ctime>

namespace freshet {

// Sanitizers and unoptimised builds are slow.
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
inline constexpr bool kSlowBuild = false;
#else
inline constexpr bool kSlowBuild = true;
#endif

inline double cpu_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

}  // namespace freshet
