// An HTTP/1.1 client for one server: keep-alive, chunked bodies read as they come, TLS.
//
// Lives on one io_context that one thread runs; nothing here is synchronised. Connections are kept
// and reused; one that the server closed while it was idle is replaced without the caller noticing.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>

#include "base/status.h"
#include "bench_client/url.h"

namespace freshet::bench_client {

struct ClientOptions {
  Url url;
  std::string bearer;  // an API key; empty: none
  std::vector<std::pair<std::string, std::string>> headers;
  bool verify_tls = true;
  double connect_timeout_s = 30.0;
  double read_timeout_s = 3600.0;  // without any byte
};

struct Reply {
  int status = 0;
  std::string reason;
  std::string body;  // of a request with a sink: only what came with an error status
};

class HttpClient {
 public:
  // Gets the bytes of a body with status 200 as they come.
  using Sink = std::function<void(std::string_view)>;

  // Looks the host up. Errors name it.
  static Result<std::unique_ptr<HttpClient>> create(boost::asio::io_context& io,
                                                    ClientOptions options);
  ~HttpClient();

  // `target` is appended to the URL's prefix; an empty `body` makes it a GET.
  boost::asio::awaitable<Result<Reply>> request(std::string target, const std::string& body,
                                                Sink sink);
  // The same, running the io_context until the answer is there. Whole answers up to 64 MiB.
  Result<Reply> request_now(const std::string& target, const std::string& body = {});

 private:
  struct Impl;
  explicit HttpClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet::bench_client
