// Runs a Program once.
//
// Scopes are Jinja's: `if` does not open one; `for`, `macro`, `with`, and the blocks of `set`,
// `filter`, `call` and `generation` do, and names set inside stay inside. A macro sees the scopes
// around its definition.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tokenizer/template/ast.h"
#include "tokenizer/template/builtins.h"
#include "tokenizer/template/loop.h"

namespace freshet::jinja {

struct Scope {
  Scope* parent = nullptr;  // null: the template's own scope, Interpreter::root_
  std::vector<std::pair<NameId, Value>> variables;
  bool captured = false;  // referenced by a macro or loop, so it lives to the end
};

struct MacroRep final : Rep {
  const Stmt* stmt = nullptr;
  Scope* scope = nullptr;
};

class Interpreter final : public Runtime {
 public:
  Interpreter(const Program& program, std::chrono::local_seconds now);
  ~Interpreter() override;

  std::string render(const json::Value& context);
  Value call(const Value& function, Args& args) override;

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  // Opens a new scope under `parent` for its own lifetime.
  class Frame {
   public:
    Frame(Interpreter& in, Scope* parent);
    Frame(const Frame&) = delete;
    ~Frame();
    // Empties the scope for the next iteration of a loop.
    void renew();

   private:
    void retire();
    Interpreter& in_;
    Scope* saved_;
    std::unique_ptr<Scope> scope_;
  };

  // Redirects output to a string of its own for its own lifetime.
  class Capture {
   public:
    explicit Capture(Interpreter& in) : in_(in), saved_(std::exchange(in.out_, &text)) {}
    Capture(const Capture&) = delete;
    ~Capture() {
      in_.out_ = saved_;
      in_.live_output_ -= text.size();
    }
    std::string text;

   private:
    Interpreter& in_;
    std::string* saved_;
  };

  Value from_json(const json::Value& v, int depth);

  // Statements (interpreter.cc)
  Flow run(const Body& body);
  Flow run(const Stmt& s);
  Flow run_scoped(const Body& body);
  Flow run_if(const Stmt& s);
  Flow run_for(const Stmt& s, const Value& iterable, int64_t depth0);
  Flow run_block(const Stmt& s);
  void run_call_block(const Stmt& s);
  Value loop_items(const Stmt& s, const Value& iterable);
  Value make_macro(const Stmt& s);
  Value call_macro(const MacroRep& macro, Args& args);
  void bind_parameters(const Stmt& s, Args& args);
  void emit(std::string_view text);
  Value lookup(NameId name);
  void assign(NameId name, Value v);
  void assign(const Target& target, const Value& v);
  void capture_scopes();

  // Expressions (evaluator.cc)
  Value eval(const Expr& e);
  Value eval_items(const Expr& e);
  Value eval_dict(const Expr& e);
  Value eval_attribute(const Expr& e);
  Value eval_slice(const Expr& e);
  Value eval_call(const Expr& e, const Value* caller);
  Value eval_filter(const Expr& e, const Value* block_input);
  Value eval_concat(const Expr& e);
  Value eval_compare(const Expr& e);
  Value eval_conditional(const Expr& e);
  Args eval_arguments(const Expr& e);
  Value block_filter(const Expr* chain, std::string text);

  const Program& program_;
  std::vector<Value> root_;  // by NameId; undefined without a message if not set
  Scope* scope_ = nullptr;
  std::vector<std::unique_ptr<Scope>> captured_;
  std::string* out_ = nullptr;
  size_t live_output_ = 0;
};

}  // namespace freshet::jinja
