// How to reach the hub and where its cache is, from the environment variables that other programs
// use for the same purpose. A plain value; reading it is thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "http/client.h"

namespace freshet::hub {

struct Settings {
  std::string endpoint;   // "https://huggingface.co", without a slash at the end
  std::string cache;      // the folder that holds models--ORG--REPO
  std::string token;      // empty: none
  bool offline = false;   // no network at all
  double timeout_s = 30;  // without receiving a byte
  std::string https_proxy, http_proxy, no_proxy;
  int retries = 5;  // in a row, without progress between them

  // Errors: no home folder, an endpoint or a timeout that makes no sense.
  static Result<Settings> from_environment();
};

// Sets options.proxy if `s` asks for one for options.url. Errors name the proxy's variable, but
// never print a password.
Status apply_proxy(const Settings& s, http::ClientOptions& options);

// Whether a list such as "localhost,.example.com,10.0.0.1:8080" names this host. "*" is any host.
bool bypasses_proxy(std::string_view no_proxy, std::string_view host, int port);

}  // namespace freshet::hub
