// One client connection: reads requests, passes them to the handler, writes the answers.
//
// A connection runs on one strand of the server's io_context and owns itself. The server only knows
// it through Shared::connections, where it is listed from construction to destruction. close() and
// close_if_idle() are thread-safe. Private to the HTTP server.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>

#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>

#include "server/http_server.h"

namespace freshet::server {

class Connection {
 public:
  virtual ~Connection() = default;
  virtual void close_if_idle() = 0;
  virtual void close() = 0;
};

// State shared by the connections of a server. Outlives them.
struct Shared {
  HttpOptions options;
  Handler handler;
  boost::asio::thread_pool* workers = nullptr;
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> requests{0};
  std::atomic<size_t> body_bytes{0};  // of all bodies being read; limit: 4 * max_body_bytes
  std::mutex mutex;
  std::condition_variable changed;  // signals a change of `connections`
  std::set<Connection*> connections;
};

// Takes over the socket; uses TLS if `tls` is given. `tls` must outlive the connection.
void launch_connection(boost::asio::ip::tcp::socket socket, Shared& shared,
                       boost::asio::ssl::context* tls);

// A timeout in milliseconds, limited so that adding it to the clock cannot overflow.
inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1000.0));
}

}  // namespace freshet::server
