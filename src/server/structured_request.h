// Reads the structured-output fields into one description for grammar::Grammar.
//
// response_format, vLLM's structured_outputs and its older guided_*, and llama-server's grammar and
// json_schema. Only one of them may be given. Pure functions.
#pragma once

#include "server/fields.h"

namespace freshet::server {

struct StructuredRequest {
  json::Value description;                // null: none
  const char* field = "response_format";  // its field name, for errors
};

StructuredRequest read_structured(Fields& fields);

}  // namespace freshet::server
