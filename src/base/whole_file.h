// Writing a file as a whole: readers see the old file or the new one, never a part of it.
//
// The bytes go to a file beside it ("PATH.PID.partial"), which then takes its name; an existing
// file's permissions are kept. After an error the file is as it was, and the one beside it is gone.
// A link is replaced by a file. Errors name the path and the reason. Thread-safe for different
// paths.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet {

enum class Durable { kNo, kYes };  // whether the bytes are on the disk before the name is

Status write_whole_file(const std::string& path, std::span<const std::span<const uint8_t>> pieces,
                        Durable durable = Durable::kYes);
Status write_whole_file(const std::string& path, std::string_view text,
                        Durable durable = Durable::kYes);

}  // namespace freshet
