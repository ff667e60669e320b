#include "loader/safetensors.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "base/json.h"

namespace freshet::loader {
namespace {

// The limit of the format's own library; a larger header means a corrupt or hostile file.
constexpr uint64_t kMaxHeader = 100'000'000;

struct DtypeInfo {
  std::string_view name;
  int bits;
  std::optional<quant::Format> format;
};

constexpr DtypeInfo kDtypes[] = {
    {"F32", 32, quant::Format::kF32},
    {"F16", 16, quant::Format::kF16},
    {"BF16", 16, quant::Format::kBF16},
    {"BOOL", 8, {}},
    {"U8", 8, {}},
    {"I8", 8, {}},
    {"F8_E4M3", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},
    {"U16", 16, {}},
    {"I16", 16, {}},
    {"U32", 32, {}},
    {"I32", 32, {}},
    {"U64", 64, {}},
    {"I64", 64, {}},
    {"F64", 64, {}},
    {"C64", 64, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
};

const DtypeInfo* dtype_info(std::string_view name) {
  for (const DtypeInfo& d : kDtypes) {
    if (d.name == name) return &d;
  }
  return nullptr;
}

// A duplicate key in the outermost object of valid JSON `text`, or "". The parser keeps the last of
// the two, so a header could describe one tensor twice.
std::string_view repeated_key(std::string_view text) {
  std::unordered_set<std::string_view> keys;
  std::string_view last;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      const size_t begin = ++i;
      while (text[i] != '"') i += text[i] == '\\' ? 2 : 1;
      last = text.substr(begin, i - begin);
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      --depth;
    } else if (c == ':' && depth == 1 && !keys.insert(last).second) {
      return last;
    }
  }
  return {};
}

std::optional<std::vector<int64_t>> int_array(const json::Value* v) {
  if (v == nullptr || !v->is_array()) return std::nullopt;
  std::vector<int64_t> out;
  out.reserve(v->as_array().size());
  for (const json::Value& e : v->as_array()) {
    const auto i = e.is_number() ? e.as_int64() : std::nullopt;
    if (!i || *i < 0) return std::nullopt;
    out.push_back(*i);
  }
  return out;
}

Result<TensorSource> tensor_of(const std::string& name, const json::Value& entry,
                               std::span<const uint8_t> data) {
  const json::Value* dtype = entry.find("dtype");
  if (dtype == nullptr || !dtype->is_string()) {
    return invalid_argument("tensor '{}' has no dtype", name);
  }
  auto shape = int_array(entry.find("shape"));
  const auto elements = shape ? checked_product(*shape) : std::nullopt;
  if (!elements) return invalid_argument("tensor '{}' has an invalid shape", name);
  const auto offsets = int_array(entry.find("data_offsets"));
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1]) {
    return invalid_argument("tensor '{}' has invalid data_offsets", name);
  }
  const auto begin = static_cast<size_t>((*offsets)[0]);
  const auto end = static_cast<size_t>((*offsets)[1]);
  if (end > data.size()) {
    return invalid_argument(
        "tensor '{}' ends at byte {} of {} bytes of data: the file is truncated", name, end,
        data.size());
  }
  TensorSource t;
  t.name = name;
  t.dtype = dtype->as_string();
  t.data = data.data() + begin;
  t.bytes = end - begin;
  t.shape = *std::move(shape);
  if (const DtypeInfo* info = dtype_info(t.dtype)) {
    int64_t bits = 0;
    if (__builtin_mul_overflow(*elements, int64_t{info->bits}, &bits) || bits % 8 != 0 ||
        static_cast<uint64_t>(bits / 8) != t.bytes) {
      return invalid_argument(
          "tensor '{}' has {} bytes, which does not match its shape and dtype {}", name, t.bytes,
          t.dtype);
    }
    t.format = info->format;
  }
  return t;
}

// The tensors must cover the data exactly: an overlap or a gap means that the header is wrong.
Status check_tiling(const std::vector<TensorSource>& tensors, std::span<const uint8_t> data) {
  std::vector<const TensorSource*> sorted;
  sorted.reserve(tensors.size());
  for (const TensorSource& t : tensors) sorted.push_back(&t);
  std::sort(sorted.begin(), sorted.end(), [](const TensorSource* a, const TensorSource* b) {
    return a->data != b->data ? a->data < b->data : a->bytes < b->bytes;
  });
  const uint8_t* at = data.data();
  for (const TensorSource* t : sorted) {
    if (t->data < at) return invalid_argument("tensor '{}' overlaps another", t->name);
    if (t->data > at)
      return invalid_argument("bytes before tensor '{}' belong to no tensor", t->name);
    at += t->bytes;
  }
  if (at != data.data() + data.size()) {
    return invalid_argument("{} bytes at the end belong to no tensor",
                            data.data() + data.size() - at);
  }
  return {};
}

}  // namespace

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  FRESHET_ASSIGN_OR_RETURN(MappedFile mapped, MappedFile::open(path));
  SafetensorsFile f;
  f.file_ = std::make_unique<MappedFile>(std::move(mapped));
  FRESHET_RETURN_IF_ERROR(f.read(f.file_->bytes()).with_context(path));
  return f;
}

Result<SafetensorsFile> SafetensorsFile::parse(std::span<const uint8_t> bytes,
                                               const std::string& name) {
  SafetensorsFile f;
  FRESHET_RETURN_IF_ERROR(f.read(bytes).with_context(name));
  return f;
}

Status SafetensorsFile::read(std::span<const uint8_t> bytes) {
  if (bytes.size() < 8) return invalid_argument("not a safetensors file: {} bytes", bytes.size());
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  if (length > kMaxHeader) {
    return invalid_argument("not a safetensors file: a header of {} bytes exceeds the limit of {}",
                            length, kMaxHeader);
  }
  if (length > bytes.size() - 8) {
    return invalid_argument("the header of {} bytes does not fit in the file: it is truncated",
                            length);
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + 8, length);
  const std::span<const uint8_t> data = bytes.subspan(8 + length);
  auto header = json::parse(text, {.depth = 8, .bytes = kMaxHeader});
  if (!header.ok()) return header.status().with_context("header");
  if (!header->is_object()) return invalid_argument("the header is not a JSON object");
  if (const auto key = repeated_key(text); key.data() != nullptr) {
    return invalid_argument("the header names '{}' twice", key);
  }
  tensors_.reserve(header->as_object().size());
  for (const auto& [name, entry] : header->as_object()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) return invalid_argument("__metadata__ is not an object");
      for (const auto& [k, v] : entry.as_object()) {
        if (v.is_string()) metadata_[k] = v.as_string();
      }
      continue;
    }
    FRESHET_ASSIGN_OR_RETURN(TensorSource t, tensor_of(name, entry, data));
    t.file = file_.get();
    t.file_offset = static_cast<size_t>(t.data - bytes.data());
    tensors_.push_back(std::move(t));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
  return check_tiling(tensors_, data);
}

const TensorSource* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

}  // namespace freshet::loader
