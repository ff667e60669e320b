// Stands before the application while its model is loaded.
//
// Until open(), every request is answered with 503 and Retry-After; a browser gets a page that asks
// again by itself. /health and the others do not say "healthy" before, as in llama-server.
// Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "server/http_server.h"

namespace freshet::server {

class StartGate {
 public:
  void handle(std::shared_ptr<Exchange> exchange);
  // What loading is at, for the message.
  void progress(const std::string& stage, double fraction);
  // From now on, requests go to `handler`.
  void open(Handler handler);

 private:
  std::mutex mutex_;
  std::shared_ptr<const Handler> handler_;  // guarded by mutex_, as is state_
  std::string state_ = "starting";
};

}  // namespace freshet::server
