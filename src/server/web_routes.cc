// The web page; its files are linked into the program (web/assets.S).
//
// The files contain no secrets and need no key; the API calls of the page do. The content security
// policy lets the page connect only to this server and run only its own scripts.
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <openssl/evp.h>

#include "server/app.h"

namespace freshet::server {

struct WebAsset {
  const char* path;
  const char* begin;
  const char* end;
};
extern "C" const WebAsset freshet_web_assets[];  // the last one has no path

namespace {

constexpr char kPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const char* content_type(std::string_view path) {
  if (path.ends_with(".js")) return "text/javascript; charset=utf-8";
  if (path.ends_with(".css")) return "text/css; charset=utf-8";
  if (path.ends_with(".svg")) return "image/svg+xml";
  return "text/html; charset=utf-8";
}

std::string entity_tag(std::string_view content) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  FRESHET_CHECK(EVP_Digest(content.data(), content.size(), digest, &size, EVP_sha256(), nullptr) ==
                1);
  std::string tag = "\"";
  for (unsigned i = 0; i < 12; ++i) tag += fmt::format("{:02x}", digest[i]);
  return tag + '"';
}

// If-None-Match is "*" or a list of tags, including weak ones.
bool has_tag(std::string_view list, std::string_view tag) {
  return list == "*" || list.find(tag) != std::string_view::npos;
}

void serve(const App::Exchanges& exchange, const WebAsset& asset, const std::string& tag) {
  HttpResponse response;
  // Browsers revalidate each time and get 304 until the program changes.
  response.headers = {{"ETag", tag},
                      {"Cache-Control", "no-cache"},
                      {"Content-Security-Policy", kPolicy},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Cross-Origin-Opener-Policy", "same-origin"},
                      {"Cross-Origin-Resource-Policy", "same-origin"}};
  response.content_type = content_type(asset.path);
  if (has_tag(exchange->request().header("if-none-match"), tag)) {
    response.status = 304;
  } else {
    response.body.assign(asset.begin, asset.end);
  }
  exchange->send(std::move(response));
}

}  // namespace

void add_web_routes(App& app, std::vector<App::Route>& routes) {
  if (!app.options().web_page) return;
  for (const WebAsset* next = freshet_web_assets; next->path != nullptr; ++next) {
    const WebAsset& asset = *next;
    std::string tag = entity_tag({asset.begin, static_cast<size_t>(asset.end - asset.begin)});
    routes.push_back({"GET", asset.path, true,
                      [&asset, tag = std::move(tag)](App::Exchanges exchange, const json::Value&) {
                        serve(exchange, asset, tag);
                      }});
  }
}

}  // namespace freshet::server
