#include "server/start_gate.h"

#include <utility>

#include <fmt/format.h>

#include "server/api_error.h"

namespace freshet::server {
namespace {

bool wants_page(const HttpRequest& request) {
  return request.method == "GET" && request.path == "/" &&
         request.header("accept").find("text/html") != std::string_view::npos;
}

HttpResponse waiting_page(const std::string& message) {
  HttpResponse page;
  page.status = 503;
  page.headers.emplace_back("Retry-After", "1");
  page.content_type = "text/html; charset=utf-8";
  page.body = fmt::format(
      "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta http-equiv=\"refresh\" "
      "content=\"1\"><title>Freshet</title><p>{}</p></html>\n",
      message);
  return page;
}

}  // namespace

void StartGate::handle(std::shared_ptr<Exchange> exchange) {
  std::shared_ptr<const Handler> handler;
  std::string state;
  {
    const std::scoped_lock lock(mutex_);
    handler = handler_;
    state = state_;
  }
  if (handler != nullptr) return (*handler)(std::move(exchange));
  const std::string message = fmt::format("the model is being loaded ({})", state);
  HttpResponse response =
      wants_page(exchange->request()) ? waiting_page(message) : to_response({503, message, ""});
  exchange->send(std::move(response));
}

void StartGate::progress(const std::string& stage, double fraction) {
  std::string state = fmt::format("{}, {:.0f} %", stage, fraction * 100.0);
  const std::scoped_lock lock(mutex_);
  state_ = std::move(state);
}

void StartGate::open(Handler handler) {
  auto shared = std::make_shared<const Handler>(std::move(handler));
  const std::scoped_lock lock(mutex_);
  handler_ = std::move(shared);
}

}  // namespace freshet::server
