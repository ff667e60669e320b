#include "loader/gguf.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace freshet::loader {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place, little-endian");

constexpr uint32_t kMaxDimensions = 4;
constexpr uint64_t kMaxName = 65535;  // length of a key or a tensor name

// Types that ggml defines and that are only listed here: their sizes are needed to check the rest
// of the file.
struct ForeignType {
  uint32_t ggml_type;
  std::string_view name;
  int block_size;
  int block_bytes;
};
constexpr ForeignType kForeign[] = {
    {9, "Q8_1", 32, 36}, {15, "Q8_K", 256, 292}, {24, "I8", 1, 1},
    {25, "I16", 1, 2},   {26, "I32", 1, 4},      {27, "I64", 1, 8},
    {28, "F64", 1, 8},   {40, "NVFP4", 64, 36},  {41, "Q1_0", 128, 18},
};

struct BlockShape {
  std::optional<quant::Format> format;
  std::string name;
  int block_size = 0;
  int block_bytes = 0;
};

std::optional<BlockShape> block_shape(uint32_t ggml_type) {
  if (const auto format = quant::format_by_ggml_type(ggml_type)) {
    const quant::FormatInfo& i = quant::info(*format);
    std::string name(i.name);
    for (char& c : name) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    return BlockShape{format, std::move(name), i.block_size, i.block_bytes};
  }
  for (const ForeignType& t : kForeign) {
    if (t.ggml_type == ggml_type) {
      return BlockShape{std::nullopt, std::string(t.name), t.block_size, t.block_bytes};
    }
  }
  return std::nullopt;
}

template <class T>
T load(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// 2^63 is exact in a double; it is the first value that does not fit.
std::optional<int64_t> integral(double v) {
  if (!(v >= -0x1p63 && v < 0x1p63) || v != std::floor(v)) return std::nullopt;
  return static_cast<int64_t>(v);
}

}  // namespace

std::string_view name_of(GgufType t) {
  constexpr std::string_view kNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                         "bool", "string", "array", "u64", "i64", "f64"};
  const auto i = static_cast<size_t>(t);
  return i < std::size(kNames) ? kNames[i] : "?";
}

size_t size_of(GgufType t) {
  switch (t) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      return 0;
  }
  return 0;
}

std::optional<int64_t> GgufValue::int_at(uint64_t i) const {
  if (i >= count || type == GgufType::kString) return std::nullopt;
  const uint8_t* p = raw.data() + i * size_of(type);
  switch (type) {
    case GgufType::kU8:
      return load<uint8_t>(p);
    case GgufType::kI8:
      return load<int8_t>(p);
    case GgufType::kBool:
      return load<uint8_t>(p) != 0;
    case GgufType::kU16:
      return load<uint16_t>(p);
    case GgufType::kI16:
      return load<int16_t>(p);
    case GgufType::kU32:
      return load<uint32_t>(p);
    case GgufType::kI32:
      return load<int32_t>(p);
    case GgufType::kI64:
      return load<int64_t>(p);
    case GgufType::kU64: {
      const auto v = load<uint64_t>(p);
      if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
      return static_cast<int64_t>(v);
    }
    case GgufType::kF32:
      return integral(load<float>(p));
    case GgufType::kF64:
      return integral(load<double>(p));
    case GgufType::kString:
    case GgufType::kArray:
      break;
  }
  return std::nullopt;
}

std::optional<double> GgufValue::number_at(uint64_t i) const {
  if (i >= count || type == GgufType::kString) return std::nullopt;
  const uint8_t* p = raw.data() + i * size_of(type);
  if (type == GgufType::kF32) return load<float>(p);
  if (type == GgufType::kF64) return load<double>(p);
  if (type == GgufType::kU64) return static_cast<double>(load<uint64_t>(p));
  const auto v = int_at(i);
  return v ? std::optional<double>(static_cast<double>(*v)) : std::nullopt;
}

// Reads the file in one pass with a cursor that never leaves it.
class GgufFile::Parser {
 public:
  Parser(GgufFile& out, std::span<const uint8_t> bytes) : out_(out), bytes_(bytes) {}

  Status run() {
    uint64_t tensors = 0;
    uint64_t keys = 0;
    FRESHET_RETURN_IF_ERROR(header(tensors, keys));
    // The minimum size of an entry limits a count by the remaining bytes.
    if (keys > left() / 13) return too_many("metadata keys", keys);
    out_.metadata_.reserve(keys);
    for (uint64_t i = 0; i < keys; ++i) FRESHET_RETURN_IF_ERROR(key_value(i));
    FRESHET_RETURN_IF_ERROR(alignment());
    if (tensors > left() / 24) return too_many("tensors", tensors);
    out_.tensors_.reserve(tensors);
    offsets_.reserve(tensors);
    for (uint64_t i = 0; i < tensors; ++i) FRESHET_RETURN_IF_ERROR(tensor_info(i));
    for (size_t i = 0; i < out_.tensors_.size(); ++i) {
      if (!out_.index_.emplace(out_.tensors_[i].name, i).second) {
        return invalid_argument("tensor '{}' is listed twice", out_.tensors_[i].name);
      }
    }
    FRESHET_RETURN_IF_ERROR(place_tensors());
    return check_overlaps();
  }

 private:
  uint64_t left() const { return bytes_.size() - at_; }

  template <class T>
  bool read(T& v) {
    if (left() < sizeof v) return false;
    v = load<T>(bytes_.data() + at_);
    at_ += sizeof v;
    return true;
  }

  bool read_string(std::string_view& s, uint64_t limit) {
    uint64_t n = 0;
    if (!read(n) || n > left() || n > limit) return false;
    s = {reinterpret_cast<const char*>(bytes_.data()) + at_, static_cast<size_t>(n)};
    at_ += n;
    return true;
  }

  Status too_many(std::string_view what, uint64_t n) const {
    return invalid_argument("{} {} do not fit in the remaining {} bytes of the file", n, what,
                            left());
  }

  Status header(uint64_t& tensors, uint64_t& keys) {
    if (left() < 4 || std::memcmp(bytes_.data(), "GGUF", 4) != 0) {
      return invalid_argument("not a GGUF file: the magic is missing");
    }
    at_ = 4;
    if (!read(out_.version_)) return invalid_argument("truncated in the header");
    const uint32_t v = out_.version_;
    if (v != 0 && (v & 0xffff) == 0) return unsupported("big-endian GGUF is not supported");
    if (v < 2 || v > 3) {
      return unsupported("GGUF version {} is not supported (2 and 3 are); convert the model again",
                         v);
    }
    if (!read(tensors) || !read(keys)) return invalid_argument("truncated in the header");
    return {};
  }

  Status key_value(uint64_t index) {
    std::string_view key;
    if (!read_string(key, kMaxName)) {
      return invalid_argument("metadata key {} is truncated or has an impossible length", index);
    }
    uint32_t type = 0;
    if (!read(type)) return invalid_argument("truncated at metadata key '{}'", key);
    GgufValue value;
    if (type == static_cast<uint32_t>(GgufType::kArray)) {
      value.is_array = true;
      if (!read(type) || !read(value.count)) {
        return invalid_argument("truncated at metadata key '{}'", key);
      }
      if (type == static_cast<uint32_t>(GgufType::kArray)) {
        return unsupported("metadata key '{}' is an array of arrays, which is not supported", key);
      }
    }
    if (type > static_cast<uint32_t>(GgufType::kF64)) {
      return invalid_argument("metadata key '{}' has the unknown type {}", key, type);
    }
    value.type = static_cast<GgufType>(type);
    FRESHET_RETURN_IF_ERROR(payload(key, value));
    if (!out_.keys_.emplace(key, out_.metadata_.size()).second) {
      return invalid_argument("metadata key '{}' occurs twice", key);
    }
    out_.metadata_.emplace_back(key, std::move(value));
    return {};
  }

  Status payload(std::string_view key, GgufValue& value) {
    const size_t size = value.type == GgufType::kString ? sizeof(uint64_t) : size_of(value.type);
    if (value.count > left() / size) {
      return invalid_argument(
          "metadata key '{}' claims {} values of type {}, but the file is too short", key,
          value.count, name_of(value.type));
    }
    if (value.type != GgufType::kString) {
      value.raw = bytes_.subspan(at_, value.count * size);
      at_ += value.raw.size();
      return {};
    }
    value.strings.resize(value.count);
    for (std::string_view& s : value.strings) {
      if (!read_string(s, left())) {
        return invalid_argument(
            "metadata key '{}' holds a string that goes beyond the end of the file", key);
      }
    }
    return {};
  }

  Status alignment() {
    const GgufValue* v = out_.find("general.alignment");
    if (v == nullptr) return {};
    const auto n = v->is_array ? std::nullopt : v->int_at(0);
    if (!n || *n <= 0 || *n > (1 << 30) || !std::has_single_bit(static_cast<uint64_t>(*n))) {
      return invalid_argument("general.alignment is not a power of two");
    }
    out_.alignment_ = static_cast<uint64_t>(*n);
    return {};
  }

  Status tensor_info(uint64_t index) {
    std::string_view name;
    if (!read_string(name, kMaxName)) {
      return invalid_argument("the name of tensor {} is truncated or has an impossible length",
                              index);
    }
    uint32_t n = 0;
    if (!read(n)) return invalid_argument("truncated at tensor '{}'", name);
    if (n > kMaxDimensions) return invalid_argument("tensor '{}' has {} dimensions", name, n);
    TensorSource t;
    t.name = std::string(name);
    t.shape.resize(n);
    for (uint32_t d = n; d-- > 0;) {  // stored innermost first
      uint64_t v = 0;
      if (!read(v)) return invalid_argument("truncated at tensor '{}'", name);
      t.shape[d] = v <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
                       ? static_cast<int64_t>(v)
                       : -1;
    }
    uint32_t type = 0;
    uint64_t offset = 0;
    if (!read(type) || !read(offset)) return invalid_argument("truncated at tensor '{}'", name);
    FRESHET_RETURN_IF_ERROR(size_tensor(t, type));
    if (offset % out_.alignment_ != 0) {
      return invalid_argument("tensor '{}' starts at offset {}, not a multiple of the alignment {}",
                              name, offset, out_.alignment_);
    }
    offsets_.push_back(offset);
    out_.tensors_.push_back(std::move(t));
    return {};
  }

  static Status size_tensor(TensorSource& t, uint32_t type) {
    const auto shape = block_shape(type);
    if (!shape) {
      return unsupported("tensor '{}' has the unknown type {}: the file is newer than this program",
                         t.name, type);
    }
    t.format = shape->format;
    t.dtype = shape->name;
    const auto elements = checked_product(t.shape);
    if (!elements) return invalid_argument("tensor '{}' has an impossible shape", t.name);
    if ((t.shape.empty() ? 1 : t.shape.back()) % shape->block_size != 0) {
      return invalid_argument(
          "tensor '{}' has rows of {} numbers, not a multiple of {}'s block of {}", t.name,
          t.shape.empty() ? 1 : t.shape.back(), t.dtype, shape->block_size);
    }
    if (__builtin_mul_overflow(static_cast<uint64_t>(*elements / shape->block_size),
                               static_cast<uint64_t>(shape->block_bytes), &t.bytes)) {
      return invalid_argument("tensor '{}' has an impossible shape", t.name);
    }
    return {};
  }

  Status place_tensors() {
    // A file without tensors may end right after the tables.
    const uint64_t padding = (out_.alignment_ - at_ % out_.alignment_) % out_.alignment_;
    const uint64_t data = std::min<uint64_t>(at_ + padding, bytes_.size());
    const uint64_t size = bytes_.size() - data;
    for (size_t i = 0; i < out_.tensors_.size(); ++i) {
      TensorSource& t = out_.tensors_[i];
      if (offsets_[i] > size || t.bytes > size - offsets_[i]) {
        return invalid_argument(
            "tensor '{}' ({} bytes at {}) ends after the file's {} bytes of data: "
            "the file is truncated",
            t.name, t.bytes, offsets_[i], size);
      }
      t.file = out_.file_.get();
      t.file_offset = data + offsets_[i];
      t.data = bytes_.data() + t.file_offset;
    }
    return {};
  }

  Status check_overlaps() const {
    std::vector<const TensorSource*> sorted;
    sorted.reserve(out_.tensors_.size());
    for (const TensorSource& t : out_.tensors_) {
      if (t.bytes > 0) sorted.push_back(&t);
    }
    std::sort(sorted.begin(), sorted.end(),
              [](const TensorSource* a, const TensorSource* b) { return a->data < b->data; });
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (sorted[i - 1]->data + sorted[i - 1]->bytes > sorted[i]->data) {
        return invalid_argument("tensors '{}' and '{}' overlap", sorted[i - 1]->name,
                                sorted[i]->name);
      }
    }
    return {};
  }

  GgufFile& out_;
  std::span<const uint8_t> bytes_;
  uint64_t at_ = 0;
  std::vector<uint64_t> offsets_;  // of the tensors, relative to the start of the data
};

Result<GgufFile> GgufFile::open(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::open(path));
  GgufFile f;
  f.file_ = std::make_unique<MappedFile>(std::move(mapped));
  FRESHET_RETURN_IF_ERROR(Parser(f, f.file_->bytes()).run().with_context(path));
  return f;
}

Result<GgufFile> GgufFile::parse(std::span<const uint8_t> bytes, const std::string& name) {
  GgufFile f;
  FRESHET_RETURN_IF_ERROR(Parser(f, bytes).run().with_context(name));
  return f;
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto it = keys_.find(key);
  return it == keys_.end() ? nullptr : &metadata_[it->second].second;
}

std::optional<int64_t> GgufFile::get_int(std::string_view key) const {
  const GgufValue* v = find(key);
  return v != nullptr && !v->is_array ? v->int_at(0) : std::nullopt;
}

std::optional<uint32_t> GgufFile::get_u32(std::string_view key) const {
  const auto v = get_int(key);
  if (!v || *v < 0 || *v > std::numeric_limits<uint32_t>::max()) return std::nullopt;
  return static_cast<uint32_t>(*v);
}

std::optional<float> GgufFile::get_f32(std::string_view key) const {
  const GgufValue* v = find(key);
  if (v == nullptr || v->is_array) return std::nullopt;
  const auto n = v->number_at(0);
  return n ? std::optional<float>(static_cast<float>(*n)) : std::nullopt;
}

std::optional<bool> GgufFile::get_bool(std::string_view key) const {
  const auto v = get_int(key);
  return v ? std::optional<bool>(*v != 0) : std::nullopt;
}

std::optional<std::string_view> GgufFile::get_string(std::string_view key) const {
  const GgufValue* v = find(key);
  if (v == nullptr || v->is_array || v->type != GgufType::kString) return std::nullopt;
  return v->strings[0];
}

std::optional<std::vector<int64_t>> GgufFile::get_ints(std::string_view key) const {
  const GgufValue* v = find(key);
  if (v == nullptr || v->type == GgufType::kString) return std::nullopt;
  std::vector<int64_t> out(v->count);
  for (uint64_t i = 0; i < v->count; ++i) {
    const auto n = v->int_at(i);
    if (!n) return std::nullopt;
    out[i] = *n;
  }
  return out;
}

std::optional<std::vector<float>> GgufFile::get_floats(std::string_view key) const {
  const GgufValue* v = find(key);
  if (v == nullptr || v->type == GgufType::kString) return std::nullopt;
  std::vector<float> out(v->count);
  for (uint64_t i = 0; i < v->count; ++i) out[i] = static_cast<float>(*v->number_at(i));
  return out;
}

const std::vector<std::string_view>* GgufFile::get_strings(std::string_view key) const {
  const GgufValue* v = find(key);
  return v != nullptr && v->is_array && v->type == GgufType::kString ? &v->strings : nullptr;
}

const TensorSource* GgufFile::find_tensor(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

}  // namespace freshet::loader
