// JSON Schema (drafts 4 to 2020-12, in the parts a grammar can say) to rules.
//
// What constrains and cannot be held is an error that names the keyword and the JSON pointer of its
// schema: an answer is never less than the schema asks without a word. docs/structured-output.md
// lists what is supported, and how values are spelled.
#pragma once

#include "base/json.h"
#include "base/status.h"
#include "grammar/expression.h"

namespace freshet::grammar {

Result<RuleSet> json_schema_rules(const json::Value& schema);

}  // namespace freshet::grammar
