#include "server/http_server.h"

#include <chrono>
#include <mutex>
#include <optional>
#include <thread>

#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>

#include "server/connection.h"

namespace freshet::server {
namespace {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using boost::system::error_code;

}  // namespace

struct HttpServer::Impl {
  explicit Impl(const HttpOptions& o)
      : workers(static_cast<size_t>(std::max(1, o.worker_threads))),
        posted(static_cast<size_t>(std::max(1, o.worker_threads))),
        io(std::max(1, o.io_threads)),
        acceptor(asio::make_strand(io)),
        retry(acceptor.get_executor()) {
    shared.options = o;
    shared.workers = &workers;
  }

  Status load_tls() {
    if (shared.options.tls_certificate.empty() && shared.options.tls_key.empty()) return {};
    if (shared.options.tls_certificate.empty() || shared.options.tls_key.empty()) {
      return invalid_argument(
          "TLS needs both a certificate and a key (--ssl-certfile, --ssl-keyfile)");
    }
    tls.emplace(asio::ssl::context::tls_server);
    tls->set_options(asio::ssl::context::no_tlsv1 | asio::ssl::context::no_tlsv1_1);
    error_code ec;
    tls->use_certificate_chain_file(shared.options.tls_certificate, ec);
    if (ec) {
      return invalid_argument("cannot use certificate {}: {}", shared.options.tls_certificate,
                              ec.message());
    }
    tls->use_private_key_file(shared.options.tls_key, asio::ssl::context::pem, ec);
    if (ec) return invalid_argument("cannot use key {}: {}", shared.options.tls_key, ec.message());
    return {};
  }

  Status bind() {
    error_code ec;
    tcp::resolver resolver(io);
    const auto found = resolver.resolve(shared.options.host, std::to_string(shared.options.port),
                                        tcp::resolver::passive, ec);
    if (ec || found.empty())
      return invalid_argument("cannot resolve --host {}: {}", shared.options.host, ec.message());
    const tcp::endpoint endpoint = *found.begin();
    acceptor.open(endpoint.protocol(), ec);
    if (!ec) acceptor.set_option(asio::socket_base::reuse_address(true), ec);
    if (!ec) acceptor.bind(endpoint, ec);
    if (!ec) acceptor.listen(4096, ec);
    if (ec) {
      return io_error("cannot listen on {}: {}{}",
                      host_and_port(shared.options.host, shared.options.port), ec.message(),
                      ec == asio::error::address_in_use ? "; choose another --port" : "");
    }
    return {};
  }

  void accept_next() {
    acceptor.async_accept(asio::make_strand(io), [this](error_code ec, tcp::socket socket) {
      if (ec == asio::error::operation_aborted || shared.stopping) return;
      if (ec) {  // most likely out of file descriptors: wait until some are closed
        retry.expires_after(std::chrono::milliseconds(50));
        retry.async_wait([this](error_code cancelled) {
          if (!cancelled) accept_next();
        });
        return;
      }
      admit(std::move(socket));
      accept_next();
    });
  }

  void admit(tcp::socket socket) {
    {
      std::lock_guard lock(shared.mutex);
      if (shared.connections.size() >= static_cast<size_t>(shared.options.max_connections))
        return;  // closes it
    }
    launch_connection(std::move(socket), shared, tls ? &*tls : nullptr);
  }

  void for_each_connection(void (Connection::*f)()) {
    std::lock_guard lock(shared.mutex);
    for (Connection* c : shared.connections) (c->*f)();
  }

  bool stop(double seconds) {
    if (stopped) return true;
    stopped = true;
    shared.stopping = true;
    asio::post(acceptor.get_executor(), [this] {
      error_code ignored;
      acceptor.close(ignored);
      retry.cancel();
    });
    for_each_connection(&Connection::close_if_idle);
    bool all_done = false;
    {
      std::unique_lock lock(shared.mutex);
      all_done = shared.changed.wait_for(lock, milliseconds(seconds),
                                         [this] { return shared.connections.empty(); });
    }
    for_each_connection(&Connection::close);
    workers.join();
    posted.join();
    {
      std::unique_lock lock(shared.mutex);
      shared.changed.wait_for(lock, std::chrono::seconds(5),
                              [this] { return shared.connections.empty(); });
    }
    io.stop();
    for (auto& t : threads) t.join();
    return all_done;
  }

  Shared shared;
  asio::thread_pool workers;
  asio::thread_pool posted;  // separate: a slow handler must not block open streams
  asio::io_context io;
  std::optional<asio::ssl::context> tls;
  tcp::acceptor acceptor;
  asio::steady_timer retry;
  std::vector<std::thread> threads;
  bool stopped = false;
};

Result<std::unique_ptr<HttpServer>> HttpServer::listen(const HttpOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  FRESHET_RETURN_IF_ERROR(impl->load_tls());
  FRESHET_RETURN_IF_ERROR(impl->bind());
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

void HttpServer::serve(Handler handler) {
  impl_->shared.handler = std::move(handler);
  impl_->accept_next();
  for (int i = 0; i < std::max(1, impl_->shared.options.io_threads); ++i) {
    impl_->threads.emplace_back([io = &impl_->io] { io->run(); });
  }
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() {
  impl_->stop(0);
}
uint16_t HttpServer::port() const {
  return impl_->acceptor.local_endpoint().port();
}
bool HttpServer::is_loopback() const {
  return impl_->acceptor.local_endpoint().address().is_loopback();
}
void HttpServer::post(std::function<void()> task) {
  asio::post(impl_->posted, std::move(task));
}
int HttpServer::connections() const {
  std::lock_guard lock(impl_->shared.mutex);
  return static_cast<int>(impl_->shared.connections.size());
}
bool HttpServer::stop(double seconds) {
  return impl_->stop(seconds);
}

}  // namespace freshet::server
