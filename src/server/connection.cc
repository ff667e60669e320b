#include "server/connection.h"

#include <array>
#include <optional>

#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <fmt/format.h>
#include <poll.h>

#include "server/exchange.h"

namespace freshet::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;
using PlainStream = beast::tcp_stream;
using TlsStream = asio::ssl::stream<beast::tcp_stream>;

constexpr size_t kMaxChunkExtension = 256;
constexpr size_t kMaxChunkedBody = size_t{8} << 20;  // limit for a body of undeclared length
constexpr size_t kSmallBody = 64 << 10;
constexpr size_t kReadSize = 16 << 10;
constexpr size_t kWriteSlice = 128 << 10;  // write_timeout_s applies to each slice

HttpResponse error_response(int status, const std::string& message) {
  std::string quoted;
  for (char c : message) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return {
      status,
      {},
      "application/json",
      fmt::format(
          R"({{"error":{{"message":"{}","type":"invalid_request_error","param":null,"code":{}}}}})",
          quoted, status)};
}

// Reserves `bytes` of the common budget for bodies, and releases them. Small bodies are not
// counted, so that they still get through while large ones use up the budget.
class BodyBudget {
 public:
  BodyBudget(Shared& shared, size_t bytes)
      : shared_(shared), bytes_(bytes > kSmallBody ? bytes : 0) {
    granted_ = bytes_ == 0 ||
               shared_.body_bytes.fetch_add(bytes_) + bytes_ <= 4 * shared_.options.max_body_bytes;
  }
  ~BodyBudget() { shared_.body_bytes.fetch_sub(bytes_); }
  BodyBudget(const BodyBudget&) = delete;
  BodyBudget& operator=(const BodyBudget&) = delete;
  bool granted() const { return granted_; }

 private:
  Shared& shared_;
  size_t bytes_;
  bool granted_ = false;
};

struct ParsedRequest {
  HttpRequest request;
  bool http11 = true;
  bool keep_alive = true;
};

asio::redirect_error_t<asio::use_awaitable_t<>> into(error_code& error) {
  return asio::redirect_error(asio::use_awaitable, error);
}

// With TLS or without. The choice is made at run time in read_some() and write_some(), so that the
// code above is compiled once.
class ConnectionImpl final : public Connection,
                             public std::enable_shared_from_this<ConnectionImpl> {
 public:
  ConnectionImpl(tcp::socket socket, Shared& shared, asio::ssl::context* tls)
      : shared_(shared), wake_timer_(socket.get_executor()), gone_timer_(socket.get_executor()) {
    if (tls != nullptr)
      tls_.emplace(PlainStream(std::move(socket)), *tls);
    else
      plain_.emplace(std::move(socket));
    std::lock_guard lock(shared_.mutex);
    shared_.connections.insert(this);
  }
  ~ConnectionImpl() override {
    std::lock_guard lock(shared_.mutex);
    shared_.connections.erase(this);
    shared_.changed.notify_all();
  }

  void launch() {
    asio::co_spawn(
        lowest().get_executor(),
        [self = shared_from_this()]() -> asio::awaitable<void> { co_await self->run(); },
        asio::detached);
  }

  void close_if_idle() override {
    asio::post(lowest().get_executor(), [weak = weak_from_this()] {
      if (auto self = weak.lock(); self && self->idle_) self->close_now();
    });
  }
  void close() override {
    asio::post(lowest().get_executor(), [weak = weak_from_this()] {
      if (auto self = weak.lock()) self->close_now();
    });
  }

 private:
  PlainStream& lowest() { return tls_ ? tls_->next_layer() : *plain_; }

  asio::awaitable<size_t> read_some(asio::mutable_buffer to, error_code& error) {
    if (tls_) co_return co_await tls_->async_read_some(to, into(error));
    co_return co_await plain_->async_read_some(to, into(error));
  }
  asio::awaitable<size_t> write_some(asio::const_buffer from, error_code& error) {
    if (tls_) co_return co_await tls_->async_write_some(from, into(error));
    co_return co_await plain_->async_write_some(from, into(error));
  }
  asio::awaitable<void> write(std::string_view bytes, error_code& error) {
    while (!bytes.empty() && !error)
      bytes.remove_prefix(co_await write_some(asio::buffer(bytes), error));
  }

  void close_now() {
    error_code ignored;
    lowest().socket().shutdown(tcp::socket::shutdown_both, ignored);
    lowest().close();
    wake_timer_.cancel();
  }

  asio::awaitable<void> run() {
    if (!co_await handshake()) co_return;
    error_code ec;
    lowest().socket().set_option(tcp::no_delay(true), ec);
    bool more = true;
    while (more) more = co_await one_request();
    co_await finish_stream();
  }

  asio::awaitable<bool> handshake() {
    if (!tls_) co_return true;
    lowest().expires_after(milliseconds(shared_.options.header_timeout_s));
    error_code ec;
    co_await tls_->async_handshake(asio::ssl::stream_base::server, into(ec));
    co_return !ec;
  }

  asio::awaitable<void> finish_stream() {
    error_code ec;
    lowest().expires_after(std::chrono::seconds(2));
    if (tls_) {
      co_await tls_->async_shutdown(into(ec));
    } else {
      lowest().socket().shutdown(tcp::socket::shutdown_send, ec);
      // Read what the client still sends: closing with unread data would reset the connection and
      // could lose the answer.
      std::array<char, 4096> rest{};
      for (size_t total = 0; !ec && total < (size_t{256} << 10);) {
        total += co_await plain_->async_read_some(asio::buffer(rest), into(ec));
      }
    }
    lowest().close();
  }

  // Returns whether the connection may carry another request.
  asio::awaitable<bool> one_request() {
    int status = 0;
    std::string error;
    http::request_parser<http::string_body> parser;
    const size_t head = co_await read_header(status, error);
    if (head == 0) {
      if (status != 0) co_await refuse(status, error);
      co_return false;
    }
    if (!accept_header(parser, head, status, error)) {
      co_await refuse(status, error);
      co_return false;
    }
    ParsedRequest parsed;  // before the body is read: trailers are not headers
    if (!convert(parser.get(), parsed)) {
      co_await refuse(400, "malformed request target");
      co_return false;
    }
    const size_t undeclared = std::min(kMaxChunkedBody, shared_.options.max_body_bytes);
    const size_t declared = parser.content_length() ? static_cast<size_t>(*parser.content_length())
                                                    : (parser.chunked() ? undeclared : 0);
    const BodyBudget budget(shared_, declared);
    if (!budget.granted()) {
      co_await refuse(503, "too many large requests at once: try again later");
      co_return false;
    }
    if (!co_await read_body(parser, status, error)) {
      if (status != 0) co_await refuse(status, error);
      co_return false;
    }
    parsed.request.body = std::move(parser.get().body());
    co_return co_await answer(std::move(parsed));
  }

  // Reads up to the blank line. 0 with status 0: the client disconnected without an error.
  asio::awaitable<size_t> read_header(int& status, std::string& error) {
    idle_ = buffer_.size() == 0;
    if (idle_ && shared_.stopping) co_return 0;
    lowest().expires_after(
        milliseconds(first_ ? shared_.options.header_timeout_s : shared_.options.idle_timeout_s));
    first_ = false;
    size_t scanned = 0;
    for (;;) {
      const std::string_view seen(static_cast<const char*>(buffer_.data().data()), buffer_.size());
      const size_t end = seen.find("\r\n\r\n", scanned > 3 ? scanned - 3 : 0);
      if (end != std::string_view::npos) co_return end + 4;
      scanned = seen.size();
      if (scanned > shared_.options.max_header_bytes) {
        status = 431;
        error = fmt::format("the header is larger than {} bytes", shared_.options.max_header_bytes);
        co_return 0;
      }
      error_code ec;
      const size_t n = co_await read_some(buffer_.prepare(kReadSize), ec);
      if (ec) co_return 0;  // a timeout has closed the socket already
      if (idle_) lowest().expires_after(milliseconds(shared_.options.header_timeout_s));
      idle_ = false;
      buffer_.commit(n);
    }
  }

  bool accept_header(http::request_parser<http::string_body>& parser, size_t head, int& status,
                     std::string& error) {
    const std::string_view raw(static_cast<const char*>(buffer_.data().data()), head);
    status = 400;
    if (raw.size() > shared_.options.max_header_bytes) {
      status = 431;
      error = fmt::format("the header is larger than {} bytes", shared_.options.max_header_bytes);
      return false;
    }
    if (auto refusal = header_block_error(raw)) {
      error = *refusal;
      return false;
    }
    parser.header_limit(static_cast<std::uint32_t>(shared_.options.max_header_bytes + 64));
    parser.body_limit(shared_.options.max_body_bytes);
    error_code ec;
    const size_t used = parser.put(asio::buffer(raw.data(), raw.size()), ec);
    if (ec == http::error::body_limit) {
      status = 413;
      error = fmt::format("the body is larger than {} bytes", shared_.options.max_body_bytes);
      return false;
    }
    if (ec || !parser.is_header_done()) {
      error = "malformed header";
      return false;
    }
    buffer_.consume(used);
    if (parser.chunked())
      parser.body_limit(std::min(shared_.options.max_body_bytes, kMaxChunkedBody));
    return true;
  }

  asio::awaitable<bool> read_body(http::request_parser<http::string_body>& parser, int& status,
                                  std::string& error) {
    status = 0;
    if (parser.is_done()) co_return true;
    lowest().expires_after(milliseconds(shared_.options.body_timeout_s));
    error_code ec;
    if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
      static constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
      co_await write(kContinue, ec);
      if (ec) co_return false;
    }
    auto limit_extension = [](std::uint64_t, beast::string_view extension, error_code& e) {
      if (extension.size() > kMaxChunkExtension) e = http::error::bad_chunk_extension;
    };
    parser.on_chunk_header(limit_extension);
    while (!parser.is_done() && !ec) co_await parse_some(parser, ec);
    if (!ec) co_return true;
    if (ec == http::error::body_limit) {
      status = 413;
      error = "the body is too large";
    } else if (ec.category() == http::make_error_code(http::error::bad_chunk).category() &&
               ec != http::error::partial_message) {
      status = 400;
      error = "malformed body framing";
    }
    co_return false;
  }

  // Gives the parser what has arrived, and reads more if that does not get it any further.
  asio::awaitable<void> parse_some(http::request_parser<http::string_body>& parser,
                                   error_code& ec) {
    if (buffer_.size() > 0) {
      buffer_.consume(parser.put(buffer_.data(), ec));
      if (ec != http::error::need_more) co_return;
      ec = {};
    }
    const size_t room = std::min(kReadSize, buffer_.max_size() - buffer_.size());
    if (room == 0) {
      ec = http::error::buffer_overflow;
      co_return;
    }
    buffer_.commit(co_await read_some(buffer_.prepare(room), ec));
    if (ec == asio::error::eof) {
      ec = {};
      parser.put_eof(ec);
    }
  }

  bool convert(const http::request<http::string_body>& message, ParsedRequest& out) {
    out.http11 = message.version() == 11;
    out.keep_alive = message.keep_alive() && !shared_.stopping;
    out.request.method = std::string(message.method_string());
    auto target =
        parse_target({message.target().data(), message.target().size()}, tls_ ? "https" : "http");
    if (!target) return false;
    out.request.path = std::move(target->path);
    out.request.query = std::move(target->query);
    if (!target->host.empty()) out.request.headers.emplace_back("host", target->host);
    for (const auto& field : message) {
      std::string name(field.name_string());
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      if (name == "host" && !target->host.empty()) continue;  // the host of the target wins
      out.request.headers.emplace_back(std::move(name), std::string(field.value()));
    }
    error_code ec;
    const auto remote = lowest().socket().remote_endpoint(ec);
    if (!ec) out.request.remote = remote.address().to_string();
    out.request.number = ++shared_.requests;
    return true;
  }

  asio::awaitable<void> refuse(int status, const std::string& message) {
    ExchangeState state({}, true, false, shared_.options.max_queued_bytes, [] {});
    state.send(error_response(status, message));
    std::string piece;
    if (state.next(piece) != ExchangeState::Next::kWrite) co_return;
    lowest().expires_after(std::chrono::seconds(5));
    error_code ec;
    co_await write(piece, ec);
  }

  std::function<void()> make_waker() {
    // Without an executor of its own: an exchange may outlive the server, whose executors may not.
    return [weak = weak_from_this()] {
      auto self = weak.lock();
      if (!self || self->wake_posted_.exchange(true)) return;
      asio::post(self->lowest().get_executor(), [self] {
        self->wake_posted_ = false;
        self->woken_ = true;
        self->wake_timer_.cancel();
      });
    };
  }

  asio::awaitable<bool> answer(ParsedRequest parsed) {
    auto state =
        std::make_shared<ExchangeState>(std::move(parsed.request), parsed.http11, parsed.keep_alive,
                                        shared_.options.max_queued_bytes, make_waker());
    asio::post(*shared_.workers, [handler = &shared_.handler, state] {
      auto exchange = std::make_shared<ExchangeHandle>(state);
      try {
        (*handler)(exchange);
      } catch (const std::exception& e) {
        exchange->send(error_response(500, "internal error"));
      }
    });
    ++watch_;
    lowest().expires_never();
    watch_for_leaving(state, watch_);
    const size_t sent = co_await write_answer(*state);
    ++watch_;  // ends the watcher of this answer
    gone_timer_.cancel();
    error_code ec;
    lowest().socket().cancel(ec);
    state->complete(sent);
    co_return state->keep_alive() && !shared_.stopping;
  }

  asio::awaitable<size_t> write_answer(ExchangeState& state) {
    size_t sent = 0;
    std::string piece;
    for (;;) {
      woken_ = false;
      const auto next = state.next(piece);
      if (next == ExchangeState::Next::kDone || next == ExchangeState::Next::kCut) co_return sent;
      if (next == ExchangeState::Next::kWait) {
        wake_timer_.expires_after(std::chrono::hours(24));
        error_code ignored;
        if (!woken_) co_await wake_timer_.async_wait(into(ignored));
        if (!lowest().socket().is_open()) state.mark_gone();
        continue;
      }
      for (size_t at = 0; at < piece.size();) {
        lowest().expires_after(milliseconds(shared_.options.write_timeout_s));
        error_code ec;
        const size_t n = co_await write_some(
            asio::buffer(piece.data() + at, std::min(kWriteSlice, piece.size() - at)), ec);
        if (ec) {
          state.mark_gone();
          co_return sent;
        }
        at += n;
        sent += n;
      }
      lowest().expires_never();
    }
  }

  // Detects that the client closes its end while an answer is being generated.
  void watch_for_leaving(std::shared_ptr<ExchangeState> state, uint64_t watch) {
    lowest().socket().async_wait(
        tcp::socket::wait_read, [self = shared_from_this(), state, watch](error_code ec) {
          if (ec || watch != self->watch_) return;
          if (self->peer_closed()) {
            self->leave(*state);
          } else {
            self->watch_slowly(state, watch);  // readable because of a pipelined request
          }
        });
  }

  void watch_slowly(std::shared_ptr<ExchangeState> state, uint64_t watch) {
    gone_timer_.expires_after(std::chrono::milliseconds(100));
    gone_timer_.async_wait([self = shared_from_this(), state, watch](error_code ec) {
      if (ec || watch != self->watch_) return;
      if (self->peer_closed()) {
        self->leave(*state);
      } else {
        self->watch_slowly(state, watch);
      }
    });
  }

  void leave(ExchangeState& state) {
    state.mark_gone();
    woken_ = true;
    wake_timer_.cancel();
  }

  bool peer_closed() {
    pollfd p{lowest().socket().native_handle(), POLLRDHUP, 0};
    return ::poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
  }

  std::optional<PlainStream> plain_;
  std::optional<TlsStream> tls_;
  Shared& shared_;
  beast::flat_buffer buffer_{(size_t{1} << 20) + (64 << 10)};
  asio::steady_timer wake_timer_;
  asio::steady_timer gone_timer_;
  std::atomic<bool> wake_posted_{false};
  bool woken_ = false;
  bool first_ = true;
  bool idle_ = true;
  uint64_t watch_ = 0;
};

}  // namespace

void launch_connection(tcp::socket socket, Shared& shared, asio::ssl::context* tls) {
  std::make_shared<ConnectionImpl>(std::move(socket), shared, tls)->launch();
}

}  // namespace freshet::server
