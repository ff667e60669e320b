// Whether a value meets a schema, decided outright: for the values that enum and const list.
//
// Errors are those keywords that neither this nor a grammar can hold. Recursion is bounded.
#pragma once

#include "grammar/schema_branches.h"

namespace freshet::grammar {

Result<bool> meets(SchemaDocument& document, int id, const json::Value& value, int depth = 0);
// A bit of TypeBit.
unsigned type_bit(const json::Value& value);
// The types that the nodes' "type" allow, and whether numbers must be whole.
Result<unsigned> allowed_types(const SchemaDocument& document, const NodeIds& nodes, bool& whole);

}  // namespace freshet::grammar
