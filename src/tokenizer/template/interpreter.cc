#include "tokenizer/template/interpreter.h"

namespace freshet::jinja {

Interpreter::Interpreter(const Program& program, std::chrono::local_seconds now)
    : Runtime(program.limits, now), program_(program) {
  root_.assign(program.names.size(), Value::undefined());
  for (const Builtin& b : global_functions()) {
    const auto it = program.ids.find(std::string(b.name));
    if (it == program.ids.end()) continue;
    auto rep = std::make_unique<FunctionRep>();
    rep->builtin = &b;
    root_[static_cast<size_t>(it->second)] = adopt(Kind::kFunction, std::move(rep), 0, 0);
  }
}

Interpreter::~Interpreter() {
  for (auto& scope : captured_) scope->variables.clear();
  root_.clear();
}

Value Interpreter::from_json(const json::Value& v, int depth) {
  if (depth > kMaxValueDepth) fail_limit("the nesting of values");
  switch (v.type()) {
    case json::Type::kNull:
      return {};
    case json::Type::kBool:
      return Value(v.as_bool());
    case json::Type::kNumber: {
      if (!v.is_integer()) return Value(v.as_double());
      if (const auto i = v.as_int64()) return Value(*i);
      return big_int(v.number_text());
    }
    case json::Type::kString:
      return str(v.as_string());
    case json::Type::kArray: {
      std::vector<Value> items;
      items.reserve(v.as_array().size());
      for (const json::Value& item : v.as_array()) items.push_back(from_json(item, depth + 1));
      return list(std::move(items));
    }
    case json::Type::kObject:
      break;
  }
  std::vector<std::pair<Value, Value>> items;
  items.reserve(v.as_object().size());
  for (const auto& [key, value] : v.as_object()) {
    items.emplace_back(str(key), from_json(value, depth + 1));
  }
  return dict(std::move(items));
}

std::string Interpreter::render(const json::Value& context) {
  if (!context.is_object()) fail("a template's context must be a JSON object");
  for (const auto& [key, value] : context.as_object()) {
    const auto it = program_.ids.find(key);
    if (it != program_.ids.end()) root_[static_cast<size_t>(it->second)] = from_json(value, 0);
  }
  Capture capture(*this);
  run(program_.body);
  live_output_ -= capture.text.size();
  return std::exchange(capture.text, {});
}

// ----------------------------------------------------------------------------------------- scopes

Interpreter::Frame::Frame(Interpreter& in, Scope* parent)
    : in_(in), saved_(in.scope_), scope_(std::make_unique<Scope>()) {
  scope_->parent = parent;
  in_.scope_ = scope_.get();
}

Interpreter::Frame::~Frame() {
  in_.scope_ = saved_;
  retire();
}

void Interpreter::Frame::retire() {
  if (scope_->captured) in_.captured_.push_back(std::move(scope_));
}

void Interpreter::Frame::renew() {
  Scope* parent = scope_->parent;
  if (!scope_->captured) {
    scope_->variables.clear();
    return;
  }
  retire();
  scope_ = std::make_unique<Scope>();
  scope_->parent = parent;
  in_.scope_ = scope_.get();
}

void Interpreter::capture_scopes() {
  for (Scope* s = scope_; s != nullptr && !s->captured; s = s->parent) {
    budget().take(256);  // approximate cost of keeping it; never refunded
    s->captured = true;
  }
}

Value Interpreter::lookup(NameId name) {
  for (const Scope* s = scope_; s != nullptr; s = s->parent) {
    for (const auto& [id, value] : s->variables) {
      if (id == name) return value;
    }
  }
  const Value& v = root_[static_cast<size_t>(name)];
  if (!v.is_undefined() || v.rep() != nullptr) return v;
  return undefined(fmt::format("'{}' is undefined", program_.names[static_cast<size_t>(name)]));
}

void Interpreter::assign(NameId name, Value v) {
  if (scope_ == nullptr) {
    root_[static_cast<size_t>(name)] = std::move(v);
    return;
  }
  for (auto& [id, value] : scope_->variables) {
    if (id == name) {
      value = std::move(v);
      return;
    }
  }
  scope_->variables.emplace_back(name, std::move(v));
}

void Interpreter::assign(const Target& target, const Value& v) {
  if (!target.parts.empty()) {
    const Items items(*this, v);
    if (items.size() < target.parts.size()) {
      fail("not enough values to unpack (expected {}, got {})", target.parts.size(), items.size());
    }
    if (items.size() > target.parts.size()) {
      fail("too many values to unpack (expected {})", target.parts.size());
    }
    for (size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i]);
    return;
  }
  if (target.attribute.empty()) return assign(target.name, v);
  const Value ns = lookup(target.name);
  if (!ns.is(Kind::kNamespace)) fail("cannot assign attribute on non-namespace object");
  auto& rep = ns.as<NamespaceRep>();
  if (Value* slot = rep.find(target.attribute)) {
    *slot = v;
    return;
  }
  const size_t bytes = target.attribute.size() + 64;
  budget().take(bytes);
  rep.bytes += bytes;
  rep.attributes.emplace_back(target.attribute, v);
}

// ------------------------------------------------------------------------------------- statements

void Interpreter::emit(std::string_view text) {
  if (text.size() > limits().output_bytes - live_output_) fail_limit("output");
  charge(text.size());
  live_output_ += text.size();
  out_->append(text);
}

Interpreter::Flow Interpreter::run(const Body& body) {
  for (const Stmt* s : body) {
    try {
      if (const Flow flow = run(*s); flow != Flow::kNormal) return flow;
    } catch (Error& e) {
      if (e.line == 0) e.line = s->line;
      throw;
    }
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run(const Stmt& s) {
  const Level level(*this);
  step();
  switch (s.kind) {
    case Stmt::Kind::kText:
      emit(s.text);
      return Flow::kNormal;
    case Stmt::Kind::kOutput: {
      const Value v = eval(*s.expr);
      if (v.is_string()) {
        emit(v.text());
      } else {
        emit(str_of(*this, v));
      }
      return Flow::kNormal;
    }
    case Stmt::Kind::kIf:
      return run_if(s);
    case Stmt::Kind::kFor:
      return run_for(s, eval(*s.expr), 0);
    case Stmt::Kind::kSet:
      assign(s.target, eval(*s.expr));
      return Flow::kNormal;
    case Stmt::Kind::kMacro:
      assign(s.name, make_macro(s));
      return Flow::kNormal;
    case Stmt::Kind::kCallBlock:
      run_call_block(s);
      return Flow::kNormal;
    case Stmt::Kind::kScope:
      return run_scoped(s.body);
    case Stmt::Kind::kBreak:
      return Flow::kBreak;
    case Stmt::Kind::kContinue:
      return Flow::kContinue;
    case Stmt::Kind::kSetBlock:
    case Stmt::Kind::kFilterBlock:
    case Stmt::Kind::kWith:
      return run_block(s);
  }
  return Flow::kNormal;
}

Interpreter::Flow Interpreter::run_scoped(const Body& body) {
  const Frame frame(*this, scope_);
  return run(body);
}

Interpreter::Flow Interpreter::run_if(const Stmt& s) {
  for (const auto& [test, body] : s.branches) {
    if (truth(eval(*test))) return run(body);
  }
  return run(s.body);
}

Interpreter::Flow Interpreter::run_block(const Stmt& s) {
  if (s.kind == Stmt::Kind::kWith) {
    // Evaluates all values before it sets any name.
    std::vector<Value> values;
    for (const auto& [target, expr] : s.assignments) values.push_back(eval(*expr));
    const Frame frame(*this, scope_);
    for (size_t i = 0; i < values.size(); ++i) assign(s.assignments[i].first, values[i]);
    return run(s.body);
  }
  Flow flow = Flow::kNormal;
  std::string text;
  {
    Capture capture(*this);
    flow = run_scoped(s.body);
    text = capture.text;
  }
  if (flow != Flow::kNormal) return flow;
  const Value v = block_filter(s.expr, std::move(text));
  if (s.kind == Stmt::Kind::kSetBlock) {
    assign(s.target, v);
  } else {
    emit(str_of(*this, v));
  }
  return flow;
}

// The items to loop over, as a list, filtered by the `if` of the loop.
Value Interpreter::loop_items(const Stmt& s, const Value& iterable) {
  const bool is_sequence = iterable.is_list() || iterable.is(Kind::kView);
  if (is_sequence && s.test == nullptr) return iterable;
  const Items items(*this, iterable);
  if (s.test == nullptr) return list(items.copy());
  std::vector<Value> kept;
  Frame frame(*this, scope_);
  for (const Value& item : items) {
    step();
    frame.renew();
    assign(s.target, item);
    if (truth(eval(*s.test))) kept.push_back(item);
  }
  return list(std::move(kept));
}

Interpreter::Flow Interpreter::run_for(const Stmt& s, const Value& iterable, int64_t depth0) {
  const Value items = loop_items(s, iterable);
  auto rep = std::make_unique<LoopRep>();
  rep->items = items;
  rep->depth0 = depth0;
  if (s.recursive) {
    capture_scopes();
    rep->stmt = &s;
    rep->scope = scope_;
  }
  const Value loop = adopt(Kind::kLoop, std::move(rep), 0, items.depth());
  bool finished_one = false;
  {
    Frame frame(*this, scope_);
    for (size_t i = 0; i < items.items().size(); ++i) {
      step();
      loop.as<LoopRep>().index = static_cast<int64_t>(i);
      if (i > 0) frame.renew();
      assign(program_.loop, loop);
      assign(s.target, items.items()[i]);
      const Flow flow = run(s.body);
      if (flow == Flow::kBreak) break;
      finished_one |= flow == Flow::kNormal;
    }
  }
  // In Jinja, `else` applies to loops without a completed iteration.
  return finished_one ? Flow::kNormal : run_scoped(s.otherwise);
}

void Interpreter::run_call_block(const Stmt& s) {
  const Value caller = make_macro(s);
  const Value v = eval_call(*s.expr, &caller);
  emit(str_of(*this, v));
}

// ----------------------------------------------------------------------------------------- macros

Value Interpreter::make_macro(const Stmt& s) {
  capture_scopes();
  auto rep = std::make_unique<MacroRep>();
  rep->stmt = &s;
  rep->scope = scope_;
  return adopt(Kind::kMacro, std::move(rep), 0, 0);
}

namespace {
// Extracts the named argument; false if it is not there.
bool take_named(Args& args, std::string_view name, Value& out) {
  for (size_t i = 0; i < args.named.size(); ++i) {
    if (args.named[i].first != name) continue;
    out = std::move(args.named[i].second);
    args.named.erase(args.named.begin() + static_cast<std::ptrdiff_t>(i));
    return true;
  }
  return false;
}
}  // namespace

void Interpreter::bind_parameters(const Stmt& s, Args& args) {
  const size_t count = s.parameters.size();
  bool has_caller_parameter = false;
  std::vector<size_t> missing;
  for (size_t i = 0; i < count; ++i) {
    const Parameter& p = s.parameters[i];
    has_caller_parameter |= p.name == program_.caller;
    Value v;
    if (i < args.positional.size()) {
      v = args.positional[i];
    } else if (!take_named(args, p.text, v)) {
      missing.push_back(i);
      continue;
    }
    assign(p.name, std::move(v));
  }
  for (const size_t i : missing) {
    const Parameter& p = s.parameters[i];
    assign(p.name, p.fallback != nullptr
                       ? eval(*p.fallback)
                       : undefined(fmt::format("parameter '{}' was not provided", p.text)));
  }
  if (s.uses_caller && !has_caller_parameter) {
    Value caller;
    if (!take_named(args, "caller", caller)) caller = undefined("No caller defined");
    assign(program_.caller, std::move(caller));
  }
  if (s.uses_kwargs) {
    std::vector<std::pair<Value, Value>> items;
    for (auto& [key, value] : args.named) items.emplace_back(str(key), std::move(value));
    assign(program_.kwargs, dict(std::move(items)));
  } else if (!args.named.empty()) {
    fail("macro '{}' takes no keyword argument '{}'", s.text, args.named[0].first);
  }
  if (s.uses_varargs) {
    std::vector<Value> rest;
    for (size_t i = count; i < args.positional.size(); ++i) rest.push_back(args.positional[i]);
    assign(program_.varargs, tuple(std::move(rest)));
  } else if (args.positional.size() > count) {
    fail("macro '{}' takes not more than {} argument(s)", s.text, count);
  }
}

Value Interpreter::call_macro(const MacroRep& macro, Args& args) {
  const Stmt& s = *macro.stmt;
  const Frame frame(*this, macro.scope);
  bind_parameters(s, args);
  std::string text;
  {
    Capture capture(*this);
    run(s.body);
    text = capture.text;
  }
  return str(std::move(text));
}

Value Interpreter::call(const Value& f, Args& args) {
  const Level level(*this);
  step();
  switch (f.kind()) {
    case Kind::kUndefined:
      fail_undefined(f);
    case Kind::kFunction:
      return (*f.as<FunctionRep>().builtin)(*this, f, args);
    case Kind::kMethod: {
      const auto& method = f.as<MethodRep>();
      return (*method.builtin)(*this, method.receiver, args);
    }
    case Kind::kMacro:
      return call_macro(f.as<MacroRep>(), args);
    case Kind::kJoiner: {
      auto& joiner = f.as<JoinerRep>();
      return std::exchange(joiner.used, true) ? joiner.separator : str("");
    }
    case Kind::kLoop: {
      const auto& loop = f.as<LoopRep>();
      if (loop.stmt == nullptr) fail("the loop must have the 'recursive' marker to be called");
      if (args.positional.size() != 1 || !args.named.empty()) fail("loop() takes one argument");
      Frame frame(*this, loop.scope);
      Capture capture(*this);
      run_for(*loop.stmt, args.positional[0], loop.depth0 + 1);
      return str(capture.text);
    }
    default:
      fail("'{}' object is not callable", type_name(f));
  }
}

}  // namespace freshet::jinja
