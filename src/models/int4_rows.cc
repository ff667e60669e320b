#include "models/int4_rows.h"

#include <algorithm>
#include <cstring>

#include "models/quantization_config.h"
#include "quant/int4.h"
#include "quant/q4_0.h"
#include "quant/q8_0.h"
#include "tensor/dtype.h"

namespace freshet::models {
namespace {

using loader::TensorSource;
using quant::Format;

enum class Layout4 { kGptq, kGptqV2, kAwq, kCompressed };

// The place of output r % 8 in a word of AWQ.
constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};

std::string_view text_of(Layout4 layout) {
  return layout == Layout4::kAwq          ? "awq"
         : layout == Layout4::kCompressed ? "pack-quantized"
                                          : "gptq";
}

// A matrix as the file has it.
struct Packed {
  Layout4 layout;
  int64_t rows, cols, groups;
  int bits;
  const uint8_t* words;
  const uint8_t* zero_words = nullptr;  // nullptr: the middle of the range
  std::vector<float> scales;
  std::vector<int32_t> order;  // of the columns; empty: unchanged

  int per_word() const { return 32 / bits; }
  uint32_t mask() const { return (uint32_t{1} << bits) - 1; }
  static uint32_t word(const uint8_t* at, int64_t i) {
    uint32_t w;
    std::memcpy(&w, at + i * 4, 4);
    return w;
  }

  // The numbers of row r; room for whole words.
  void row(int64_t r, uint8_t* q) const {
    if (layout == Layout4::kAwq) {
      const int shift = 4 * kAwqPlace[r % 8];
      for (int64_t c = 0; c < cols; ++c) {
        q[c] = static_cast<uint8_t>(word(words, c * (rows / 8) + r / 8) >> shift & 15);
      }
      return;
    }
    const int n = per_word();
    const int64_t all = (cols + n - 1) / n;
    for (int64_t i = 0; i < all; ++i) {
      const uint32_t w = word(words, layout == Layout4::kCompressed ? r * all + i : i * rows + r);
      for (int k = 0; k < n; ++k) *q++ = static_cast<uint8_t>(w >> (bits * k) & mask());
    }
  }
  int zero(int64_t r, int64_t g) const {
    const int n = per_word();
    if (zero_words == nullptr) return 1 << (bits - 1);
    if (layout == Layout4::kCompressed) {
      return static_cast<int>(word(zero_words, r / n * groups + g) >> (bits * (r % n)) & mask());
    }
    uint32_t w = word(zero_words, g * ((rows + n - 1) / n) + r / n);
    if (layout == Layout4::kGptq) w += 0xffffffff / mask();  // adds 1 to each
    const int place = static_cast<int>(r % n);
    return static_cast<int>(w >> (bits * (layout == Layout4::kAwq ? kAwqPlace[place] : place)) &
                            mask());
  }
  float scale(int64_t r, int64_t g) const {
    return scales[static_cast<size_t>(layout == Layout4::kCompressed ? r * groups + g
                                                                     : g * rows + r)];
  }
};

Result<Layout4> layout_of(const WeightReader& reader, const TensorSource& packed) {
  const json::Value* q = quantization_config(reader.config());
  if (q == nullptr) {
    return invalid_argument(
        "tensor '{}' is quantised, but config.json has no quantization_config that says how",
        packed.name);
  }
  const std::string method = quantization_text(*q, "quant_method", "");
  const std::string format = quantization_text(*q, "format", "");
  if (packed.name.ends_with(".weight_packed")) {
    const bool mixed = format == "mixed-precision";
    if (method == "compressed-tensors" && (format == "pack-quantized" || mixed)) {
      return Layout4::kCompressed;
    }
    return unsupported(
        "tensor '{}': compressed-tensors of format '{}': only pack-quantized is read", packed.name,
        format);
  }
  if (method == "gptq") {
    const std::string written = quantization_text(*q, "checkpoint_format", "gptq");
    if (written == "gptq") return Layout4::kGptq;
    if (written == "gptq_v2") return Layout4::kGptqV2;
    return unsupported("tensor '{}': checkpoint_format '{}' of GPTQ: save it as gptq or gptq_v2",
                       packed.name, written);
  }
  if (method == "awq") {
    const std::string version = quantization_text(*q, "version", "gemm");
    if (version == "gemm") return Layout4::kAwq;
    return unsupported("tensor '{}': version '{}' of AWQ: only gemm is read", packed.name, version);
  }
  return unsupported("tensor '{}': quant_method '{}': gptq, awq and compressed-tensors are read",
                     packed.name, method);
}

Status check(const TensorSource& t, std::string_view dtype, std::vector<int64_t> wanted) {
  if (t.dtype == dtype && t.shape == wanted) return {};
  return invalid_argument("tensor '{}' is {} [{}], but the model's configuration asks for {} [{}]",
                          t.name, t.dtype, fmt::join(t.shape, ", "), dtype,
                          fmt::join(wanted, ", "));
}

// The bits of a number: 4, or 8 if a dimension says so.
Result<int> bits_of(const TensorSource& packed, Layout4 layout, int64_t rows, int64_t cols) {
  const auto words = [](int64_t n, int bits) { return (n * bits + 31) / 32; };
  if (layout == Layout4::kAwq) {
    if (rows % 8 == 0 && packed.shape == std::vector{cols, rows / 8}) return 4;
  } else if (packed.shape.size() == 2) {
    const bool by_row = layout == Layout4::kCompressed;
    const int64_t across = packed.shape[by_row ? 1 : 0];
    if (packed.shape[by_row ? 0 : 1] == rows && (by_row || cols % 32 == 0)) {
      for (const int bits : {4, 8}) {
        if (across == words(cols, bits)) return bits;
      }
    }
  }
  return invalid_argument(
      "tensor '{}' has shape [{}], which is no {} matrix [{}, {}] of 4 or 8 bits", packed.name,
      fmt::join(packed.shape, ", "), text_of(layout), rows, cols);
}

constexpr int64_t kWholeRows = -1;  // as a group size

void collect_group_sizes(const json::Value& v, std::vector<int64_t>& sizes) {
  if (!v.is_object()) return;
  for (const auto& [key, value] : v.as_object()) {
    if (key == "group_size") {
      sizes.push_back(value.is_number() ? value.as_int64().value_or(0) : kWholeRows);
    }
    collect_group_sizes(value, sizes);
  }
}

// The size of a group: one that quantization_config gives for some module, or whole rows.
Result<int64_t> group_of(const WeightReader& reader, const TensorSource& scales, int64_t groups,
                         int64_t cols) {
  std::vector<int64_t> sizes;
  collect_group_sizes(*quantization_config(reader.config()), sizes);
  const int64_t size = groups > 0 && cols % groups == 0 ? cols / groups : 0;
  const auto has = [&](int64_t n) { return std::ranges::find(sizes, n) != sizes.end(); };
  const bool named = sizes.empty() || has(size) || (groups == 1 && has(kWholeRows));
  if (size == 0 || !named) {
    return invalid_argument(
        "tensor '{}' has scales of {} groups for rows of {} numbers: group_size is {}", scales.name,
        groups, cols, sizes.empty() ? kWholeRows : sizes.front());
  }
  return size;
}

// The columns sorted by group; empty if they are sorted already. An index of constants was never
// written and counts as absent.
Result<std::vector<int32_t>> order_of(const TensorSource& index, int64_t cols, int64_t size) {
  FRESHET_RETURN_IF_ERROR(check(index, "I32", {cols}));
  bool in_order = true, unused = true;
  std::vector<int32_t> group(static_cast<size_t>(cols)), next(static_cast<size_t>(cols / size));
  for (int64_t c = 0; c < cols; ++c) {
    const auto g = static_cast<int32_t>(Packed::word(index.data, c));
    in_order &= g == c / size;
    unused &= g == 0 || g == -1;
    group[static_cast<size_t>(c)] = g;
  }
  std::vector<int32_t> order;
  if (in_order || unused) return order;
  order.resize(static_cast<size_t>(cols));
  for (int64_t c = 0; c < cols; ++c) {
    const int32_t g = group[static_cast<size_t>(c)];
    int32_t* taken = g >= 0 && g < cols / size ? &next[static_cast<size_t>(g)] : nullptr;
    if (taken == nullptr || *taken == size) {
      return invalid_argument("tensor '{}' puts input {} in group {}: there are {} groups of {}",
                              index.name, c, g, cols / size, size);
    }
    order[static_cast<size_t>(g * size + (*taken)++)] = static_cast<int32_t>(c);
  }
  return order;
}

Result<const TensorSource*> part(const WeightReader& reader, const TensorSource& packed,
                                 const std::string& name) {
  const TensorSource* found = reader.find_name(name);
  if (found != nullptr) return found;
  return invalid_argument("tensor '{}' is missing: '{}' has no meaning without it", name,
                          packed.name);
}

Status read_scales(const WeightReader& reader, const TensorSource& t, Packed& m) {
  const bool by_row = m.layout == Layout4::kCompressed;
  const size_t rank = t.shape.size();
  const bool a_row = by_row && rank == 1 && t.shape[0] == m.rows;
  if (!a_row && (rank != 2 || t.shape[by_row ? 0 : 1] != m.rows)) {
    return invalid_argument("tensor '{}' has shape [{}]: it must have {} {}", t.name,
                            fmt::join(t.shape, ", "), m.rows, by_row ? "rows" : "columns");
  }
  m.groups = a_row ? 1 : t.shape[by_row ? 1 : 0];
  FRESHET_ASSIGN_OR_RETURN(m.scales, reader.values(t, m.rows * m.groups));
  return {};
}

Result<Packed> read(const WeightReader& reader, const TensorSource& packed, int64_t rows,
                    int64_t cols, int64_t& group, bool& f16) {
  FRESHET_ASSIGN_OR_RETURN(const Layout4 layout, layout_of(reader, packed));
  if (packed.dtype != "I32") {
    return unsupported("tensor '{}' is {}: packed numbers are read from I32", packed.name,
                       packed.dtype);
  }
  FRESHET_ASSIGN_OR_RETURN(const int bits, bits_of(packed, layout, rows, cols));
  Packed m{layout, rows, cols, 0, bits, packed.data, nullptr, {}, {}};
  const bool by_row = layout == Layout4::kCompressed;
  const std::string stem = packed.name.substr(0, packed.name.rfind('.') + 1);
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* scales,
                           part(reader, packed, stem + (by_row ? "weight_scale" : "scales")));
  FRESHET_RETURN_IF_ERROR(read_scales(reader, *scales, m));
  f16 = scales->dtype == "F16";
  FRESHET_ASSIGN_OR_RETURN(group, group_of(reader, *scales, m.groups, cols));
  const int64_t words = (rows + m.per_word() - 1) / m.per_word();
  const TensorSource* zeros = reader.find_name(stem + (by_row ? "weight_zero_point" : "qzeros"));
  if (zeros == nullptr && (layout == Layout4::kGptq || layout == Layout4::kGptqV2)) {
    return part(reader, packed, stem + "qzeros").status();
  }
  if (zeros != nullptr) {
    const std::vector<int64_t> wanted =
        by_row ? std::vector{words, m.groups} : std::vector{m.groups, words};
    FRESHET_RETURN_IF_ERROR(check(*zeros, "I32", wanted));
    m.zero_words = zeros->data;
  }
  const TensorSource* index = reader.find_name(stem + (by_row ? "weight_g_idx" : "g_idx"));
  if (index != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(m.order, order_of(*index, cols, group));
  }
  return m;
}

bool symmetric(const Packed& m) {
  for (int64_t g = 0; m.zero_words != nullptr && g < m.groups; ++g) {
    for (int64_t r = 0; r < m.rows; ++r) {
      if (m.zero(r, g) != 1 << (m.bits - 1)) return false;
    }
  }
  return true;
}

bool fit_f16(std::span<const float> values) {
  return std::ranges::all_of(values, [](float v) { return f16_to_f32(f32_to_f16(v)) == v; });
}

Result<Format> format_of(const Packed& m, const TensorSource& packed, int64_t group, bool f16) {
  const bool even = symmetric(m);
  if (group % 32 != 0) {
    return unsupported("tensor '{}' has groups of {} numbers: multiples of 32 are read",
                       packed.name, group);
  }
  if (m.bits == 8) {
    if (even && fit_f16(m.scales)) return Format::kQ8_0;
    return unsupported(
        "tensor '{}': 8 bits are read with zero points of 128 and scales that F16 holds",
        packed.name);
  }
  if (group % 128 == 0) return Format::kInt4G128;
  return even && f16 ? Format::kQ4_0 : Format::kInt4G32;
}

// Packs numbers q[0, n) of 4 bits in the order of all formats here, 32 at a time.
void put_nibbles(const uint8_t* q, int n, uint8_t* to) {
  for (int i = 0; i < n; i += 32, q += 32) {
    for (int k = 0; k < 16; ++k) *to++ = static_cast<uint8_t>(q[k] | q[k + 16] << 4);
  }
}

void put_block(quant::Q4_0::Block& b, const uint8_t* q, float d, int) {
  b.d = f32_to_f16(d);
  put_nibbles(q, 32, b.qs);
}
void put_block(quant::Q8_0::Block& b, const uint8_t* q, float d, int zero) {
  b.d = f32_to_f16(d);
  for (int i = 0; i < 32; ++i) b.qs[i] = static_cast<int8_t>(q[i] - zero);
}
void put_block(quant::Int4G128::Block& b, const uint8_t* q, float d, int zero) {
  quant::Int4G128::set_scale(b, d, zero);
  put_nibbles(q, 128, b.qs);
}
void put_block(quant::Int4G32::Block& b, const uint8_t* q, float d, int zero) {
  quant::Int4G32::set_scale(b, d, zero);
  put_nibbles(q, 32, b.qs);
}

template <class F>
void put_row(const Packed& m, int64_t group, int64_t r, uint8_t* to) {
  std::vector<uint8_t> q(static_cast<size_t>(m.cols + 8));
  m.row(r, q.data());
  if (!m.order.empty()) {
    const std::vector<uint8_t> all = q;
    for (size_t c = 0; c < m.order.size(); ++c) q[c] = all[static_cast<size_t>(m.order[c])];
  }
  for (int64_t c = 0; c < m.cols; c += F::kBlockSize) {
    typename F::Block b;
    put_block(b, q.data() + c, m.scale(r, c / group), m.zero(r, c / group));
    std::memcpy(to, &b, sizeof b);
    to += sizeof b;
  }
}

using PutRow = void (*)(const Packed& m, int64_t group, int64_t r, uint8_t* to);
PutRow put_row_of(Format f) {
  switch (f) {
    case Format::kQ8_0:
      return put_row<quant::Q8_0>;
    case Format::kQ4_0:
      return put_row<quant::Q4_0>;
    case Format::kInt4G128:
      return put_row<quant::Int4G128>;
    default:
      return put_row<quant::Int4G32>;
  }
}

}  // namespace

bool is_packed(const TensorSource& source) {
  return std::ranges::any_of(kPackedSuffixes,
                             [&](std::string_view s) { return source.name.ends_with(s); });
}

Result<Rows> int4_rows(const WeightReader& reader, const TensorSource& packed, int64_t rows,
                       int64_t cols, Inputs inputs) {
  int64_t group = 0;
  bool f16 = false;
  FRESHET_ASSIGN_OR_RETURN(Packed m, read(reader, packed, rows, cols, group, f16));
  const bool reorders = inputs == Inputs::kAnyOrder && reader.ops().reorders_inputs();
  if (!m.order.empty() && !reorders) {
    return unsupported(
        "tensor '{}' has groups in act-order (desc_act), which experts, latent attention, "
        "embeddings and GPUs do not take: quantise it with desc_act false",
        packed.name);
  }
  Rows out;
  FRESHET_ASSIGN_OR_RETURN(out.format, format_of(m, packed, group, f16));
  if (reader.shapes_suffice()) {
    out = Rows::shape(out.format, rows, cols);
    out.inputs = std::move(m.order);
    return out;
  }
  out.cols = cols;
  const size_t stride = quant::row_bytes(out.format, cols);
  FRESHET_ASSIGN_OR_RETURN(Buffer buffer, Buffer::allocate(static_cast<size_t>(rows) * stride));
  for (int64_t r = 0; r < rows; ++r) {
    out.rows.push_back(buffer.data() + static_cast<size_t>(r) * stride);
  }
  const PutRow put = put_row_of(out.format);
  // Neighbouring rows share cache lines of the file.
  constexpr int64_t kRowsAtOnce = 128;
  uint8_t* const first = buffer.data();
  reader.ops().pool().parallel_for((rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](int64_t i, int) {
    for (int64_t r = i * kRowsAtOnce; r < std::min(rows, (i + 1) * kRowsAtOnce); ++r) {
      put(m, group, r, first + static_cast<size_t>(r) * stride);
    }
  });
  out.owned.push_back(std::move(buffer));
  out.inputs = std::move(m.order);
  return out;
}

}  // namespace freshet::models
