// Clocks for tests that bound time: processor time of this process, which other programs on the
// machine do not lengthen, and whether the build is one that is slow on purpose.
#pragma once

#include <ctime>

namespace freshet {

// Sanitizers and unoptimised builds take their time.
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
inline constexpr bool kSlowBuild = false;
#else
inline constexpr bool kSlowBuild = true;
#endif

inline double cpu_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

}  // namespace freshet
