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
#include "http/url.h"

namespace freshet::http {

struct ClientOptions {
  Url url;
  std::string bearer;  // an API key; empty: none
  std::vector<std::pair<std::string, std::string>> headers;
  std::string user_agent = "freshet/" FRESHET_VERSION;
  bool verify_tls = true;
  double connect_timeout_s = 30.0;
  double read_timeout_s = 3600.0;  // without receiving a byte
  size_t read_size = 16 << 10;     // bytes per read of a body
  // Connections go through this HTTP proxy, with CONNECT for TLS; empty host: directly.
  Url proxy;
  std::string proxy_authorization;  // value of Proxy-Authorization; empty: none
};

struct Reply {
  int status = 0;
  std::string reason;
  std::string body;  // empty if a sink took it
  // Names in lower case. Only filled for exchange().
  std::vector<std::pair<std::string, std::string>> headers;

  std::string_view header(std::string_view name) const;  // "" if absent
};

class Client {
 public:
  // Receives the bytes of a body with status 200 as they arrive.
  using Sink = std::function<void(std::string_view)>;
  // The same; false aborts the exchange, which is then an error.
  using CheckedSink = std::function<bool(std::string_view)>;
  // Called when the headers have arrived. True: the body goes to the sink.
  using OnHead = std::function<bool(const Reply&)>;

  // Resolves the host name. Errors name the host.
  static Result<std::unique_ptr<Client>> create(boost::asio::io_context& io, ClientOptions options);
  ~Client();

  // `target` is appended to the URL's prefix; an empty `body` makes it a GET.
  boost::asio::awaitable<Result<Reply>> request(std::string target, const std::string& body,
                                                Sink sink);
  // The same, but runs the io_context until the answer is complete. Answers of up to 64 MiB.
  Result<Reply> request_now(const std::string& target, const std::string& body = {});

  // A request without a body, for callers that need headers; runs the io_context until the answer
  // is complete.
  struct Call {
    std::string method = "GET";  // or HEAD
    std::string target;
    std::vector<std::pair<std::string, std::string>> headers;
  };
  Result<Reply> exchange(const Call& call, const OnHead& on_head, const CheckedSink& sink);

 private:
  struct Impl;
  explicit Client(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace freshet::http
