// The parser's position in the tokens, and the primitives to advance it.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/template/ast.h"
#include "tokenizer/template/lexer.h"

namespace freshet::jinja {

class TokenStream {
 public:
  TokenStream(std::vector<Token> tokens, Program& program)
      : program_(program), tokens_(std::move(tokens)) {}

  const Token& current() const { return tokens_[at_]; }
  const Token& look() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  int line() const { return current().line; }
  Token next() {
    Token token = current();
    if (at_ + 1 < tokens_.size()) ++at_;
    return token;
  }
  bool is(TokenType type) const { return current().type == type; }
  bool is_op(std::string_view op) const {
    return current().type == TokenType::kOperator && current().text == op;
  }
  bool is_name(std::string_view name) const {
    return current().type == TokenType::kName && current().text == name;
  }
  bool skip_op(std::string_view op) { return is_op(op) && (next(), true); }
  bool skip_name(std::string_view name) { return is_name(name) && (next(), true); }
  void expect_op(std::string_view op) {
    if (!skip_op(op)) unexpected(fmt::format("'{}'", op));
  }
  Token expect(TokenType type, std::string_view what) {
    if (!is(type)) unexpected(what);
    return next();
  }
  [[noreturn]] void unexpected(std::string_view wanted) const {
    fail("expected {}, got {}", wanted, describe());
  }
  std::string describe() const {
    switch (current().type) {
      case TokenType::kEnd:
        return "the end of the template";
      case TokenType::kData:
        return "text";
      case TokenType::kString:
        return "a string";
      default:
        return fmt::format("'{}'", current().text);
    }
  }

  Expr* make(Expr::Kind kind, std::vector<Expr*> items = {}) {
    auto& e = program_.exprs.emplace_back(std::make_unique<Expr>());
    e->kind = kind;
    e->line = line();
    e->items = std::move(items);
    return e.get();
  }

 protected:
  Program& program_;

  // Guards one level of the parser's recursion.
  class Level {
   public:
    explicit Level(TokenStream& stream) : stream_(stream) {
      if (++stream_.depth_ > kMaxDepth) fail("the template is nested too deeply");
    }
    Level(const Level&) = delete;
    ~Level() { --stream_.depth_; }

   private:
    static constexpr int kMaxDepth = 150;
    TokenStream& stream_;
  };

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace freshet::jinja
