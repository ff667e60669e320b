// The platform of this build.
#pragma once

namespace freshet {

#if defined(__aarch64__)
inline constexpr bool kArm64 = true;
#else
inline constexpr bool kArm64 = false;
#endif

}  // namespace freshet
