// What a request's choice of sparse_attention means for a model's cache. Pure.
#pragma once

#include "freshet/engine.h"
#include "kv_cache/kv_storage.h"
#include "kv_cache/sparse_attention.h"

namespace freshet::engine {

// The request's own choice, or else `usual`. Requests for embeddings have no use for the usual one.
// Errors name the key of the JSON object.
Result<kv_cache::SparseAttention> sparse_of(const Request& request,
                                            const kv_cache::SparseAttention& usual);

// An engine's own choice, from EngineOptions::sparse_attention. The blocks of `cache` get what it
// needs. `sees`: the model has a tower for pictures, whose rows may attend to one another.
// Errors: no layer can read selectively, or the model or another option forbids it.
Result<kv_cache::SparseAttention> usual_sparse(const EngineOptions& options, bool on_device,
                                               bool sees, KvCacheSpec& cache);

}  // namespace freshet::engine
