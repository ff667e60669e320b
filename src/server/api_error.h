// An error of the OpenAI API: an HTTP status and
// {"error": {"message", "type", "param", "code"}}. Value type; pure functions.
#pragma once

#include <string>

#include "base/json.h"
#include "base/status.h"
#include "server/http_server.h"

namespace freshet::server {

struct ApiError {
  int status = 400;
  std::string message;
  std::string param;  // the wrong field, or empty
};

ApiError bad_request(std::string param, std::string message);
// kInvalidArgument is 400, kNotFound 404, kResourceExhausted 429, kCancelled 499, the rest 500.
ApiError from_status(const Status& status, std::string param = {});

json::Value to_json(const ApiError& error);
HttpResponse to_response(const ApiError& error);

}  // namespace freshet::server
