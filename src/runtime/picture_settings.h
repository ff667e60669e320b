// How a model's pictures are made ready: the settings of its files' processor, from
// preprocessor_config.json or from the metadata of a GGUF model's tower. Reads files; thread-safe.
#pragma once

#include <optional>

#include "base/status.h"
#include "layers/spec.h"
#include "loader/checkpoint.h"
#include "media/image_settings.h"

namespace freshet::runtime {

Result<media::ImageSettings> picture_settings(const loader::Checkpoint& checkpoint);
// The same of a model that may have no tower in its files: nothing.
Result<std::optional<media::ImageSettings>> tower_settings(const loader::Checkpoint& checkpoint,
                                                           const ModelSpec& spec);

// The positions in the tower that memory is planned for: those of the largest picture that the
// processor makes, but of at most kPlannedRows rows and of `context` rows.
inline constexpr int64_t kPlannedRows = 4096;
int64_t planned_positions(const media::ImageSettings& settings, const VisionSpec& spec,
                          int64_t context);

}  // namespace freshet::runtime
