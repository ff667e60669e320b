#include "engine/sparse.h"

namespace freshet::engine {

Result<kv_cache::SparseAttention> sparse_of(const Request& request,
                                            const kv_cache::SparseAttention& usual) {
  if (!request.sparse_attention.empty())
    return kv_cache::make_sparse_attention(request.sparse_attention);
  return request.pooling != Pooling::kNone ? kv_cache::SparseAttention{} : usual;
}

namespace {

// Why no query of the model can read selectively.
Status check_selectable(const KvCacheSpec& cache, const kv_cache::SparseAttention& sparse) {
  if (cache.state_group() >= 0)
    return unsupported(
        "--sparse-attention does not go with models with states (state-space or linear attention)");
  bool two_way = false, biased = false, latent = false, any = false, packed = false;
  for (size_t g = 0; g < cache.groups.size(); ++g) {
    const KvGroup& group = cache.groups[g];
    if (group.cross > 0) return unsupported("--sparse-attention does not go with encoder-decoders");
    two_way = two_way || group.two_way;
    any = any || cache.may_select(static_cast<int>(g));
    for (const int layer : group.layers) {
      const ops::KvShape& shape = cache.layers[static_cast<size_t>(layer)].shape;
      biased = biased || shape.biased;
      packed = packed || ops::has_int4(shape.type);
      latent = latent || shape.value_is_key_prefix;
    }
  }
  if (any && packed && sparse.policy == kv_cache::SparsePolicy::kSparq) {
    return unsupported(
        "--sparse-attention: sparq does not read a cache of 4 bits; use quest, or another "
        "--kv-cache-dtype");
  }
  if (any) return {};
  if (two_way) return unsupported("--sparse-attention does not go with models that read both ways");
  if (biased)
    return unsupported("--sparse-attention does not go with models with a bias by distance");
  if (latent) return unsupported("--sparse-attention does not go with latent attention (MLA)");
  return unsupported("--sparse-attention: no layer of this model attends to all tokens");
}

}  // namespace

Result<kv_cache::SparseAttention> usual_sparse(const EngineOptions& options, bool on_device,
                                               bool sees, KvCacheSpec& cache) {
  if (options.sparse_attention.empty()) return kv_cache::SparseAttention{};
  FRESHET_ASSIGN_OR_RETURN(const auto sparse,
                           kv_cache::make_sparse_attention(options.sparse_attention));
  if (!sparse.selects()) return sparse;
  if (on_device) return unsupported("--sparse-attention needs the CPU; use --device cpu");
  if (!options.kv_eviction.empty())
    return invalid_argument("--sparse-attention does not go with --kv-eviction");
  if (sees) return unsupported("--sparse-attention does not go with models that read pictures");
  FRESHET_RETURN_IF_ERROR(check_selectable(cache, sparse));
  if (sparse.policy == kv_cache::SparsePolicy::kQuest) cache = with_bounds(cache);
  if (sparse.policy == kv_cache::SparsePolicy::kSparq) cache = with_sums(cache);
  return sparse;
}

}  // namespace freshet::engine
