// Base64 (RFC 4648, the standard alphabet), decoding only. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace freshet::tokenizer {

// nullopt if `text` is not Base64. Padding is optional.
std::optional<std::string> decode_base64(std::string_view text);

}  // namespace freshet::tokenizer
