#include "tokenizer/template/expression_parser.h"

#include <algorithm>
#include <optional>

#include "tokenizer/template/text.h"

namespace freshet::jinja {
namespace {

// Constants belong to no rendering, so they have no budget.
Value constant_string(std::string text) {
  auto rep = std::make_unique<StringRep>();
  rep->ascii = is_ascii(text);
  rep->text = std::move(text);
  return {Kind::kString, rep.release()};
}

}  // namespace

Expr* ExpressionParser::constant(Value v) {
  Expr* e = make(Expr::Kind::kConst);
  e->constant = std::move(v);
  return e;
}

Expr* ExpressionParser::expression(bool with_condition) {
  const Level level(*this);
  if (!with_condition) return logical_or();
  Expr* e = logical_or();
  while (skip_name("if")) {
    Expr* condition = logical_or();
    Expr* otherwise = skip_name("else") ? expression() : nullptr;
    e = make(Expr::Kind::kConditional, {e, condition, otherwise});
  }
  return e;
}

Expr* ExpressionParser::logical_or() {
  Expr* e = logical_and();
  while (skip_name("or")) e = make(Expr::Kind::kOr, {e, logical_and()});
  return e;
}

Expr* ExpressionParser::logical_and() {
  Expr* e = logical_not();
  while (skip_name("and")) e = make(Expr::Kind::kAnd, {e, logical_not()});
  return e;
}

Expr* ExpressionParser::logical_not() {
  const Level level(*this);
  if (skip_name("not")) return make(Expr::Kind::kNot, {logical_not()});
  return comparison();
}

Expr* ExpressionParser::comparison() {
  static constexpr std::pair<std::string_view, CompareOp> kOps[] = {
      {"==", CompareOp::kEq}, {"!=", CompareOp::kNe}, {"<", CompareOp::kLt},
      {"<=", CompareOp::kLe}, {">", CompareOp::kGt},  {">=", CompareOp::kGe}};
  Expr* left = sum();
  Expr* chain = nullptr;
  while (true) {
    std::optional<CompareOp> op;
    for (const auto& [text, value] : kOps) {
      if (is_op(text)) op = value;
    }
    if (op) {
      next();
    } else if (skip_name("in")) {
      op = CompareOp::kIn;
    } else if (is_name("not") && look().type == TokenType::kName && look().text == "in") {
      next();
      next();
      op = CompareOp::kNotIn;
    } else {
      return chain == nullptr ? left : chain;
    }
    if (chain == nullptr) chain = make(Expr::Kind::kCompare, {left});
    chain->compares.push_back(*op);
    chain->items.push_back(sum());
  }
}

Expr* ExpressionParser::sum() {
  Expr* e = concat();
  while (is_op("+") || is_op("-")) {
    const BinaryOp op = next().text == "+" ? BinaryOp::kAdd : BinaryOp::kSub;
    e = make(Expr::Kind::kBinary, {e, concat()});
    e->op = op;
  }
  return e;
}

Expr* ExpressionParser::concat() {
  Expr* e = product();
  if (!is_op("~")) return e;
  e = make(Expr::Kind::kConcat, {e});
  while (skip_op("~")) e->items.push_back(product());
  return e;
}

Expr* ExpressionParser::product() {
  static constexpr std::pair<std::string_view, BinaryOp> kOps[] = {{"*", BinaryOp::kMul},
                                                                   {"/", BinaryOp::kDiv},
                                                                   {"//", BinaryOp::kFloorDiv},
                                                                   {"%", BinaryOp::kMod}};
  Expr* e = power();
  while (true) {
    const auto* op = std::find_if(std::begin(kOps), std::end(kOps),
                                  [&](const auto& o) { return is_op(o.first); });
    if (op == std::end(kOps)) return e;
    next();
    e = make(Expr::Kind::kBinary, {e, power()});
    e->op = op->second;
  }
}

Expr* ExpressionParser::power() {
  Expr* e = unary();
  while (skip_op("**")) {
    e = make(Expr::Kind::kBinary, {e, unary()});
    e->op = BinaryOp::kPow;
  }
  return e;
}

Expr* ExpressionParser::unary(bool with_filter) {
  const Level level(*this);
  Expr* e = nullptr;
  if (skip_op("-")) {
    e = make(Expr::Kind::kNegative, {unary(false)});
  } else if (skip_op("+")) {
    e = make(Expr::Kind::kPositive, {unary(false)});
  } else {
    e = primary();
  }
  e = postfix(e);
  return with_filter ? filters_and_tests(e) : e;
}

Expr* ExpressionParser::name() {
  const Token token = next();
  const std::string& text = token.text;
  if (text == "true" || text == "True") return constant(Value(true));
  if (text == "false" || text == "False") return constant(Value(false));
  if (text == "none" || text == "None") return constant(Value());
  saw_caller_ |= text == "caller";
  saw_varargs_ |= text == "varargs";
  saw_kwargs_ |= text == "kwargs";
  Expr* e = make(Expr::Kind::kName);
  e->name = program_.id_of(text);
  return e;
}

Expr* ExpressionParser::primary() {
  switch (current().type) {
    case TokenType::kName:
      return name();
    case TokenType::kString: {
      std::string text = next().text;
      while (is(TokenType::kString)) text += next().text;
      return constant(constant_string(std::move(text)));
    }
    case TokenType::kInteger: {
      const Token token = next();
      if (token.text.empty()) return constant(Value(token.integer));
      auto big = std::make_unique<StringRep>();
      big->text = token.text;
      return constant(Value(Kind::kBigInt, big.release()));
    }
    case TokenType::kFloat:
      return constant(Value(next().number));
    default:
      break;
  }
  if (is_op("(")) return parenthesized();
  if (is_op("[")) return list();
  if (is_op("{")) return dict();
  unexpected("an expression");
}

Expr* ExpressionParser::parenthesized() {
  expect_op("(");
  if (skip_op(")")) return make(Expr::Kind::kTuple);
  Expr* e = tuple();
  expect_op(")");
  return e;
}

Expr* ExpressionParser::list() {
  expect_op("[");
  Expr* e = make(Expr::Kind::kList);
  while (!is_op("]")) {
    e->items.push_back(expression());
    if (!skip_op(",")) break;
  }
  expect_op("]");
  return e;
}

Expr* ExpressionParser::dict() {
  expect_op("{");
  Expr* e = make(Expr::Kind::kDict);
  while (!is_op("}")) {
    e->items.push_back(expression());
    expect_op(":");
    e->items.push_back(expression());
    if (!skip_op(",")) break;
  }
  expect_op("}");
  return e;
}

Expr* ExpressionParser::tuple(bool with_condition, std::string_view end_name) {
  const auto ended = [&] {
    return is(TokenType::kVariableEnd) || is(TokenType::kBlockEnd) || is_op(")") ||
           (!end_name.empty() && is_name(end_name));
  };
  Expr* e = expression(with_condition);
  if (!is_op(",")) return e;
  e = make(Expr::Kind::kTuple, {e});
  while (skip_op(",")) {
    if (ended()) break;
    e->items.push_back(expression(with_condition));
  }
  return e;
}

Expr* ExpressionParser::postfix(Expr* e) {
  while (true) {
    if (is_op(".") || is_op("[")) {
      e = subscript(e);
    } else if (is_op("(")) {
      e = make(Expr::Kind::kCall, {e});
      arguments(e);
    } else {
      return e;
    }
  }
}

Expr* ExpressionParser::filters_and_tests(Expr* e) {
  while (true) {
    if (is_op("|")) {
      e = filter_chain(e, false);
    } else if (is_name("is")) {
      e = test(e);
    } else if (is_op("(")) {
      e = make(Expr::Kind::kCall, {e});
      arguments(e);
    } else {
      return e;
    }
  }
}

Expr* ExpressionParser::subscript(Expr* object) {
  if (skip_op(".")) {
    if (is(TokenType::kInteger)) {
      return make(Expr::Kind::kItem, {object, constant(Value(next().integer))});
    }
    Expr* e = make(Expr::Kind::kAttribute, {object});
    e->text = expect(TokenType::kName, "a name or number after '.'").text;
    return e;
  }
  expect_op("[");
  Expr* parts[3] = {nullptr, nullptr, nullptr};
  int colons = 0;
  while (!is_op("]")) {
    if (is_op(":") && colons < 2) {
      next();
      ++colons;
    } else if (parts[colons] == nullptr) {
      parts[colons] = expression();
    } else if (colons == 0 && is_op(",")) {
      // x[a, b] has a tuple as its key.
      parts[0] = make(Expr::Kind::kTuple, {parts[0]});
      while (skip_op(",") && !is_op("]")) parts[0]->items.push_back(expression());
    } else {
      unexpected("']'");
    }
  }
  next();
  if (colons > 0) return make(Expr::Kind::kSlice, {object, parts[0], parts[1], parts[2]});
  if (parts[0] == nullptr) parts[0] = make(Expr::Kind::kTuple);
  return make(Expr::Kind::kItem, {object, parts[0]});
}

void ExpressionParser::arguments(Expr* call) {
  expect_op("(");
  while (!is_op(")")) {
    if (skip_op("*")) {
      if (call->star != nullptr || call->star_star != nullptr) fail("a call has two '*' arguments");
      call->star = expression();
    } else if (skip_op("**")) {
      if (call->star_star != nullptr) fail("a call has two '**' arguments");
      call->star_star = expression();
    } else if (is(TokenType::kName) && look().type == TokenType::kOperator && look().text == "=") {
      std::string key = next().text;
      next();
      call->named.emplace_back(std::move(key), expression());
    } else {
      if (!call->named.empty() || call->star != nullptr || call->star_star != nullptr) {
        fail("a positional argument follows a keyword argument");
      }
      call->items.push_back(expression());
    }
    if (!skip_op(",")) break;
  }
  expect_op(")");
}

std::string ExpressionParser::dotted_name(std::string_view what) {
  std::string text = expect(TokenType::kName, what).text;
  while (skip_op(".")) text.append(1, '.').append(expect(TokenType::kName, what).text);
  return text;
}

Expr* ExpressionParser::filter_chain(Expr* input, bool starts_inline) {
  Expr* e = input;
  while (starts_inline || skip_op("|")) {
    starts_inline = false;
    e = make(Expr::Kind::kFilter, {e});
    e->text = dotted_name("a filter's name");
    if (is_op("(")) arguments(e);
  }
  return e;
}

Expr* ExpressionParser::test(Expr* value) {
  next();  // "is"
  const bool negated = skip_name("not");
  Expr* e = make(Expr::Kind::kTest, {value});
  e->text = dotted_name("a test's name");
  const bool has_operand =
      is(TokenType::kString) || is(TokenType::kInteger) || is(TokenType::kFloat) || is_op("[") ||
      is_op("{") || (is(TokenType::kName) && !is_name("else") && !is_name("or") && !is_name("and"));
  if (is_op("(")) {
    arguments(e);
  } else if (has_operand) {
    if (is_name("is")) fail("tests cannot be chained with 'is'");
    // Any other word is an operand, as in Jinja, even "if": "x is defined if y" is an error.
    e->items.push_back(postfix(primary()));
  }
  return negated ? make(Expr::Kind::kNot, {e}) : e;
}

NameId ExpressionParser::name_target() {
  const std::string text = expect(TokenType::kName, "a name").text;
  static constexpr std::string_view kConstants[] = {"true", "false", "none",
                                                    "True", "False", "None"};
  if (std::find(std::begin(kConstants), std::end(kConstants), text) != std::end(kConstants)) {
    fail("cannot assign to '{}'", text);
  }
  return program_.id_of(text);
}

Target ExpressionParser::single_target(bool with_namespace) {
  const Level level(*this);
  if (skip_op("(")) {
    Target t = target(with_namespace, "");
    expect_op(")");
    return t;
  }
  Target t;
  t.name = name_target();
  if (with_namespace && skip_op("."))
    t.attribute = expect(TokenType::kName, "an attribute's name").text;
  return t;
}

Target ExpressionParser::target(bool with_namespace, std::string_view end_name) {
  Target first = single_target(with_namespace);
  if (!is_op(",")) return first;
  Target t;
  t.parts.push_back(std::move(first));
  while (skip_op(",")) {
    if (is_op(")") || is_op("=") || (!end_name.empty() && is_name(end_name))) break;
    t.parts.push_back(single_target(with_namespace));
  }
  return t;
}

}  // namespace freshet::jinja
