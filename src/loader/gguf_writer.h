// Writer of a GGUF version 3 file, little-endian.
//
// Use: add metadata and declare all tensors, open(), write the bytes of the tensors in the order of
// declaration (in chunks of any size), close(). The bytes go to a temporary file beside the target;
// close() renames it once it is complete and on disk. So an error or a crash (or dropping the
// writer) leaves no partial model behind. Every file system error is returned, including a full
// disk. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "loader/gguf.h"
#include "quant/format.h"

namespace freshet::loader {

class GgufWriter {
 public:
  // REQUIRES: a power of two, at least 8. Written as general.alignment unless it is the default.
  explicit GgufWriter(uint32_t alignment = 32);
  ~GgufWriter();  // removes an unfinished file
  GgufWriter(const GgufWriter&) = delete;
  GgufWriter& operator=(const GgufWriter&) = delete;

  // Call before open(). Adding a key again replaces its value; general.alignment is ignored.
  void add_u32(std::string_view key, uint32_t v);
  void add_i32(std::string_view key, int32_t v);
  void add_u64(std::string_view key, uint64_t v);
  void add_f32(std::string_view key, float v);
  void add_bool(std::string_view key, bool v);
  void add_string(std::string_view key, std::string_view v);
  void add_i32s(std::string_view key, std::span<const int32_t> v);
  void add_f32s(std::string_view key, std::span<const float> v);
  void add_strings(std::string_view key, std::span<const std::string> v);
  void add_value(std::string_view key, const GgufValue& v);  // as returned by a reader

  // `shape` has 1 to 4 dimensions, outermost first; the last one must fill whole blocks.
  Status add_tensor(std::string_view name, quant::Format format, std::vector<int64_t> shape);

  // Of what comes before the tensors' bytes, once all is added and declared.
  uint64_t head_bytes() const { return head().size(); }

  Status open(const std::string& path);
  Status write(std::span<const uint8_t> bytes);  // the next bytes of the declared tensors
  Status close();

 private:
  struct Tensor {
    std::string name;
    quant::Format format;
    std::vector<int64_t> shape;
    uint64_t bytes;
    uint64_t offset;
  };
  template <class T>
  void add_scalar(std::string_view key, GgufType type, T v);
  template <class T>
  void add_array(std::string_view key, GgufType type, std::span<const T> v);
  void set(std::string_view key, std::string encoded);
  std::string head() const;
  Status put(std::span<const uint8_t> bytes);
  Status flush();
  Status write_out(std::span<const uint8_t> bytes);
  Status failed(std::string_view what);
  void abandon();

  uint32_t alignment_;
  std::vector<std::pair<std::string, std::string>> metadata_;  // key, type and value as bytes
  std::vector<Tensor> tensors_;
  std::unordered_set<std::string> names_;
  uint64_t data_size_ = 0;  // of the declared tensors, each padded
  std::string path_;
  std::string partial_path_;
  int fd_ = -1;
  std::string buffer_;
  size_t current_ = 0;    // index of the tensor being written
  uint64_t written_ = 0;  // bytes of it written so far
};

}  // namespace freshet::loader
