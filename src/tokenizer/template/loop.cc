#include "tokenizer/template/loop.h"

#include "tokenizer/template/operators.h"

namespace freshet::jinja {

Value loop_attribute(Runtime& rt, const Value& value, std::string_view name) {
  const auto& loop = value.as<LoopRep>();
  const auto& items = loop.items.items();
  const auto size = static_cast<int64_t>(items.size());
  if (name == "index") return Value(loop.index + 1);
  if (name == "index0") return Value(loop.index);
  if (name == "revindex") return Value(size - loop.index);
  if (name == "revindex0") return Value(size - loop.index - 1);
  if (name == "first") return Value(loop.index == 0);
  if (name == "last") return Value(loop.index == size - 1);
  if (name == "length") return Value(size);
  if (name == "depth") return Value(loop.depth0 + 1);
  if (name == "depth0") return Value(loop.depth0);
  if (name == "previtem") {
    if (loop.index == 0) return rt.undefined("there is no previous item");
    return items[static_cast<size_t>(loop.index - 1)];
  }
  if (name == "nextitem") {
    if (loop.index + 1 >= size) return rt.undefined("there is no next item");
    return items[static_cast<size_t>(loop.index + 1)];
  }
  return rt.undefined(
      fmt::format("'jinja2.runtime.LoopContext object' has no attribute '{}'", name));
}

Value loop_cycle(Runtime&, const Value& loop, const Args& args) {
  if (args.positional.empty()) fail("no items for cycling given");
  const auto index = static_cast<size_t>(loop.as<LoopRep>().index);
  return args.positional[index % args.positional.size()];
}

Value loop_changed(Runtime& rt, const Value& value, const Args& args) {
  auto& loop = value.as<LoopRep>();
  bool same = loop.has_changed && loop.last_changed.size() == args.positional.size();
  for (size_t i = 0; same && i < args.positional.size(); ++i) {
    same = equals(rt, loop.last_changed[i], args.positional[i]);
  }
  if (same) return Value(false);
  if (!loop.retained) rt.retain(value);
  loop.retained = true;
  loop.has_changed = true;
  loop.last_changed = args.positional;
  return Value(true);
}

}  // namespace freshet::jinja
