#include "server/api_error.h"

#include <utility>

namespace freshet::server {
namespace {

const char* type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "service_unavailable_error";
    default:
      return status < 500 ? "invalid_request_error" : "internal_error";
  }
}

}  // namespace

ApiError bad_request(std::string param, std::string message) {
  return {400, std::move(message), std::move(param)};
}

ApiError from_status(const Status& status, std::string param) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kUnsupported:
      return {400, status.message(), std::move(param)};
    case StatusCode::kNotFound:
      return {404, status.message(), std::move(param)};
    case StatusCode::kResourceExhausted:
      return {429, status.message(), std::move(param)};
    case StatusCode::kCancelled:
      return {499, status.message(), std::move(param)};
    default:
      return {500, status.message(), std::move(param)};
  }
}

json::Value to_json(const ApiError& error) {
  json::Object inner;
  inner["message"] = error.message;
  inner["type"] = type_of(error.status);
  inner["param"] = error.param.empty() ? json::Value() : json::Value(error.param);
  inner["code"] = error.status;
  json::Object outer;
  outer["error"] = std::move(inner);
  return outer;
}

HttpResponse to_response(const ApiError& error) {
  HttpResponse response;
  response.status = error.status;
  if (error.status == 429 || error.status == 503) response.headers.emplace_back("Retry-After", "1");
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  response.body = json::write(to_json(error));
  return response;
}

}  // namespace freshet::server
