#include "http/client.h"

#include <optional>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/connect.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>

namespace freshet::http {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace bh = beast::http;
using asio::awaitable;
using boost::system::error_code;
using TlsStream = asio::ssl::stream<beast::tcp_stream>;
using Endpoints = asio::ip::tcp::resolver::results_type;
using Message = bh::request<bh::string_body>;

constexpr uint32_t kMaxHeaders = 64 << 10;  // signed URLs are long
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
  bh::request_serializer<bh::string_body> serializer(message);
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

using Parser = bh::response_parser<bh::buffer_body>;

// Gives the parser what has arrived, and reads more if that does not get it any further.
awaitable<void> parse_some(Connection& connection, Parser& parser, size_t read_size,
                           error_code& error) {
  for (;;) {
    if (connection.buffer.size() > 0) {
      error = {};
      connection.buffer.consume(parser.put(connection.buffer.data(), error));
      if (error != bh::error::need_more) co_return;
    }
    error = {};
    const size_t read = co_await connection.read_some(connection.buffer.prepare(read_size), error);
    connection.buffer.commit(read);
    if (error == asio::error::eof) {
      error = {};
      if (!parser.got_some())
        error = bh::error::end_of_stream;
      else
        parser.put_eof(error);
      co_return;
    }
    if (error) co_return;
  }
}

struct Exchange {
  const std::string& message;
  bool head_only = false;  // HEAD: the answer has no body
  Client::OnHead on_head;  // empty: bodies with status 200 go to the sink
  Client::CheckedSink sink;
  double timeout_s = 0.0;
  size_t read_size = 0;
};

std::vector<std::pair<std::string, std::string>> headers_of(const Parser& parser) {
  std::vector<std::pair<std::string, std::string>> headers;
  for (const auto& field : parser.get()) {
    std::string name(field.name_string());
    for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
    headers.emplace_back(std::move(name), std::string(field.value()));
  }
  return headers;
}

awaitable<void> perform(Connection& connection, const Exchange& x, Attempt& attempt) {
  connection.lowest().expires_after(duration(x.timeout_s));
  co_await connection.write(x.message, attempt.error);
  if (attempt.error) co_return;
  Parser parser;
  parser.body_limit(boost::none);
  parser.header_limit(kMaxHeaders);
  parser.skip(x.head_only);
  connection.lowest().expires_after(duration(x.timeout_s));
  while (!parser.is_header_done() && !attempt.error)
    co_await parse_some(connection, parser, x.read_size, attempt.error);
  if (attempt.error) co_return;
  attempt.nothing_came = false;
  attempt.reply.status = parser.get().result_int();
  attempt.reply.reason = std::string(parser.get().reason());
  bool streamed = x.sink && attempt.reply.status == 200;
  if (x.on_head) {
    attempt.reply.headers = headers_of(parser);
    streamed = x.on_head(attempt.reply);
  }
  const size_t most = attempt.reply.status == 200 ? kMaxWholeBody : kMaxErrorBody;
  const auto chunk = std::make_unique_for_overwrite<char[]>(x.read_size);
  while (!parser.is_done()) {
    parser.get().body().data = chunk.get();
    parser.get().body().size = x.read_size;
    connection.lowest().expires_after(duration(x.timeout_s));
    co_await parse_some(connection, parser, x.read_size, attempt.error);
    if (attempt.error == bh::error::need_buffer) attempt.error = {};
    if (attempt.error) co_return;
    const std::string_view bytes(chunk.get(), x.read_size - parser.get().body().size);
    if (bytes.empty()) continue;
    if (streamed) {
      if (!x.sink(bytes)) {
        attempt.error = asio::error::operation_aborted;
        co_return;
      }
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

struct Client::Impl {
  asio::io_context& io;
  ClientOptions options;
  asio::ssl::context tls{asio::ssl::context::tls_client};
  Endpoints endpoints;
  std::vector<std::unique_ptr<Connection>> idle;

  // Asks the proxy for a connection to the server.
  awaitable<Status> open_tunnel(beast::tcp_stream& stream) {
    const std::string to = fmt::format("{}:{}", options.url.host, options.url.port);
    bh::request<bh::empty_body> ask(bh::verb::connect, to, 11);
    ask.set(bh::field::host, to);
    if (!options.proxy_authorization.empty())
      ask.set(bh::field::proxy_authorization, options.proxy_authorization);
    error_code error;
    co_await bh::async_write(stream, ask, into(error));
    beast::flat_buffer buffer;
    bh::response_parser<bh::empty_body> parser;
    parser.skip(true);
    if (!error) co_await bh::async_read_header(stream, buffer, parser, into(error));
    if (error)
      co_return io_error("the proxy {} did not answer: {}", options.proxy.text(), error.message());
    if (parser.get().result_int() != 200) {
      co_return io_error("the proxy {} refuses to connect to {}: {} {}", options.proxy.text(), to,
                         parser.get().result_int(), std::string(parser.get().reason()));
    }
    co_return Status();
  }

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
    if (!error && options.url.tls && !options.proxy.host.empty()) {
      const Status tunnel = co_await open_tunnel(stream);
      if (!tunnel.ok()) co_return tunnel;
    }
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

  Message message(bh::verb method, const std::string& target, const std::string& body) const {
    const bool by_proxy = !options.proxy.host.empty() && !options.url.tls;
    Message m(method, (by_proxy ? options.url.text() : options.url.prefix) + target, 11);
    if (by_proxy && !options.proxy_authorization.empty())
      m.set(bh::field::proxy_authorization, options.proxy_authorization);
    m.set(bh::field::host, options.url.host_header());
    m.set(bh::field::user_agent, options.user_agent);
    m.set(bh::field::accept, "*/*");
    if (!body.empty()) m.set(bh::field::content_type, "application/json");
    if (!options.bearer.empty()) m.set(bh::field::authorization, "Bearer " + options.bearer);
    for (const auto& [name, value] : options.headers) m.set(name, value);
    m.body() = body;
    m.prepare_payload();
    return m;
  }

  awaitable<Result<Reply>> run(const Exchange& x);
  Result<Reply> wait_for(awaitable<Result<Reply>> reply);
};

Client::Client(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

Result<std::unique_ptr<Client>> Client::create(asio::io_context& io, ClientOptions options) {
  auto impl = std::unique_ptr<Impl>(new Impl{io, std::move(options)});
  error_code error;
  const Url& proxy = impl->options.proxy;
  const Url& url = proxy.host.empty() ? impl->options.url : proxy;
  if (proxy.tls) return unsupported("{}: give the proxy as an http:// URL", proxy.text());
  if (impl->options.url.tls) {
    impl->tls.set_default_verify_paths(error);
    impl->tls.set_verify_mode(impl->options.verify_tls ? asio::ssl::verify_peer
                                                       : asio::ssl::verify_none);
  }
  asio::ip::tcp::resolver resolver(io);
  impl->endpoints = resolver.resolve(url.host, std::to_string(url.port), error);
  if (error) return io_error("cannot find {}: {}", url.host, error.message());
  return std::unique_ptr<Client>(new Client(std::move(impl)));
}

awaitable<Result<Reply>> Client::Impl::run(const Exchange& x) {
  for (;;) {
    std::unique_ptr<Connection> connection;
    const bool reused = !idle.empty();
    if (reused) {
      connection = std::move(idle.back());
      idle.pop_back();
    } else {
      auto made = co_await connect();
      if (!made.ok()) co_return made.status();
      connection = std::move(made).value();
    }
    Attempt attempt;
    co_await perform(*connection, x, attempt);
    // The server may have closed the idle connection: retry once on a new one.
    if (attempt.error && reused && attempt.nothing_came && attempt.error != beast::error::timeout) {
      continue;
    }
    if (attempt.error) {
      co_return io_error("{} {}: {}", options.url.text(),
                         attempt.nothing_came ? "did not answer" : "broke off its answer",
                         attempt.error.message());
    }
    if (attempt.keep) idle.push_back(std::move(connection));
    co_return std::move(attempt.reply);
  }
}

Result<Reply> Client::Impl::wait_for(awaitable<Result<Reply>> reply) {
  std::optional<Result<Reply>> answer;
  asio::co_spawn(
      io, [&]() -> awaitable<void> { answer.emplace(co_await std::move(reply)); },
      [](std::exception_ptr error) {
        if (error) std::rethrow_exception(error);
      });
  io.restart();
  io.run();
  FRESHET_CHECK(answer.has_value());
  return *std::move(answer);
}

awaitable<Result<Reply>> Client::request(std::string target, const std::string& body, Sink sink) {
  const auto method = body.empty() ? bh::verb::get : bh::verb::post;
  const std::string message = serialize(impl_->message(method, target, body));
  Exchange x{.message = message,
             .timeout_s = impl_->options.read_timeout_s,
             .read_size = impl_->options.read_size};
  if (sink) {
    x.sink = [&sink](std::string_view bytes) {
      sink(bytes);
      return true;
    };
  }
  co_return co_await impl_->run(x);
}

Result<Reply> Client::request_now(const std::string& target, const std::string& body) {
  return impl_->wait_for(request(target, body, {}));
}

Result<Reply> Client::exchange(const Call& call, const OnHead& on_head, const CheckedSink& sink) {
  const bool head = call.method == "HEAD";
  Message m = impl_->message(head ? bh::verb::head : bh::verb::get, call.target, {});
  for (const auto& [name, value] : call.headers) m.set(name, value);
  const std::string message = serialize(m);
  const Exchange x{.message = message,
                   .head_only = head,
                   .on_head = on_head,
                   .sink = sink,
                   .timeout_s = impl_->options.read_timeout_s,
                   .read_size = impl_->options.read_size};
  return impl_->wait_for(impl_->run(x));
}

std::string_view Reply::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

}  // namespace freshet::http
