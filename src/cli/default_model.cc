#include "cli/default_model.h"

// FRESHET_DEFAULT_MODEL: the path of the file, set by CMake.
asm(".pushsection .rodata\n"
    ".balign 64\n"
    "freshet_default_model_begin:\n"
    ".incbin \"" FRESHET_DEFAULT_MODEL
    "\"\n"
    "freshet_default_model_end:\n"
    ".byte 0\n"
    ".popsection\n");

extern "C" {
extern const uint8_t freshet_default_model_begin[];
extern const uint8_t freshet_default_model_end[];
}

namespace freshet::cli {

std::span<const uint8_t> default_model() {
  return {freshet_default_model_begin, freshet_default_model_end};
}

}  // namespace freshet::cli
