// Packed weights in a file, mapped at the next start in place of packing them again.
//
// A cache file is pages: a header of 64 bytes, the packed weights in the order in which a model
// asks for them, each on a page boundary, then the index (the key, and name, format, shape and
// place of each weight). It is mapped read-only and shared, so all processes use one copy. A file
// is valid only if its header and index are intact (a hash), its size is the size that it states,
// and its key is the requested one: everything that the packed bytes depend on, as text. The bytes
// of the weights are not checked at each start, just as those of the model's files are not: the
// folder must be trusted like the model.
//
// A writer fills PATH.tmp under a lock and renames it when all of it is on the disk. The next
// writer takes over the file of one that died. One thread each; any number of processes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "base/status.h"
#include "loader/checkpoint.h"
#include "ops/ops.h"

namespace freshet::models {

// Lines of "name value...": the versions of the program and of the packing, the instruction set,
// the rows that pack, the configuration, and for each file its path, size, time of change, and
// hashes of its header (names, types, shapes) and of pages spread over the rest. Threads and
// batches are not in it: packing does not depend on them.
std::string weight_cache_key(const loader::Checkpoint& checkpoint, const ops::Ops& ops);
// "<model>-<instruction set>-<hash of its path>.weights" in `folder`: a model that has changed
// replaces its older cache.
std::string weight_cache_path(const std::string& folder, const loader::Checkpoint& checkpoint,
                              const ops::Ops& ops);

struct CachedWeight {
  std::string name;
  quant::Format format = quant::Format::kF32;
  int64_t rows = 0, cols = 0;
  uint64_t offset = 0, bytes = 0;
};

class WeightCache {
 public:
  // An error says why the file cannot be used: absent, damaged, or which line of the key differs.
  static Result<WeightCache> open(const std::string& path, std::string_view key);

  // The next weight; an error if it is not the requested one. It may outlive the cache.
  Result<ops::Weight> next(ops::Ops& ops, const std::string& name, quant::Format format,
                           int64_t rows, int64_t cols);
  bool at_end() const { return next_ == weights_.size(); }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::vector<CachedWeight> weights_;
  size_t next_ = 0;
};

class WeightCacheWriter {
 public:
  // kResourceExhausted: another process is writing this file. Makes the folder.
  static Result<WeightCacheWriter> create(const std::string& path);
  WeightCacheWriter(WeightCacheWriter&& other) noexcept;
  ~WeightCacheWriter();  // without commit(): leaves nothing

  Status add(const std::string& name, const ops::Weight& weight);
  Status commit(std::string_view key);
  const Status& status() const { return error_; }  // the first error of add()

 private:
  WeightCacheWriter() = default;
  Status write(const uint8_t* data, size_t bytes, uint64_t offset);
  Status append(std::span<const uint8_t> bytes);
  Status flush();

  std::string path_;
  int fd_ = -1;
  uint64_t end_ = 0;  // of the appended bytes
  // Not yet written. Bytes are written in chunks of 2 MiB, because some file systems then keep them
  // in huge pages: GEMMs read those an eighth faster.
  std::vector<uint8_t> rest_;
  std::vector<CachedWeight> weights_;
  Status error_;
};

}  // namespace freshet::models
