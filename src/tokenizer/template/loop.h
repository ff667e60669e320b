// The special variable `loop`.
#pragma once

#include <string_view>

#include "tokenizer/template/runtime.h"

namespace freshet::jinja {

struct Stmt;
struct Scope;

struct LoopRep final : Rep {
  Value items;  // a list
  int64_t index = 0;
  int64_t depth0 = 0;
  bool retained = false;
  std::vector<Value> last_changed;
  bool has_changed = false;
  const Stmt* stmt = nullptr;  // of a recursive loop: `loop(items)` runs it again
  Scope* scope = nullptr;
  void clear() override { last_changed.clear(); }
};

Value loop_attribute(Runtime& rt, const Value& loop, std::string_view name);
Value loop_cycle(Runtime& rt, const Value& loop, const Args& args);
Value loop_changed(Runtime& rt, const Value& loop, const Args& args);

}  // namespace freshet::jinja
