// A chat's tools and tool_choice: checked, and narrowed to the tools that may be called. Pure.
#pragma once

#include "server/openai_request.h"

namespace freshet::server {

void read_tools(Fields& fields, ChatRequest& request);

}  // namespace freshet::server
