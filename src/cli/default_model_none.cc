#include "cli/default_model.h"

namespace freshet::cli {

std::span<const uint8_t> default_model() {
  return {};
}

}  // namespace freshet::cli
