// The time for logs. Thread-safe.
#pragma once

#include <string>

namespace freshet {

std::string utc_now();  // "2026-11-28T09:30:00.123Z"

}  // namespace freshet
