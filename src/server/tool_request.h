// Checks a chat's tools and tool_choice, and keeps only the tools that may be called. Pure
// functions.
#pragma once

#include "server/openai_request.h"

namespace freshet::server {

void read_tools(Fields& fields, ChatRequest& request);

}  // namespace freshet::server
