// A compiled template. Immutable once parsed; nodes live as long as their Program and refer to each
// other by plain pointers, so that no chain of them is freed recursively.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tokenizer/template/chat_template.h"
#include "tokenizer/template/operators.h"

namespace freshet::jinja {

using NameId = int;  // index into Program::names

struct Expr {
  enum class Kind : uint8_t {
    kConst,
    kName,
    kList,
    kTuple,
    kDict,       // items: key, value, key, value
    kAttribute,  // items[0].text
    kItem,       // items[0][items[1]]
    kSlice,      // items[0][items[1]:items[2]:items[3]], null if omitted
    kCall,       // items[0](items[1]...)
    kFilter,     // items[0]|text(items[1]...); items[0] is null in a block's filter
    kTest,       // items[0] is text(items[1]...)
    kNot,
    kNegative,
    kPositive,
    kBinary,
    kConcat,
    kCompare,  // items[0] compares[0] items[1] compares[1] items[2] ...
    kAnd,
    kOr,
    kConditional,  // items[0] if items[1] else items[2] (may be null)
  };
  Kind kind = Kind::kConst;
  BinaryOp op = BinaryOp::kAdd;
  int line = 0;
  NameId name = 0;
  std::string text;
  Value constant;
  std::vector<Expr*> items;
  std::vector<CompareOp> compares;
  std::vector<std::pair<std::string, Expr*>> named;  // of calls, filters and tests
  Expr* star = nullptr;                              // f(*star)
  Expr* star_star = nullptr;                         // f(**star_star)
};

// A target of `set` or `for`: a name, a namespace's attribute, or a tuple of targets.
struct Target {
  NameId name = -1;
  std::string attribute;
  std::vector<Target> parts;
};

struct Stmt;
using Body = std::vector<Stmt*>;

struct Parameter {
  std::string text;
  NameId name = 0;
  Expr* fallback = nullptr;
};

struct Stmt {
  enum class Kind : uint8_t {
    kText,
    kOutput,
    kIf,         // branches in order, then body
    kFor,        // for target in expr if test: body, else otherwise
    kSet,        // target = expr
    kSetBlock,   // target = body | expr (may be null)
    kMacro,      // name(parameters): body
    kCallBlock,  // call(parameters) expr: body
    kFilterBlock,
    kWith,   // targets[i] = values[i]: body
    kScope,  // body, whose assignments stay inside
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kText;
  int line = 0;
  std::string text;
  Expr* expr = nullptr;
  Expr* test = nullptr;
  bool recursive = false;
  Target target;
  std::vector<std::pair<Expr*, Body>> branches;
  std::vector<std::pair<Target, Expr*>> assignments;
  Body body;
  Body otherwise;
  // Macros and call blocks.
  NameId name = 0;
  std::vector<Parameter> parameters;
  bool uses_caller = false;
  bool uses_varargs = false;
  bool uses_kwargs = false;
};

struct Program {
  TemplateLimits limits;
  std::vector<std::string> names;
  std::unordered_map<std::string, NameId> ids;
  std::vector<std::unique_ptr<Expr>> exprs;
  std::vector<std::unique_ptr<Stmt>> stmts;
  Body body;
  NameId loop, caller, varargs, kwargs;  // the ids of these names

  NameId id_of(const std::string& name) {
    const auto [it, added] = ids.try_emplace(name, static_cast<NameId>(names.size()));
    if (added) names.push_back(name);
    return it->second;
  }
};

}  // namespace freshet::jinja
