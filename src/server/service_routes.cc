// /health, /ping, /ready, /version, /metrics.
#include "server/app.h"

namespace freshet::server {
namespace {

void health(const App::Exchanges& exchange) {
  json::Object o;
  o["status"] = "healthy";
  send_json(exchange, o);
}

void ready(const App& app, const App::Exchanges& exchange) {
  if (app.draining()) return send_error(exchange, {503, "the server is shutting down", ""});
  json::Object o;
  o["status"] = "ready";
  send_json(exchange, o);
}

void version(const App::Exchanges& exchange) {
  json::Object o;
  o["version"] = FRESHET_VERSION;
  send_json(exchange, o);
}

}  // namespace

void add_service_routes(App& app, std::vector<App::Route>& routes) {
  using X = App::Exchanges;
  for (const char* path : {"/health", "/ping"})  // /ping is for SageMaker, as in vLLM
    routes.push_back({"GET", path, true, [](const X& x, const json::Value&) { health(x); }});
  routes.push_back(
      {"GET", "/ready", true, [&app](const X& x, const json::Value&) { ready(app, x); }});
  routes.push_back({"GET", "/version", false, [](const X& x, const json::Value&) { version(x); }});
  routes.push_back(
      {"GET", "/metrics", false, [&app](const X& x, const json::Value&) {
         x->send({200, {}, "text/plain; version=0.0.4; charset=utf-8", app.metrics().expose()});
       }});
}

}  // namespace freshet::server
