#include "loader/gguf_writer.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace freshet::loader {
namespace {

constexpr uint32_t kDefaultAlignment = 32;
constexpr size_t kBufferSize = size_t{1} << 20;
constexpr std::string_view kAlignmentKey = "general.alignment";

template <class T>
void append(std::string& out, const T& v) {
  out.append(reinterpret_cast<const char*>(&v), sizeof v);
}

void append_string(std::string& out, std::string_view s) {
  append(out, static_cast<uint64_t>(s.size()));
  out.append(s);
}

uint64_t padding(uint64_t n, uint64_t alignment) {
  return (alignment - n % alignment) % alignment;
}

std::span<const uint8_t> as_bytes(std::string_view s) {
  return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

}  // namespace

GgufWriter::GgufWriter(uint32_t alignment) : alignment_(alignment) {
  FRESHET_CHECK(alignment >= 8 && std::has_single_bit(alignment), "alignment {}", alignment);
  if (alignment != kDefaultAlignment) {
    std::string value;
    append(value, static_cast<uint32_t>(GgufType::kU32));
    append(value, alignment);
    metadata_.emplace_back(kAlignmentKey, std::move(value));
  }
}

GgufWriter::~GgufWriter() {
  abandon();
}

void GgufWriter::set(std::string_view key, std::string encoded) {
  FRESHET_CHECK(fd_ < 0, "metadata comes before open()");
  if (key == kAlignmentKey) return;
  for (auto& [k, v] : metadata_) {
    if (k == key) {
      v = std::move(encoded);
      return;
    }
  }
  metadata_.emplace_back(key, std::move(encoded));
}

template <class T>
void GgufWriter::add_scalar(std::string_view key, GgufType type, T v) {
  std::string out;
  append(out, static_cast<uint32_t>(type));
  append(out, v);
  set(key, std::move(out));
}

template <class T>
void GgufWriter::add_array(std::string_view key, GgufType type, std::span<const T> v) {
  std::string out;
  append(out, static_cast<uint32_t>(GgufType::kArray));
  append(out, static_cast<uint32_t>(type));
  append(out, static_cast<uint64_t>(v.size()));
  out.append(reinterpret_cast<const char*>(v.data()), v.size_bytes());
  set(key, std::move(out));
}

void GgufWriter::add_u32(std::string_view key, uint32_t v) {
  add_scalar(key, GgufType::kU32, v);
}
void GgufWriter::add_i32(std::string_view key, int32_t v) {
  add_scalar(key, GgufType::kI32, v);
}
void GgufWriter::add_u64(std::string_view key, uint64_t v) {
  add_scalar(key, GgufType::kU64, v);
}
void GgufWriter::add_f32(std::string_view key, float v) {
  add_scalar(key, GgufType::kF32, v);
}
void GgufWriter::add_bool(std::string_view key, bool v) {
  add_scalar(key, GgufType::kBool, static_cast<uint8_t>(v));
}
void GgufWriter::add_i32s(std::string_view key, std::span<const int32_t> v) {
  add_array(key, GgufType::kI32, v);
}
void GgufWriter::add_f32s(std::string_view key, std::span<const float> v) {
  add_array(key, GgufType::kF32, v);
}

void GgufWriter::add_string(std::string_view key, std::string_view v) {
  std::string out;
  append(out, static_cast<uint32_t>(GgufType::kString));
  append_string(out, v);
  set(key, std::move(out));
}

void GgufWriter::add_strings(std::string_view key, std::span<const std::string> v) {
  GgufValue value;
  value.type = GgufType::kString;
  value.is_array = true;
  value.count = v.size();
  value.strings.assign(v.begin(), v.end());
  add_value(key, value);
}

void GgufWriter::add_value(std::string_view key, const GgufValue& v) {
  std::string out;
  if (v.is_array) {
    append(out, static_cast<uint32_t>(GgufType::kArray));
    append(out, static_cast<uint32_t>(v.type));
    append(out, v.count);
  } else {
    append(out, static_cast<uint32_t>(v.type));
  }
  for (const std::string_view s : v.strings) append_string(out, s);
  out.append(reinterpret_cast<const char*>(v.raw.data()), v.raw.size());
  set(key, std::move(out));
}

Status GgufWriter::add_tensor(std::string_view name, quant::Format format,
                              std::vector<int64_t> shape) {
  FRESHET_CHECK(fd_ < 0, "tensors are declared before open()");
  const quant::FormatInfo& info = quant::info(format);
  const auto elements = checked_product(shape);
  if (shape.empty() || shape.size() > 4 || !elements) {
    return invalid_argument("tensor '{}' has a shape that GGUF cannot hold", name);
  }
  if (shape.back() % info.block_size != 0) {
    return invalid_argument(
        "tensor '{}' has rows of {} numbers, not a multiple of {}'s block of {}", name,
        shape.back(), info.name, info.block_size);
  }
  if (!names_.emplace(name).second) {
    return invalid_argument("tensor '{}' is written twice", name);
  }
  uint64_t bytes = 0;
  uint64_t end = 0;
  if (__builtin_mul_overflow(static_cast<uint64_t>(*elements / info.block_size),
                             static_cast<uint64_t>(info.block_bytes), &bytes) ||
      __builtin_add_overflow(data_size_, bytes, &end) || end > uint64_t{1} << 62) {
    return invalid_argument("tensor '{}' has a shape that GGUF cannot hold", name);
  }
  tensors_.push_back({std::string(name), format, std::move(shape), bytes, data_size_});
  data_size_ = end + padding(end, alignment_);
  return {};
}

std::string GgufWriter::head() const {
  std::string out = "GGUF";
  append(out, uint32_t{3});
  append(out, static_cast<uint64_t>(tensors_.size()));
  append(out, static_cast<uint64_t>(metadata_.size()));
  for (const auto& [key, value] : metadata_) {
    append_string(out, key);
    out.append(value);
  }
  for (const Tensor& t : tensors_) {
    append_string(out, t.name);
    append(out, static_cast<uint32_t>(t.shape.size()));
    for (size_t d = t.shape.size(); d-- > 0;) append(out, t.shape[d]);  // innermost first
    append(out, quant::info(t.format).ggml_type);
    append(out, t.offset);
  }
  out.append(padding(out.size(), alignment_), '\0');
  return out;
}

Status GgufWriter::open(const std::string& path) {
  FRESHET_CHECK(fd_ < 0 && path_.empty(), "a GgufWriter writes one file");
  struct stat there{};
  if (::stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    return io_error("{} is not a regular file, so it is not replaced", path);
  }
  path_ = path;
  partial_path_ = fmt::format("{}.{}.partial", path, ::getpid());
  fd_ = ::open(partial_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) return failed("cannot create");
  return put(as_bytes(head()));
}

Status GgufWriter::write(std::span<const uint8_t> bytes) {
  FRESHET_CHECK(fd_ >= 0, "write() comes after open()");
  while (!bytes.empty()) {
    FRESHET_CHECK(current_ < tensors_.size(), "more bytes than the declared tensors hold");
    const Tensor& t = tensors_[current_];
    const auto n = static_cast<size_t>(std::min<uint64_t>(bytes.size(), t.bytes - written_));
    FRESHET_RETURN_IF_ERROR(put(bytes.first(n)));
    bytes = bytes.subspan(n);
    written_ += n;
    if (written_ < t.bytes) break;
    buffer_.append(padding(t.bytes, alignment_), '\0');
    ++current_;
    written_ = 0;
  }
  return {};
}

Status GgufWriter::close() {
  FRESHET_CHECK(fd_ >= 0, "close() comes after open()");
  while (current_ < tensors_.size() && tensors_[current_].bytes == 0) ++current_;
  FRESHET_CHECK(current_ == tensors_.size(), "tensor '{}' was declared but not written",
                tensors_[current_].name);
  FRESHET_RETURN_IF_ERROR(flush());
  if (::fsync(fd_) != 0) return failed("cannot write");
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0) return failed("cannot write");
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0) return failed("cannot rename to");
  partial_path_.clear();
  return {};
}

// Small chunks are collected in the buffer; large ones bypass it without a copy.
Status GgufWriter::put(std::span<const uint8_t> bytes) {
  if (buffer_.size() + bytes.size() < kBufferSize) {
    buffer_.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return {};
  }
  FRESHET_RETURN_IF_ERROR(flush());
  return write_out(bytes);
}

Status GgufWriter::flush() {
  FRESHET_RETURN_IF_ERROR(write_out(as_bytes(buffer_)));
  buffer_.clear();
  return {};
}

Status GgufWriter::write_out(std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return failed("cannot write");
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return {};
}

Status GgufWriter::failed(std::string_view what) {
  const int error = errno;
  abandon();
  return io_error("{} {}: {}", what, path_, std::generic_category().message(error));
}

void GgufWriter::abandon() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  if (!partial_path_.empty()) ::unlink(partial_path_.c_str());
  partial_path_.clear();
}

}  // namespace freshet::loader
