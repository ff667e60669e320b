// Splits a template into tokens, with Jinja's whitespace control (trim_blocks and lstrip_blocks
// on). Pure; throws Error with the line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace freshet::jinja {

enum class TokenType : uint8_t {
  kData,  // text between tags
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,  // unescaped
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct Token {
  TokenType type = TokenType::kEnd;
  int line = 1;
  std::string text;  // for kInteger: decimal digits if the number does not fit `integer`, else ""
  int64_t integer = 0;
  double number = 0;
};

std::vector<Token> tokenize(std::string_view source);

}  // namespace freshet::jinja
