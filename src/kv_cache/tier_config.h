// What the options say about tiers below the cache.
//
// vLLM's spelling: --kv-offloading-size, and --kv-transfer-config with an OffloadingConnector,
// whose fields are honoured or refused by name. Pure functions.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace freshet::kv_cache {

struct TierConfig {
  size_t host_bytes = 0;  // 0: only what the disk tier needs as a buffer
  std::string policy = "lru";
  bool prompt_only = false;  // output tokens are not stored
  std::string folder;        // of the disk tier; "": none
  size_t folder_bytes = size_t{10} << 30;
  int readers = 2;
  bool wanted() const { return host_bytes > 0 || !folder.empty(); }
};

// Reads the JSON of --kv-transfer-config into `config`. Errors: kInvalidArgument, kUnsupported.
Status read_transfer_config(const std::string& text, TierConfig& config);

}  // namespace freshet::kv_cache
