// The folder of downloaded models, in the layout that huggingface_hub, llama.cpp and others share:
//
//   models--ORG--REPO/blobs/HASH                      contents, named by the hub's ETag
//   models--ORG--REPO/snapshots/COMMIT/PATH           symbolic links to ../../blobs/HASH
//   models--ORG--REPO/refs/REVISION                   the commit of a branch or tag
//   models--ORG--REPO/.no_exist/COMMIT/PATH           an empty file: the repository has no such
//   file .locks/models--ORG--REPO/HASH.lock                flock() while a blob is downloaded
//
// Files and refs appear by rename, so readers never see half of one. Safe to use from several
// processes; an object is used by one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "hub/listing.h"
#include "hub/names.h"

namespace freshet::hub {

struct CachedModel {
  ModelRef ref;      // with the quantisation of a GGUF model
  std::string path;  // the GGUF file, or the folder of the snapshot
  std::string commit;
  Selection selection;  // paths relative to the snapshot
};

class Cache {
 public:
  explicit Cache(std::string root) : root_(std::move(root)) {}

  const std::string& root() const { return root_; }
  std::string repo_dir(const std::string& repo) const { return root_ + "/" + repo_folder(repo); }
  std::string blob_path(const std::string& repo, const std::string& blob) const;
  std::string snapshot_dir(const std::string& repo, const std::string& commit) const;

  // Creates the folders of a repository.
  Status prepare(const std::string& repo) const;
  // Makes snapshots/COMMIT/PATH a link to the blob.
  Status link(const std::string& repo, const std::string& commit, const std::string& path,
              const std::string& blob) const;
  Status write_ref(const std::string& repo, const std::string& revision,
                   const std::string& commit) const;

  // Remembers that the repository has no tokenizer: then a folder without one is complete.
  Status note_no_tokenizer(const std::string& repo, const std::string& commit) const;

  // The files of a snapshot whose contents are there.
  std::vector<RepoFile> files(const std::string& repo, const std::string& commit) const;
  // The model, if all of it is there: at the commit that refs/ names, no network asked.
  std::optional<CachedModel> locate(const ModelRef& ref) const;
  // Every complete model, by repository and path.
  std::vector<CachedModel> list() const;
  // Removes a model; the whole repository if ref.quant is empty. Blobs that another file of the
  // repository needs stay. Returns the bytes freed; kNotFound if there is nothing to remove.
  Result<int64_t> remove(const ModelRef& ref) const;

 private:
  bool is_complete(const std::string& repo, const std::string& commit,
                   const Selection& selection) const;
  std::optional<std::string> commit_of(const std::string& repo, const std::string& revision) const;
  std::string root_;
};

// Holds the lock of a blob. Waits for another process; `on_wait` is called once before.
class BlobLock {
 public:
  template <class OnWait>
  static Result<BlobLock> take(const Cache& cache, const std::string& repo, const std::string& blob,
                               const OnWait& on_wait) {
    FRESHET_ASSIGN_OR_RETURN(BlobLock lock, open(cache, repo, blob));
    if (!lock.try_take()) {
      on_wait();
      FRESHET_RETURN_IF_ERROR(lock.wait());
    }
    return lock;
  }
  BlobLock(BlobLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  BlobLock& operator=(BlobLock&&) = delete;
  ~BlobLock();

 private:
  explicit BlobLock(int fd) : fd_(fd) {}
  static Result<BlobLock> open(const Cache& cache, const std::string& repo,
                               const std::string& blob);
  bool try_take();
  Status wait();
  int fd_;
};

}  // namespace freshet::hub
