#include "bench_client/serve.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include "bench_client/sse.h"
#include "http/url.h"
#include "server/http_server.h"

namespace freshet::bench_client {
namespace {

using namespace std::chrono_literals;

TEST(Url, TakesAddressesApart) {
  const http::Url a = http::parse_url("http://127.0.0.1:8000").value();
  EXPECT_FALSE(a.tls);
  EXPECT_EQ(a.host, "127.0.0.1");
  EXPECT_EQ(a.port, 8000);
  EXPECT_EQ(a.prefix, "");
  const http::Url b = http::parse_url("https://api.example.com/some/path/").value();
  EXPECT_TRUE(b.tls);
  EXPECT_EQ(b.port, 443);
  EXPECT_EQ(b.prefix, "/some/path");
  EXPECT_EQ(b.host_header(), "api.example.com");
  const http::Url c = http::parse_url("http://[::1]:81/").value();
  EXPECT_EQ(c.host, "::1");
  EXPECT_EQ(c.host_header(), "[::1]:81");
  for (const char* bad : {"", "localhost:8000", "ftp://a", "http://", "http://:80", "http://a:0",
                          "http://a:65536", "http://a:x", "http://u@a", "http://a?b", "http://[::1",
                          "http://[::1]x", "http://a b", "http://a\r\nX: y"}) {
    EXPECT_FALSE(http::parse_url(bad).ok()) << bad;
  }
}

std::vector<std::string> events_of(const std::string& stream, size_t piece) {
  std::vector<std::string> events;
  SseParser parser;
  for (size_t at = 0; at < stream.size(); at += piece) {
    EXPECT_TRUE(parser.push(std::string_view(stream).substr(at, piece),
                            [&](std::string_view e) { events.emplace_back(e); }));
  }
  return events;
}

// The examples of the HTML standard, section 9.2.6.
TEST(Sse, ReadsTheStandardsExamples) {
  const std::string stocks = "data: YHOO\ndata: +2\ndata: 10\n\n";
  const std::string four =
      ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n";
  const std::string empty = "data\n\ndata\ndata\n\ndata:";
  for (const size_t piece : {1u, 2u, 7u, 1000u}) {
    EXPECT_EQ(events_of(stocks, piece), (std::vector<std::string>{"YHOO\n+2\n10"}));
    EXPECT_EQ(events_of(four, piece), (std::vector<std::string>{"first event", "second event"}));
    EXPECT_EQ(events_of(empty, piece), (std::vector<std::string>{"", "\n"}));
    EXPECT_EQ(events_of("data: a\r\n\r\ndata: b\r\r", piece), (std::vector<std::string>{"a", "b"}));
  }
}

TEST(Sse, GivesUpOnEndlessEvents) {
  SseParser parser(1000);
  const auto none = [](std::string_view) { FAIL(); };
  EXPECT_TRUE(parser.push("data: " + std::string(900, 'x'), none));
  EXPECT_FALSE(parser.push(std::string(900, 'x'), none));
  EXPECT_FALSE(parser.push("\n\n", none));
}

// Feeds the raw events of a server at one, two, three ... seconds.
Outcome read_answer(bool chat, const std::vector<std::string>& pieces) {
  Outcome outcome;
  outcome.start = 0.5;
  outcome.input_tokens = 9;
  AnswerReader reader(chat, outcome);
  double now = 1.0;
  for (const std::string& piece : pieces) reader.push(piece, now++);
  reader.finish();
  return outcome;
}

TEST(AnswerReader, CountsAsVllmDoes) {
  const Outcome o = read_answer(
      false, {": ping\n\ndata: {\"choices\":[{\"text\":\"He\"}]}\n\n",
              "data: {\"choices\":[{\"text\":\"llo\"}],\"usage\":null}\n\nda",
              "ta: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}]}\n\n",
              "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":7}}\n\n",
              "data: [DONE]\n\n"});
  EXPECT_TRUE(o.success) << o.error;
  EXPECT_EQ(o.text, "Hello");
  EXPECT_EQ(o.ttft, 0.5);
  EXPECT_EQ(o.itl, (std::vector<double>{1.0, 1.0}));
  EXPECT_EQ(o.latency, 2.5);  // not the time of the usage
  EXPECT_EQ(o.input_tokens, 4);
  EXPECT_EQ(o.output_tokens, 7);
}

// Five tokens from a server without usage; opening and closing events do not count.
TEST(AnswerReader, CountsEventsThatCarryText) {
  for (const bool chat : {false, true}) {
    const auto event = [&](const std::string& text, const char* end) {
      return chat ? R"(data: {"choices":[{"delta":{"content":")" + text + R"("},"finish_reason":)" +
                        end + "}]}\n\n"
                  : R"(data: {"choices":[{"text":")" + text + R"(","finish_reason":)" + end +
                        "}]}\n\n";
    };
    std::vector<std::string> answer = {
        chat ? "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
             : event("", "null")};
    for (int i = 0; i < 5; ++i) answer.push_back(event("x", "null"));
    answer.push_back(event("", "\"length\""));
    answer.emplace_back("data: [DONE]\n\n");
    const Outcome o = read_answer(chat, answer);
    EXPECT_TRUE(o.success) << o.error;
    EXPECT_EQ(o.output_tokens, 5);
    EXPECT_EQ(o.ttft, 1.5);
    EXPECT_EQ(o.itl, (std::vector<double>{1, 1, 1, 1}));
    EXPECT_EQ(o.latency, 5.5);
    // The same with a usage.
    answer.insert(answer.end() - 1,
                  "data: {\"choices\":[],\"usage\":{\"completion_tokens\":5}}\n\n");
    EXPECT_EQ(read_answer(chat, answer).itl, o.itl);
    EXPECT_EQ(read_answer(chat, answer).output_tokens, 5);
  }
}

// Reasoning and tool calls count as tokens.
TEST(AnswerReader, CountsThoughtsAndCalls) {
  const Outcome o =
      read_answer(true, {R"(data: {"choices":[{"delta":{"reasoning":"hm"}}]})"
                         "\n\n",
                         R"(data: {"choices":[{"delta":{"reasoning_content":"hm"}}]})"
                         "\n\n",
                         R"(data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]})"
                         "\n\n"});
  EXPECT_TRUE(o.success) << o.error;
  EXPECT_EQ(o.output_tokens, 3);
}

TEST(AnswerReader, KnowsFailures) {
  EXPECT_FALSE(read_answer(false, {}).success);
  EXPECT_FALSE(read_answer(false, {"data: [DONE]\n\n"}).success);
  EXPECT_FALSE(read_answer(false, {"data: {\n\n"}).success);
  EXPECT_FALSE(read_answer(true, {"data: [1]\n\n"}).success);
  const Outcome o = read_answer(true, {"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n",
                                       "data: {\"error\":{\"message\":\"out of blocks\"}}\n\n"});
  EXPECT_FALSE(o.success);
  EXPECT_EQ(o.error, "out of blocks");
  const Outcome counted = read_answer(true, {"data: {\"choices\":[{\"delta\":{}}]}\n\n"});
  EXPECT_TRUE(counted.success);
  EXPECT_EQ(counted.output_tokens, 1);
}

// An OpenAI-compatible server that returns answers of the requested length; one id per byte.
class FakeServer {
 public:
  FakeServer() {
    server::HttpOptions options;
    options.port = 0;
    options.worker_threads = 8;
    http_ = server::HttpServer::listen(options).value();
    http_->serve([this](std::shared_ptr<server::Exchange> x) { handle(std::move(x)); });
  }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(http_->port()); }

  std::atomic<int> peak = 0;
  std::atomic<int> requests = 0;
  std::chrono::milliseconds gap = 0ms;
  bool tells_vocabulary = true;
  std::string key;
  std::function<bool(int number, const std::shared_ptr<server::Exchange>&)> misbehave;
  std::vector<json::Value> bodies() {
    const std::lock_guard lock(mutex_);
    return bodies_;
  }

 private:
  using X = std::shared_ptr<server::Exchange>;
  static void send(const X& x, const json::Value& value, int status = 200) {
    x->send({status, {}, "application/json", json::write(value)});
  }

  void handle(const X& x) {
    const std::string& path = x->request().path;
    if (!key.empty() && x->request().header("authorization") != "Bearer " + key)
      return send(x, json::parse(R"({"error":{"message":"no key"}})").value(), 401);
    if (path == "/v1/models") {
      return send(
          x, json::parse(tells_vocabulary ? R"({"data":[{"id":"fake","meta":{"n_vocab":256}}]})"
                                          : R"({"data":[{"id":"fake"}]})")
                 .value());
    }
    auto parsed = json::parse(x->request().body);
    const json::Value body = parsed.ok() ? std::move(parsed).value() : json::Value();
    if (path == "/tokenize" || path == "/detokenize") return send(x, vocabulary(path, body));
    if (path != "/v1/completions" && path != "/v1/chat/completions")
      return send(x, json::Object(), 404);
    const int number = requests++;
    {
      const std::lock_guard lock(mutex_);
      bodies_.push_back(body);
    }
    if (misbehave && misbehave(number, x)) return;
    answer(x, path == "/v1/chat/completions", body);
  }

  static json::Value vocabulary(const std::string& path, const json::Value& body) {
    json::Object o;
    if (path == "/tokenize") {
      json::Array tokens;
      for (const char c : body.get_string("prompt", ""))
        tokens.emplace_back(static_cast<int64_t>(static_cast<unsigned char>(c)));
      o["tokens"] = std::move(tokens);
    } else {
      std::string text;
      for (const json::Value& id : body.find("tokens")->as_array())
        text += static_cast<char>('a' + *id.as_int64() % 26);
      o["prompt"] = text;
    }
    return o;
  }

  void answer(const X& x, bool chat, const json::Value& body) {
    const int now = ++active_;
    for (int seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {
    }
    const int64_t count = body.get_int(chat ? "max_completion_tokens" : "max_tokens", 1);
    x->start({200, {}, "text/event-stream", ""});
    for (int64_t i = 0; i < count; ++i) {
      std::this_thread::sleep_for(gap);
      x->write(chat ? "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n"
                    : "data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
    }
    --active_;
    x->write(
        fmt::format("data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":3,"
                    "\"completion_tokens\":{}}}}}\n\ndata: [DONE]\n\n",
                    count));
    x->finish();
  }

  std::mutex mutex_;
  std::vector<json::Value> bodies_;
  std::atomic<int> active_ = 0;
  std::unique_ptr<server::HttpServer> http_;
};

ServeOptions small(const FakeServer& server) {
  ServeOptions o;
  o.base_url = server.url();
  o.dataset.num_prompts = 20;
  o.dataset.random_input_len = 12;
  o.dataset.random_output_len = 5;
  return o;
}

ServeResult run(const ServeOptions& o, const ServeHooks& hooks = {}) {
  auto result = bench_serve(o, nullptr, hooks);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? std::move(result).value() : ServeResult{};
}

TEST(BenchServe, SendsIdsAndCounts) {
  FakeServer server;
  server.gap = 5ms;
  ServeOptions o = small(server);
  o.ignore_eos = true;
  o.extra_body["temperature"] = 0.5;
  size_t done = 0;
  ServeHooks hooks;
  hooks.progress = [&](size_t n, size_t total) {
    done = n;
    EXPECT_EQ(total, 20u);
  };
  const ServeResult r = run(o, hooks);
  EXPECT_EQ(r.model, "fake");
  EXPECT_EQ(done, 20u);
  const Totals t = totals(r.run);
  EXPECT_EQ(t.completed, 20);
  EXPECT_EQ(t.output_tokens, 100);
  EXPECT_EQ(t.input_tokens, 60);
  for (const Outcome& outcome : r.run.outcomes) {
    EXPECT_EQ(outcome.itl.size(), 4u);
    EXPECT_GE(outcome.latency, 0.024);
    EXPECT_EQ(outcome.text, "aaaaa");
  }
  const auto bodies = server.bodies();
  ASSERT_EQ(bodies.size(), 20u);
  for (const json::Value& body : bodies) {
    EXPECT_EQ(body.find("prompt")->as_array().size(), 12u);
    EXPECT_EQ(body.get_int("max_tokens", 0), 5);
    EXPECT_TRUE(body.get_bool("ignore_eos", false));
    EXPECT_EQ(body.get_double("temperature", 0), 0.5);
    EXPECT_EQ(body.get_string("model", ""), "fake");
  }
}

TEST(BenchServe, ChatGetsTextOfTheRightLength) {
  FakeServer server;
  ServeOptions o = small(server);
  o.chat = true;
  EXPECT_EQ(totals(run(o).run).completed, 20);
  for (const json::Value& body : server.bodies()) {
    const json::Value& message = body.find("messages")->as_array().front();
    EXPECT_EQ(message.get_string("role", ""), "user");
    EXPECT_EQ(message.get_string("content", "").size(), 12u);
  }
}

TEST(BenchServe, WorksWithoutAKnownVocabulary) {
  FakeServer server;
  server.tells_vocabulary = false;
  EXPECT_EQ(totals(run(small(server)).run).completed, 20);
}

TEST(BenchServe, KeepsToItsConcurrencyAndWarmsUp) {
  FakeServer server;
  server.gap = 2ms;
  ServeOptions o = small(server);
  o.max_concurrency = 3;
  o.warmups = 2;
  const ServeResult r = run(o);
  EXPECT_EQ(server.requests, 22);
  EXPECT_EQ(server.peak, 3);
  EXPECT_EQ(totals(r.run).peak_concurrency, 3);
  EXPECT_GT(r.run.outcomes.back().queue_time(), 0.01);
}

TEST(BenchServe, SendsAtTheRateAskedFor) {
  FakeServer server;
  ServeOptions o = small(server);
  o.dataset.num_prompts = 40;
  o.arrivals.rate = 100.0;
  const auto wanted = arrival_times(40, o.arrivals);
  // A busy machine delays some runs. Who is late by design is late in all of them.
  double least = 1.0;
  for (int attempt = 0; attempt < 20 && least >= 0.05; ++attempt) {
    const ServeResult r = run(o);
    double late = 0.0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_GE(r.run.outcomes[i].start, wanted[i]);
      late += r.run.outcomes[i].start - wanted[i];
    }
    least = std::min(least, late / 40.0);
    EXPECT_GT(r.run.duration, 0.39);
  }
  EXPECT_LT(least, 0.05);
}

TEST(BenchServe, CountsFailuresAndGoesOn) {
  FakeServer server;
  server.misbehave = [](int number, const std::shared_ptr<server::Exchange>& x) {
    switch (number) {
      case 3:
        x->send({429, {}, "application/json", R"({"error":{"message":"queue is full"}})"});
        return true;
      case 5:  // aborted in the middle
        x->start({200, {}, "text/event-stream", "data: {\"choices\":[{\"text\":\"a\"}]}\n\n"});
        std::this_thread::sleep_for(50ms);
        return true;
      case 7:
        x->send({200, {}, "text/event-stream", "data: {\"error\":{\"message\":\"gone\"}}\n\n"});
        return true;
      case 9:
        x->send({500, {}, "text/plain", "<html>"});
        return true;
      default:
        return false;
    }
  };
  ServeOptions o = small(server);
  o.max_concurrency = 1;
  const ServeResult r = run(o);
  EXPECT_EQ(totals(r.run).completed, 16);
  EXPECT_EQ(totals(r.run).failed, 4);
  EXPECT_NE(r.run.outcomes[3].error.find("queue is full"), std::string::npos);
  EXPECT_NE(r.run.outcomes[5].error.find("broke off"), std::string::npos);
  EXPECT_EQ(r.run.outcomes[7].error, "gone");
  EXPECT_NE(r.run.outcomes[9].error.find("500"), std::string::npos);
}

TEST(BenchServe, SaysWhatIsMissing) {
  FakeServer server;
  server.key = "secret";
  ServeOptions o = small(server);
  const auto refused = bench_serve(o, nullptr, {});
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("API key"), std::string::npos);
  o.api_key = "secret";
  EXPECT_EQ(totals(run(o).run).completed, 20);
  o.base_url = "http://127.0.0.1:1";
  EXPECT_EQ(bench_serve(o, nullptr, {}).status().code(), StatusCode::kIo);
}

TEST(BenchServe, StopsWhenTold) {
  FakeServer server;
  server.gap = 50ms;
  std::atomic<bool> stop = false;
  ServeHooks hooks;
  hooks.stop = &stop;
  hooks.progress = [&](size_t, size_t) { stop = true; };
  ServeOptions o = small(server);
  o.max_concurrency = 1;
  const auto result = bench_serve(o, nullptr, hooks);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), StatusCode::kCancelled);
  EXPECT_LT(server.requests, 5);
}

}  // namespace
}  // namespace freshet::bench_client
