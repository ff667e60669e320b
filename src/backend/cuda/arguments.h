// Converts arguments of ops to arguments of the plug-in's table. Pure functions.
#pragma once

#include "backend/cuda/api.h"
#include "ops/ops.h"

namespace freshet::cuda {

// kCount: the plug-in has no GEMM for this format.
inline Code code_of(quant::Format format) {
  switch (format) {
    case quant::Format::kF32:
      return Code::kF32;
    case quant::Format::kF16:
      return Code::kF16;
    case quant::Format::kBF16:
      return Code::kBF16;
    case quant::Format::kFP8:
      return Code::kFP8;
    case quant::Format::kINT8:
      return Code::kInt8;
    case quant::Format::kQ8_0:
      return Code::kQ8_0;
    case quant::Format::kQ4_0:
      return Code::kQ4_0;
    case quant::Format::kQ4_K:
      return Code::kQ4_K;
    case quant::Format::kQ6_K:
      return Code::kQ6_K;
    case quant::Format::kMXFP4:
      return Code::kMXFP4;
    case quant::Format::kQ4_1:
      return Code::kQ4_1;
    case quant::Format::kQ5_0:
      return Code::kQ5_0;
    case quant::Format::kQ5_1:
      return Code::kQ5_1;
    case quant::Format::kIQ4_NL:
      return Code::kIQ4_NL;
    case quant::Format::kIQ4_XS:
      return Code::kIQ4_XS;
    case quant::Format::kQ2_K:
      return Code::kQ2_K;
    case quant::Format::kQ3_K:
      return Code::kQ3_K;
    case quant::Format::kQ5_K:
      return Code::kQ5_K;
    case quant::Format::kInt4G128:
      return Code::kInt4G128;
    case quant::Format::kInt4G32:
      return Code::kInt4G32;
    case quant::Format::kMXFP8:
    case quant::Format::kFP8G32:
    case quant::Format::kNF4:
    case quant::Format::kFP4:
    case quant::Format::kNVFP4:
    case quant::Format::kInt2G128:
    case quant::Format::kInt2G32:
    case quant::Format::kInt3G128:
    case quant::Format::kInt3G32:
    case quant::Format::kInt8G128:
    case quant::Format::kInt8G32:
    case quant::Format::kIQ1_S:
    case quant::Format::kIQ1_M:
    case quant::Format::kIQ2_XXS:
    case quant::Format::kIQ2_XS:
    case quant::Format::kIQ2_S:
    case quant::Format::kIQ3_XXS:
    case quant::Format::kIQ3_S:
    case quant::Format::kTQ1_0:
    case quant::Format::kTQ2_0:
      break;
  }
  return Code::kCount;
}

inline Rows rows_of(const Matrix& m) {
  return {m.data, m.rows, m.cols, m.stride};
}

inline WeightView view_of(const ops::Weight& w) {
  return {w.packed.data(), w.rows, w.cols, code_of(w.format)};
}

inline NormArgs args_of(const ops::Norm& n) {
  return {n.weight, n.bias, n.eps, n.kind == ops::NormKind::kLayer};
}

inline GluArgs args_of(const ops::Glu& g) {
  return {static_cast<int32_t>(g.activation), g.limit, g.alpha};
}

inline CacheType type_of(ops::KvType type) {
  if (type == ops::KvType::kFP8) return CacheType::kE4M3;
  if (type == ops::KvType::kInt8) return CacheType::kInt8;
  if (type == ops::KvType::kInt4) return CacheType::kInt4;
  if (type == ops::KvType::kK8V4) return CacheType::kK8V4;
  return type == ops::KvType::kBF16 ? CacheType::kBF16 : CacheType::kF16;
}

inline CacheArgs args_of(const ops::KvView& v) {
  const ops::KvShape& s = v.shape;
  return {v.data,         static_cast<int64_t>(s.block_bytes()),
          s.kv_heads,     s.key_dim,
          s.value_dim,    s.value_is_key_prefix,
          type_of(s.type)};
}

inline RoutingArgs args_of(const ops::Routing& r) {
  return {static_cast<int32_t>(r.score),
          r.experts,
          r.top_k,
          r.groups,
          r.top_groups,
          r.group_score_top,
          r.renormalize,
          r.correction,
          r.renormalize_eps,
          r.scale};
}

// The number of 32-column chunks in a row of fragments.
inline int64_t chunks_of(int64_t cols) {
  return (cols + kPadCols - 1) / kPadCols * (kPadCols / 32);
}

}  // namespace freshet::cuda
