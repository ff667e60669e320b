// Importance matrices: the mean square of each input of each matrix, measured on a text.
//
// Reads and writes the two forms of llama.cpp. GGUF (the default since 2025): general.type
// "imatrix", imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size, and for each weight
// NAME.in_sum2 [experts, K], NAME.counts [experts, 1] and perhaps NAME.in_sum. The older .dat, all
// little-endian: i32 entries, then for each i32 length, name, i32 calls, i32 values, and F32
// values, which are mean squares times calls; then i32 chunks, i32 length, data set. A .dat has no
// counts of experts: one that no token reached is written as ones, as llama.cpp does.
//
// Names are those of the GGUF model. Files may be hostile: every length is checked against the
// file, and sums must be finite and not negative. Plain data; safe to read from many threads.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::quantizer {

struct Imatrix {
  struct Entry {
    std::vector<float> sum2;    // [experts * K]: sums of squares
    std::vector<float> sum;     // [experts * K]: sums; may be empty
    std::vector<float> counts;  // tokens; one for each expert, or one for all
  };
  // A tensor that has an entry if it was calibrated.
  struct Tensor {
    std::string name;
    int64_t experts = 1;
    int64_t cols = 0;
  };

  std::map<std::string, Entry, std::less<>> entries;
  std::vector<std::string> datasets;
  uint32_t chunk_count = 0;
  uint32_t chunk_size = 512;  // tokens; a .dat does not tell it: llama.cpp's default

  static Result<Imatrix> load(const std::string& path);
  // The same for bytes in memory; `name` is used in errors.
  static Result<Imatrix> parse(std::span<const uint8_t> bytes, const std::string& name);

  Status save_gguf(const std::string& path) const;
  Status save_dat(const std::string& path) const;

  // Adds the sums and counts of another file. Sums of inputs are kept where both have them.
  Status merge(const Imatrix& other);

  // The names without an entry, or with one that no token reached. An error if an entry has another
  // size than its tensor, or if the file has entries for none of them.
  Result<std::vector<std::string>> missing(std::span<const Tensor> tensors) const;
};

// What encoders use of an Imatrix: mean squares. An expert that no token reached has the mean of
// the tensor's other experts. Immutable; thread-safe.
class Importance {
 public:
  Importance() = default;  // of nothing
  explicit Importance(const Imatrix& imatrix);

  // The mean squares of the inputs of a tensor or one of its experts; empty if there are none for
  // `cols` inputs. Several matrices may share an entry (Entry::counts).
  std::span<const float> of(std::string_view name, int64_t expert, int64_t cols) const;
  size_t size() const { return means_.size(); }

 private:
  std::map<std::string, std::vector<float>, std::less<>> means_;  // [experts * K]
};

}  // namespace freshet::quantizer
