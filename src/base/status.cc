#include "base/status.h"

#include <cstdio>
#include <cstdlib>

namespace freshet {

void check_failed(const char* expression, const char* file, int line, const std::string& detail) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s%s%s\n", file, line, expression,
               detail.empty() ? "" : ": ", detail.c_str());
  std::abort();
}

}  // namespace freshet
