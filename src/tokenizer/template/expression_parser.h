// Parser of Jinja expressions, by precedence: if, or, and, not, comparisons, + -, ~, * / // %, **,
// unary, postfix, filters and tests.
#pragma once

#include <string_view>
#include <vector>

#include "tokenizer/template/token_stream.h"

namespace freshet::jinja {

class ExpressionParser : public TokenStream {
 public:
  using TokenStream::TokenStream;

  Expr* expression(bool with_condition = true);
  // One expression, or several separated by commas, up to the end of the tag or a word of
  // `end_names`.
  Expr* tuple(bool with_condition = true, std::string_view end_name = "");
  // "name | name(args)" after the tag of a block; null if there is none.
  Expr* filter_chain(Expr* input, bool starts_inline);
  Target target(bool with_namespace, std::string_view end_name);
  NameId name_target();

 protected:
  // Names read since these flags were last reset; a macro uses them to see whether it needs caller,
  // varargs or kwargs.
  bool saw_caller_ = false;
  bool saw_varargs_ = false;
  bool saw_kwargs_ = false;

 private:
  Expr* logical_or();
  Expr* logical_and();
  Expr* logical_not();
  Expr* comparison();
  Expr* sum();
  Expr* concat();
  Expr* product();
  Expr* power();
  Expr* unary(bool with_filter = true);
  Expr* primary();
  Expr* name();
  Expr* list();
  Expr* dict();
  Expr* parenthesized();
  Expr* postfix(Expr* e);
  Expr* filters_and_tests(Expr* e);
  Expr* subscript(Expr* e);
  Expr* test(Expr* e);
  void arguments(Expr* call);
  std::string dotted_name(std::string_view what);
  Expr* constant(Value v);
  Target single_target(bool with_namespace);
};

}  // namespace freshet::jinja
