// Helpers of the loader tests: fixtures made by tools/golden_loader.py, and files with arbitrary
// bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "loader/tensor_source.h"

namespace freshet::loader {

inline std::string data_path(const std::string& name) {
  return std::string(FRESHET_SOURCE_DIR) + "/tests/data/loader/" + name;
}

inline std::vector<uint8_t> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_bytes(const std::string& path, std::span<const uint8_t> bytes) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

inline std::string fnv1a(const uint8_t* data, size_t n) {
  uint64_t h = 0xcbf29ce484222325;
  for (size_t i = 0; i < n; ++i) h = (h ^ data[i]) * 0x100000001b3;
  return fmt::format("{:016x}", h);
}

struct ExpectedTensor {
  std::string dtype, shape, hash;
};

// The lines of expected.txt for one file.
inline std::map<std::string, ExpectedTensor> expected_tensors(const std::string& file) {
  std::ifstream in(data_path("expected.txt"));
  std::map<std::string, ExpectedTensor> out;
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string of, name;
    ExpectedTensor e;
    fields >> of >> name >> e.dtype >> e.shape >> e.hash;
    if (of == file) out[name] = e;
  }
  return out;
}

inline void expect_tensors(const std::vector<TensorSource>& tensors, const std::string& file) {
  const auto expected = expected_tensors(file);
  ASSERT_FALSE(expected.empty());
  EXPECT_EQ(tensors.size(), expected.size());
  for (const TensorSource& t : tensors) {
    std::string name = t.name;
    std::replace(name.begin(), name.end(), ' ', '_');
    const auto it = expected.find(name);
    ASSERT_NE(it, expected.end()) << name;
    EXPECT_EQ(t.dtype, it->second.dtype) << name;
    EXPECT_EQ(t.shape.empty() ? "-" : fmt::format("{}", fmt::join(t.shape, ",")), it->second.shape);
    EXPECT_EQ(fnv1a(t.data, t.bytes), it->second.hash) << name;
    if (t.format) {
      EXPECT_EQ(quant::row_bytes(*t.format, t.elements()), t.bytes) << name;
    }
    if (t.file != nullptr) {
      EXPECT_EQ(t.file->bytes().data() + t.file_offset, t.data) << name;
    }
  }
}

// A hostile file may be refused or read, but every view that was read must lie inside it.
inline void expect_inside(const std::vector<TensorSource>& tensors, std::span<const uint8_t> file) {
  for (const TensorSource& t : tensors) {
    ASSERT_GE(t.data, file.data());
    ASSERT_LE(t.bytes, static_cast<size_t>(file.data() + file.size() - t.data));
    ASSERT_GE(t.elements(), 0);
  }
}

}  // namespace freshet::loader
