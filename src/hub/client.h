// Requests to the hub and to the servers that it redirects to.
//
// The token goes to the endpoint's own origin only (scheme, host and port): a redirect to another
// server never carries it. Redirects from https to http are refused. One thread; blocking.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <boost/asio/io_context.hpp>

#include "http/client.h"
#include "http/url.h"
#include "hub/settings.h"

namespace freshet::hub {

// The end of a chain of redirects.
struct Answer {
  int status = 0;
  std::string reason;
  std::string body;           // unless a sink took it
  bool from_endpoint = true;  // the endpoint itself answered, not a server it redirected to
  http::Reply head;           // its headers
  // Of the endpoint's own answer: the file's name in blobs/, "" if it does not say.
  std::string etag;
  int64_t size = -1;       // of the whole file; -1 if the endpoint does not say
  std::string error_code;  // "GatedRepo", "RepoNotFound", "EntryNotFound" ...
};

class HubClient {
 public:
  explicit HubClient(const Settings& settings) : settings_(settings) {}
  HubClient(const HubClient&) = delete;
  HubClient& operator=(const HubClient&) = delete;

  // Called with the headers of the last answer of a chain; true: its body goes to the sink.
  using OnAnswer = std::function<bool(const Answer&)>;
  struct Fetch {
    std::string method = "GET";
    std::string url;
    int64_t offset = 0;  // > 0: asks for the bytes from here on
    OnAnswer on_answer;
    http::Client::CheckedSink sink;
  };
  // One try. An error (kIo) means that no complete answer came; statuses such as 404 are answers.
  Result<Answer> fetch(const Fetch& f);
  // Answers of up to 64 MiB, tried again as retry_after() says. `note` hears about it.
  Result<Answer> get_text(const std::string& url, const std::function<void(std::string)>& note);

  const Settings& settings() const { return settings_; }

 private:
  Result<http::Client*> client_for(const http::Url& server);

  const Settings& settings_;
  boost::asio::io_context io_{1};
  std::map<std::string, std::unique_ptr<http::Client>> clients_;  // by origin
};

// Whether the same request may succeed later: 408, 429, 500, 502, 503, 504, or an error of a server
// that the endpoint redirected to (an expired signed URL).
bool may_succeed_later(const Answer& answer);
// Seconds to wait before try number `failures` + 1: doubles from half a second to a minute; longer
// if the server asks for it (Retry-After, at most five minutes).
double retry_after(int failures, const Answer* answer);
void sleep_for(double seconds);

// The error for an answer that is neither a success nor worth another try. `what`: "ORG/REPO".
Status failure_of(const Answer& answer, const std::string& what, const Settings& settings);

}  // namespace freshet::hub
