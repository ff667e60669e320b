// JSON Schema (drafts 4 to 2020-12, the parts that a grammar can express) to rules.
//
// A constraint that cannot be enforced is an error that names the keyword and the JSON pointer of
// its schema: a schema is never silently weakened. docs/structured-output.md lists what is
// supported, and how values are spelled.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "grammar/expression.h"

namespace freshet::grammar {

Result<RuleSet> json_schema_rules(const json::Value& schema);

struct CallableTool {
  std::string name;
  // A schema; nullptr: the tool takes no arguments, so only {}.
  const json::Value* parameters = nullptr;
};
// {"name": one of the tools, `arguments_key`: an object that its parameters allow}. Each schema is
// a document of its own: its references, anchors and dialect mean the same as if it stood alone.
Result<RuleSet> tool_call_rules(const std::vector<CallableTool>& tools,
                                std::string_view arguments_key);

}  // namespace freshet::grammar
