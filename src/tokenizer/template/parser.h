// Builds a Program from the source of a template. Throws Error with the line.
#pragma once

#include <memory>
#include <string_view>

#include "tokenizer/template/ast.h"

namespace freshet::jinja {

std::unique_ptr<Program> parse_template(std::string_view source, const TemplateLimits& limits);

}  // namespace freshet::jinja
