// Answers in the format of OpenAI's Responses API: a response object, or its stream of typed
// events.
#pragma once

#include <memory>

#include "server/openai_format.h"
#include "server/responses_request.h"

namespace freshet::server {

std::unique_ptr<AnswerFormat> make_response_format(FormatContext context,
                                                   const ResponseRequest& request,
                                                   ToolDialect dialect);

}  // namespace freshet::server
