#include "tokenizer/template/builtins.h"

#include <algorithm>
#include <unordered_map>

namespace freshet::jinja {

Bound bind(std::string_view function, std::string_view parameters, int required, const Args& args) {
  Bound bound;
  size_t count = 0;
  for (std::string_view rest = parameters; !rest.empty(); ++count) {
    const size_t end = std::min(rest.find(' '), rest.size());
    const std::string_view name = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (count < args.positional.size()) bound.values_[count] = &args.positional[count];
    for (const auto& [key, value] : args.named) {
      if (key != name) continue;
      if (bound.values_[count] != nullptr) fail("{}() got two values for '{}'", function, name);
      bound.values_[count] = &value;
    }
    if (bound.values_[count] == nullptr && static_cast<int>(count) < required) {
      fail("{}() is missing its argument '{}'", function, name);
    }
  }
  if (args.positional.size() > count) {
    fail("{}() takes at most {} arguments, got {}", function, count, args.positional.size());
  }
  const auto bound_count = std::count_if(bound.values_.begin(), bound.values_.end(),
                                         [](const Value* v) { return v != nullptr; });
  if (static_cast<size_t>(bound_count) != args.positional.size() + args.named.size()) {
    for (const auto& [key, value] : args.named) {
      const bool known =
          std::find(bound.values_.begin(), bound.values_.end(), &value) != bound.values_.end();
      if (!known) fail("{}() got an unexpected keyword argument '{}'", function, key);
    }
  }
  return bound;
}

namespace {

using Table = std::unordered_map<std::string_view, const Builtin*>;

Table table_of(std::initializer_list<std::span<const Builtin>> lists) {
  Table table;
  for (const auto& list : lists) {
    for (const Builtin& b : list) table.emplace(b.name, &b);
  }
  return table;
}

const Builtin* find_in(const Table& table, std::string_view name) {
  const auto it = table.find(name);
  return it == table.end() ? nullptr : it->second;
}

}  // namespace

const Builtin* find_filter(std::string_view name) {
  static const Table table =
      table_of({text_filters(), sequence_filters(), value_filters(), rare_filters()});
  return find_in(table, name);
}

const Builtin* find_method(const Value& receiver, std::string_view name) {
  static const Table strings = table_of({string_methods()});
  static const Table dicts = table_of({dict_methods()});
  static const Table sequences = table_of({sequence_methods()});
  static const Table loops = table_of({loop_methods()});
  static const Table cyclers = table_of({cycler_methods()});
  switch (receiver.kind()) {
    case Kind::kString:
      return find_in(strings, name);
    case Kind::kDict:
      return find_in(dicts, name);
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
      return find_in(sequences, name);
    case Kind::kLoop:
      return find_in(loops, name);
    case Kind::kCycler:
      return find_in(cyclers, name);
    default:
      return nullptr;
  }
}

Value Runtime::filter(std::string_view name, const Value& input, Args& args) {
  const Builtin* builtin = find_filter(name);
  if (builtin == nullptr) fail("no filter named '{}'", name);
  return (*builtin)(*this, input, args);
}

bool Runtime::test(std::string_view name, const Value& input, Args& args) {
  const Predicate* predicate = find_predicate(name);
  if (predicate == nullptr) fail("no test named '{}'", name);
  return predicate->run(*this, input, bind(name, predicate->parameters, predicate->required, args));
}

}  // namespace freshet::jinja
