// /v1/responses.
#include <utility>

#include "server/app.h"
#include "server/responses_format.h"
#include "server/responses_request.h"

namespace freshet::server {
namespace {

void responses(App& app, App::Exchanges exchange, const json::Value& body) {
  auto parsed = parse_response(body, app.options().limits, &app.options().sampling_defaults);
  if (auto* error = std::get_if<ApiError>(&parsed)) return send_error(exchange, *error);
  auto& request = std::get<ResponseRequest>(parsed);
  auto prepared = app.prepare(request.chat);
  if (auto* error = std::get_if<ApiError>(&prepared))
    return send_error(exchange, in_words_of_responses(std::move(*error)));
  auto& chat = std::get<App::PreparedChat>(prepared);
  FormatContext context = app.format_context("resp", request.chat);
  context.reasoning = std::move(chat.reasoning);
  auto format = make_response_format(std::move(context), request, app.tool_dialect());
  app.answer(std::move(exchange), request.chat, std::move(chat.params), {std::move(chat.prompt)},
             std::move(format), std::move(chat.pictures));
}

}  // namespace

void add_responses_routes(App& app, std::vector<App::Route>& routes) {
  routes.push_back({"POST", "/v1/responses", false, [&app](App::Exchanges x, const json::Value& b) {
                      responses(app, std::move(x), b);
                    }});
}

}  // namespace freshet::server
