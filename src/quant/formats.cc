#include <algorithm>
#include <array>
#include <cstring>

#include "base/status.h"
#include "quant/format.h"
#include "quant/fp8.h"
#include "quant/int4.h"
#include "quant/int8.h"
#include "quant/int_groups.h"
#include "quant/iq1_m.h"
#include "quant/iq1_s.h"
#include "quant/iq2_s.h"
#include "quant/iq2_xs.h"
#include "quant/iq2_xxs.h"
#include "quant/iq3_s.h"
#include "quant/iq3_xxs.h"
#include "quant/iq4_nl.h"
#include "quant/iq4_xs.h"
#include "quant/mxfp4.h"
#include "quant/mxfp8.h"
#include "quant/nf4.h"
#include "quant/nvfp4.h"
#include "quant/plain.h"
#include "quant/q2_k.h"
#include "quant/q3_k.h"
#include "quant/q4_0.h"
#include "quant/q4_1.h"
#include "quant/q4_k.h"
#include "quant/q5_0.h"
#include "quant/q5_1.h"
#include "quant/q5_k.h"
#include "quant/q6_k.h"
#include "quant/q8_0.h"
#include "quant/tq1_0.h"
#include "quant/tq2_0.h"

namespace freshet::quant {
namespace {

// Formats whose rows begin with a scale: they are decoded and encoded by row.
template <class F>
concept HasHead = requires { F::kHeadBytes; };

// Blocks are copied, because files do not align them.
template <class F>
void decode_part(const void* row, int64_t first, float* out, int64_t n) {
  FRESHET_CHECK(first % F::kBlockSize == 0 && n % F::kBlockSize == 0);
  const auto* from = static_cast<const uint8_t*>(row);
  if constexpr (HasHead<F>) {
    F::decode(from, first, out, n);
  } else {
    from += static_cast<size_t>(first / F::kBlockSize) * sizeof(typename F::Block);
    for (int64_t i = 0; i < n; i += F::kBlockSize, from += sizeof(typename F::Block)) {
      typename F::Block b;
      std::memcpy(&b, from, sizeof b);
      F::decode(b, out + i);
    }
  }
}

template <class F>
concept Encodes =
    HasHead<F> || requires(const float* x, typename F::Block& b) { F::encode(x, x, b); };

template <class F>
void encode_row(const float* in, void* row, int64_t n, const float* importance) {
  FRESHET_CHECK(n % F::kBlockSize == 0);
  auto* to = static_cast<uint8_t*>(row);
  if constexpr (HasHead<F>) {
    F::encode(in, to, n, importance);
  } else {
    for (int64_t i = 0; i < n; i += F::kBlockSize, to += sizeof(typename F::Block)) {
      typename F::Block b;
      if constexpr (F::kBlockSize == 1) {
        F::encode(in + i, nullptr, b);
      } else {
        float x[F::kBlockSize];
        float w[F::kBlockSize];
        prepare_block(in + i, importance != nullptr ? importance + i : nullptr, F::kBlockSize, x,
                      w);
        F::encode(x, w, b);
      }
      std::memcpy(to, &b, sizeof b);
    }
  }
}

template <class F>
constexpr FormatInfo row() {
  int head = 0;
  if constexpr (HasHead<F>) head = F::kHeadBytes;
  FormatInfo i{
      F::kFormat, F::kName,     F::kBlockSize,   static_cast<int>(sizeof(typename F::Block)),
      head,       F::kGgmlType, &decode_part<F>, nullptr};
  if constexpr (Encodes<F>) i.encode = &encode_row<F>;
  return i;
}

// In the order of Format.
constexpr std::array kFormats = {
    row<F32>(),      row<F16>(),     row<BF16>(),     row<FP8>(),      row<INT8>(),
    row<Q4_0>(),     row<Q4_1>(),    row<Q5_0>(),     row<Q5_1>(),     row<Q8_0>(),
    row<Q2_K>(),     row<Q3_K>(),    row<Q4_K>(),     row<Q5_K>(),     row<Q6_K>(),
    row<IQ4_NL>(),   row<IQ4_XS>(),  row<MXFP4>(),    row<Int4G128>(), row<Int4G32>(),
    row<MXFP8>(),    row<FP8G32>(),  row<NF4>(),      row<FP4>(),      row<NVFP4>(),
    row<Int2G128>(), row<Int2G32>(), row<Int3G128>(), row<Int3G32>(),  row<Int8G128>(),
    row<Int8G32>(),  row<IQ1_S>(),   row<IQ1_M>(),    row<IQ2_XXS>(),  row<IQ2_XS>(),
    row<IQ2_S>(),    row<IQ3_XXS>(), row<IQ3_S>(),    row<TQ1_0>(),    row<TQ2_0>(),
};
static_assert([] {
  for (size_t i = 0; i < kFormats.size(); ++i) {
    if (kFormats[i].format != static_cast<Format>(i)) return false;
  }
  return true;
}());

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

}  // namespace

const FormatInfo& info(Format f) {
  const auto i = static_cast<size_t>(f);
  FRESHET_CHECK(i < kFormats.size());
  return kFormats[i];
}

std::span<const FormatInfo> all_formats() {
  return kFormats;
}

std::optional<Format> format_by_name(std::string_view name) {
  for (const FormatInfo& i : kFormats) {
    if (std::equal(name.begin(), name.end(), i.name.begin(), i.name.end(),
                   [](char a, char b) { return lower(a) == b; })) {
      return i.format;
    }
  }
  return std::nullopt;
}

std::optional<Format> format_by_ggml_type(uint32_t type) {
  for (const FormatInfo& i : kFormats) {
    if (i.ggml_type == type && type != kNoGgmlType) return i.format;
  }
  return std::nullopt;
}

}  // namespace freshet::quant
