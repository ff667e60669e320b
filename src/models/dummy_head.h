// An EAGLE-3 head of random weights, for measuring shapes without their files (dummy.h).
//
// It reads three states of the target and has a head of its own for 32,000 tokens, or for all if
// the target has fewer. Immutable inputs; thread-safe.
#pragma once

#include "base/json.h"
#include "models/draft_heads.h"
#include "models/dummy.h"

namespace freshet::models {

// `config`: the head's config.json, or null for a layer of the target's shape.
Result<HeadPlan> plan_dummy_head(const json::Value& config, const ModelSpec& target,
                                 DummyFormat format, ops::Ops& ops);
// `target`: the loaded target, whose embedding is shared.
Result<DraftHead> dummy_head(const json::Value& config, const Model& target, DummyFormat format,
                             ops::Ops& ops);

}  // namespace freshet::models
