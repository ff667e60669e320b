// Options of `serve` about pictures: where they may come from, and how many of them.
//
// add_media_options() declares them; media_options() checks what was given. Single-threaded.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "server/picture_parts.h"

namespace freshet::cli {

struct MediaFlags {
  std::vector<std::string> domains;
  std::string local_path;
  std::string limit_per_prompt;  // {"image": N}
  double fetch_timeout_s = 5.0;
  double cache_gib = 0.5;
};

void add_media_options(CLI::App& command, MediaFlags& flags);
// With a reader of what is not a data: URL.
Result<server::MediaOptions> media_options(const MediaFlags& flags);

}  // namespace freshet::cli
