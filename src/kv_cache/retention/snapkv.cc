// SnapKV (arXiv:2404.14469): at the end of the prompt, keeps the keys with the largest weights in
// its last queries, pooled along the sequence, and these last tokens.
#include "kv_cache/retention/pooled.h"

namespace freshet::kv_cache {

constinit const RetentionKind kSnapKv = {
    "snapkv",
    "window kernel sinks interval",
    {.window = 16, .kernel = 13},
    [](const RetentionConfig& c) { return Retention(std::make_shared<PooledWindowPolicy>(c)); }};

}  // namespace freshet::kv_cache
