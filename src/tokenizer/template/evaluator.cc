// The expression part of Interpreter.
#include "tokenizer/template/interpreter.h"

namespace freshet::jinja {

Value Interpreter::eval(const Expr& e) {
  const Level level(*this);
  step();
  switch (e.kind) {
    case Expr::Kind::kConst:
      return e.constant;
    case Expr::Kind::kName:
      return lookup(e.name);
    case Expr::Kind::kList:
    case Expr::Kind::kTuple:
      return eval_items(e);
    case Expr::Kind::kDict:
      return eval_dict(e);
    case Expr::Kind::kAttribute:
      return eval_attribute(e);
    case Expr::Kind::kItem: {
      const Value object = eval(*e.items[0]);
      return get_item(*this, object, eval(*e.items[1]));
    }
    case Expr::Kind::kSlice:
      return eval_slice(e);
    case Expr::Kind::kCall:
      return eval_call(e, nullptr);
    case Expr::Kind::kFilter:
      return eval_filter(e, nullptr);
    case Expr::Kind::kTest: {
      const Value v = eval(*e.items[0]);
      Args args = eval_arguments(e);
      return Value(test(e.text, v, args));
    }
    case Expr::Kind::kNot:
      return Value(!truth(eval(*e.items[0])));
    case Expr::Kind::kNegative:
      return negate(*this, eval(*e.items[0]));
    case Expr::Kind::kPositive: {
      const Value v = eval(*e.items[0]);
      need_defined(v);
      if (v.is(Kind::kBigInt)) return v;
      if (!v.is_number()) fail("bad operand type for unary +: '{}'", type_name(v));
      return v.is_int() ? Value(v.as_int()) : v;
    }
    case Expr::Kind::kBinary: {
      const Value a = eval(*e.items[0]);
      return binary(*this, e.op, a, eval(*e.items[1]));
    }
    case Expr::Kind::kConcat:
      return eval_concat(e);
    case Expr::Kind::kCompare:
      return eval_compare(e);
    case Expr::Kind::kAnd: {
      Value a = eval(*e.items[0]);
      return truth(a) ? eval(*e.items[1]) : a;
    }
    case Expr::Kind::kOr: {
      Value a = eval(*e.items[0]);
      return truth(a) ? a : eval(*e.items[1]);
    }
    case Expr::Kind::kConditional:
      return eval_conditional(e);
  }
  return {};
}

Value Interpreter::eval_items(const Expr& e) {
  std::vector<Value> items;
  items.reserve(e.items.size());
  for (const Expr* item : e.items) items.push_back(eval(*item));
  return list(std::move(items), e.kind == Expr::Kind::kList ? Kind::kList : Kind::kTuple);
}

Value Interpreter::eval_dict(const Expr& e) {
  std::vector<std::pair<Value, Value>> items;
  for (size_t i = 0; i < e.items.size(); i += 2) {
    Value key = eval(*e.items[i]);
    items.emplace_back(std::move(key), eval(*e.items[i + 1]));
  }
  return dict(std::move(items));
}

Value Interpreter::eval_attribute(const Expr& e) {
  const Value object = eval(*e.items[0]);
  const Builtin* method = find_method(object, e.text);
  if (method == nullptr) return get_attribute(*this, object, e.text);
  auto rep = std::make_unique<MethodRep>();
  rep->builtin = method;
  rep->receiver = object;
  return adopt(Kind::kMethod, std::move(rep), 0, object.depth());
}

Value Interpreter::eval_slice(const Expr& e) {
  const auto part = [&](size_t i) { return e.items[i] == nullptr ? Value() : eval(*e.items[i]); };
  const Value object = eval(*e.items[0]);
  const Value start = part(1);
  const Value stop = part(2);
  return get_slice(*this, object, start, stop, part(3));
}

Args Interpreter::eval_arguments(const Expr& e) {
  Args args;
  for (size_t i = 1; i < e.items.size(); ++i) args.positional.push_back(eval(*e.items[i]));
  for (const auto& [key, expr] : e.named) args.named.emplace_back(key, eval(*expr));
  if (e.star != nullptr) {
    for (const Value& v : Items(*this, eval(*e.star))) args.positional.push_back(v);
    step(static_cast<int64_t>(args.positional.size()));
  }
  if (e.star_star != nullptr) {
    const Value more = eval(*e.star_star);
    need_defined(more);
    if (!more.is_dict()) fail("argument after ** must be a mapping, not {}", type_name(more));
    for (const auto& [key, value] : more.dict().items) {
      args.named.emplace_back(need_string(key, "a keyword argument's name"), value);
      step();
    }
  }
  return args;
}

Value Interpreter::eval_call(const Expr& e, const Value* caller) {
  const Expr& callee = *e.items[0];
  const auto arguments = [&] {
    Args args = eval_arguments(e);
    if (caller != nullptr) args.named.emplace_back("caller", *caller);
    return args;
  };
  if (callee.kind == Expr::Kind::kAttribute) {
    // A method call does not need a value for the bound method.
    const Value object = eval(*callee.items[0]);
    if (const Builtin* method = find_method(object, callee.text)) {
      Args args = arguments();
      return (*method)(*this, object, args);
    }
    const Value f = get_attribute(*this, object, callee.text);
    Args args = arguments();
    return call(f, args);
  }
  const Value f = eval(callee);
  Args args = arguments();
  return call(f, args);
}

Value Interpreter::eval_filter(const Expr& e, const Value* block_input) {
  const Level level(*this);
  const Expr* inner = e.items[0];
  Value input;
  if (inner == nullptr) {
    input = *block_input;
  } else if (block_input != nullptr) {
    input = eval_filter(*inner, block_input);
  } else {
    input = eval(*inner);
  }
  Args args = eval_arguments(e);
  return filter(e.text, input, args);
}

Value Interpreter::block_filter(const Expr* chain, std::string text) {
  const Value input = str(std::move(text));
  return chain == nullptr ? input : eval_filter(*chain, &input);
}

Value Interpreter::eval_concat(const Expr& e) {
  std::string out;
  for (const Expr* item : e.items) {
    append_str(*this, out, eval(*item));
    expect(out.size());
  }
  return str(std::move(out));
}

Value Interpreter::eval_compare(const Expr& e) {
  Value left = eval(*e.items[0]);
  for (size_t i = 0; i < e.compares.size(); ++i) {
    Value right = eval(*e.items[i + 1]);
    if (!compare(*this, e.compares[i], left, right)) return Value(false);
    left = std::move(right);
  }
  return Value(true);
}

Value Interpreter::eval_conditional(const Expr& e) {
  if (truth(eval(*e.items[1]))) return eval(*e.items[0]);
  if (e.items[2] != nullptr) return eval(*e.items[2]);
  return undefined("the inline if-expression evaluated to false and no else section was defined.");
}

}  // namespace freshet::jinja
