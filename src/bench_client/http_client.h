// An HTTP/1.1 client for one server: keep-alive, streamed chunked bodies, TLS.
//
// Runs on one io_context and one thread; not synchronised. Connections are reused. If the server
// closed an idle connection, it is replaced transparently.
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
  double read_timeout_s = 3600.0;  // without receiving a byte
};

struct Reply {
  int status = 0;
  std::string reason;
  std::string body;  // of a request with a sink: only the body of an error status
};

class HttpClient {
 public:
  // Receives the bytes of a body with status 200 as they arrive.
  using Sink = std::function<void(std::string_view)>;

  // Resolves the host name. Errors name the host.
  static Result<std::unique_ptr<HttpClient>> create(boost::asio::io_context& io,
                                                    ClientOptions options);
  ~HttpClient();

  // `target` is appended to the URL's prefix; an empty `body` makes it a GET.
  boost::asio::awaitable<Result<Reply>> request(std::string target, const std::string& body,
                                                Sink sink);
  // The same, but runs the io_context until the answer is complete. Answers of up to 64 MiB.
  Result<Reply> request_now(const std::string& target, const std::string& body = {});

 private:
  struct Impl;
  explicit HttpClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet::bench_client
