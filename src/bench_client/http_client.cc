#include "bench_client/http_client.h"

#include <optional>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

namespace freshet::bench_client {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::awaitable;
using boost::system::error_code;
using TlsStream = asio::ssl::stream<beast::tcp_stream>;
using Endpoints = asio::ip::tcp::resolver::results_type;
using Message = http::request<http::string_body>;

constexpr size_t kReadSize = 16 << 10;
constexpr size_t kMaxErrorBody = 64 << 10;
constexpr size_t kMaxWholeBody = 64 << 20;

std::chrono::nanoseconds duration(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

asio::redirect_error_t<asio::use_awaitable_t<>> into(error_code& error) {
  return asio::redirect_error(asio::use_awaitable, error);
}

// With TLS or without. The choice is made here, at run time, so that the code above is compiled
// once.
struct Connection {
  std::optional<beast::tcp_stream> plain;
  std::optional<TlsStream> tls;
  beast::flat_buffer buffer;
  beast::tcp_stream& lowest() { return tls ? tls->next_layer() : *plain; }

  awaitable<size_t> read_some(asio::mutable_buffer to, error_code& error) {
    if (tls) co_return co_await tls->async_read_some(to, into(error));
    co_return co_await plain->async_read_some(to, into(error));
  }
  awaitable<void> write(std::string_view bytes, error_code& error) {
    while (!bytes.empty() && !error) {
      const asio::const_buffer from(bytes.data(), bytes.size());
      size_t written = 0;
      if (tls)
        written = co_await tls->async_write_some(from, into(error));
      else
        written = co_await plain->async_write_some(from, into(error));
      bytes.remove_prefix(written);
    }
  }
};

// The outcome of a request on one connection.
struct Attempt {
  error_code error;
  bool nothing_came = true;  // no byte of an answer arrived
  bool keep = false;         // the connection can be used again
  Reply reply;
};

std::string serialize(const Message& message) {
  std::string text;
  http::request_serializer<http::string_body> serializer(message);
  error_code error;
  while (!serializer.is_done()) {
    serializer.next(error, [&](error_code&, const auto& buffers) {
      for (const auto& buffer : beast::buffers_range_ref(buffers))
        text.append(static_cast<const char*>(buffer.data()), buffer.size());
      serializer.consume(beast::buffer_bytes(buffers));
    });
  }
  return text;
}

using Parser = http::response_parser<http::buffer_body>;

// Gives the parser what has arrived, and reads more if that does not get it any further.
awaitable<void> parse_some(Connection& connection, Parser& parser, error_code& error) {
  for (;;) {
    if (connection.buffer.size() > 0) {
      error = {};
      connection.buffer.consume(parser.put(connection.buffer.data(), error));
      if (error != http::error::need_more) co_return;
    }
    error = {};
    const size_t read = co_await connection.read_some(connection.buffer.prepare(kReadSize), error);
    connection.buffer.commit(read);
    if (error == asio::error::eof) {
      error = {};
      if (!parser.got_some())
        error = http::error::end_of_stream;
      else
        parser.put_eof(error);
      co_return;
    }
    if (error) co_return;
  }
}

awaitable<void> exchange(Connection& connection, const std::string& message,
                         const HttpClient::Sink& sink, double timeout_s, Attempt& attempt) {
  connection.lowest().expires_after(duration(timeout_s));
  co_await connection.write(message, attempt.error);
  if (attempt.error) co_return;
  Parser parser;
  parser.body_limit(boost::none);
  connection.lowest().expires_after(duration(timeout_s));
  while (!parser.is_header_done() && !attempt.error)
    co_await parse_some(connection, parser, attempt.error);
  if (attempt.error) co_return;
  attempt.nothing_came = false;
  attempt.reply.status = parser.get().result_int();
  attempt.reply.reason = std::string(parser.get().reason());
  const bool streamed = sink && attempt.reply.status == 200;
  const size_t most = attempt.reply.status == 200 ? kMaxWholeBody : kMaxErrorBody;
  char chunk[kReadSize];
  while (!parser.is_done()) {
    parser.get().body().data = chunk;
    parser.get().body().size = sizeof chunk;
    connection.lowest().expires_after(duration(timeout_s));
    co_await parse_some(connection, parser, attempt.error);
    if (attempt.error == http::error::need_buffer) attempt.error = {};
    if (attempt.error) co_return;
    const std::string_view bytes(chunk, sizeof chunk - parser.get().body().size);
    if (bytes.empty()) continue;
    if (streamed) {
      sink(bytes);
    } else if (attempt.reply.body.size() + bytes.size() <= most) {
      attempt.reply.body += bytes;
    } else {
      co_return;  // larger than any useful answer: the connection is closed
    }
  }
  connection.lowest().expires_never();
  attempt.keep = parser.get().keep_alive() && connection.buffer.size() == 0;
}

}  // namespace

struct HttpClient::Impl {
  asio::io_context& io;
  ClientOptions options;
  asio::ssl::context tls{asio::ssl::context::tls_client};
  Endpoints endpoints;
  std::vector<std::unique_ptr<Connection>> idle;

  awaitable<Result<std::unique_ptr<Connection>>> connect() {
    auto connection = std::make_unique<Connection>();
    if (options.url.tls)
      connection->tls.emplace(io, tls);
    else
      connection->plain.emplace(io);
    beast::tcp_stream& stream = connection->lowest();
    stream.expires_after(duration(options.connect_timeout_s));
    error_code error;
    co_await stream.async_connect(endpoints, into(error));
    if (!error) {
      error_code ignored;
      stream.socket().set_option(asio::ip::tcp::no_delay(true), ignored);
    }
    if (!error && options.url.tls) {
      if (SSL_set_tlsext_host_name(connection->tls->native_handle(), options.url.host.c_str()) != 1)
        co_return internal_error("TLS does not accept the host name {}", options.url.host);
      if (options.verify_tls)
        connection->tls->set_verify_callback(asio::ssl::host_name_verification(options.url.host));
      co_await connection->tls->async_handshake(asio::ssl::stream_base::client, into(error));
    }
    if (error) co_return io_error("cannot connect to {}: {}", options.url.text(), error.message());
    co_return std::move(connection);
  }

  Message message(const std::string& target, const std::string& body) const {
    Message m(body.empty() ? http::verb::get : http::verb::post, options.url.prefix + target, 11);
    m.set(http::field::host, options.url.host_header());
    m.set(http::field::user_agent, "freshet-bench/" FRESHET_VERSION);
    m.set(http::field::accept, "*/*");
    if (!body.empty()) m.set(http::field::content_type, "application/json");
    if (!options.bearer.empty()) m.set(http::field::authorization, "Bearer " + options.bearer);
    for (const auto& [name, value] : options.headers) m.set(name, value);
    m.body() = body;
    m.prepare_payload();
    return m;
  }
};

HttpClient::HttpClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpClient::~HttpClient() = default;

Result<std::unique_ptr<HttpClient>> HttpClient::create(asio::io_context& io,
                                                       ClientOptions options) {
  auto impl = std::unique_ptr<Impl>(new Impl{io, std::move(options)});
  error_code error;
  const Url& url = impl->options.url;
  if (url.tls) {
    impl->tls.set_default_verify_paths(error);
    impl->tls.set_verify_mode(impl->options.verify_tls ? asio::ssl::verify_peer
                                                       : asio::ssl::verify_none);
  }
  asio::ip::tcp::resolver resolver(io);
  impl->endpoints = resolver.resolve(url.host, std::to_string(url.port), error);
  if (error) return io_error("cannot find {}: {}", url.host, error.message());
  return std::unique_ptr<HttpClient>(new HttpClient(std::move(impl)));
}

awaitable<Result<Reply>> HttpClient::request(std::string target, const std::string& body,
                                             Sink sink) {
  const std::string message = serialize(impl_->message(target, body));
  for (;;) {
    std::unique_ptr<Connection> connection;
    const bool reused = !impl_->idle.empty();
    if (reused) {
      connection = std::move(impl_->idle.back());
      impl_->idle.pop_back();
    } else {
      auto made = co_await impl_->connect();
      if (!made.ok()) co_return made.status();
      connection = std::move(made).value();
    }
    Attempt attempt;
    co_await exchange(*connection, message, sink, impl_->options.read_timeout_s, attempt);
    // The server may have closed the idle connection: retry once on a new one.
    if (attempt.error && reused && attempt.nothing_came && attempt.error != beast::error::timeout) {
      continue;
    }
    if (attempt.error) {
      co_return io_error("{} {}: {}", impl_->options.url.text(),
                         attempt.nothing_came ? "did not answer" : "broke off its answer",
                         attempt.error.message());
    }
    if (attempt.keep) impl_->idle.push_back(std::move(connection));
    co_return std::move(attempt.reply);
  }
}

Result<Reply> HttpClient::request_now(const std::string& target, const std::string& body) {
  std::optional<Result<Reply>> answer;
  asio::co_spawn(
      impl_->io, [&]() -> awaitable<void> { answer.emplace(co_await request(target, body, {})); },
      [](std::exception_ptr error) {
        if (error) std::rethrow_exception(error);
      });
  impl_->io.restart();
  impl_->io.run();
  FRESHET_CHECK(answer.has_value());
  return *std::move(answer);
}

}  // namespace freshet::bench_client
