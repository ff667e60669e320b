// Writes a download to a file and hashes it meanwhile, on a thread of its own, so that the network
// is read while the disk and SHA-256 work.
//
// The file only grows at its end, so after a kill it holds a prefix of the download; open() hashes
// what is there and goes on behind it. One caller; write() blocks while the thread is behind by
// several megabytes. Errors of the disk stick: status() has the first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::hub {

class BlobWriter {
 public:
  static Result<std::unique_ptr<BlobWriter>> open(const std::string& path);
  ~BlobWriter();

  int64_t size() const;                // bytes in the file and on their way there
  bool write(std::string_view bytes);  // false after an error
  Status restart();                    // empties the file
  // Waits for the thread and syncs the file to the disk; returns the SHA-256 in hexadecimal digits.
  // write() may follow.
  Result<std::string> finish();
  Status status() const;

 private:
  struct Impl;
  explicit BlobWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

std::string sha256_of(std::string_view bytes);
// The hash by which git names the contents of a file: SHA-1 of "blob SIZE\0" and the contents.
Result<std::string> git_hash_of_file(const std::string& path);

}  // namespace freshet::hub
