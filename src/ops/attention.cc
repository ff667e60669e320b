#include "ops/attention.h"

namespace freshet::ops {

size_t KvShape::head_bytes() const {
  size_t token = stored_bytes(info(type).key, key_dim);
  if (!value_is_key_prefix) token += stored_bytes(info(type).value, value_dim);
  return kBlockTokens * token;
}

size_t KvShape::bounds_at() const {
  return (static_cast<size_t>(kv_heads) * head_bytes() + 63) / 64 * 64;
}

size_t KvShape::sums_at() const {
  if (!bounded) return bounds_at();
  const size_t bounds = sizeof(uint16_t) * 2 * static_cast<size_t>(kv_heads * key_dim);
  return bounds_at() + (bounds + 63) / 64 * 64;
}

size_t KvShape::block_bytes() const {
  if (!summed) return sums_at();
  const size_t sums = sizeof(float) * static_cast<size_t>(kv_heads * value_dim);
  return sums_at() + (sums + 63) / 64 * 64;
}

Status check_shape(const KvShape& shape) {
  if (!shape.value_is_key_prefix || !has_int4(shape.type)) return {};
  return unsupported(
      "latent attention (MLA) does not keep keys and values in {}: use --kv-cache-dtype int8",
      name_of(shape.type));
}

size_t KvShape::id_bytes() const {
  return nested ? kNestedUnit : block_bytes();
}

KvShape coarse_shape(const KvShape& fine) {
  KvShape coarse{KvType::kInt4, fine.kv_heads, fine.key_dim, fine.value_dim};
  coarse.nested = true;
  return coarse;
}

int32_t coarse_parts(const KvShape& fine) {
  if (fine.value_is_key_prefix) return 0;
  return static_cast<int32_t>(fine.block_bytes() / coarse_shape(fine).block_bytes());
}

}  // namespace freshet::ops
