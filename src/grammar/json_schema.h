// JSON Schema (drafts 4 to 2020-12, in the parts a grammar can say) to rules.
//
// What constrains and cannot be held is an error that names the keyword and the JSON pointer of its
// schema: an answer is never less than the schema asks without a word. docs/structured-output.md
// lists what is supported, and how values are spelled.
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
  const json::Value* parameters = nullptr;  // a schema; nullptr: the tool takes none, so {} alone
};
// {"name": one of the tools, `arguments_key`: an object that its parameters allow}. Each schema is
// a document of its own: its references, anchors and dialect mean what they mean where it stands
// alone.
Result<RuleSet> tool_call_rules(const std::vector<CallableTool>& tools,
                                std::string_view arguments_key);

}  // namespace freshet::grammar
