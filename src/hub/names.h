// Names of models on the hub, and which names and paths are safe to use on this machine.
//
// Everything here is pure and thread-safe. What a server sends (paths, hashes, revisions) passes
// these checks before it becomes part of a path.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace freshet::hub {

// A model on the hub: "ORG/REPO@REVISION:QUANT".
struct ModelRef {
  std::string repo;               // "ORG/REPO"; old repositories have no ORG
  std::string revision = "main";  // a branch, a tag or a commit
  std::string quant;              // "Q4_K_M", a file name, "safetensors"; "" means the default

  std::string text() const;  // "hf:ORG/REPO:QUANT"; the revision unless it is main
};

// "hf:ORG/REPO[@REVISION][:QUANT]", also "hf://..." and without "hf:".
Result<ModelRef> parse_model_ref(std::string_view text);

// Whether `text` begins with "hf:", in any case.
bool is_hub_name(std::string_view text);

// The model that a URL on the hub means: ENDPOINT/ORG/REPO, .../tree/REV, .../resolve/REV/FILE or
// .../blob/REV/FILE. nullopt for URLs of other servers or of other kinds.
std::optional<ModelRef> ref_of_url(std::string_view url, std::string_view endpoint);

// A path of a file in a repository. Errors: absolute, "..", backslashes, control characters ...
Status check_file_path(std::string_view path);
Status check_repo(std::string_view repo);
Status check_revision(std::string_view revision);
bool is_commit(std::string_view text);     // 40 lower-case hexadecimal digits
bool is_blob_name(std::string_view text);  // may name a file in blobs/: an ETag of the hub

// "models--ORG--REPO", and the reverse ("" if it is not such a name).
std::string repo_folder(std::string_view repo);
std::string repo_of_folder(std::string_view folder);

// An ETag header without quotes and W/.
std::string etag_text(std::string_view header);

}  // namespace freshet::hub
