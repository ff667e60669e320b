#include "hub/client.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <thread>

#include "hub/names.h"

namespace freshet::hub {
namespace {

constexpr int kMostRedirects = 10;
constexpr size_t kDownloadRead = 128 << 10;

int64_t size_text_value(std::string_view text) {
  int64_t size = -1;
  const auto r = std::from_chars(text.data(), text.data() + text.size(), size);
  return r.ec == std::errc() && r.ptr == text.data() + text.size() && size >= 0 ? size : -1;
}

bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

// What the endpoint says about the file, before or instead of a redirect.
void read_endpoint_headers(const http::Reply& head, Answer& answer) {
  const std::string_view linked = head.header("x-linked-etag");
  if (!linked.empty()) answer.etag = etag_text(linked);
  if (answer.etag.empty() && !is_redirect(head.status))
    answer.etag = etag_text(head.header("etag"));
  if (answer.size < 0) answer.size = size_text_value(head.header("x-linked-size"));
  answer.error_code = std::string(head.header("x-error-code"));
}

}  // namespace

Result<http::Client*> HubClient::client_for(const http::Url& server) {
  auto& client = clients_[server.origin()];
  if (client == nullptr) {
    http::ClientOptions options;
    options.url = server;
    options.read_timeout_s = settings_.timeout_s;
    options.connect_timeout_s = std::min(30.0, settings_.timeout_s);
    options.read_size = kDownloadRead;
    FRESHET_RETURN_IF_ERROR(apply_proxy(settings_, options));
    FRESHET_ASSIGN_OR_RETURN(client, http::Client::create(io_, std::move(options)));
  }
  return client.get();
}

Result<Answer> HubClient::fetch(const Fetch& f) {
  FRESHET_ASSIGN_OR_RETURN(const auto endpoint, http::parse_url(settings_.endpoint));
  FRESHET_ASSIGN_OR_RETURN(auto url, http::parse_resource_url(f.url));
  Answer answer;
  for (int hop = 0; hop <= kMostRedirects; ++hop) {
    FRESHET_ASSIGN_OR_RETURN(http::Client* const client, client_for(url.server));
    answer.from_endpoint = url.server.origin() == endpoint.origin();
    http::Client::Call call{.method = f.method, .target = url.target, .headers = {}};
    // Compressed bodies would have other sizes and hashes.
    call.headers.emplace_back("Accept-Encoding", "identity");
    if (f.offset > 0) call.headers.emplace_back("Range", fmt::format("bytes={}-", f.offset));
    if (answer.from_endpoint && !settings_.token.empty())
      call.headers.emplace_back("Authorization", "Bearer " + settings_.token);
    const auto on_head = [&](const http::Reply& head) {
      if (answer.from_endpoint) read_endpoint_headers(head, answer);
      answer.status = head.status;
      answer.reason = head.reason;
      answer.head = head;
      return !is_redirect(head.status) && f.on_answer && f.on_answer(answer);
    };
    FRESHET_ASSIGN_OR_RETURN(http::Reply reply, client->exchange(call, on_head, f.sink));
    const std::string_view location = reply.header("location");
    if (!is_redirect(reply.status) || location.empty()) {
      answer.body = std::move(reply.body);
      return answer;
    }
    const auto next = http::resolve_location(url, location);
    if (!next.ok())
      return invalid_argument("{} redirects to something that is not a URL", url.server.origin());
    if (url.server.tls && !next->server.tls)
      return invalid_argument("{} redirects to {}, which is not encrypted: refused",
                              url.server.origin(), next->server.origin());
    url = *next;
  }
  return invalid_argument("{} redirects in a loop", f.url.substr(0, f.url.find('?')));
}

Result<Answer> HubClient::get_text(const std::string& url,
                                   const std::function<void(std::string)>& note) {
  for (int failures = 0;;) {
    Fetch f{.url = url, .on_answer = {}, .sink = {}};
    auto answer = fetch(f);
    const bool again =
        answer.ok() ? may_succeed_later(*answer) : answer.status().code() == StatusCode::kIo;
    if (again && !answer.ok() && failures == settings_.retries)
      return io_error("{} (HTTPS_PROXY sets a proxy, HF_ENDPOINT a mirror)",
                      answer.status().message());
    if (!again || ++failures > settings_.retries) return answer;
    const double wait = retry_after(failures, answer.ok() ? &*answer : nullptr);
    note(fmt::format("{}: trying again in {:.1f} s",
                     answer.ok()
                         ? fmt::format("the hub answered {} {}", answer->status, answer->reason)
                         : answer.status().message(),
                     wait));
    sleep_for(wait);
  }
}

bool may_succeed_later(const Answer& a) {
  for (const int status : {408, 429, 500, 502, 503, 504}) {
    if (a.status == status) return true;
  }
  return !a.from_endpoint && a.status >= 400 && a.status != 416;
}

double retry_after(int failures, const Answer* answer) {
  double wait = 0.5;
  for (int i = 1; i < failures && wait < 60.0; ++i) wait *= 2.0;
  wait = std::min(wait, 60.0);
  const int64_t asked =
      answer == nullptr ? -1 : size_text_value(answer->head.header("retry-after"));
  return std::max(wait, static_cast<double>(std::min<int64_t>(asked, 300)));
}

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

Status failure_of(const Answer& a, const std::string& what, const Settings& s) {
  const std::string page = s.endpoint + "/" + what;
  const bool has_token = !s.token.empty();
  if (a.from_endpoint && (a.status == 401 || a.status == 403)) {
    if (a.error_code == "GatedRepo") {
      return invalid_argument("{} is gated: accept its terms at {}{}", what, page,
                              has_token ? " with the account of your token"
                                        : " and set HF_TOKEN to a token of that account");
    }
    if (a.status == 401 && !has_token) {
      return invalid_argument(
          "{} does not exist, is private or is gated: check the name at {}; if you have access, "
          "set HF_TOKEN",
          what, page);
    }
    return invalid_argument(
        "the hub refuses {} with this token ({}): check it, or accept the "
        "terms at {}",
        what, a.status, page);
  }
  if (a.status == 404) {
    if (a.error_code == "RevisionNotFound")
      return not_found("{} has no such revision: {}/tree/main shows what there is", what, page);
    if (a.error_code == "EntryNotFound")
      return not_found("{} has no such file: see {}", what, page);
    return not_found("there is no {} on {}", what, s.endpoint);
  }
  return io_error("{}: the server answered {} {}", what, a.status, a.reason);
}

}  // namespace freshet::hub
