#include "server/http_server.h"

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

namespace freshet::server {
namespace {

using namespace std::chrono_literals;

// For what must happen soon. The machine may be slow and busy.
constexpr std::chrono::seconds kPatience{120};

// A blocking client that sends raw bytes and reads the answer.
class RawClient {
 public:
  explicit RawClient(uint16_t port) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_port = htons(port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    timeval timeout{kPatience.count(), 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
  }
  ~RawClient() { close(); }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  void send(std::string_view s) const {
    while (!s.empty()) {
      const ssize_t n = ::send(fd_, s.data(), s.size(), MSG_NOSIGNAL);
      if (n <= 0) return;
      s.remove_prefix(static_cast<size_t>(n));
    }
  }
  // Reads until `marker` was received or the server closes the connection.
  std::string read_until(std::string_view marker) const {
    std::string out;
    char buffer[4096];
    while (out.find(marker) == std::string::npos) {
      const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
      if (n <= 0) break;
      out.append(buffer, static_cast<size_t>(n));
    }
    return out;
  }
  std::string read_all() const { return read_until(std::string_view("\0never\0", 7)); }

 private:
  int fd_ = -1;
};

template <class Predicate>
bool eventually(Predicate p) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < end) {
    if (p()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return p();
}

Result<std::unique_ptr<HttpServer>> serving(const HttpOptions& options, Handler handler) {
  auto server = HttpServer::listen(options);
  if (server.ok()) (*server)->serve(std::move(handler));
  return server;
}

std::unique_ptr<HttpServer> echo_server(HttpOptions options = {}) {
  options.port = 0;
  auto server = serving(options, [](std::shared_ptr<Exchange> x) {
    const HttpRequest& r = x->request();
    x->send({200,
             {{"X-Path", r.path}, {"X-Host", std::string(r.header("host"))}},
             "text/plain",
             r.method + ":" + r.body});
  });
  EXPECT_TRUE(server.ok()) << server.status().message();
  return std::move(server).value();
}

TEST(HttpServer, AnswersAndKeepsAlive) {
  auto server = echo_server();
  RawClient client(server->port());
  for (int i = 0; i < 3; ++i) {
    client.send("POST /a%20b?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello");
    const std::string answer = client.read_until("POST:hello");
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
    EXPECT_NE(answer.find("X-Path: /a b\r\n"), std::string::npos);
    EXPECT_NE(answer.find("Content-Length: 10\r\n"), std::string::npos);
  }
}

TEST(HttpServer, ReadsChunkedBodiesAndPipelinedRequests) {
  auto server = echo_server();
  RawClient client(server->port());
  client.send(
      "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
      "chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
      "GET /second HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  const std::string all = client.read_all();
  EXPECT_NE(all.find("POST:abcde"), std::string::npos) << all;
  EXPECT_NE(all.find("X-Path: /second"), std::string::npos) << all;
}

TEST(HttpServer, SendsContinueWhenAsked) {
  auto server = echo_server();
  RawClient client(server->port());
  client.send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_TRUE(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 100 Continue"));
  client.send("hi");
  EXPECT_NE(client.read_until("POST:hi").find("POST:hi"), std::string::npos);
}

class Refused : public testing::TestWithParam<const char*> {};

TEST_P(Refused, With400AndAClosedConnection) {
  auto server = echo_server();
  RawClient client(server->port());
  client.send(GetParam());
  const std::string answer = client.read_all();
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 400 ")) << answer;
  EXPECT_NE(answer.find("Connection: close"), std::string::npos);
  EXPECT_EQ(answer.find("smuggled"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(
    Smuggling, Refused,
    testing::Values(
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: "
        "3\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0x3\r\n\r\nabc",
        "POST / HTTP/1.1\r\nHost : x\r\nContent-Length: 3\r\n\r\nabc", "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n folded\r\n\r\n",
        "GET / HTTP/1.1\nHost: a\r\n\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX-A: 1\rX: 2\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: a\r\n\r\n", "GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET http://a/ HTTP/1.1\r\n\r\n", "GET http://a/ HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a b\r\n\r\n", "GET / HTTP/1.1\r\nHost: me@a\r\n\r\n",
        "GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n", "GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n",
        "GARBAGE\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "
        "chunked\r\n\r\nffffffffffffffffff\r\nabc\r\n0\r\n\r\n"));

// RFC 9112, section 3.2.2: a server must accept them, and prefer the host of the target to Host.
TEST(HttpServer, TakesTargetsInAbsoluteForm) {
  auto server = echo_server();
  RawClient client(server->port());
  const std::pair<std::string, std::string> cases[] = {
      {"http://example.org:81/a%20b?q=/", "X-Path: /a b\r\nX-Host: example.org:81\r\n"},
      {"HTTP://Example.ORG", "X-Path: /\r\nX-Host: Example.ORG\r\n"},
      {"http://127.0.0.1?q", "X-Path: /\r\nX-Host: 127.0.0.1\r\n"},
      {"http://[::1]:8000/b", "X-Path: /b\r\nX-Host: [::1]:8000\r\n"},
      {"/http://c/", "X-Path: /http://c/\r\nX-Host: other:1\r\n"},
  };
  for (const auto& [target, headers] : cases) {
    client.send("POST " + target + " HTTP/1.1\r\nHost: other:1\r\nContent-Length: 5\r\n\r\nhello");
    const std::string answer = client.read_until("POST:hello");
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << target << "\n" << answer;
    EXPECT_NE(answer.find(headers), std::string::npos) << target << "\n" << answer;
  }
  client.send("GET http://example.org/ HTTP/1.0\r\n\r\n");
  EXPECT_NE(client.read_all().find("X-Host: example.org\r\n"), std::string::npos);
}

TEST(HttpServer, RefusesOtherTargets) {
  for (const char* target : {"",
                             "*",
                             "a",
                             "a/b",
                             "example.org:80",
                             "http:",
                             "http:/a",
                             "http://",
                             "http:///a",
                             "http://:80/",
                             "http://?q",
                             "http://me@a/",
                             "http://me:word@a/",
                             "http://a:b/",
                             "http://a:65536/",
                             "http://a:99999999999/",
                             "http://a:-1/",
                             "http://a#f",
                             "http://a/b#f",
                             "/a#f",
                             "http://[::1/",
                             "http://::1/",
                             "http://[a]/",
                             "http://[::1]a/",
                             "http://a%zz/",
                             "http://a\\b/",
                             "http://a\"/",
                             "http://a/%zz",
                             "http://a/%00",
                             "https://a/",
                             "ftp://a/",
                             "file:///a",
                             "ws://a/",
                             " http://a/",
                             "http ://a/"}) {
    EXPECT_FALSE(parse_target(target, "http").has_value()) << target;
  }
  EXPECT_TRUE(parse_target("https://a/", "https").has_value());
  EXPECT_FALSE(parse_target("http://a/", "https").has_value());
  EXPECT_EQ(parse_target("http://a:/b", "http")->host, "a:");  // legal: the scheme's port
  EXPECT_EQ(parse_target("http://a:00080", "http")->path, "/");
}

TEST(HttpServer, RefusesLongChunkExtensions) {
  auto server = echo_server();
  RawClient client(server->port());
  client.send("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;a=" +
              std::string(32768, 'b') + "\r\nabc\r\n0\r\n\r\n");
  EXPECT_TRUE(client.read_all().starts_with("HTTP/1.1 400 "));
}

TEST(HttpServer, LimitsHeaderBodyAndTime) {
  HttpOptions options;
  options.max_header_bytes = 1024;
  options.max_body_bytes = 1000;
  auto server = echo_server(options);
  RawClient big_header(server->port());
  big_header.send("GET / HTTP/1.1\r\nHost: x\r\nX: " + std::string(40000, 'a'));
  EXPECT_TRUE(big_header.read_all().starts_with("HTTP/1.1 431 "));
  RawClient big_body(server->port());
  big_body.send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n");
  EXPECT_TRUE(big_body.read_all().starts_with("HTTP/1.1 413 "));
  RawClient big_chunks(server->port());
  big_chunks.send("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n7d0\r\n" +
                  std::string(2000, 'a') + "\r\n0\r\n\r\n");
  const std::string refusal = big_chunks.read_all();
  EXPECT_TRUE(refusal.starts_with("HTTP/1.1 413 ")) << refusal;
  const double usual = std::exchange(options.header_timeout_s, 0.3);
  server = echo_server(options);
  RawClient slow(server->port());
  slow.send("GET / HT");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(slow.read_all(), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::duration<double>(usual));
}

TEST(HttpServer, StreamsFromAnotherThread) {
  std::thread producer;
  HttpOptions options;
  options.port = 0;
  auto server = serving(options, [&](std::shared_ptr<Exchange> x) {
    producer = std::thread([x] {
      x->start({200, {}, "text/event-stream", ""});
      for (int i = 0; i < 100; ++i) x->write("data: " + std::to_string(i) + "\n\n");
      x->finish();
    });
  });
  ASSERT_TRUE(server.ok());
  RawClient client((*server)->port());
  client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string answer = client.read_until("0\r\n\r\n");
  producer.join();
  EXPECT_NE(answer.find("Transfer-Encoding: chunked"), std::string::npos);
  EXPECT_NE(answer.find("data: 0\n\n"), std::string::npos);
  EXPECT_NE(answer.find("data: 99\n\n"), std::string::npos);
}

TEST(HttpServer, AnExchangeMayOutliveIt) {
  std::promise<std::shared_ptr<Exchange>> promise;
  HttpOptions options;
  options.port = 0;
  auto server = serving(options, [&](std::shared_ptr<Exchange> x) {
    x->start({200, {}, "text/event-stream", "data: 1\n\n"});
    promise.set_value(std::move(x));
  });
  ASSERT_TRUE(server.ok());
  RawClient client((*server)->port());
  client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  auto future = promise.get_future();
  ASSERT_EQ(future.wait_for(kPatience), std::future_status::ready);
  std::shared_ptr<Exchange> held = future.get();
  EXPECT_FALSE((*server)->stop(0.01));
  (*server).reset();
  EXPECT_TRUE(held->gone());
  held->write("data: 2\n\n");  // the client is gone
  held.reset();                // a sanitizer would detect a use of freed server memory
}

TEST(HttpServer, TellsTheProducerThatTheClientLeft) {
  std::atomic<bool> gone{false};
  std::atomic<int> status{0};
  std::shared_ptr<Exchange> held;
  std::mutex mutex;
  HttpOptions options;
  options.port = 0;
  auto server = serving(options, [&](std::shared_ptr<Exchange> x) {
    x->on_gone([&] { gone = true; });
    x->on_complete([&](int s, size_t) { status = s; });
    x->start({200, {}, "text/event-stream", "data: 1\n\n"});
    std::lock_guard lock(mutex);
    held = x;
  });
  ASSERT_TRUE(server.ok());
  for (const bool pipelined : {false, true}) {
    gone = false;
    status = 0;
    RawClient client((*server)->port());
    client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    client.read_until("data: 1");
    if (pipelined) client.send("GET / HTTP/1.1\r\n");
    EXPECT_FALSE(gone);
    client.close();
    EXPECT_TRUE(eventually([&] { return gone.load(); }));
    EXPECT_TRUE(eventually([&] { return status == 499; }));
  }
  std::lock_guard lock(mutex);
  held.reset();
}

TEST(HttpServer, CutsOffAClientThatDoesNotRead) {
  std::atomic<bool> gone{false};
  HttpOptions options;
  options.port = 0;
  options.max_queued_bytes = 1 << 20;
  auto server = serving(options, [&](std::shared_ptr<Exchange> x) {
    x->on_gone([&] { gone = true; });
    x->start({200, {}, "text/event-stream", ""});
    for (int i = 0; i < 1000 && !x->gone(); ++i) x->write(std::string(64 << 10, 'x'));
  });
  ASSERT_TRUE(server.ok());
  RawClient client((*server)->port());
  client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(eventually([&] { return gone.load(); }));
}

TEST(HttpServer, AnswersADroppedRequestWith500) {
  HttpOptions options;
  options.port = 0;
  auto server = serving(options, [](std::shared_ptr<Exchange>) {});
  ASSERT_TRUE(server.ok());
  RawClient client((*server)->port());
  client.send("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(client.read_all().starts_with("HTTP/1.1 500 "));
}

TEST(HttpServer, StopWaitsForAnswersInProgress) {
  std::thread producer;
  std::promise<void> begun;
  HttpOptions options;
  options.port = 0;
  auto server = serving(options, [&](std::shared_ptr<Exchange> x) {
    producer = std::thread([x, &begun] {
      begun.set_value();
      std::this_thread::sleep_for(200ms);
      x->send({200, {}, "text/plain", "late"});
    });
  });
  ASSERT_TRUE(server.ok());
  RawClient idle((*server)->port());
  RawClient client((*server)->port());
  client.send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  ASSERT_TRUE(eventually([&] { return (*server)->connections() == 2; }));
  ASSERT_EQ(begun.get_future().wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE((*server)->stop(kPatience.count()));
  producer.join();
  EXPECT_NE(client.read_all().find("late"), std::string::npos);
}

TEST(HttpServer, AnswersWhatCameBeforeItServed) {
  HttpOptions options;
  options.port = 0;
  auto server = HttpServer::listen(options);
  ASSERT_TRUE(server.ok());
  RawClient early((*server)->port());
  early.send("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  (*server)->serve(
      [](std::shared_ptr<Exchange> x) { x->send({200, {}, "text/plain", "in time"}); });
  EXPECT_NE(early.read_all().find("in time"), std::string::npos);
}

TEST(HttpServer, StopsWithoutHavingServed) {
  HttpOptions options;
  options.port = 0;
  auto server = HttpServer::listen(options);
  ASSERT_TRUE(server.ok());
  RawClient client((*server)->port());
  (*server).reset();
  EXPECT_EQ(client.read_all(), "");
}

TEST(HttpServer, WritesAddresses) {
  EXPECT_EQ(host_and_port("127.0.0.1", 80), "127.0.0.1:80");
  EXPECT_EQ(host_and_port("localhost", 8000), "localhost:8000");
  EXPECT_EQ(host_and_port("::1", 80), "[::1]:80");
}

TEST(HttpServer, NamesWhatItCannotBind) {
  auto first = echo_server();
  HttpOptions options;
  options.port = first->port();
  auto second = HttpServer::listen(options);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find(std::to_string(options.port)), std::string::npos);
}

}  // namespace
}  // namespace freshet::server
