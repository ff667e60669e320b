// Cached prefixes as files of their own: llama-server's save, restore and erase of a slot.
//
// A file is a block log (kv_cache/block_log.h) whose first record holds the tokens; the others are
// their blocks, numbered in their keys. It has whole blocks only. The blocks are read and written
// on the caller's thread, while a table holds them; the step thread only takes and releases them.
// Any thread but the step thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/step_loop.h"
#include "freshet/engine.h"

namespace freshet::engine {

// As Engine::save_prefix() and the others.
Result<PrefixFile> save_prefix(StepLoop& loop, const std::string& identity,
                               const std::vector<int32_t>& tokens, const std::string& salt,
                               const std::string& path);
Result<PrefixFile> restore_prefix(StepLoop& loop, const std::string& identity,
                                  const std::string& path, const std::string& salt);
int erase_prefix(StepLoop& loop, const std::vector<int32_t>& tokens, const std::string& salt);

}  // namespace freshet::engine
