// Fields of OpenAI's, vLLM's and llama-server's requests that this server does not support.
//
// They are refused by name, because ignoring them would change the answer. Neutral values (null,
// false, an empty list, the number that turns the field off) are accepted. docs/serving.md lists
// these fields, and those that are ignored because they do not change the answer.
#pragma once

#include "server/fields.h"

namespace freshet::server {

// For every generating route.
void refuse_unsupported_fields(Fields& fields);

}  // namespace freshet::server
