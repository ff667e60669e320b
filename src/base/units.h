// Amounts as text, by one rule (docs/glossary.md): amounts of memory and files in binary units
// (KiB, MiB, GiB), rates in decimal ones (GB/s, GOP/s). Thread-safe.
#pragma once

#include <cstddef>
#include <string>

namespace freshet {

std::string format_bytes(size_t bytes);  // "9.1 GiB", "512 MiB", "20 bytes"

}  // namespace freshet
