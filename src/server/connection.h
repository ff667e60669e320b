// One client's connection: reads requests, hands them to the handler, writes what comes back.
//
// A connection lives on one strand of the server's io_context and owns itself; the server knows it
// by Shared::connections alone, which it enters when made and leaves when destroyed. close() and
// close_if_idle() may be called from any thread. Private to the HTTP server.
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

// What the connections of a server share. Outlives them.
struct Shared {
  HttpOptions options;
  Handler handler;
  boost::asio::thread_pool* workers = nullptr;
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> requests{0};
  std::atomic<size_t> body_bytes{0};  // of all requests being read, against 4 * max_body_bytes
  std::mutex mutex;
  std::condition_variable changed;  // of `connections`
  std::set<Connection*> connections;
};

// Serves the socket from here on; with TLS where `tls` is given, which outlives the connection.
void launch_connection(boost::asio::ip::tcp::socket socket, Shared& shared,
                       boost::asio::ssl::context* tls);

// Of a time-out, which may be any number: more, added to the clock, would overflow its nanoseconds.
inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1000.0));
}

}  // namespace freshet::server
