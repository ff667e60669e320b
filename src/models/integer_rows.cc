#include "models/integer_rows.h"

#include <algorithm>
#include <cstring>

#include "models/quantization_config.h"
#include "quant/int4.h"
#include "quant/int_groups.h"
#include "quant/q4_0.h"
#include "quant/q8_0.h"
#include "tensor/dtype.h"

namespace freshet::models {
namespace {

using loader::TensorSource;
using ops::Ops;
using quant::Format;

// kCompressedWords: as compressed-tensors packed until 2025, whole numbers in each word.
enum class Layout4 { kGptq, kGptqV2, kAwq, kCompressed, kCompressedWords };

bool by_row(Layout4 layout) {
  return layout == Layout4::kCompressed || layout == Layout4::kCompressedWords;
}

// The place of output r % 8 in a word of AWQ.
constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};

std::string_view text_of(Layout4 layout) {
  return layout == Layout4::kAwq ? "awq" : by_row(layout) ? "pack-quantized" : "gptq";
}

// The words that n numbers of `bits` bits take.
int64_t words_of(Layout4 layout, int64_t n, int bits) {
  const int64_t whole = 32 / bits;
  return layout == Layout4::kCompressedWords ? (n + whole - 1) / whole : (n * bits + 31) / 32;
}

// A matrix as the file has it.
struct Packed {
  Layout4 layout;
  int64_t rows, cols, groups;
  int bits;
  const uint8_t* words;
  const uint8_t* zero_words = nullptr;  // nullptr: the middle of the range
  std::vector<float> scales;            // one: for all
  std::vector<int32_t> order;           // of the columns; empty: unchanged

  uint32_t mask() const { return (uint32_t{1} << bits) - 1; }
  static uint32_t word(const uint8_t* at, int64_t i) {
    uint32_t w;
    std::memcpy(&w, at + i * 4, 4);
    return w;
  }

  // Number i of a run of words, of which word k is at(k).
  template <class At>
  uint32_t number(int64_t i, const At& at) const {
    if (layout == Layout4::kCompressedWords) {
      const int64_t whole = 32 / bits;
      return at(i / whole) >> (bits * (i % whole)) & mask();
    }
    const int64_t bit = i * bits, shift = bit % 32;
    uint64_t w = at(bit / 32);
    if (shift + bits > 32) w |= uint64_t{at(bit / 32 + 1)} << 32;
    return static_cast<uint32_t>(w >> shift) & mask();
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
    const int64_t all = words_of(layout, cols, bits);
    const auto at = [&](int64_t i) {
      return word(words, by_row(layout) ? r * all + i : i * rows + r);
    };
    if (32 % bits != 0) {
      for (int64_t c = 0; c < cols; ++c) q[c] = static_cast<uint8_t>(number(c, at));
      return;
    }
    for (int64_t i = 0; i < all; ++i) {
      const uint32_t w = at(i);
      for (int k = 0; k < 32 / bits; ++k) *q++ = static_cast<uint8_t>(w >> (bits * k) & mask());
    }
  }
  int zero(int64_t r, int64_t g) const {
    if (zero_words == nullptr) return 1 << (bits - 1);
    if (by_row(layout)) {
      return static_cast<int>(
          number(r, [&](int64_t i) { return word(zero_words, i * groups + g); }));
    }
    const int64_t across = words_of(layout, rows, bits);
    if (layout == Layout4::kAwq) {
      return static_cast<int>(word(zero_words, g * across + r / 8) >> (4 * kAwqPlace[r % 8]) & 15);
    }
    // 1 was subtracted from each number; where they do not straddle words, from the whole word.
    const bool less = layout == Layout4::kGptq, whole = 32 % bits == 0;
    const uint32_t stored = number(r, [&](int64_t i) {
      return word(zero_words, g * across + i) + (less && whole ? 0xffffffff / mask() : 0);
    });
    return static_cast<int>((stored + (less && !whole ? 1 : 0)) & mask());
  }
  float scale(int64_t r, int64_t g) const {
    if (scales.size() == 1) return scales[0];
    return scales[static_cast<size_t>(by_row(layout) ? r * groups + g : g * rows + r)];
  }
  // Whether all zero points are z.
  bool all_zeros(int z) const {
    for (int64_t g = 0; zero_words != nullptr && g < groups; ++g) {
      for (int64_t r = 0; r < rows; ++r) {
        if (zero(r, g) != z) return false;
      }
    }
    return zero_words != nullptr || z == 1 << (bits - 1);
  }
};

Result<Layout4> gptq_layout(const TensorSource& packed, const json::Value& q) {
  const std::string written = quantization_text(q, "checkpoint_format", "gptq");
  if (written == "gptq") return Layout4::kGptq;
  if (written == "gptq_v2") return Layout4::kGptqV2;
  return unsupported("tensor '{}': checkpoint_format '{}' of GPTQ: save it as gptq or gptq_v2",
                     packed.name, written);
}

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
        "tensor '{}': compressed-tensors of format '{}': of integers in words, only pack-quantized "
        "is read",
        packed.name, format);
  }
  if (method == "gptq") return gptq_layout(packed, *q);
  const std::string packing = quantization_text(*q, "packing_format", "");
  if (method == "auto-round" && packing.ends_with("gptq")) return gptq_layout(packed, *q);
  if (method == "auto-round" && packing.ends_with("awq")) return Layout4::kAwq;
  if (method == "awq") {
    const std::string version = quantization_text(*q, "version", "gemm");
    if (version == "gemm") return Layout4::kAwq;
    return unsupported("tensor '{}': version '{}' of AWQ: only gemm is read", packed.name, version);
  }
  return unsupported("tensor '{}': quant_method '{}': {} are read", packed.name, method,
                     kQuantMethods);
}

Status check(const TensorSource& t, std::string_view dtype, std::vector<int64_t> wanted) {
  if (t.dtype == dtype && t.shape == wanted) return {};
  return invalid_argument("tensor '{}' is {} [{}], but the model's configuration asks for {} [{}]",
                          t.name, t.dtype, fmt::join(t.shape, ", "), dtype,
                          fmt::join(wanted, ", "));
}

// Collects the integers that quantization_config gives for a key, anywhere in it; kWholeRows for
// what is no number.
constexpr int64_t kWholeRows = -1;  // as a group size
void collect(const json::Value& v, std::initializer_list<std::string_view> keys,
             std::vector<int64_t>& found) {
  if (!v.is_object()) return;
  for (const auto& [key, value] : v.as_object()) {
    if (std::ranges::find(keys, key) != keys.end()) {
      found.push_back(value.is_number() ? value.as_int64().value_or(0) : kWholeRows);
    }
    collect(value, keys, found);
  }
}

// The bits of a number, and the layout, from the shape. Where more than one fits, it is one that
// quantization_config names for some module, or else the first.
Result<int> bits_of(const WeightReader& reader, const TensorSource& packed, Layout4& layout,
                    int64_t rows, int64_t cols) {
  std::vector<std::pair<int, Layout4>> fit;
  if (layout == Layout4::kAwq) {
    if (rows % 8 == 0 && packed.shape == std::vector{cols, rows / 8}) return 4;
  } else if (packed.shape.size() == 2) {
    const bool rows_first = by_row(layout);
    const int64_t across = packed.shape[rows_first ? 1 : 0];
    const bool other = packed.shape[rows_first ? 0 : 1] == rows && (rows_first || cols % 32 == 0);
    for (const int bits : {4, 8, 2, 3, 5, 6, 7}) {
      if (other && across == words_of(layout, cols, bits)) fit.emplace_back(bits, layout);
    }
    for (const int bits : {3, 5, 6, 7}) {
      constexpr Layout4 kWords = Layout4::kCompressedWords;
      if (other && rows_first && across == words_of(kWords, cols, bits))
        fit.emplace_back(bits, kWords);
    }
  }
  std::vector<int64_t> named;
  collect(*quantization_config(reader.config()), {"bits", "num_bits"}, named);
  const auto found = std::ranges::find_if(
      fit, [&](const auto& f) { return std::ranges::find(named, f.first) != named.end(); });
  if (!fit.empty()) {
    const auto& chosen = found != fit.end() ? *found : fit.front();
    layout = chosen.second;
    return chosen.first;
  }
  return invalid_argument("tensor '{}' has shape [{}], which is no {} matrix [{}, {}] of {}",
                          packed.name, fmt::join(packed.shape, ", "), text_of(layout), rows, cols,
                          layout == Layout4::kAwq ? "4 bits" : "2 to 8 bits");
}

// The size of a group: one that quantization_config gives for some module, or whole rows.
Result<int64_t> group_of(const WeightReader& reader, const TensorSource& scales, int64_t groups,
                         int64_t cols) {
  std::vector<int64_t> sizes;
  collect(*quantization_config(reader.config()), {"group_size"}, sizes);
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
  const bool rows_first = by_row(m.layout);
  const size_t rank = t.shape.size();
  if (rows_first && t.elements() == 1) {  // strategy "tensor"
    m.groups = 1;
    FRESHET_ASSIGN_OR_RETURN(m.scales, reader.values(t, 1));
    return {};
  }
  const bool a_row = rows_first && rank == 1 && t.shape[0] == m.rows;
  if (!a_row && (rank != 2 || t.shape[rows_first ? 0 : 1] != m.rows)) {
    return invalid_argument("tensor '{}' has shape [{}]: it must have {} {}", t.name,
                            fmt::join(t.shape, ", "), m.rows, rows_first ? "rows" : "columns");
  }
  m.groups = a_row ? 1 : t.shape[rows_first ? 1 : 0];
  FRESHET_ASSIGN_OR_RETURN(m.scales, reader.values(t, m.rows * m.groups));
  return {};
}

// The zero points. Some files of symmetric numbers say "gptq" and hold the zero points of
// "gptq_v2", or the reverse: there the values decide.
Status read_zeros(const WeightReader& reader, const TensorSource& packed, const std::string& stem,
                  Packed& m) {
  const bool rows_first = by_row(m.layout);
  const bool gptq = m.layout == Layout4::kGptq || m.layout == Layout4::kGptqV2;
  const TensorSource* zeros =
      reader.find_name(stem + (rows_first ? "weight_zero_point" : "qzeros"));
  if (zeros == nullptr && gptq) return part(reader, packed, stem + "qzeros").status();
  if (zeros == nullptr) return {};
  const int64_t words = words_of(m.layout, m.rows, m.bits);
  FRESHET_RETURN_IF_ERROR(check(
      *zeros, "I32", rows_first ? std::vector{words, m.groups} : std::vector{m.groups, words}));
  m.zero_words = zeros->data;
  const json::Value* even = quantization_config(reader.config())->find("sym");
  if (!gptq || even == nullptr || !even->is_bool() || !even->as_bool()) return {};
  const bool v1 = m.layout == Layout4::kGptq;
  if (m.all_zeros((1 << (m.bits - 1)) + (v1 ? 1 : -1))) {
    m.layout = v1 ? Layout4::kGptqV2 : Layout4::kGptq;
  }
  return {};
}

Result<Packed> read(const WeightReader& reader, const TensorSource& packed, int64_t rows,
                    int64_t cols, int64_t& group) {
  FRESHET_ASSIGN_OR_RETURN(Layout4 layout, layout_of(reader, packed));
  if (packed.dtype != "I32") {
    return unsupported("tensor '{}' is {}: packed numbers are read from I32", packed.name,
                       packed.dtype);
  }
  FRESHET_ASSIGN_OR_RETURN(const int bits, bits_of(reader, packed, layout, rows, cols));
  Packed m{layout, rows, cols, 0, bits, packed.data, nullptr, {}, {}};
  const bool rows_first = by_row(layout);
  const std::string stem = packed.name.substr(0, packed.name.rfind('.') + 1);
  FRESHET_ASSIGN_OR_RETURN(const TensorSource* scales,
                           part(reader, packed, stem + (rows_first ? "weight_scale" : "scales")));
  FRESHET_RETURN_IF_ERROR(read_scales(reader, *scales, m));
  FRESHET_ASSIGN_OR_RETURN(group, group_of(reader, *scales, m.groups, cols));
  FRESHET_RETURN_IF_ERROR(read_zeros(reader, packed, stem, m));
  const TensorSource* index = reader.find_name(stem + (rows_first ? "weight_g_idx" : "g_idx"));
  if (index != nullptr) {
    FRESHET_ASSIGN_OR_RETURN(m.order, order_of(*index, cols, group));
  }
  return m;
}

bool fit_f16(std::span<const float> values) {
  return std::ranges::all_of(values, [](float v) { return f16_to_f32(f32_to_f16(v)) == v; });
}

// Numbers of two and three bits are stored as such where there are kernels for them, otherwise in
// four, and five to seven bits in eight. F32 holds what no format does: groups that are not
// multiples of 32.
Format format_of(const Ops& ops, const Packed& m, int64_t group, bool f16) {
  if (group % 32 != 0) return Format::kF32;
  const bool even = m.all_zeros(1 << (m.bits - 1)), wide = group % 128 == 0;
  const auto runs = [&](Format f) { return ops.matmul_row(f) != "none"; };
  if (m.bits > 4) {
    // The differences to zero points are bytes.
    if ((even || m.bits < 8) && fit_f16(m.scales)) return Format::kQ8_0;
    return wide ? Format::kInt8G128 : Format::kInt8G32;
  }
  const Format narrow = m.bits == 2 ? (wide ? Format::kInt2G128 : Format::kInt2G32)
                                    : (wide ? Format::kInt3G128 : Format::kInt3G32);
  if (m.bits < 4 && runs(narrow)) return narrow;
  if (wide) return Format::kInt4G128;
  return m.bits == 4 && even && f16 ? Format::kQ4_0 : Format::kInt4G32;
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
void put_levels(typename F::Block& b, const uint8_t* q, float d, int zero) {
  b = {};
  F::set_scale(b, d, zero);
  for (int i = 0; i < F::kBlockSize; ++i) F::set_level(b, i, q[i]);
}

// A row's numbers in the order of their groups; room for whole words.
std::vector<uint8_t> numbers_of(const Packed& m, int64_t r) {
  std::vector<uint8_t> q(static_cast<size_t>(m.cols + 16));
  m.row(r, q.data());
  if (!m.order.empty()) {
    const std::vector<uint8_t> all = q;
    for (size_t c = 0; c < m.order.size(); ++c) q[c] = all[static_cast<size_t>(m.order[c])];
  }
  return q;
}

void put_plain_row(const Packed& m, int64_t group, int64_t r, uint8_t* to) {
  const std::vector<uint8_t> q = numbers_of(m, r);
  for (int64_t c = 0; c < m.cols; ++c) {
    const int64_t g = c / group;
    const float v = m.scale(r, g) * static_cast<float>(q[static_cast<size_t>(c)] - m.zero(r, g));
    std::memcpy(to + c * 4, &v, sizeof v);
  }
}

template <class F>
void put_row(const Packed& m, int64_t group, int64_t r, uint8_t* to) {
  const std::vector<uint8_t> q = numbers_of(m, r);
  for (int64_t c = 0; c < m.cols; c += F::kBlockSize) {
    typename F::Block b;
    const float d = m.scale(r, c / group);
    const int zero = m.zero(r, c / group);
    if constexpr (requires { F::set_level(b, 0, 0); }) {
      put_levels<F>(b, q.data() + c, d, zero);
    } else {
      put_block(b, q.data() + c, d, zero);
    }
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
    case Format::kInt2G128:
      return put_row<quant::Int2G128>;
    case Format::kInt2G32:
      return put_row<quant::Int2G32>;
    case Format::kInt3G128:
      return put_row<quant::Int3G128>;
    case Format::kInt3G32:
      return put_row<quant::Int3G32>;
    case Format::kInt8G128:
      return put_row<quant::Int8G128>;
    case Format::kInt8G32:
      return put_row<quant::Int8G32>;
    case Format::kF32:
      return put_plain_row;
    default:
      return put_row<quant::Int4G32>;
  }
}

}  // namespace

bool is_packed(const TensorSource& source) {
  return std::ranges::any_of(kPackedSuffixes,
                             [&](std::string_view s) { return source.name.ends_with(s); });
}

Result<Rows> integer_rows(const WeightReader& reader, const TensorSource& packed, int64_t rows,
                          int64_t cols, Inputs inputs) {
  int64_t group = 0;
  FRESHET_ASSIGN_OR_RETURN(Packed m, read(reader, packed, rows, cols, group));
  const bool reorders = inputs == Inputs::kAnyOrder && reader.ops().reorders_inputs();
  if (!m.order.empty() && !reorders) {
    return unsupported(
        "tensor '{}' has groups in act-order (desc_act), which experts, latent attention, "
        "embeddings and GPUs do not take: quantise it with desc_act false",
        packed.name);
  }
  Rows out;
  const std::string stem = packed.name.substr(0, packed.name.rfind('.') + 1);
  const TensorSource* scales =
      reader.find_name(stem + (by_row(m.layout) ? "weight_scale" : "scales"));
  out.format = format_of(reader.ops(), m, group, scales->dtype == "F16");
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
