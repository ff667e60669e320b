#include "tokenizer/template/parser.h"

#include <algorithm>
#include <initializer_list>

#include "tokenizer/template/expression_parser.h"

namespace freshet::jinja {
namespace {

class Parser final : public ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  void run() {
    try {
      program_.body = statements({});
    } catch (Error& e) {
      if (e.line == 0) e.line = line();
      throw;
    }
  }

 private:
  using Words = std::initializer_list<std::string_view>;

  Stmt* make_stmt(Stmt::Kind kind) {
    auto& s = program_.stmts.emplace_back(std::make_unique<Stmt>());
    s->kind = kind;
    s->line = line();
    return s.get();
  }

  // Statements up to a tag that starts with one of `ends` (which is then current) or, if `ends` is
  // empty, to the end of the template.
  Body statements(Words ends) {
    const Level level(*this);
    Body body;
    while (true) {
      switch (current().type) {
        case TokenType::kData:
          body.push_back(make_stmt(Stmt::Kind::kText));
          body.back()->text = next().text;
          break;
        case TokenType::kVariableBegin: {
          next();
          body.push_back(make_stmt(Stmt::Kind::kOutput));
          body.back()->expr = tuple();
          expect(TokenType::kVariableEnd, "'}}'");
          break;
        }
        case TokenType::kBlockBegin:
          next();
          if (std::any_of(ends.begin(), ends.end(), [&](auto w) { return is_name(w); }))
            return body;
          statement(body);
          end_tag();
          break;
        default:
          if (ends.size() > 0) unexpected(fmt::format("'{{% {} %}}'", *(ends.end() - 1)));
          return body;
      }
    }
  }

  void end_tag() { expect(TokenType::kBlockEnd, "'%}'"); }

  // The body of a block: from after its opening tag through the word that ends it.
  Body block(std::string_view end) {
    begin_body();
    Body body = statements({end});
    next();
    return body;
  }
  void begin_body() {
    skip_op(":");
    end_tag();
  }

  void statement(Body& body) {
    const std::string word = is(TokenType::kName) ? current().text : "";
    if (word == "if") return body.push_back(if_statement());
    if (word == "for") return body.push_back(for_statement());
    if (word == "set") return body.push_back(set_statement());
    if (word == "macro") return body.push_back(macro());
    if (word == "call") return body.push_back(call_block());
    if (word == "filter") return body.push_back(filter_block());
    if (word == "with") return body.push_back(with());
    if (word == "generation") return body.push_back(scope("endgeneration"));
    if (word == "block") return body.push_back(named_block());
    if (word == "autoescape") return body.push_back(autoescape());
    if (word == "print") return print(body);
    if (word == "break" || word == "continue") return body.push_back(jump());
    if (word == "include" || word == "import" || word == "from" || word == "extends") {
      fail("'{}' is not supported: a chat template is one file", word);
    }
    fail("unknown tag {}", describe());
  }

  Stmt* if_statement() {
    Stmt* s = make_stmt(Stmt::Kind::kIf);
    while (true) {
      next();  // "if" or "elif"
      Expr* test = tuple(false);
      begin_body();
      s->branches.emplace_back(test, statements({"elif", "else", "endif"}));
      if (is_name("elif")) continue;
      if (skip_name("else"))
        s->body = block("endif");
      else
        next();
      return s;
    }
  }

  Stmt* for_statement() {
    Stmt* s = make_stmt(Stmt::Kind::kFor);
    next();
    s->target = target(false, "in");
    if (!skip_name("in")) unexpected("'in'");
    s->expr = tuple(false, "recursive");
    if (skip_name("if")) s->test = expression();
    s->recursive = skip_name("recursive");
    begin_body();
    ++loops_;
    s->body = statements({"else", "endfor"});
    --loops_;
    if (skip_name("else"))
      s->otherwise = block("endfor");
    else
      next();
    return s;
  }

  Stmt* set_statement() {
    Stmt* s = make_stmt(Stmt::Kind::kSet);
    next();
    s->target = target(true, "");
    if (skip_op("=")) {
      s->expr = tuple();
      return s;
    }
    s->kind = Stmt::Kind::kSetBlock;
    s->expr = filter_chain(nullptr, false);
    s->body = block("endset");
    return s;
  }

  void parameters(Stmt* s) {
    expect_op("(");
    while (!is_op(")")) {
      Parameter p;
      p.text = current().text;
      p.name = name_target();
      if (skip_op("=")) {
        p.fallback = expression();
      } else if (!s->parameters.empty() && s->parameters.back().fallback != nullptr) {
        fail("non-default argument follows default argument");
      }
      s->parameters.push_back(std::move(p));
      if (!skip_op(",")) break;
    }
    expect_op(")");
  }

  // A macro's body has its own loop count, and its own flags for the names that let it take extra
  // arguments.
  void macro_body(Stmt* s, std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    const bool caller = std::exchange(saw_caller_, false);
    const bool varargs = std::exchange(saw_varargs_, false);
    const bool kwargs = std::exchange(saw_kwargs_, false);
    s->body = block(end);
    loops_ = loops;
    s->uses_caller = saw_caller_;
    s->uses_varargs = saw_varargs_;
    s->uses_kwargs = saw_kwargs_;
    saw_caller_ |= caller;
    saw_varargs_ |= varargs;
    saw_kwargs_ |= kwargs;
  }

  Stmt* macro() {
    Stmt* s = make_stmt(Stmt::Kind::kMacro);
    next();
    s->text = current().text;
    s->name = name_target();
    parameters(s);
    macro_body(s, "endmacro");
    return s;
  }

  Stmt* call_block() {
    Stmt* s = make_stmt(Stmt::Kind::kCallBlock);
    next();
    s->text = "caller";
    if (is_op("(")) parameters(s);
    s->expr = expression();
    if (s->expr->kind != Expr::Kind::kCall) fail("'call' needs a call, as in {{% call macro() %}}");
    macro_body(s, "endcall");
    return s;
  }

  Stmt* filter_block() {
    Stmt* s = make_stmt(Stmt::Kind::kFilterBlock);
    next();
    s->expr = filter_chain(nullptr, true);
    s->body = block("endfilter");
    return s;
  }

  Stmt* with() {
    Stmt* s = make_stmt(Stmt::Kind::kWith);
    next();
    while (!is(TokenType::kBlockEnd)) {
      if (!s->assignments.empty()) expect_op(",");
      Target t = target(false, "");
      expect_op("=");
      s->assignments.emplace_back(std::move(t), expression());
    }
    s->body = block("endwith");
    return s;
  }

  Stmt* scope(std::string_view end) {
    Stmt* s = make_stmt(Stmt::Kind::kScope);
    next();
    s->body = block(end);
    return s;
  }

  Stmt* autoescape() {
    Stmt* s = make_stmt(Stmt::Kind::kScope);
    next();
    if (!skip_name("false")) fail("'autoescape' is not supported, except as false");
    s->body = block("endautoescape");
    return s;
  }

  // Without inheritance, a block is just its content.
  Stmt* named_block() {
    Stmt* s = make_stmt(Stmt::Kind::kScope);
    next();
    const std::string name = expect(TokenType::kName, "a block's name").text;
    skip_name("scoped");
    skip_name("required");
    s->body = block("endblock");
    skip_name(name);
    return s;
  }

  void print(Body& body) {
    next();
    bool first = true;
    while (!is(TokenType::kBlockEnd)) {
      if (!first) expect_op(",");
      first = false;
      body.push_back(make_stmt(Stmt::Kind::kOutput));
      body.back()->expr = expression();
    }
  }

  Stmt* jump() {
    if (loops_ == 0) fail("'{}' outside a loop", current().text);
    const bool is_break = next().text == "break";
    return make_stmt(is_break ? Stmt::Kind::kBreak : Stmt::Kind::kContinue);
  }

  int loops_ = 0;
};

}  // namespace

std::unique_ptr<Program> parse_template(std::string_view source, const TemplateLimits& limits) {
  auto program = std::make_unique<Program>();
  program->limits = limits;
  program->loop = program->id_of("loop");
  program->caller = program->id_of("caller");
  program->varargs = program->id_of("varargs");
  program->kwargs = program->id_of("kwargs");
  Parser(tokenize(source), *program).run();
  return program;
}

}  // namespace freshet::jinja
