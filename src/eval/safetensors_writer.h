// Writer of a .safetensors file of F32 tensors: a JSON header, then the tensors one after the
// other.
//
// Shapes are given first, data follows in any pieces and in order. Errors of the file system, a
// full disk included, are returned by write() or close(). Not thread-safe.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace freshet::eval {

class SafetensorsWriter {
 public:
  struct Entry {
    std::string name;
    std::vector<int64_t> shape;
  };

  static Result<SafetensorsWriter> create(const std::string& path, std::span<const Entry> entries);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) = delete;
  ~SafetensorsWriter();

  Status write(std::span<const float> values);
  // REQUIRES: every tensor was written in full.
  Status close();

 private:
  SafetensorsWriter(std::FILE* file, std::string path, int64_t values)
      : file_(file), path_(std::move(path)), left_(values) {}
  Status failed() const;

  std::FILE* file_;
  std::string path_;
  int64_t left_;  // values to come
};

}  // namespace freshet::eval
