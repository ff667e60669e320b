// Gets models from the hub, and GGUF files from other servers, into their folders.
//
// Blocking; one thread. After a kill at any time the same call goes on where the last one stopped.
#pragma once

#include <string>

#include "base/status.h"
#include "hub/cache.h"
#include "hub/download.h"
#include "hub/settings.h"

namespace freshet::hub {

struct Pulled {
  CachedModel model;
  std::string licence;  // "" if the repository states none
  bool gated = false;
  int64_t downloaded = 0;  // bytes that had to be fetched
};

// What the repository holds at ref.revision now.
Result<Listing> list_repo(HubClient& client, const ModelRef& ref, const Observer& observer);

// Downloads what is missing, at the revision's newest commit. refs/ is written last: until all
// files are there, an older complete snapshot stays in use.
Result<Pulled> pull(const Settings& settings, const ModelRef& ref, const Observer& observer);

// Where pull_url() puts a file: FOLDER/downloads/KEY/NAME.gguf, where KEY belongs to the URL.
// Errors: not a URL, or not one of a .gguf file.
Result<std::string> path_of_url(const std::string& folder, const std::string& url);
// Downloads a GGUF file from any server; returns its path. The token goes to the hub only.
Result<std::string> pull_url(const Settings& settings, const std::string& folder,
                             const std::string& url, const Observer& observer);

// An error if the file system of `folder` has less than `bytes` free. The nearest existing parent
// counts if the folder does not exist.
Status check_space(const std::string& folder, int64_t bytes);

}  // namespace freshet::hub
