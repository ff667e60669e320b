// Finds out how a draft head was trained: which states of the target it reads, and how.
//
// A head that is wired differently from its training still runs, and drafts badly. So each way that
// occurs in published heads is tried on texts: the head is given the texts' own tokens and the
// target's states, and counts as right where its best token is the target's best token for the same
// place. Blocks the calling thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "models/draft_heads.h"
#include "runtime/loaded_model.h"
#include "speculative/config.h"

namespace freshet::eval {

struct WiringVariant {
  std::string name;
  models::HeadOverrides overrides;
  double acceptance = 0.0;  // share of first drafts that are right
  std::string error;        // why it could not be tried
};

struct Wiring {
  std::vector<WiringVariant> variants;  // the first is the configured one
  // The one that fits best: another than the first only if it is better beyond chance.
  size_t best = 0;
  int64_t drafts = 0;  // of each variant
};

struct WiringOptions {
  runtime::LoadOptions loading;  // of the target
  std::string kv_cache_dtype = "auto";
  std::vector<std::vector<int32_t>> texts;       // ids; of at most 512 each the rest is not used
  std::function<bool(double fraction)> goes_on;  // false: stop
};

// REQUIRES: the method is a draft head's (speculative::head_kind()).
Result<Wiring> diagnose_wiring(const speculative::Config& config, const WiringOptions& options);

}  // namespace freshet::eval
