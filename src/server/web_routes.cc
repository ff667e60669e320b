// The web page; its files are linked into the program (web/assets.S).
//
// The files contain no secrets and need no key; the API calls of the page do. The content security
// policy lets the page connect only to this server and run only its own scripts.
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <openssl/evp.h>

#include "server/app.h"

extern "C" {
extern const char freshet_web_index_begin[], freshet_web_index_end[];
extern const char freshet_web_style_begin[], freshet_web_style_end[];
extern const char freshet_web_icon_begin[], freshet_web_icon_end[];
extern const char freshet_web_app_begin[], freshet_web_app_end[];
extern const char freshet_web_api_begin[], freshet_web_api_end[];
extern const char freshet_web_chart_begin[], freshet_web_chart_end[];
extern const char freshet_web_dashboard_begin[], freshet_web_dashboard_end[];
extern const char freshet_web_markdown_begin[], freshet_web_markdown_end[];
extern const char freshet_web_message_begin[], freshet_web_message_end[];
extern const char freshet_web_prometheus_begin[], freshet_web_prometheus_end[];
extern const char freshet_web_settings_begin[], freshet_web_settings_end[];
extern const char freshet_web_tokens_begin[], freshet_web_tokens_end[];
}

namespace freshet::server {
namespace {

constexpr char kHtml[] = "text/html; charset=utf-8";
constexpr char kCss[] = "text/css; charset=utf-8";
constexpr char kScript[] = "text/javascript; charset=utf-8";
constexpr char kSvg[] = "image/svg+xml";

constexpr char kPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

struct Asset {
  const char* path;
  const char* type;
  const char* begin;
  const char* end;
};

#define FRESHET_ASSET_ROW(path, type, name) \
  {path, type, freshet_web_##name##_begin, freshet_web_##name##_end}

const Asset kAssets[] = {
    FRESHET_ASSET_ROW("/", kHtml, index),
    FRESHET_ASSET_ROW("/web/style.css", kCss, style),
    FRESHET_ASSET_ROW("/web/icon.svg", kSvg, icon),
    FRESHET_ASSET_ROW("/web/app.js", kScript, app),
    FRESHET_ASSET_ROW("/web/api.js", kScript, api),
    FRESHET_ASSET_ROW("/web/chart.js", kScript, chart),
    FRESHET_ASSET_ROW("/web/dashboard.js", kScript, dashboard),
    FRESHET_ASSET_ROW("/web/markdown.js", kScript, markdown),
    FRESHET_ASSET_ROW("/web/message.js", kScript, message),
    FRESHET_ASSET_ROW("/web/prometheus.js", kScript, prometheus),
    FRESHET_ASSET_ROW("/web/settings.js", kScript, settings),
    FRESHET_ASSET_ROW("/web/tokens.js", kScript, tokens),
};

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

void serve(const App::Exchanges& exchange, const Asset& asset, const std::string& tag) {
  HttpResponse response;
  // Browsers revalidate each time and get 304 until the program changes.
  response.headers = {{"ETag", tag},
                      {"Cache-Control", "no-cache"},
                      {"Content-Security-Policy", kPolicy},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Cross-Origin-Opener-Policy", "same-origin"},
                      {"Cross-Origin-Resource-Policy", "same-origin"}};
  response.content_type = asset.type;
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
  for (const Asset& asset : kAssets) {
    std::string tag = entity_tag({asset.begin, static_cast<size_t>(asset.end - asset.begin)});
    routes.push_back({"GET", asset.path, true,
                      [&asset, tag = std::move(tag)](App::Exchanges exchange, const json::Value&) {
                        serve(exchange, asset, tag);
                      }});
  }
}

}  // namespace freshet::server
