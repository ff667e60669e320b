// The languages that Whisper knows, by code and by English name. Pure.
#pragma once

#include <string_view>

namespace freshet::speech {

// The code of a language given by its code or its name, in any case; "" if it is not known.
std::string_view language_code(std::string_view language);
// The name of a code; the code itself if it is not known.
std::string_view language_name(std::string_view code);

}  // namespace freshet::speech
