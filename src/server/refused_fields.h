// Known fields of OpenAI's, vLLM's and llama-server's requests that this server cannot honour.
//
// A field that changes the answer is refused by name: without it, the answer would be one to
// another question. Its neutral values (null, false, an empty list, the number that turns it off)
// pass. docs/serving.md lists these fields, and those that are ignored because they change nothing.
#pragma once

#include "server/fields.h"

namespace freshet::server {

// Of every generating route.
void refuse_unsupported_fields(Fields& fields);

}  // namespace freshet::server
