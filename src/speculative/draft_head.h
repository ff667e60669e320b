// Draft heads by method: eagle, eagle3, mtp and dflash (models/draft_heads.h).
#pragma once

#include <optional>
#include <string_view>

#include "models/draft_heads.h"
#include "speculative/config.h"

namespace freshet::speculative {

// Empty: the method's drafter is no such head.
std::optional<models::HeadKind> head_kind(std::string_view method);

// The checkpoint that holds the head, or nothing for an MTP layer that is a part of the target's.
Result<std::optional<loader::Checkpoint>> open_head(const Config& config);

}  // namespace freshet::speculative
