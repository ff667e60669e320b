// What a repository holds, and which of its files make a model.
//
// Pure and thread-safe. The answers of a server are untrusted: paths, hashes and sizes are checked
// here, and a listing with a path that leaves its folder is refused as a whole.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace freshet::hub {

struct RepoFile {
  std::string path;   // relative, with '/'; passes check_file_path()
  int64_t size = -1;  // in bytes; -1 if unknown
  std::string blob;   // the name in blobs/: SHA-256 of an LFS file, else git's SHA-1; "" if unknown
};

struct Listing {
  std::string commit;   // 40 hexadecimal digits
  std::string licence;  // as the repository states it; "" if it does not
  bool gated = false;   // the publisher wants its terms accepted first
  std::vector<RepoFile> files;
};

// The answer to GET /api/models/REPO/revision/REV?blobs=true.
Result<Listing> parse_listing(std::string_view json);

struct Selection {
  bool gguf = false;            // else a folder with config.json and safetensors
  std::string main;             // the GGUF file (of a split one, the first part); "" for a folder
  std::vector<RepoFile> files;  // in the order of download
  int64_t bytes() const;        // of files with a known size
};

// The files of one model. `quant`: "Q4_K_M" (in any case), a file name, "safetensors", or "" for
// the default: GGUF in Q4_K_M, else safetensors, else GGUF in Q8_0 or what comes first by name.
// Errors start with `repo` and say what there is. Weights that would have to be unpickled are never
// selected. `quant` also finds parts: "model-00001-of-00003.gguf" selects all three.
Result<Selection> select_files(const std::vector<RepoFile>& files, std::string_view quant,
                               std::string_view repo);

// Whether all numbered parts and the configuration are there.
bool has_all_parts(const Selection& selection);
bool has_tokenizer(const Selection& selection);  // a GGUF file holds its own

// The quantisation in a GGUF file's name, in upper case: "Q4_K_M", "BF16"; "" if there is none.
std::string quant_of(std::string_view path);
// The GGUF models among the files, each by its first part, sorted by path.
std::vector<RepoFile> gguf_models(const std::vector<RepoFile>& files);
// The sum of the sizes of a GGUF model's parts.
int64_t gguf_bytes(const std::vector<RepoFile>& files, const RepoFile& first);

}  // namespace freshet::hub
