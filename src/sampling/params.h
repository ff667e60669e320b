// Checks of SamplingParams (declared in freshet/engine.h). Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "freshet/engine.h"

namespace freshet {

// An error of a field; the message is formatted with fmt.
template <class... Args>
RequestError wrong(std::string_view field, fmt::format_string<Args...> f, Args&&... args) {
  return {std::string(field), fmt::format(f, std::forward<Args>(args)...)};
}

// The first error in `params` for a model of `vocab` tokens, if any.
std::optional<RequestError> find_error(const SamplingParams& params, int64_t vocab);

}  // namespace freshet
