// An HTTP/1.1 server for streamed answers: keep-alive, chunked bodies, server-sent events, TLS.
//
// Each request becomes an Exchange, which is passed to the handler on a worker thread, so that slow
// work (templates, tokenisation) never stalls other connections. An Exchange may be answered from
// any thread, once: either send(), or start() followed by write()s and finish(). Writes never
// block: they are queued, and coalesced while the client is slow. If the queue exceeds its limit or
// the client closes its end, the connection is closed and on_gone() tells the producer.
//
// Framing is strict (RFC 9112), because proxies may be in front. These are refused with 400 and the
// connection is closed: folded header lines, bare CR or LF, repeated or conflicting Host,
// Content-Length and Transfer-Encoding, codings other than chunked, and large chunk extensions. A
// request target is a path or an absolute URL, whose host then replaces Host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace freshet::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0: any free port
  int io_threads = 1;
  int worker_threads = 2;  // for handlers, and as many for posted tasks
  size_t max_header_bytes = 32 << 10;
  size_t max_body_bytes = 64 << 20;
  size_t max_queued_bytes = 4 << 20;  // of one answer, waiting for a slow client
  int max_connections = 8192;
  double header_timeout_s = 10.0;  // to receive the whole header
  double body_timeout_s = 60.0;
  double idle_timeout_s = 75.0;   // between requests of one connection
  double write_timeout_s = 60.0;  // without write progress
  std::string tls_certificate;    // PEM files; both or neither
  std::string tls_key;
};

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;   // decoded, without the query
  std::string query;  // raw, after '?'
  Headers headers;    // names in lower case
  std::string body;
  std::string remote;   // address of the peer
  uint64_t number = 0;  // counts requests of this server

  std::string_view header(std::string_view lower_case_name) const;  // "" if absent
};

struct HttpResponse {
  int status = 200;
  Headers headers;
  std::string content_type = "application/json";
  std::string body;
};

class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual const HttpRequest& request() const = 0;

  virtual void send(HttpResponse response) = 0;
  // Starts a streamed answer; `response.body` is its first part.
  virtual void start(HttpResponse response) = 0;
  virtual void write(std::string piece) = 0;
  virtual void finish() = 0;

  // Called at most once, on a server thread, if the client disconnects before the answer is
  // complete; at once if it already has. Set before returning from the handler.
  virtual void on_gone(std::function<void()> callback) = 0;
  virtual bool gone() const = 0;
  // Called once when the answer has been written or aborted, with the status and the bytes sent.
  virtual void on_complete(std::function<void(int status, size_t bytes)> callback) = 0;
};

using Handler = std::function<void(std::shared_ptr<Exchange>)>;

class HttpServer {
 public:
  // Binds the port; connections wait until serve(). Errors name the address or the certificate.
  static Result<std::unique_ptr<HttpServer>> listen(const HttpOptions& options);
  // REQUIRES: called once, before stop(). Everything that the handler uses must be ready.
  void serve(Handler handler);
  ~HttpServer();  // stop(0)

  uint16_t port() const;
  // Whether only this machine can connect.
  bool is_loopback() const;
  int connections() const;
  // Runs a task on a thread that handlers do not block. REQUIRES: not after stop().
  void post(std::function<void()> task);
  // Closes the listener and idle connections, waits up to `seconds` for answers in progress, then
  // closes the remaining connections. Returns whether all answers were finished.
  bool stop(double seconds);

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Status texts, percent-decoding and query look-up: also used by the routes, and unit-tested.
std::string_view reason_phrase(int status);
std::optional<std::string> percent_decode(std::string_view s);
// "127.0.0.1:80", "[::1]:80": as in a URL.
std::string host_and_port(const std::string& host, int port);

// The parsed target of a request line.
struct RequestTarget {
  std::string path;   // decoded
  std::string query;  // raw
  std::string host;   // with the port, if the target has absolute form; "" in origin form
};
// Parses origin form (/path?query), or absolute form with this scheme ("http" or "https", that of
// the connection). nullopt for anything else, including user names and fragments.
std::optional<RequestTarget> parse_target(std::string_view target, std::string_view scheme);

// Checks a raw header block (up to and including the blank line) for errors that the parser
// accepts. Returns the reason for refusal, or nullopt.
std::optional<std::string> header_block_error(std::string_view raw);

}  // namespace freshet::server
