// Reads the files that URLs in requests name: over HTTP from hosts that the policy allows, and from
// the policy's folder.
//
// Every redirection is checked like the URL itself; a file must lie in the folder once symbolic
// links are followed. Limits: bytes (the policy's), and seconds for all of a download. Proxies come
// from the environment. Stateless: any number of threads may read at a time.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "media/data_url.h"

namespace freshet::cli {

struct MediaReader {
  media::MediaPolicy policy;
  double timeout_s = 5.0;

  // REQUIRES: check_media_url(url, policy) gave kFile or kFetch.
  Result<std::vector<uint8_t>> read(const std::string& url) const;
};

// The bytes of a file on this machine, at most `limit` of them.
Result<std::vector<uint8_t>> read_media_file(const std::string& path, size_t limit);

}  // namespace freshet::cli
