// Checks of SamplingParams (declared in freshet/engine.h). Pure.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "freshet/engine.h"

namespace freshet {

// The first thing that is wrong with `params` for a model of `vocab` tokens; ok when nothing is.
Status validate(const SamplingParams& params, int64_t vocab);

}  // namespace freshet
